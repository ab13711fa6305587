"""The step by which memory is measured is as large as any that the engine may plan."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.core.stats import StepTimes
from forerun.core.step import ReadyResult, SequenceResult, StepResult
from forerun.drafters.guard import GuardedDrafter
from forerun.executor.largest_step import ChainDrafter, LargestStep
from forerun.executor.local import LocalExecutor
from forerun.grammar.cache import GrammarCache
from forerun.kv.cache import KVCache
from forerun.verify.matching import MatchingConfig
from tests.engines import EOS, tiny_target


class Recorder:
    """Keeps plans, and drafts as many tokens as they allow."""

    def __init__(self):
        self.plans = []

    def execute(self, plan):
        self.plans.append(plan)
        results = [SequenceResult(token_ids=[0], draft=Draft((0,) * one.draft_limit)) for one in plan.sequences]
        return ReadyResult(StepResult(sequences=results, times=StepTimes()))


@settings(max_examples=200)
@given(st.data())
def test_it_has_as_many_rows_and_sequences_as_there_may_be_and_no_sequence_is_too_long(data):
    num_sequences = data.draw(st.integers(1, 12))
    step = LargestStep(
        num_sequences=num_sequences,
        num_rows=data.draw(st.integers(num_sequences, 80)),
        longest=data.draw(st.integers(4, 120)),
        num_drafted=data.draw(st.integers(0, 5)),
        block_size=data.draw(st.sampled_from([1, 4, 16])),
    )
    recorder = Recorder()
    num_rows = step.run(recorder)
    plan = recorder.plans[-1]
    assert num_rows == len(plan.rows.token_ids) <= step.num_rows
    assert len(plan.sequences) == step.num_sequences
    drafted = max(0, min(step.num_drafted, step.longest - 3))
    if num_rows < step.num_rows:
        rows = [one.num_tail + one.num_draft for one in plan.sequences]
        assert all(count in (1 + drafted, step.longest - 1) for count in rows), "no sequence has another row to give"
    for one in plan.sequences:
        assert one.start + one.num_tail + one.num_draft == one.end <= step.longest
        assert one.num_draft <= step.num_drafted
        assert len(one.blocks) * step.block_size >= one.end
    assert max(one.end for one in plan.sequences) >= step.longest - drafted - 2
    assert set(plan.rows.slots) <= set(range(step.block_size)), "block 0 is all that there is"


def test_most_sequences_decode_with_a_draft_beside_one_chunk_of_a_prompt():
    recorder = Recorder()
    LargestStep(num_sequences=4, num_rows=40, longest=100, num_drafted=3, block_size=4).run(recorder)
    *decoding, reading = recorder.plans[-1].sequences
    assert [(one.num_tail, one.num_draft) for one in decoding] == [(1, 3)] * 3
    assert (reading.num_tail, reading.num_draft) == (28, 0)


@pytest.mark.parametrize(
    ("num_rows", "longest", "num_drafted", "executed"),
    [(40, 64, 3, 40), (8, 64, 0, 8), (64, 16, 4, 60), (8, 120, 6, 8)],
)
def test_an_executor_computes_all_of_its_rows(num_rows, longest, num_drafted, executed):
    target, largest = tiny_target(), []
    executor = LocalExecutor(
        model=target.model,
        attention=target.attention,
        cache=KVCache(
            target.model.kv_specs, num_blocks=1, block_size=4, dtype=target.model.dtype, device=target.model.device
        ),
        verifier=MatchingConfig().build(num_drafted),
        drafting=GuardedDrafter(ChainDrafter(frozenset()), vocab_size=target.model.vocab_size),
        grammars=GrammarCache(None, vocab_size=target.model.vocab_size, eos_token_ids=frozenset({EOS})),
        torch_threads=nullcontext(),
    )
    forward = executor.forward

    def watched(batch, attend):
        largest.append(len(batch.token_ids))
        return forward(batch, attend)

    executor.forward = watched
    step = LargestStep(num_sequences=4, num_rows=num_rows, longest=longest, num_drafted=num_drafted, block_size=4)
    assert step.run(executor) == executed == largest[-1]
    assert executor.drafting.num_failures == 0
