"""Recordings: what a target's texts and candidates are, and files that are none."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from forerun.bench.recording import NUM_CANDIDATES, RecordedText, read_recording, record, write_recording
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.core.sampling_params import SamplingParams
from forerun.errors import ConfigError
from forerun.llm import LLM
from tests.engines import tiny_target

PROMPTS = {"loops": [[7, 8, 9] * 4, [11, 12] * 5, [20, 21]]}


@pytest.fixture(scope="module")
def llm():
    settings = EngineSettings(model="tiny", block_size=4, num_gpu_blocks_override=64, max_model_len=64, max_num_seqs=2)
    return LLM.from_target(tiny_target(), settings, resolve_speculative(None))


@pytest.fixture(scope="module")
def recording(llm):
    return record(llm, PROMPTS, max_tokens=6, temperatures=(0.0, 1.0))


def test_each_prompt_is_answered_at_each_temperature(recording):
    assert {kind: len(texts) for kind, texts in recording.by_kind.items()} == {"loops": 3, "loops, temperature 1": 3}
    assert [text.prompt_ids for text in recording.by_kind["loops"]] == PROMPTS["loops"]
    assert [text.temperature for text in recording.texts] == [0.0] * 3 + [1.0] * 3


def test_texts_are_the_targets_own(llm, recording):
    outputs = llm.generate(PROMPTS["loops"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert [text.answer_ids for text in recording.by_kind["loops"]] == [one.outputs[0].token_ids for one in outputs]


def test_a_text_is_what_its_seed_writes(llm, recording):
    assert recording.seeds == [0, 1, 2] * 2
    texts = list(zip(recording.texts, recording.seeds, strict=True))
    params = [SamplingParams(temperature=text.temperature, max_tokens=6, seed=seed) for text, seed in texts]
    outputs = llm.generate([text.prompt_ids for text, _ in texts], params, use_tqdm=False)
    assert [text.answer_ids for text, _ in texts] == [one.outputs[0].token_ids for one in outputs]


def test_a_greedy_token_is_its_places_first_candidate(recording):
    for text in recording.by_kind["loops"]:
        assert text.candidate_ids.shape == (len(text.answer_ids), NUM_CANDIDATES)
        assert text.candidate_ids[:, 0].tolist() == text.answer_ids


def test_candidates_fall_in_likelihood(recording):
    assert all((np.diff(text.candidate_logprobs) <= 0).all() for text in recording.texts)


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.jsonl.gz"])
def test_a_recording_comes_back_from_its_file(recording, tmp_path, name):
    path = tmp_path / name
    write_recording(recording, path)
    found = read_recording(path)
    assert found.info == recording.info
    for one, other in zip(found.texts, recording.texts, strict=True):
        assert (one.kind, one.temperature, one.prompt_ids, one.answer_ids) == (
            other.kind,
            other.temperature,
            other.prompt_ids,
            other.answer_ids,
        )
        assert (one.candidate_ids == other.candidate_ids).all()
        np.testing.assert_allclose(one.candidate_logprobs, other.candidate_logprobs, atol=1e-3)


@pytest.mark.parametrize("number", [0, 2])
def test_a_recording_that_is_interrupted_leaves_no_file(recording, tmp_path, monkeypatch, number):
    to_json = RecordedText.to_json

    def interrupted(text):
        if text is recording.texts[number]:
            raise KeyboardInterrupt
        return to_json(text)

    monkeypatch.setattr(RecordedText, "to_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_recording(recording, tmp_path / "texts.jsonl.gz")
    assert not list(tmp_path.iterdir())


class Stopping:
    """An engine that is interrupted after some batches."""

    def __init__(self, llm, num_batches):
        self.llm, self.left = llm, num_batches

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def generate(self, prompts, *args, **options):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.llm.generate(prompts, *args, **options)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_a_recording_goes_on_where_it_was_interrupted(llm, recording, tmp_path, num_batches):
    file, asked = tmp_path / "unfinished.jsonl.gz", {"max_tokens": 6, "temperatures": (0.0, 1.0)}
    with pytest.raises(KeyboardInterrupt):
        record(Stopping(llm, num_batches), PROMPTS, unfinished=file, **asked)
    assert len(read_recording(file).texts) == 2 * num_batches
    found = record(Stopping(llm, 3 - num_batches), PROMPTS, unfinished=file, **asked)
    assert [(one.kind, one.answer_ids) for one in found.texts] == [
        (one.kind, one.answer_ids) for one in recording.texts
    ]


def test_a_recording_that_is_interrupted_before_any_text_leaves_nothing(llm, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        record(Stopping(llm, 0), PROMPTS, max_tokens=6, unfinished=tmp_path / "unfinished.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ({"loops": [[7, 8, 9], *PROMPTS["loops"][1:]]}, {}, "begun with other prompts or temperatures"),
        ({"loops": PROMPTS["loops"][:1]}, {}, "begun with other prompts or temperatures"),
        (PROMPTS, {"temperatures": (1.0, 0.0)}, "begun with other prompts or temperatures"),
        (PROMPTS, {"max_tokens": 5}, "begun with max_tokens 6"),
    ],
)
def test_a_recording_of_other_texts_does_not_go_on(llm, tmp_path, prompts, options, said):
    file = tmp_path / "unfinished.jsonl"
    asked = {"max_tokens": 6, "temperatures": (0.0, 1.0)}
    with pytest.raises(KeyboardInterrupt):
        record(Stopping(llm, 1), PROMPTS, unfinished=file, **asked)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=f"{said}; give the same options to go on, or delete it"):
        record(llm, prompts, unfinished=file, **(asked | options))
    assert file.read_bytes() == before


HEAD = {"recording": 1, "model": "m", "dtype": "float32", "kernels": "torch", "vocab_size": 9, "max_tokens": 4}
TEXT = {"kind": "a", "temperature": 0.0, "prompt": [1], "answer": [2], "top": [[2, 3]], "logprobs": [[-0.1, -3.0]]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], 'line 1: must begin with an object that has "recording": 1'),
        ([TEXT], 'line 1: must begin with an object that has "recording": 1'),
        ([HEAD | {"recording": True}, TEXT], 'line 1: must begin with an object that has "recording": 1'),
        ([{"recording": 1}], "line 1: lacks 'model'"),
        ([HEAD], "has no text"),
        ([HEAD, {**TEXT, "top": [[2]]}], 'line 2: "top" and "logprobs"'),
        (
            [HEAD, TEXT, {**TEXT, "answer": []}],
            'line 3: "prompt", "answer" and each of "top" must have one token or more',
        ),
        ([HEAD, {**TEXT, "prompt": "abc"}], 'line 2: "prompt", "answer" and each of "top"'),
        ([HEAD, {**TEXT, "prompt": [-1]}], "line 2: .*each of 0 to 8"),
        ([HEAD, {**TEXT, "top": [[9, 1]]}], "line 2: .*each of 0 to 8"),
        ([HEAD, {**TEXT, "top": [[1 << 40, 1]]}], "line 2: .*each of 0 to 8"),
        ([HEAD, {**TEXT, "kind": ["a"]}], 'line 2: "kind" must be a text'),
        ([HEAD | {"vocab_size": -1}, TEXT], 'line 1: "vocab_size": got -1'),
        ([HEAD, TEXT, {"kind": "a"}], "line 3: lacks 'temperature'"),
        ([HEAD, TEXT, [1]], "line 3"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path, lines, message):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=message):
        read_recording(path)


def test_a_line_that_breaks_off_is_named(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps(HEAD) + "\n" + json.dumps(TEXT)[:20])
    with pytest.raises(ConfigError, match=r"texts.jsonl, line 2: is not JSON"):
        read_recording(path)


def test_a_file_that_is_not_packed_as_its_name_says_is_refused(tmp_path):
    path = tmp_path / "texts.jsonl.gz"
    path.write_text(json.dumps(HEAD))
    with pytest.raises(ConfigError, match="cannot read"):
        read_recording(path)


def test_a_packed_file_with_a_bit_that_is_another_is_refused(recording, tmp_path):
    path = tmp_path / "texts.jsonl.gz"
    write_recording(recording, path)
    whole = path.read_bytes()
    for place in range(100, len(whole), 31):  # behind the head, whose name of a file says nothing
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match=r"texts\.jsonl\.gz"):
            read_recording(path)


def test_a_recording_says_whether_its_weights_were_made_up_and_an_older_one_that_they_were_not(recording, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEAD, TEXT)))
    assert read_recording(path).info.load_format == "auto"
    write_recording(replace(recording, info=replace(recording.info, load_format="dummy")), path)
    assert read_recording(path).info.load_format == "dummy"
