"""Traces: acceptance from a trace is that of a replay of the same text with the same drafter."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.bench.pass_costs import PassCosts
from forerun.bench.profiling.traces import can_be_traced, trace_drafts
from forerun.bench.recording import RecordedText, Recording, RecordingInfo
from forerun.bench.replay import judge_recording
from forerun.core.draft import Draft
from forerun.errors import ForerunError
from tests.bench.profiling.tiny import NGRAM
from tests.contract.drafters import RandomTreeDrafter
from tests.engines import VOCAB_SIZE

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


def test_tokens_per_step_are_those_of_a_replay() -> None:
    found = recording()
    trace = trace_drafts("ngram", NGRAM, found)
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
    trace = trace_drafts("trees", {"method": RandomTreeDrafter, "num_speculative_tokens": 6}, found)
    assert sum(trace.draft(0, place).num_nodes for place in range(60)) > 0
    for text in range(trace.num_texts):
        for place in range(trace.num_answer_tokens(text)):
            draft = trace.draft(text, place)
            shape = Draft((0,) * draft.num_nodes, draft.parents)
            assert list(draft.right_nodes) == (shape.path(draft.right_nodes[-1]) if draft.right_nodes else [])


def test_a_drafter_that_computes_has_no_trace() -> None:
    config = {"method": "draft_model", "model": "other", "num_speculative_tokens": 2}
    assert can_be_traced(NGRAM, VOCAB_SIZE)
    assert not can_be_traced(config, VOCAB_SIZE)
    with pytest.raises(ForerunError, match="head: "):
        trace_drafts("head", config, recording())
