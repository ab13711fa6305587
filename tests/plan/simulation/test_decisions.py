"""A simulation of a real run decides as the run did, step by step: rows, drafts, blocks, preemptions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun import SamplingParams
from forerun.core.stats import StepTimes
from forerun.core.step import ReadyResult
from forerun.engine.engine import Engine
from forerun.engine.simulation import SimulationSettings
from forerun.executor.simulated import VirtualClock
from forerun.executor.simulated_text import (
    NOTHING_DRAFTED,
    Drafted,
    DraftShape,
    HashedTexts,
    RecordedText,
    RecordedTexts,
)
from forerun.plan.simulation.fleet import Fleet, FleetRun, request_seed
from forerun.plan.simulation.requests import SimulatedRequest
from tests.contract.test_contract import PROMPTS
from tests.engines import VOCAB_SIZE, tiny_llm

NUM_TOKENS = 24
SETTINGS = {"max_num_seqs": 24, "max_num_batched_tokens": 48, "max_model_len": 128, "block_size": 4}
NUM_BLOCKS = 40  # so few that sequences are preempted
ARRIVALS = [0.0] * 10 + [
    0.002 * i for i in range(50)
]  # of requests, in seconds: some at once, then one after the other

CONFIGS = {
    "plain": None,
    "chain": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "by batch size": {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 6, 2], [7, 99, 0]],
    },
    "auto": {"method": "auto"},
}


class Measured:
    """An executor that notes plans and results, and lets a virtual clock go on by what its steps take."""

    def __init__(self, executor, clock=None):
        self.executor, self.clock = executor, clock
        self.decisions, self.results, self.times = [], [], []

    def prepare(self, spec):
        self.executor.prepare(spec)

    def release(self, ended):
        self.executor.release(ended)

    def execute(self, plan):
        planned = [
            (p.seq_id, p.start, p.num_tail, p.num_draft, p.draft_limit, p.min_survival, p.end, p.blocks.tolist())
            for p in plan.sequences
        ]
        self.decisions.append((plan.number, plan.time, planned, plan.rows.positions, plan.rows.slots))
        result = self.executor.execute(plan).result()
        self.results.append((plan, result))
        if self.clock is not None:
            drafted = any(one.draft.token_ids for one in result.sequences)
            found = result.times
            drafting = found.draft if drafted else 0.0
            forward = found.build + found.forward + found.verify + (found.draft - drafting)
            result.times = StepTimes(forward=forward, draft=drafting, num_steps=1)
            self.clock.advance(forward + drafting)
            self.times.append((forward, drafting))
        return ReadyResult(result)


class NotingEngine(Engine):
    """Any executor's engine, of whose blocks a replica's log says nothing."""

    num_held_blocks = 0


def real_run(config):
    """Outputs by request, what the engine decided, and what came of it, in time that its steps alone take."""
    parts = tiny_llm(config, num_gpu_blocks_override=NUM_BLOCKS, **SETTINGS).engine.parts
    clock = VirtualClock()
    measured = Measured(parts.executor, clock)
    engine = Engine(replace(parts, executor=measured), clock=clock)
    upcoming, outputs = list(enumerate(ARRIVALS)), {}
    while upcoming or engine.has_work:
        if not engine.has_work:
            clock.now = max(clock.now, upcoming[0][1])
        while upcoming and upcoming[0][1] <= clock.now:
            number, _ = upcoming.pop(0)
            sampling = SamplingParams(
                temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=request_seed(0, number)
            )
            engine.add_request(str(number), PROMPTS[number], sampling)
        outputs |= {one.request_id: one.outputs[0].token_ids for one in engine.step().finished}
    return outputs, measured, engine


class RecordedDrafts:
    """The drafts of a real run, at the places of the texts where it made them."""

    def __init__(self, measured, texts):
        self.drafts = {}
        lengths, seeds = {}, {}
        for plan, result in measured.results:
            for spec in plan.new:
                lengths[spec.seq_id], seeds[spec.seq_id] = len(spec.prompt_ids), spec.sampling.seed
            for planned, one in zip(plan.sequences, result.sequences, strict=True):
                lengths[planned.seq_id] += len(one.token_ids)
                if one.draft.token_ids:
                    self.drafts[seeds[planned.seq_id], lengths[planned.seq_id]] = one.draft
        self.texts = texts

    def draft(self, spec, position, *, limit, depth, min_survival):
        draft = self.drafts.get((spec.sampling.seed, position))
        if draft is None:
            return NOTHING_DRAFTED
        text = self.texts.tokens(spec, position, position + draft.depth)
        right, node, children = [], -1, draft.children()
        for token_id in text:
            node = next((child for child in children[node + 1] if draft.token_ids[child] == token_id), None)
            if node is None:
                break
            right.append(node)
        return Drafted(DraftShape(len(draft), draft.parents, draft.survival, draft.source), tuple(right))


def simulated_run(control, outputs, measured):
    """The same by a simulation that is fed the times of the real run's steps, its texts and its drafts."""
    texts = RecordedTexts(
        {
            request_seed(0, number): RecordedText(len(PROMPTS[number]), outputs[str(number)])
            for number in range(len(ARRIVALS))
        },
        HashedTexts(VOCAB_SIZE),
    )
    drafting = 0.0

    def step_seconds(plan):
        nonlocal drafting
        forward, drafting = measured.times[plan.number - 1]
        return forward

    settings = SimulationSettings(
        step_seconds=step_seconds,
        draft_seconds=lambda _, num_drafted: drafting if num_drafted else 0.0,
        drafting=RecordedDrafts(measured, texts),
        texts=texts,
        vocab_size=VOCAB_SIZE,
        num_blocks=NUM_BLOCKS,
        **SETTINGS,
    )
    run = FleetRun(Fleet(), settings, lambda: control, seed=0, keeps_chunks=False)
    (replica,) = run.replicas
    noted = Measured(replica.engine.parts.executor)
    replica.engine = NotingEngine(replace(replica.engine.parts, executor=noted), clock=replica.clock)
    run.run(
        [
            SimulatedRequest(
                arrival=arrival,
                num_prompt_tokens=len(PROMPTS[number]),
                num_output_tokens=NUM_TOKENS,
                prompt_ids=PROMPTS[number],
            )
            for number, arrival in enumerate(ARRIVALS)
        ]
    )
    return noted, replica.engine


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_simulation_decides_as_the_real_run_did_step_by_step(config):
    control = tiny_llm(config).engine.parts.control  # one that has learnt nothing
    outputs, measured, real = real_run(config)
    noted, simulated = simulated_run(control, outputs, measured)
    for number, (one, other) in enumerate(zip(noted.decisions, measured.decisions, strict=False), 1):
        assert one == other, f"step {number}"
    assert len(noted.decisions) == len(measured.decisions)
    state = real.state
    assert (simulated.state.num_preemptions, simulated.state.num_cached_tokens) == (
        state.num_preemptions,
        state.num_cached_tokens,
    )
    assert state.num_preemptions > 0, "memory was meant to be short"
    assert state.num_cached_tokens > 0, "prompts were meant to share blocks"
    assert max(len(planned) for _, _, planned, _, _ in noted.decisions) > 3
    assert simulated.stats.speculation == real.stats.speculation
    assert real.stats.speculation.num_accepted_tokens > 0 or config is None
