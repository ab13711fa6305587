"""Traces: acceptance from a trace is that of a replay of the same text with the same drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.bench.pass_costs import PassCosts
from forerun.bench.profiling.traces import trace_drafts
from forerun.bench.recording import RecordedText, Recording, RecordingInfo, record
from forerun.bench.replay import judge_recording
from forerun.core.draft import Draft
from forerun.drafters.priced import PricedDrafter
from forerun.engine.costs import PRIOR
from forerun.errors import ForerunError
from forerun.plan.draft_trace import DraftTrace
from forerun.plan.step_times import StepTimeModel
from tests.bench.profiling.tiny import NGRAM, draft_model, settings
from tests.contract.drafters import RandomTreeDrafter
from tests.engines import VOCAB_SIZE, tiny_drafter, tiny_llm, tiny_target

SETTINGS = settings()
INFO = RecordingInfo(model="tiny", dtype="float32", kernels="torch", vocab_size=VOCAB_SIZE, max_tokens=60)


def recording(seed: int = 0, *, num_texts: int = 3, length: int = 60) -> Recording:
    """Texts of few words, so that they repeat themselves."""
    source = np.random.default_rng(seed)
    texts = []
    for number in range(num_texts):
        words = source.integers(1, 6, size=length).tolist()
        texts.append(
            RecordedText(
                kind=("a", "b")[number % 2],
                temperature=0.0,
                prompt_ids=[1, 2, 3],
                answer_ids=words,
                candidate_ids=np.array([[word, 9] for word in words], dtype=np.int32),
                candidate_logprobs=np.zeros((length, 2), dtype=np.float32),
            )
        )
    return Recording(info=INFO, texts=texts)


def steps_of(seconds: float) -> StepTimeModel:
    """Steps of one row that take so long."""
    return StepTimeModel([seconds * weight for weight in (*PRIOR, 0.0, 0.0)])


def traced(name: str, config: dict[str, Any], found: Recording) -> DraftTrace:
    trace = trace_drafts(name, config, found, tiny_target(), SETTINGS)
    assert trace is not None
    return trace


def test_tokens_per_step_are_those_of_a_replay() -> None:
    found = recording()
    trace = traced("ngram", NGRAM, found)
    for kind, outcome in zip(
        ("a", "b"), judge_recording(found, {"ngram": NGRAM}, PassCosts((1, 2), (1.0, 1.0))), strict=True
    ):
        num_steps = num_tokens = 0
        for text in trace.texts_of(kind):
            place, end = 1, trace.num_answer_tokens(text)
            while place < end:
                draft = trace.draft(text, place).within(limit=3, depth=end - 1 - place)
                num_steps, num_tokens = num_steps + 1, num_tokens + len(draft.right_nodes) + 1
                place += len(draft.right_nodes) + 1
        assert num_tokens / num_steps == pytest.approx(outcome.tokens_per_step)


def test_right_nodes_are_on_the_texts_path() -> None:
    found = recording(1)
    trace = traced("trees", {"method": RandomTreeDrafter, "num_speculative_tokens": 6}, found)
    assert sum(trace.draft(0, place).num_nodes for place in range(60)) > 0
    for text in range(trace.num_texts):
        for place in range(trace.num_answer_tokens(text)):
            draft = trace.draft(text, place)
            shape = Draft((0,) * draft.num_nodes, draft.parents)
            assert list(draft.right_nodes) == (shape.path(draft.right_nodes[-1]) if draft.right_nodes else [])


def answers(*, temperature: float = 0.0) -> Recording:
    """Texts that the tiny target wrote."""
    llm = tiny_llm(max_num_seqs=4)
    prompts = {"a": [[7, 8, 9] * 4, [11, 12] * 5], "b": [[20, 21, 22, 23]]}
    return record(llm, prompts, max_tokens=20, temperatures=(temperature,))


def test_the_trace_of_a_drafter_with_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = traced("tree", draft_model(draft_tree=[2, 1], num_speculative_tokens=4), answers())
    trace.save(tmp_path / "trace.npz")
    again = DraftTrace.load(tmp_path / "trace.npz")
    assert again.sources == ("draft_model",)
    assert 0.0 < again.acceptance().conditional[0] <= 1.0
    for text in range(trace.num_texts):
        for place in range(trace.num_answer_tokens(text)):
            assert again.draft(text, place) == trace.draft(text, place)


def test_a_verifier_that_draws_anew_leaves_no_trace_of_sampled_texts() -> None:
    config = draft_model(draft_sample_method="probabilistic", rejection_sample_method="standard")
    assert trace_drafts("drawn", config, answers(temperature=1.0), tiny_target(), SETTINGS) is None
    assert trace_drafts("greedy", config, answers(), tiny_target(), SETTINGS) is not None


def test_auto_has_a_trace_if_it_asks_no_model_or_somebody_says_how_long_steps_take() -> None:
    assert trace_drafts("auto", {"method": "auto"}, answers(), tiny_target(), SETTINGS) is not None
    config = {"method": "auto", "drafter": {"method": "draft_model", "model": str(tiny_drafter(VOCAB_SIZE))}}
    assert trace_drafts("auto", config, answers(), tiny_target(), SETTINGS) is None
    assert trace_drafts("auto", config, answers(), tiny_target(), SETTINGS, step_times=steps_of(0.01)) is not None


def test_auto_asks_a_model_where_its_time_is_short_beside_that_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    note_time = PricedDrafter._note_time

    def counted(self: PricedDrafter, seconds: float, num_rows: int) -> None:
        calls.append(seconds)
        note_time(self, seconds, num_rows)

    monkeypatch.setattr(PricedDrafter, "_note_time", counted)
    config = {"method": "auto", "drafter": {"method": "draft_model", "model": str(tiny_drafter(VOCAB_SIZE))}}

    def num_asked(step_seconds: float) -> int:
        calls.clear()
        trace_drafts("auto", config, answers(), tiny_target(), SETTINGS, step_times=steps_of(step_seconds))
        return len(calls)

    assert num_asked(10.0) > 1.5 * num_asked(1e-9)


def test_what_cannot_be_traced_is_refused_by_its_name() -> None:
    with pytest.raises(ForerunError, match="head: "):
        trace_drafts("head", draft_model(model="no/such"), recording(), tiny_target(), SETTINGS)
    with pytest.raises(ForerunError, match="none: nothing is drafted"):
        trace_drafts("none", NGRAM | {"num_speculative_tokens": 0}, recording(), tiny_target(), SETTINGS)
