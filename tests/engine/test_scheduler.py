"""Who runs: budget, memory, order of arrival, preemption."""

from __future__ import annotations

import pytest

from forerun.core.draft import Draft
from forerun.engine import scheduler as scheduler_module
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.engine.speculation import FixedLength
from forerun.kv.block_pool import BlockPool
from forerun.kv.block_table import BlockTable
from tests.engine.generations import BLOCK, finish_step, generation_of

CHAIN = Draft((1, 2, 3, 4, 5, 6))


def make(num_blocks=16, *, seqs=4, tokens=32, caching=True):
    pool = BlockPool(num_blocks, enable_prefix_caching=caching)
    limits = SchedulerLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return Scheduler(pool, limits, block_size=BLOCK), pool


CONTROL = FixedLength(num_speculative_tokens=8)


def rows(chosen):
    return [(planned.start, planned.num_tail, planned.num_draft) for _, planned in chosen]


def step(scheduler):
    chosen = scheduler.schedule(CONTROL)
    finish_step(chosen)
    return rows(chosen)


def plan_only(scheduler):
    """A step that is planned and comes to nothing."""
    chosen = scheduler.schedule(CONTROL)
    for generation, _ in chosen:
        generation.in_flight = None
    return rows(chosen)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    scheduler, pool = make(tokens=6)
    scheduler.enqueue(generation_of(pool, range(14)))
    assert [step(scheduler) for _ in range(4)] == [[(0, 6, 0)], [(6, 6, 0)], [(12, 2, 0)], [(14, 1, 0)]]


def test_a_budget_of_one_token_still_gets_through():
    scheduler, pool = make(seqs=1, tokens=1)
    scheduler.enqueue(generation_of(pool, range(3)))
    assert [step(scheduler) for _ in range(4)] == [[(0, 1, 0)], [(1, 1, 0)], [(2, 1, 0)], [(3, 1, 0)]]


def test_sequences_are_admitted_in_order_up_to_max_num_seqs():
    scheduler, pool = make(seqs=2)
    arrivals = [generation_of(pool, [i, i]) for i in range(3)]
    for generation in arrivals:
        scheduler.enqueue(generation)
    step(scheduler)
    assert scheduler.running == arrivals[:2]
    scheduler.remove(arrivals[0])
    step(scheduler)
    assert scheduler.running == arrivals[1:]


def test_siblings_go_before_those_who_wait():
    scheduler, pool = make()
    waiting, *siblings = [generation_of(pool, [i]) for i in range(3)]
    scheduler.enqueue(waiting)
    scheduler.enqueue_first(siblings)
    assert list(scheduler.waiting) == [*siblings, waiting]


def test_drafts_do_not_keep_a_waiting_sequence_out():
    scheduler, pool = make(tokens=6)
    drafting = generation_of(pool, range(3))
    scheduler.enqueue(drafting)
    step(scheduler)
    drafting.draft = CHAIN
    scheduler.enqueue(generation_of(pool, range(20, 23)))
    assert step(scheduler) == [(3, 1, 2), (0, 3, 0)]


def test_only_a_sequence_at_its_end_gets_its_draft():
    scheduler, pool = make(tokens=6)
    scheduler.enqueue(generation_of(pool, range(8), output_ids=[1], draft=CHAIN))
    assert [step(scheduler) for _ in range(2)] == [[(0, 6, 0)], [(6, 3, 3)]]


def test_drafts_shrink_to_the_memory_that_is_free():
    scheduler, pool = make(num_blocks=3)
    scheduler.enqueue(generation_of(pool, range(7), output_ids=[1], draft=CHAIN))
    assert step(scheduler) == [(0, 8, 4)]


@pytest.mark.parametrize(("tokens", "drafted"), [(32, [6, 1, 6]), (11, [4, 1, 3]), (6, [1, 1, 1]), (4, [1, 0, 0])])
def test_what_the_budget_leaves_for_drafts_is_shared_out_the_longest_are_cut_first(tokens, drafted):
    scheduler, pool = make(seqs=3, tokens=tokens)
    arrivals = [generation_of(pool, [i]) for i in range(3)]
    for generation in arrivals:
        scheduler.enqueue(generation)
    step(scheduler)
    for generation, length in zip(arrivals, (6, 1, 6), strict=True):
        generation.draft = CHAIN.first(length)
    assert [num_draft for _, _, num_draft in step(scheduler)] == drafted


def test_a_sequence_that_fills_the_pool_runs_once_it_is_alone():
    scheduler, pool = make(num_blocks=4)
    small, large = generation_of(pool, range(4)), generation_of(pool, range(50, 66))
    scheduler.enqueue(small)
    scheduler.enqueue(large)
    step(scheduler)
    step(scheduler)
    assert scheduler.running == [small]
    scheduler.remove(small)
    assert step(scheduler) == [(0, 16, 0)]


def test_the_youngest_gives_way_and_waits_first_in_line():
    scheduler, pool = make(num_blocks=5, caching=False)
    old, young, waiting = generation_of(pool, range(7)), generation_of(pool, range(20, 27)), generation_of(pool, [1])
    scheduler.enqueue(old)
    scheduler.enqueue(young)
    for _ in range(2):
        step(scheduler)  # eight tokens each: four blocks, one is free
    scheduler.enqueue(waiting)
    plan_only(scheduler)
    assert (scheduler.running, list(scheduler.waiting)) == ([old], [young, waiting])
    assert scheduler.num_preemptions == 1
    assert young.table.num_blocks == 0


def test_a_sequence_preempted_in_its_prompt_computes_all_of_it_again():
    scheduler, pool = make(num_blocks=6, tokens=10, caching=False)
    old, young = generation_of(pool, range(7)), generation_of(pool, range(20, 35))
    scheduler.enqueue(old)
    step(scheduler)
    scheduler.enqueue(young)
    assert plan_only(scheduler) == [(7, 1, 0)]  # with one block kept back it does not fit
    scheduler.remove(old)
    assert step(scheduler) == [(0, 10, 0)]
    scheduler.running.insert(0, old := generation_of(pool, range(16)))  # as if memory had been taken meanwhile
    assert step(scheduler) == [(0, 10, 0)]
    assert step(scheduler) == [(10, 6, 0)]
    assert (scheduler.running, list(scheduler.waiting)) == ([old], [young])
    scheduler.remove(old)
    assert [step(scheduler) for _ in range(2)] == [[(0, 10, 0)], [(10, 5, 0)]]


def test_what_does_not_fit_is_hashed_once_however_long_it_waits(monkeypatch):
    num_hashed = []
    plain_digests = BlockTable.prefix_digests
    monkeypatch.setattr(
        BlockTable, "prefix_digests", lambda table, ids: num_hashed.append(len(ids)) or plain_digests(table, ids)
    )
    scheduler, pool = make(num_blocks=8)
    running, waiting = generation_of(pool, range(16)), generation_of(pool, range(50, 75))
    scheduler.enqueue(running)
    scheduler.enqueue(waiting)
    for _ in range(8):
        step(scheduler)
    assert num_hashed == [16, 25]
    scheduler.remove(running)
    step(scheduler)
    assert scheduler.running == [waiting]


def test_what_waits_for_memory_starts_as_soon_as_its_prefix_is_cached():
    """Five blocks were too many, with three free; one is not, when the first has computed the same prompt."""
    scheduler, pool = make(num_blocks=8)
    first, same = generation_of(pool, range(20)), generation_of(pool, range(20))
    scheduler.enqueue(first)
    scheduler.enqueue(same)
    assert step(scheduler) == [(0, 20, 0)]
    assert step(scheduler) == [(20, 1, 0), (16, 4, 0)]


def group(pool, name, count, *, first=0):
    return [generation_of(pool, [10 * first + i], group=name, max_tokens=90) for i in range(count)]


def test_requests_take_turns_at_places_that_become_free():
    scheduler, pool = make(num_blocks=64, seqs=2)
    many, few = group(pool, "many", 6), group(pool, "few", 2, first=1)
    for generation in (*many, *few):
        scheduler.enqueue(generation)
    step(scheduler)
    assert [generation.group for generation in scheduler.running] == ["many", "few"]
    for generation in list(scheduler.running):
        scheduler.remove(generation)
    step(scheduler)
    assert [generation.group for generation in scheduler.running] == ["many", "few"]


def test_a_request_that_holds_all_places_gives_up_those_above_its_share_and_no_more():
    scheduler, pool = make(num_blocks=64, seqs=8)
    for generation in group(pool, "many", 12):
        scheduler.enqueue(generation)
    step(scheduler)
    assert len(scheduler.running) == 8
    for generation in group(pool, "late", 6, first=2):
        scheduler.enqueue(generation)
    for _ in range(10):
        step(scheduler)
    running = [generation.group for generation in scheduler.running]
    assert (running.count("many"), running.count("late")) == (4, 4)
    assert scheduler.num_preemptions == 4
    for _ in range(5):
        step(scheduler)
    assert scheduler.num_preemptions == 4, "shares are reached once and kept"


def test_a_single_late_request_runs_within_a_step_beside_one_that_took_all_places():
    scheduler, pool = make(num_blocks=64, seqs=4)
    for generation in group(pool, "many", 40):
        scheduler.enqueue(generation)
    step(scheduler)
    (late,) = group(pool, "late", 1, first=9)
    scheduler.enqueue(late)
    step(scheduler)
    assert late in scheduler.running
    assert len(scheduler.running) == 4


def test_requests_of_one_completion_are_never_preempted_for_others():
    scheduler, pool = make(num_blocks=64, seqs=4)
    for i in range(12):
        scheduler.enqueue(generation_of(pool, [i]))
    for _ in range(5):
        step(scheduler)
    assert scheduler.num_preemptions == 0


def test_prompt_logprobs_are_computed_in_bounded_steps_without_the_prefix_cache(monkeypatch):
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROB_ROWS", 5)
    scheduler, pool = make()
    for _ in range(2):
        generation = generation_of(pool, range(12), prompt_logprobs=0)
        scheduler.enqueue(generation)
        assert [step(scheduler) for _ in range(3)] == [[(0, 5, 0)], [(5, 5, 0)], [(10, 2, 0)]]
        scheduler.remove(generation)


def test_prompts_with_logprobs_share_the_rows_of_a_step_and_all_go_on(monkeypatch):
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROB_ROWS", 8)
    scheduler, pool = make(num_blocks=32, seqs=4, tokens=64)
    waiting = [generation_of(pool, range(10 * i, 10 * i + 6), prompt_logprobs=0) for i in range(4)]
    for generation in waiting:
        scheduler.enqueue(generation)
    assert step(scheduler) == [(0, 6, 0), (0, 3, 0), (0, 1, 0), (0, 1, 0)]
    assert step(scheduler) == [(6, 1, 0), (3, 3, 0), (1, 5, 0), (1, 2, 0)]
    assert step(scheduler) == [(7, 1, 0), (6, 1, 0), (6, 1, 0), (3, 3, 0)]


@pytest.mark.parametrize("change", [{"index": 1}, {"output_ids": [1]}], ids=["a sibling", "prompt known already"])
def test_who_needs_no_prompt_logits_uses_the_prefix_cache(change):
    scheduler, pool = make()
    first = generation_of(pool, range(12))
    scheduler.enqueue(first)
    step(scheduler)
    scheduler.enqueue(generation_of(pool, range(12), prompt_logprobs=0, **change))
    assert scheduler.schedule(CONTROL)[1][1].start >= 8


def test_a_preempted_sequence_finding_its_own_blocks_is_no_cache_hit():
    scheduler, pool = make()
    generation = generation_of(pool, range(12))
    scheduler.enqueue(generation)
    step(scheduler)
    scheduler.remove(generation)
    scheduler.enqueue(generation)  # as preemption does
    assert scheduler.schedule(CONTROL)[0][1].start == 12
    assert (generation.num_cached_tokens, scheduler.num_cached_tokens) == (0, 0)


def test_removing_gives_every_block_back_wherever_the_sequence_is():
    scheduler, pool = make(num_blocks=8, seqs=1)
    running, waiting, held = (generation_of(pool, range(10)) for _ in range(3))
    scheduler.enqueue(running)
    scheduler.enqueue(waiting)
    plan_only(scheduler)
    for generation in (running, waiting, held, running):
        scheduler.remove(generation)
    assert not [*scheduler.waiting, *scheduler.running]
    assert pool.num_free == pool.num_blocks
