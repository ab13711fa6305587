"""The file for `forerun serve --config` is what that command reads."""

from __future__ import annotations

import pytest
import yaml

from forerun.cli import loading
from forerun.cli.app import main
from forerun.plan.tuning.candidates import BatchLimits, Candidate
from forerun.plan.tuning.serve_config import serve_config, serve_options
from forerun.server import serve as server_module

LIMITS = BatchLimits(max_num_seqs=16, max_num_batched_tokens=512)
HYBRID = {"method": "hybrid", "num_speculative_tokens": 12, "drafters": [{"method": "suffix"}]}


def text_of(config, *, engine=None, reasons=("Because: it is quick.", "two\nlines"), **options):
    candidate = Candidate(name="x", speculative_config=config, limits=LIMITS, **options)
    return serve_config(serve_options("smollm2-135m", candidate, engine or {}), reasons)


def test_reasons_are_comments():
    text = text_of(None)
    assert text.splitlines()[:3] == ["# Because: it is quick.", "# two", "# lines"]
    assert "Because" not in yaml.safe_load(text)


def test_what_was_chosen_replaces_the_users_own_options():
    found = yaml.safe_load(text_of(None, engine={"quantization": "other", "dtype": "bfloat16"}, quantization="int8"))
    assert (found["quantization"], found["dtype"]) == ("int8", "bfloat16")


def test_small_numbers_stay_numbers():
    config = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_min_token_prob": 5e-05}
    assert yaml.safe_load(text_of(config))["speculative-config"] == config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {"no_speculation": True}),
        ({"method": "auto"}, {"speculative_config": {"method": "auto"}}),
        (HYBRID, {"speculative_config": HYBRID}),
    ],
)
def test_serve_reads_it(config, expected, tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text(text_of(config, engine={"dtype": "bfloat16", "max_model_len": 512}))
    loaded = []

    class FakeServer:
        is_working = False

        def __init__(self, load, options, report):
            self.run = load

    monkeypatch.setattr(server_module, "Server", FakeServer)
    monkeypatch.setattr(loading, "load_llm", lambda model, options: loaded.append((model, options)))
    assert main(["serve", "--config", str(file)]) == 0
    ((model, options),) = loaded
    assert model == "smollm2-135m"
    given = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512, "dtype": "bfloat16"}
    assert {name: getattr(options, name) for name in given | expected} == given | expected
