"""The figures of a load test, on handmade answers."""

from __future__ import annotations

import pytest

from forerun.bench.load.answer import METRICS, Answer, Chunk, LoadRequest
from forerun.bench.load.figures import find_peaks, sum_up
from forerun.core.load_figures import Peaks, Spread


def answer(seconds, tokens, *, started=0.0, num_prompt=5, says=False, error=None, queue_time=0.0):
    """An answer whose chunks come at `seconds` with so many `tokens` each."""
    so_far = [sum(tokens[: place + 1]) for place in range(len(tokens))]
    return Answer(
        LoadRequest("a prompt", 100),
        started=started,
        queue_time=queue_time,
        chunks=[
            Chunk(at, count > 0, total if says else None)
            for at, count, total in zip(seconds, tokens, so_far, strict=True)
        ],
        num_prompt_tokens=num_prompt,
        num_output_tokens=sum(tokens),
        error=error,
    )


def test_latencies_of_one_answer():
    one = answer([0.5, 0.7, 1.1], [1, 4, 4])
    assert (one.ttft, one.latency, one.tpot) == (0.5, 1.1, pytest.approx(0.6 / 8))
    assert one.itls == one.icls == pytest.approx([0.2, 0.4])


def test_a_chunk_without_text_counts_for_itl_as_in_vllm_but_not_for_icl():
    one = answer([0.5, 0.7, 1.1], [1, 4, 0])
    assert one.itls == pytest.approx([0.2, 0.4])
    assert one.icls == pytest.approx([0.2])
    assert one.latency == 1.1


def test_the_role_that_opens_a_chat_is_no_first_token():
    one = answer([0.01, 0.5, 0.7], [0, 1, 1])
    assert one.ttft == 0.5
    assert one.itls == pytest.approx([0.2])


def test_an_answer_all_of_special_tokens_still_has_a_first_one():
    one = answer([0.5, 0.7], [0, 0])
    assert (one.ttft, one.itls) == (0.5, pytest.approx([0.2]))


def test_one_token_takes_no_time_per_token():
    assert answer([0.5], [1]).tpot is None


def test_tokens_of_chunks_are_the_servers_or_spread_evenly():
    assert answer([1, 2], [1, 5], says=True).weighted_chunks == [(1, 1), (2, 5)]
    assert answer([1, 2], [1, 5]).weighted_chunks == [(1, 3), (2, 3)]


def test_a_spread_is_in_milliseconds():
    spread = Spread.of([0.1, 0.2, 0.3, 0.6], [50, 99.9])
    assert spread.to_json("ttft") == {
        "mean_ttft_ms": pytest.approx(300),
        "median_ttft_ms": pytest.approx(250),
        "std_ttft_ms": pytest.approx(187.0829),
        "p50_ttft_ms": pytest.approx(250),
        "p99.9_ttft_ms": pytest.approx(599.1),
    }


def test_what_was_not_measured_is_none_and_not_zero():
    assert set(Spread.of([], [99]).to_json("tpot").values()) == {None}


def figures(answers, seconds=2.0, goals=None):
    return sum_up(answers, seconds, metrics=list(METRICS), percents=[99], goals=goals or {})


def test_counts_and_rates():
    found = figures([answer([1, 2], [1, 3]), answer([1], [1]), answer([1], [9], error="broken")]).to_json()
    assert {key: found[key] for key in ("completed", "failed", "total_input_tokens", "total_output_tokens")} == {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 10,
        "total_output_tokens": 5,
    }
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1, 2.5, 7.5)
    assert found["request_goodput"] is None


def test_latencies_are_of_answers_that_came_whole():
    found = figures([answer([1, 2], [1, 1], queue_time=3), answer([50], [1], error="broken")]).to_json()
    assert (found["mean_ttft_ms"], found["p99_e2el_ms"], found["mean_itl_ms"]) == (1000, 2000, 1000)
    assert (found["mean_client_queue_time_ms"], found["mean_e2el_including_client_queue_ms"]) == (3000, 5000)


def test_goodput_counts_requests_that_keep_all_goals():
    answers = [
        answer([0.1, 1.1], [1, 1]),
        answer([0.1, 0.2], [1, 1]),
        answer([0.5], [1]),
        answer([0.1], [1], error="e"),
    ]
    assert figures(answers, goals={"ttft": 200}).request_goodput == 1
    assert figures(answers, goals={"ttft": 200, "tpot": 500}).request_goodput == 0.5
    assert figures(answers, goals={"tpot": 500}).request_goodput == 1  # one token takes no time per token
    assert figures(answers, goals={"e2el": 1100}).request_goodput == 1.5


def test_peaks_are_of_whole_seconds():
    first = answer([0.5, 0.9, 1.2], [1, 4, 4], started=100.0, says=True)
    second = answer([0.3, 1.5], [1, 4], started=101.0, says=True)
    assert find_peaks([first, second]) == Peaks(num_chunks=2, num_tokens=5, num_requests=2)
    assert find_peaks([]) == Peaks(0, 0, 0)


def test_a_run_in_which_all_failed_has_figures():
    found = figures([answer([], [], error="refused")]).to_json()
    assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (0, 1, None)


def test_what_nobody_counted_is_not_known_and_not_zero():
    uncounted = answer([0.1, 0.2], [1, 1])
    uncounted.num_output_tokens = uncounted.num_prompt_tokens = None
    assert uncounted.weighted_chunks == [(0.1, None), (0.2, None)]
    both = [uncounted, answer([0.1, 1.1], [1, 1])]
    found = figures(both, goals={"tpot": 2000}).to_json()
    unknown = "total_input_tokens total_output_tokens output_throughput total_token_throughput request_goodput"
    assert {found[name] for name in [*unknown.split(), "peak_output_token_throughput"]} == {None}
    assert (found["completed"], found["max_output_tokens_per_s"], found["mean_tpot_ms"]) == (2, 3, pytest.approx(1000))
    assert figures(both, goals={"ttft": 200}).request_goodput == 1
