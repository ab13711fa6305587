"""The arithmetic of the tables."""

from __future__ import annotations

import pytest

from benchmarks.peers.report import to_markdown
from benchmarks.peers.summary import Summary, decode_speed, pass_milliseconds, pass_ratio, whole_speed


def written(contender, *, seconds, round_number=0, index=0, kind="code", text="a", accepted=None):
    return {
        "round": round_number,
        "kind": kind,
        "index": index,
        "contender": contender,
        "bytes_per_second": 4e10,
        "first_token_seconds": 1.0,
        "seconds": seconds,
        "drafted": accepted,
        "accepted": accepted,
        "peak_bytes": 1,
        "num_sequences": 1,
        "num_tokens": 9,
        "text": text,
    }


def curve(contender, seconds):
    where = {"round": 0, "kind": "curve", "index": 0, "contender": contender, "bytes_per_second": 4e10}
    return {**where, "seconds": {str(rows): times for rows, times in seconds.items()}}


def test_decoding_begins_after_the_first_token():
    assert decode_speed(written("forerun", seconds=3.0)) == 4.0
    assert whole_speed(written("forerun", seconds=3.0)) == 3.0


def test_a_median_is_over_rounds_and_prompts():
    runs = [written("forerun", seconds=seconds, index=i) for i, seconds in enumerate((2.0, 3.0, 9.0))]
    assert Summary(runs).median("forerun", "code", decode_speed) == 4.0


def test_what_was_not_measured_has_no_median():
    assert Summary([]).median("forerun", "code", decode_speed) is None


def test_ratios_are_of_the_same_prompt_in_the_same_round():
    runs = [
        written("forerun", seconds=2.0),
        written("vllm", seconds=3.0),
        written("forerun", seconds=3.0, round_number=1),
        written("vllm", seconds=5.0, round_number=1),
        written("forerun", seconds=100.0, round_number=2),  # the other was not measured then
    ]
    assert Summary(runs).ratio("forerun", "vllm", "code", decode_speed) == 2.0


def test_a_text_that_differs_in_one_round_differs():
    runs = [
        written("forerun", seconds=2.0),
        written("forerun n-gram", seconds=2.0),
        written("forerun", seconds=2.0, round_number=1),
        written("forerun n-gram", seconds=2.0, round_number=1, text="b"),
    ]
    texts = Summary(runs).texts("forerun n-gram", "forerun", "code")
    assert (texts.differing, texts.prompts) == (1, 1)


def test_acceptance_length_is_tokens_per_pass():
    assert Summary([written("x", seconds=2.0, accepted=6)]).acceptance_length("x", "code") == 3.0


def test_who_does_not_tell_has_no_acceptance_length():
    assert Summary([written("x", seconds=2.0)]).acceptance_length("x", "code") is None


def test_a_curve_is_the_median_of_its_repeats():
    run = curve("forerun", {1: [0.001, 0.002, 0.009], 8: [0.003, 0.003, 0.003]})
    assert pass_milliseconds(1)(run) == 2.0
    assert pass_ratio(8)(run) == 1.5


@pytest.fixture
def run():
    names = ("forerun", "forerun n-gram", "forerun suffix", "vllm", "vllm n-gram")
    measurements = [
        *(written(name, seconds=2.0, kind=kind, accepted=3) for name in names for kind in ("code", "chat")),
        *(written(name, seconds=2.0, kind=kind) for name in ("forerun", "vllm") for kind in ("plain", "batch")),
        curve("forerun", {1: [0.001], 8: [0.002], 16: [0.003]}),
    ]
    return {
        "model": "tiny",
        "machine": "a machine",
        "command": "python -m benchmarks.peers run",
        "num_threads": 2,
        "rounds": 1,
        "versions": dict.fromkeys(names, "1.0"),
        "memory": dict.fromkeys(names, 10**9),
        "measurements": measurements,
    }


def test_a_report_says_what_was_run_and_where(run):
    text = to_markdown(run)
    assert "a machine" in text
    assert "```bash\npython -m benchmarks.peers run\n```" in text


def test_a_report_compares_with_the_peers_that_took_part(run):
    text = to_markdown(run)
    assert "| vLLM CPU | 1.00 × | 1.00 × |" in text
    assert "llama.cpp" not in text


def test_a_report_marks_what_a_peer_cannot_do(run):
    row = next(line for line in to_markdown(run).splitlines() if line.startswith("| vLLM CPU |"))
    assert "–" in row
