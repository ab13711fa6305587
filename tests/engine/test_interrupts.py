"""A step that is interrupted, wherever: stepping on gives the same texts, and aborting leaves nothing behind."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from tests.contract.drafters import CASES, NGRAM
from tests.contract.test_contract import PROMPTS, assert_nothing_is_held
from tests.engines import tiny_llm
from tests.executor.simulations import assert_nothing_is_held as assert_simulation_holds_nothing
from tests.executor.simulations import drain, simulated_engine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, presence_penalty=0.5)
TIGHT = {"num_blocks": 30, "max_num_batched_tokens": 24, "max_num_seqs": 6}


def interrupting(function, at, *, before):
    """`function`, whose `at`-th call is interrupted."""
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if before and len(calls) == at:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    return call


SEAMS = {
    "while planning": lambda engine: (engine.parts.scheduler, "schedule"),
    "while laying out": lambda engine: (engine_module, "lay_out"),
    "while executing": lambda engine: (engine.parts.executor, "execute"),
    "while committing": lambda engine: (engine_module, "commit"),
    "while reporting": lambda engine: (engine_module, "delta"),
}
every_seam = pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)


@every_seam
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("delay", [0, 1])
def test_aborting_after_an_interrupt_leaves_nothing_behind(seam, before, delay, monkeypatch):
    for at in range(1, 30, 3):
        engine = simulated_engine(rates=[0.8, 0.6], delay=delay, **TIGHT)
        for i, prompt in enumerate(PROMPTS[:12]):
            engine.add_request(str(i), prompt, SamplingParams(n=1 + i % 2, seed=i, max_tokens=20))
        with monkeypatch.context() as patch:
            place, name = seam(engine)
            patch.setattr(place, name, interrupting(getattr(place, name), at, before=before))
            with pytest.raises(KeyboardInterrupt):
                drain(engine)
        for i in range(12):
            engine.abort(str(i))
        while engine.has_work:
            engine.step()
        assert_simulation_holds_nothing(engine)


@pytest.mark.parametrize("seam", list(SEAMS.values())[:2], ids=list(SEAMS)[:2])
@pytest.mark.parametrize("delay", [0, 1])
def test_stepping_on_after_an_interrupt_while_planning_gives_the_same_texts(seam, delay, monkeypatch):
    llm = tiny_llm(NGRAM, num_gpu_blocks_override=40, max_num_batched_tokens=24, max_num_seqs=6)
    plain = tiny_llm().generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    for at in (1, 2, 5, 9):
        engine, finished = Engine(llm.engine.parts, delay=delay), {}
        for i, prompt in enumerate(PROMPTS[:8]):
            engine.add_request(str(i), prompt, GREEDY)
        with monkeypatch.context() as patch:
            place, name = seam(engine)
            patch.setattr(place, name, interrupting(getattr(place, name), at, before=False))
            while engine.has_work:
                try:
                    finished |= {output.request_id: output for output in engine.step().finished}
                except KeyboardInterrupt:
                    continue
        assert [finished[str(i)].outputs[0].token_ids for i in range(8)] == [o.outputs[0].token_ids for o in plain]
        assert_nothing_is_held(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a mistake")], ids=["interrupt", "error"])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_result_that_is_not_applied_is_computed_again_and_so_is_the_step_after_it(error, delay, monkeypatch):
    llm = tiny_llm(NGRAM)
    plain = tiny_llm().generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    engine, finished, calls = Engine(llm.engine.parts, delay=delay), {}, []
    apply = engine.apply

    def applying(plan, result):
        calls.append(1)
        if len(calls) in (2, 5, 6):
            raise error
        return apply(plan, result)

    monkeypatch.setattr(engine, "apply", applying)
    for i, prompt in enumerate(PROMPTS[:8]):
        engine.add_request(str(i), prompt, GREEDY)
    while engine.has_work:
        try:
            finished |= {output.request_id: output for output in engine.step().finished}
        except (KeyboardInterrupt, RuntimeError):
            continue
    assert [finished[str(i)].outputs[0].token_ids for i in range(8)] == [o.outputs[0].token_ids for o in plain]
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    "config", [NGRAM, CASES["suffix-tree"], CASES["draft-model"]], ids=["ngram", "suffix", "model"]
)
def test_stepping_on_after_an_interrupt_while_drafting_gives_the_same_texts(config, monkeypatch):
    """The executor had committed tokens by then that the engine never got: it takes them back."""
    plain = tiny_llm().generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    llm = tiny_llm(config)
    for i, prompt in enumerate(PROMPTS[:8]):
        llm.engine.add_request(str(i), prompt, GREEDY)
    monkeypatch.setattr(llm.executor.drafting, "propose", interrupting(llm.executor.drafting.propose, 4, before=True))
    finished, num_interrupts = {}, 0
    while llm.engine.has_work:
        try:
            finished |= {output.request_id: output for output in llm.engine.step().finished}
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert [finished[str(i)].outputs[0].token_ids for i in range(8)] == [o.outputs[0].token_ids for o in plain]
    assert_nothing_is_held(llm)


def test_a_result_that_is_lost_while_the_next_step_is_planned_is_an_error_and_no_other_text(monkeypatch):
    llm = tiny_llm(NGRAM)
    engine = Engine(llm.engine.parts, delay=1)
    for i, prompt in enumerate(PROMPTS[:4]):
        engine.add_request(str(i), prompt, GREEDY)
    monkeypatch.setattr(llm.executor.drafting, "propose", interrupting(llm.executor.drafting.propose, 4, before=True))
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    with pytest.raises(RuntimeError, match="was lost"):
        engine.step()
    for i in range(4):
        engine.abort(str(i))
    while engine.has_work:
        engine.step()
    assert_nothing_is_held(llm)
    engine.add_request("again", PROMPTS[0], GREEDY)
    plain = tiny_llm().generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0]
    assert drain(engine)["again"].outputs[0].token_ids == plain.outputs[0].token_ids


def test_drafting_that_fails_outside_the_guard_costs_the_drafts_alone(monkeypatch, caplog):
    plain = tiny_llm().generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    llm = tiny_llm(NGRAM)
    monkeypatch.setattr("forerun.executor.local.KnownTexts.propose", lambda *_: 1 / 0)
    outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert "drafting failed" in caplog.text
    assert_nothing_is_held(llm)
