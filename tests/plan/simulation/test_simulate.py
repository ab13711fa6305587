"""Requests through simulated fleets: nothing is lost, times follow from the steps, and the same seed gives the same bytes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.random_bits import key_of
from forerun.engine.simulation import SimulatedEngine, SimulationSettings, linear_decode_seconds
from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError
from forerun.executor.simulated_text import NOTHING_DRAFTED, ConditionalAcceptance, Drafted, DraftShape
from forerun.plan.load import Load
from forerun.plan.simulation.fleet import Fleet, FleetRun, Transfer
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests, with_arrivals
from forerun.plan.simulation.routing import ROUTING
from forerun.plan.simulation.simulate import simulate
from forerun.plan.sla import Sla

ENGINE = SimulationSettings(num_blocks=400, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128)
LOAD = Load(rate=20, isl=60, osl=20, isl_cv=0.7, osl_cv=0.5, prefix_hit_rate=0.3)


def equal_requests(count, *, every, num_prompt=40, num_output=10):
    return [
        SimulatedRequest(arrival=every * i, num_prompt_tokens=num_prompt, num_output_tokens=num_output)
        for i in range(count)
    ]


def as_bytes(result):
    return json.dumps([result.to_json(), result.records_to_json()]).encode()


FLEETS = st.builds(
    Fleet,
    replicas=st.integers(1, 3),
    prefill_replicas=st.integers(0, 2),
    routing=st.sampled_from(sorted(ROUTING)),
    transfer=st.just(Transfer(seconds=0.003, bytes_per_second=1e6, bytes_per_token=100)),
)


@settings(max_examples=25, deadline=None)
@given(FLEETS, st.integers(0, 99), st.sampled_from([40, 60, 400]), st.sampled_from([0, 3]))
def test_every_request_gets_its_tokens_in_time_order_and_the_same_seed_gives_the_same_bytes(
    fleet, seed, num_blocks, num_draft_tokens
):
    engine = SimulationSettings(
        num_blocks=num_blocks,
        max_model_len=400,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        drafting=ConditionalAcceptance((0.7, 0.5)),
    )
    requests = synthetic_requests(LOAD, 25, seed=seed)
    control = FixedLength(num_speculative_tokens=num_draft_tokens)

    def run():
        return simulate(engine, requests, fleet=fleet, make_control=lambda: control, seed=seed, keeps_chunks=True)

    result = run()
    for record, request in zip(result.requests, requests, strict=True):
        assert record.arrival == request.arrival <= record.started < record.first_token <= record.finished
        times, tokens = zip(*record.chunks, strict=True)
        assert sum(tokens) == request.num_output_tokens
        assert list(times) == sorted(times)
        assert (times[0], times[-1], len(times)) == (record.first_token, record.finished, record.num_chunks)
    assert result.latencies("itl").num_values == sum(one.num_chunks - 1 for one in result.requests)
    for replica, log in zip(result.replicas, result.steps, strict=True):
        assert replica.peak_kv_usage <= 1
        assert all(begin <= end for begin, end in zip(log.ends, log.ends[1:], strict=False))
    assert sum(sum(log.num_tokens) for log in result.steps) == result.num_output_tokens
    assert as_bytes(run()) == as_bytes(result)


class EqualTexts:
    """The same text whatever the request: equal prompts share blocks of their answers too."""

    def tokens(self, spec, start, end):
        return [place % 7 for place in range(start, end)]


def seconds_by_shape(num_rows, num_sequences, num_context_tokens):
    return 0.004 + 1e-4 * num_rows + 1e-5 * num_sequences + 1e-7 * num_context_tokens / 3


def seconds_of_plan(plan):
    num_context = sum(planned.start for planned in plan.sequences)
    return seconds_by_shape(len(plan.rows.token_ids), len(plan.sequences), num_context)


class Trees:
    """Drafts of all sizes, most of them trees, by turns from two drafters; some places have none."""

    def draft(self, spec, position, *, limit, depth, min_survival):
        bits = key_of(spec.seed, position)
        parents, levels, right = [], [], []
        for node in range(min(bits % 6, limit)):
            parent = (bits >> 3 + node) % (node + 1) - 1
            level = 1 if parent < 0 else levels[parent] + 1
            if level > depth:
                break
            levels.append(level)
            parents.append(parent)
            if parent == (right[-1] if right else -1) and bits >> 20 + node & 1:
                right.append(node)
        if not parents:
            return NOTHING_DRAFTED
        return Drafted(DraftShape(len(parents), tuple(parents), source="ab"[bits >> 40 & 1]), tuple(right))


DRAFTED = st.sampled_from(
    [
        (0, (), None),
        (3, (), ConditionalAcceptance((0.8, 0.7))),
        (4, (), ConditionalAcceptance((0.7, 0.6, 0.6), (0.8, 0.75, 0.3))),
        (3, ((1, 2, 3), (3, 4, 1), (5, 9, 0)), ConditionalAcceptance((0.9,))),
        (5, (), Trees()),
        (2, (), None),
    ]
)


@settings(max_examples=100, deadline=None)
@given(
    FLEETS,
    st.integers(0, 99),
    st.sampled_from([30, 45, 300]),
    st.sampled_from([2, 3, 6]),
    st.sampled_from([None, EqualTexts()]),
    st.sampled_from([1, 20, 200]),
    st.sampled_from([8, 32]),
    DRAFTED,
)
def test_taking_steps_together_changes_nothing(
    fleet, seed, num_blocks, max_num_seqs, texts, rate, max_num_batched_tokens, drafted
):
    requests = synthetic_requests(
        Load(rate=rate, isl=30, osl=40, isl_cv=0.7, osl_cv=0.5, prefix_hit_rate=0.6), 20, seed=seed
    )
    longest, schedule, drafting = drafted

    def run(decode_seconds):
        engine = SimulationSettings(
            num_blocks=num_blocks,
            block_size=8,
            max_model_len=240,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            texts=texts,
            drafting=drafting,
            step_seconds=seconds_of_plan,
            decode_seconds=decode_seconds,
            draft_seconds=lambda num_asked, num_drafted: 1e-3 + 1e-4 * num_asked + 1e-5 * num_drafted,
        )
        control = FixedLength(num_speculative_tokens=longest, schedule=schedule)
        one = FleetRun(fleet, engine, lambda: control, seed=seed, keeps_chunks=True)
        records = one.run(requests)
        replicas = [*one.replicas, *one.prefill_replicas]
        pools = [replica.engine.parts.pool for replica in replicas]
        return (
            records,
            [(replica.steps, replica.gaps, replica.engine.stats, replica.engine.state) for replica in replicas],
            [(list(pool._free_cached), pool._free_uncached, pool._cache._block_by_digest) for pool in pools],
            [replica.engine._num_executed for replica in replicas],
        )

    assert run(seconds_by_shape) == run(None)


@pytest.mark.parametrize("num_draft_tokens", [0, 1])
def test_most_steps_of_a_busy_engine_are_taken_together(monkeypatch, num_draft_tokens):
    engine = SimulationSettings(decode_seconds=linear_decode_seconds, drafting=ConditionalAcceptance((0.6,)))
    taken, step = [], SimulatedEngine.step
    monkeypatch.setattr(SimulatedEngine, "step", lambda self: taken.append(1) or step(self))
    control = FixedLength(num_speculative_tokens=num_draft_tokens)
    result = simulate(engine, equal_requests(30, every=0.05, num_output=100), make_control=lambda: control)
    assert len(taken) == 30, "each request has a step that reads its prompt"
    assert sum(one.num_steps for one in result.replicas) > 300


def test_another_seed_gives_other_drafts():
    engine = SimulationSettings(drafting=ConditionalAcceptance((0.5,)))
    requests = synthetic_requests(LOAD, 20)
    found = {
        as_bytes(simulate(engine, requests, make_control=lambda: FixedLength(num_speculative_tokens=3), seed=seed))
        for seed in range(3)
    }
    assert len(found) == 3


def test_a_request_alone_takes_its_steps_and_nothing_else():
    engine = SimulationSettings(step_seconds=lambda plan: 0.01 + 0.001 * len(plan.rows.token_ids))
    (record,) = simulate(engine, equal_requests(1, every=1)).requests
    assert record.ttft == pytest.approx(0.01 + 0.001 * 40)
    assert record.tpot == record.icl == pytest.approx(0.011)
    assert record.e2el == pytest.approx(record.ttft + 9 * record.tpot)


def test_a_request_that_arrives_in_a_step_waits_for_its_end():
    engine = SimulationSettings(step_seconds=lambda _: 1.0)
    first, second = simulate(engine, equal_requests(2, every=0.25, num_output=3)).requests
    assert (first.finished, second.started, second.first_token) == (3.0, 1.0, 2.0)


def test_routing_at_random_is_no_turn_and_serves_worse_than_one():
    """Each in turn spaces the requests of an engine; a random choice does not, so some wait where others are idle."""
    load, engine = Load(rate=150, isl=40, osl=10), replace(ENGINE, max_num_seqs=2)
    found = {
        routing: simulate(engine, synthetic_requests(load, 600), fleet=Fleet(replicas=4, routing=routing))
        for routing in ("random", "round-robin", "least-requests")
    }
    counts = Counter(one.replica for one in found["random"].requests)
    assert set(counts) == {0, 1, 2, 3}
    assert 1 < max(counts.values()) - min(counts.values()) < 120
    means = [one.latencies("e2el").mean for one in found.values()]
    assert means == sorted(means, reverse=True)


def test_drafts_shorten_answers_by_the_mean_of_accepted_tokens():
    engine = SimulationSettings(
        drafting=ConditionalAcceptance((0.8, 0.5)), step_seconds=lambda _: 0.01, max_model_len=3000
    )
    requests = equal_requests(4, every=0, num_output=2000)
    result = simulate(engine, requests, make_control=lambda: FixedLength(num_speculative_tokens=2))
    assert result.speculation.acceptance_length == pytest.approx(1 + 0.8 + 0.8 * 0.5, rel=0.02)
    assert result.latencies("tpot").mean == pytest.approx(0.01 / 2.2, rel=0.03)


def test_drafting_takes_its_time():
    engine = SimulationSettings(
        drafting=ConditionalAcceptance((0.0,)),
        step_seconds=lambda _: 0.01,
        draft_seconds=lambda num_asked, num_drafted: 0.002 * num_asked + 0.001 * num_drafted,
    )
    (record,) = simulate(
        engine, equal_requests(1, every=0), make_control=lambda: FixedLength(num_speculative_tokens=3)
    ).requests
    drafted = [3] * 6 + [2, 1]  # after each step; never past what the answer can still use
    assert record.e2el == pytest.approx(10 * 0.01 + 0.002 * len(drafted) + 0.001 * sum(drafted))


def test_round_robin_sends_to_each_in_turn():
    result = simulate(ENGINE, equal_requests(9, every=0.01), fleet=Fleet(replicas=3))
    assert [one.replica for one in result.requests] == [0, 1, 2] * 3


def test_least_requests_avoids_the_replica_that_is_busy_with_a_long_answer():
    requests = equal_requests(8, every=0.1, num_output=5)
    requests[0] = SimulatedRequest(arrival=0, num_prompt_tokens=40, num_output_tokens=400)
    result = simulate(ENGINE, requests, fleet=Fleet(replicas=2, routing="least-requests"))
    assert [one.replica for one in result.requests] == [0] + [1] * 7


def test_least_tokens_avoids_the_replica_with_the_long_prompt():
    requests = equal_requests(3, every=0.001, num_output=50)
    requests[0] = SimulatedRequest(arrival=0, num_prompt_tokens=400, num_output_tokens=50)
    result = simulate(ENGINE, requests, fleet=Fleet(replicas=2, routing="least-tokens"))
    assert [one.replica for one in result.requests] == [0, 1, 1]


def test_prefix_affinity_finds_more_in_the_caches_than_turns_do():
    requests = [
        SimulatedRequest(
            arrival=0.05 * i, num_prompt_tokens=200, num_output_tokens=5, piece_hashes=(i * 7 % 3,), piece_size=160
        )
        for i in range(30)
    ]
    cached = {
        routing: sum(
            one.num_cached_tokens
            for one in simulate(ENGINE, requests, fleet=Fleet(replicas=2, routing=routing)).requests
        )
        for routing in ("round-robin", "prefix")
    }
    assert cached["prefix"] == 27 * 160, "each of the three prefixes is computed once"
    assert cached["round-robin"] == 24 * 160


def test_a_router_does_not_know_of_ends_that_are_to_come():
    # replica 0 is in its last step when the second request arrives: it counts as busy
    engine = SimulationSettings(step_seconds=lambda _: 1.0)
    requests = with_arrivals(equal_requests(2, every=0, num_output=1), np.array([0.0, 0.5]))
    result = simulate(engine, requests, fleet=Fleet(replicas=2, routing="least-requests"))
    assert [one.replica for one in result.requests] == [0, 1]


def test_more_replicas_keep_a_service_level_that_fewer_do_not():
    requests = synthetic_requests(Load(rate=120, isl=60, osl=40), 150)
    sla = Sla(ttft=0.2, tpot=0.02)
    found = [simulate(ENGINE, requests, fleet=Fleet(replicas=n)).attainment(sla) for n in (1, 2, 4)]
    assert found == sorted(found)
    assert found[0] < 0.5 < found[2]


def test_prompts_may_have_tokens_beyond_those_of_the_profile():
    """A server's profile knows only the tokens that it was sent."""
    settings = replace(ENGINE, vocab_size=100)
    requests = [
        SimulatedRequest(arrival=0, num_prompt_tokens=3, num_output_tokens=4, prompt_ids=[5, 40_000, number])
        for number in (7, 99_999)
    ]
    result = simulate(settings, requests)
    assert [one.num_chunks for one in result.requests] == [4, 4]


def test_short_memory_preempts():
    engine = SimulationSettings(num_blocks=20, max_model_len=256, max_num_seqs=8)
    result = simulate(engine, equal_requests(8, every=0, num_prompt=16, num_output=64))
    assert result.num_preemptions > 0
    assert result.replicas[0].peak_kv_usage > 0.9


def test_a_step_counts_the_memory_that_it_gives_back_at_its_end():
    """A request of one token ends with the step that reads its prompt: of 40 tokens, in 3 blocks of 16."""
    engine = SimulationSettings(num_blocks=20, block_size=16, max_model_len=256)
    (found,) = simulate(engine, equal_requests(2, every=1, num_output=1)).replicas
    assert found.peak_kv_usage == pytest.approx(3 / 20)
    assert found.kv_usage == pytest.approx(3 / 20)


class TestPrefillAndDecodeApart:
    fleet = Fleet(
        replicas=1, prefill_replicas=1, transfer=Transfer(seconds=0.5, bytes_per_second=1000, bytes_per_token=10)
    )

    def test_both_kinds_of_engines_hold_the_prompt(self):
        engine = SimulationSettings(num_blocks=20, block_size=16, max_model_len=256)
        found = simulate(engine, equal_requests(1, every=0), fleet=self.fleet)
        assert {one.kind: one.peak_kv_usage for one in found.replicas} == {"prefill": 3 / 20, "decode": 4 / 20}

    def test_the_second_token_comes_after_the_transfer_and_a_step(self):
        engine = SimulationSettings(step_seconds=lambda plan: 0.01 + 0.001 * len(plan.rows.token_ids))
        (record,) = simulate(engine, equal_requests(1, every=0), fleet=self.fleet, keeps_chunks=True).requests
        first, second = record.chunks[:2]
        assert first == (pytest.approx(0.01 + 0.001 * 40), 1)
        rest = 41 - 32  # of the prompt's last block, which is not full, and the first token
        assert second[0] - first[0] == pytest.approx(0.5 + 40 * 10 / 1000 + 0.01 + 0.001 * rest)

    def test_those_that_decode_read_hardly_any_prompt(self):
        result = simulate(ENGINE, synthetic_requests(LOAD, 40), fleet=self.fleet)
        decode, prefill = result.replicas
        assert (decode.kind, prefill.kind) == ("decode", "prefill")
        assert decode.num_prompt_tokens <= 40 * 17
        assert prefill.num_prompt_tokens + prefill.num_cached_tokens == result.num_input_tokens

    def test_those_that_wait_for_memory_keep_the_kv_that_came_with_them(self):
        engine = SimulationSettings(num_blocks=20, max_model_len=256, max_num_seqs=8)
        requests = equal_requests(6, every=0, num_prompt=160, num_output=20)
        decode, *_ = simulate(engine, requests, fleet=Fleet(replicas=1, prefill_replicas=6)).replicas
        assert decode.num_running == pytest.approx(1.0), "there is memory for one"
        assert decode.num_prompt_tokens == 6, "the first token of each; all else came with it"

    def test_the_first_step_of_the_one_that_decodes_has_no_draft(self):
        engine = SimulationSettings(drafting=ConditionalAcceptance((1.0,)))
        request = equal_requests(1, every=0, num_output=1 + 1 + 3 * 10)

        def chunks(fleet):
            result = simulate(
                engine,
                request,
                fleet=fleet,
                make_control=lambda: FixedLength(num_speculative_tokens=2),
                keeps_chunks=True,
            )
            return [tokens for _, tokens in result.requests[0].chunks]

        assert chunks(Fleet()) == [1, *[3] * 10, 1]
        assert chunks(self.fleet) == [1, 1, *[3] * 10]

    def test_without_a_prefix_cache_nothing_can_be_handed_over(self):
        with pytest.raises(ConfigError, match="turn prefix caching on"):
            simulate(SimulationSettings(enable_prefix_caching=False), equal_requests(1, every=0), fleet=self.fleet)


@pytest.mark.parametrize(
    ("requests", "problem"),
    [
        ([], "got none"),
        (equal_requests(2, every=-1)[::-1], "the first arrives at -1 s"),
        (equal_requests(2, every=1)[::-1], r"number 1 \(from 0\) arrives at 0 s, before"),
        (equal_requests(1, every=0, num_prompt=0), "0 prompt and 10 output tokens"),
        (equal_requests(1, every=0, num_prompt=600), "600 prompt and 10 output tokens, together more than"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(requests, problem):
    with pytest.raises(ConfigError, match=problem):
        simulate(ENGINE, requests)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Fleet(replicas=0), "replicas: got 0"),
        (lambda: Fleet(prefill_replicas=-1), "prefill_replicas: got -1"),
        (lambda: Fleet(routing="least-request"), "did you mean 'least-requests'"),
        (lambda: Transfer(seconds=-1), "got -1 s"),
        (lambda: Transfer(bytes_per_second=0), "0 bytes per second"),
        (lambda: simulate(SimulationSettings(num_blocks=3), equal_requests(1, every=0)), "num_blocks: got 3"),
    ],
)
def test_impossible_fleets_are_refused(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()
