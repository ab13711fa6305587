"""Shared options: their syntax, and the library's arguments that they become."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from cyclopts import Token

from forerun.cli.app import main
from forerun.cli.options import EngineOptions, SamplingOptions, ServingEngineOptions, parse_duration
from forerun.config.settings import EngineSettings
from forerun.core.sampling_params import SamplingParams
from tests.cli.fakes import FakeLoader

FLAG = "--speculative-config"


def config_of(loader: FakeLoader, *arguments: str) -> Any:
    assert main(["generate", "m", "p", *arguments]) == 0
    return loader.options[-1].speculative_config


def test_dotted_keys_take_hyphens_and_underscores(loader: FakeLoader) -> None:
    found = config_of(
        loader, f"{FLAG}.method", "ngram", f"{FLAG}.num-speculative-tokens", "5", f"{FLAG}.prompt_lookup_max=4"
    )
    assert found == {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-1", -1),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ("ngram", "ngram"),
        ("org/draft", "org/draft"),
        ("[[1, 4, 5], [5, 64, 2]]", [[1, 4, 5], [5, 64, 2]]),
        ('"5"', "5"),
    ],
)
def test_dotted_value_is_typed(text: str, value: object, loader: FakeLoader) -> None:
    found = config_of(loader, f"{FLAG}.key", text)["key"]
    assert found == value
    assert type(found) is type(value)


def test_json_object_keeps_its_types(loader: FakeLoader) -> None:
    found = config_of(loader, FLAG, '{"method": "ngram", "num-speculative-tokens": 5, "rates": [0.5, 1], "name": "7"}')
    assert found == {"method": "ngram", "num_speculative_tokens": 5, "rates": [0.5, 1], "name": "7"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([FLAG, "{method"], "not JSON"),
        ([FLAG, "[1]"], "must be a JSON object"),
        ([FLAG, '{"a-b": 1, "a_b": 2}'], "'a_b' is given twice"),
        ([FLAG, '{"a": 1, "a": 2}'], "'a' is given twice"),
        ([f"{FLAG}.a", '{"b": {"c": 1, "c": 2}}'], "'c' is given twice"),
        (
            [f"{FLAG}.method", "ngram", f"{FLAG}.method", "suffix"],
            "--speculative-config.method specified multiple times",
        ),
        ([f"{FLAG}.a-b", "1", f"{FLAG}.a_b", "2"], "'a_b' is given twice"),
        ([f"{FLAG}.a.b", "1"], "'a' has keys of its own"),
        ([FLAG, "{}", f"{FLAG}.a", "1"], FLAG),
        ([FLAG, '{"a": 1}', FLAG, '{"a": 2}'], FLAG),
    ],
)
def test_speculative_config_mistake_is_refused(
    arguments: list[str], expected: str, loader: FakeLoader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "m", "p", *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert loader.options == []


def test_kv_transfer_config_is_written_the_same_way(loader: FakeLoader) -> None:
    extra = {"shared_storage_path": "states"}
    dotted = ["kv-connector", "Name", "kv-role", "kv_producer", "kv-connector-extra-config", json.dumps(extra)]
    names = [f"--kv-transfer-config.{word}" if place % 2 == 0 else word for place, word in enumerate(dotted)]
    assert main(["generate", "m", "p", *names]) == 0
    whole = {"kv_connector": "Name", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    assert main(["generate", "m", "p", "--kv-transfer-config", json.dumps(whole)]) == 0
    first, second = (options.kv_transfer_config for options in loader.options)
    assert first == second == whole


def test_engine_options_reach_the_engine(loader: FakeLoader) -> None:
    arguments = ["--dtype", "float32", "--device", "cpu", "--max-model-len", "512", "--max-num-seqs", "2"]
    main(["generate", "m", "p", *arguments, "--kv-cache-memory-bytes", "1000000", "--seed", "7"])
    expected = EngineOptions(
        dtype="float32", device="cpu", max_model_len=512, max_num_seqs=2, kv_cache_memory_bytes=1_000_000, seed=7
    )
    assert loader.options == [expected]


@pytest.mark.parametrize("options", [EngineOptions(), ServingEngineOptions()])
def test_engine_options_have_the_engine_defaults(options: EngineOptions) -> None:
    engine = {field.name: field.default for field in dataclasses.fields(EngineSettings)}
    ours = options.settings()
    assert ours == {name: engine[name] for name in ours}


def test_sampling_options_become_sampling_params(loader: FakeLoader) -> None:
    main(
        [
            "generate",
            "m",
            "p",
            "--max-tokens",
            "9",
            "--temperature",
            "0.5",
            "--top-p",
            "0.9",
            "--stop",
            "a",
            "--stop",
            "b",
        ]
    )
    assert loader.llm.params == [SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, stop=["a", "b"])]


@pytest.mark.parametrize("command", [["generate", "m", "p"], ["chat", "m"]])
def test_what_the_refusal_of_max_tokens_advises_is_taken(
    command: list[str], loader: FakeLoader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("p\n"))
    assert main([*command, "--max-tokens", "0"]) == 2
    assert "max_tokens: got 0; must be an integer of 1 or more, or None for as many as fit" in capsys.readouterr().err
    assert main([*command, "--max-tokens", "None"]) == 0
    assert loader.llm.params == [SamplingParams(max_tokens=None, temperature=0.0)]


def test_sampling_options_are_greedy_and_otherwise_the_defaults() -> None:
    assert SamplingOptions().params() == SamplingParams(temperature=0.0, max_tokens=256)


def test_default_speculation_gives_way_to_any_speculative_option() -> None:
    default = {"method": "ngram"}
    assert EngineOptions().with_default_speculation(default, need="").speculative_config == default
    asked = EngineOptions(num_speculative_tokens=3)
    assert asked.with_default_speculation(default, need="") is asked


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("90m", 5400), ("3h", 10800), ("1h30m", 5400), ("1.5h", 5400), ("2d", 172800)]
)
def test_a_duration_is_numbers_with_units(text: str, seconds: float) -> None:
    assert parse_duration(float, [Token(keyword="--budget", value=text)]) == seconds
