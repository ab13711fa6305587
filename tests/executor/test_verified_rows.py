"""What drafters are shown of a step: every row with logits, its token, the one before it, and its candidates."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.core.draft import Draft
from tests.contract.drafters import Stub
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.engines import engine_of, tiny_llm, tiny_target
from tests.foreign import few_tokens


class Learner(Stub):
    """Drafts random trees and remembers all it was shown."""

    num_candidates = 5
    fails = False

    def __init__(self, target):
        super().__init__(target)
        self.shown = []
        self.prompts = set()

    def learn(self, rows):
        if self.fails:
            raise RuntimeError("not today")
        self.shown.append(rows)

    def draft(self, request):
        size = min(request.max_tokens, 4)
        parents = tuple(self.random.randrange(-1, node) for node in range(size))
        return Draft(tuple(self.random.randrange(self.target.vocab_size) for _ in range(size)), parents)


class LearningBesides(Learner):
    """Learns, but drafts nothing."""

    def draft(self, _):
        return Draft()


def learner_of(llm):
    return engine_of(llm).drafting.drafter


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_the_likeliest_candidate_of_a_judged_row_is_the_next_token_of_a_greedy_text():
    llm = tiny_llm({"method": LearningBesides, "num_speculative_tokens": 4})
    output = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0]
    text = [*PROMPTS[2], *output.outputs[0].token_ids]
    shown = learner_of(llm).shown
    assert all(len(rows) == 1 and rows.candidate_ids.shape == (1, 5) for rows in shown)
    found = [(*rows.previous_ids.tolist(), *rows.token_ids.tolist(), rows.candidate_ids[0, 0].item()) for rows in shown]
    ends = range(len(PROMPTS[2]), len(text))
    assert found == [(text[end - 2], text[end - 1], text[end]) for end in ends]


def test_rows_of_trees_have_the_token_of_their_parent_before_them():
    llm = tiny_llm({"method": Learner, "num_speculative_tokens": 4})
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    seen = {}
    for rows in learner_of(llm).shown:
        assert rows.candidate_ids.dtype == np.int32
        assert rows.candidate_logits.dtype == np.float32
        assert (np.diff(rows.candidate_logits, axis=1) <= 0).all()
        seen[len(rows)] = seen.get(len(rows), 0) + 1
    assert max(seen) == 15, "three sequences with a row and four nodes each"


@pytest.mark.parametrize("count", [24])
def test_what_is_shown_is_what_the_target_says_after_that_text(count):
    """In chunks, batches, preempted, with trees and prompt logprobs: each row names a context that exists, and its salt."""
    source = random.Random(1)
    llm = tiny_llm({"method": Learner, "num_speculative_tokens": 4}, **TIGHT)
    params = [
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, prompt_logprobs=source.choice([None, 1]))
        for _ in range(count)
    ]
    asked = [{"prompt_token_ids": prompt, "cache_salt": str(i % 3)} for i, prompt in enumerate(PROMPTS[:count])]
    outputs = llm.generate(asked, params, use_tqdm=False)
    following = {}  # (salt, previous, token) -> what followed in the final texts
    for i, output in enumerate(outputs):
        text = [-1, *PROMPTS[i], *output.outputs[0].token_ids]
        for place in range(len(PROMPTS[i]), len(text) - 1):
            following.setdefault((str(i % 3), text[place - 1], text[place]), set()).add(text[place + 1])
    hits = 0
    for rows in learner_of(llm).shown:
        covered = [row for first, end, _ in rows.salts for row in range(first, end)]
        assert covered == list(range(len(rows)))
        for first, end, salt in rows.salts:
            for row in range(first, end):
                context = salt, rows.previous_ids[row].item(), rows.token_ids[row].item()
                hits += rows.candidate_ids[row, 0].item() in following.get(context, ())
    assert hits >= sum(len(output.outputs[0].token_ids) for output in outputs)


def test_learning_that_fails_costs_no_text():
    llm, plain = tiny_llm({"method": Learner, "num_speculative_tokens": 4}), tiny_llm()
    learner_of(llm).fails = True
    texts = [
        [output.outputs[0].token_ids for output in one.generate(PROMPTS[:4], GREEDY, use_tqdm=False)]
        for one in (llm, plain)
    ]
    assert texts[0] == texts[1]
    assert engine_of(llm).drafting.num_failures > 0


def test_a_member_of_a_hybrid_learns_too():
    llm = tiny_llm(
        {
            "method": "hybrid",
            "num_speculative_tokens": 4,
            "drafters": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": Learner}, {"method": "suffix"}],
        }
    )
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert engine_of(llm).drafting.num_candidates == 5
    member = engine_of(llm).drafting.drafter._members[1].guarded.drafter
    assert len(member.shown) >= 3


class Foreseeing(Learner):
    """Drafts what the texts are, and learns."""

    texts = ()

    def draft(self, request):
        text = request.sequence.tokens_from(0)
        known = next((whole for whole in self.texts if whole[: len(text)] == text), text)
        return Draft(tuple(known[len(text) :][: request.max_tokens]))


@pytest.mark.parametrize("place", [1, 7], ids=["other tokens follow", "nothing follows"])
def test_a_text_that_a_stop_string_has_cut_costs_no_draft_and_lends_its_rows_no_wrong_token(place):
    """With a device the next step is begun before the engine has found the stop string in an accepted run."""
    target = replace(tiny_target(), tokenizer=few_tokens())
    whole = tiny_llm(target=target).generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    stop = target.tokenizer.decode(whole[0].outputs[0].token_ids[place : place + 1])
    llm = tiny_llm({"method": Foreseeing, "num_speculative_tokens": 4}, target=target, device_step=True)
    texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(PROMPTS[:4], whole, strict=True)]
    learner_of(llm).texts = texts
    sampling = [replace(GREEDY, stop=[stop]), *[GREEDY] * 3]
    outputs = llm.generate(PROMPTS[:4], sampling, use_tqdm=False)
    while llm.engine.has_work:
        llm.engine.step()
    assert outputs[0].outputs[0].token_ids == whole[0].outputs[0].token_ids[: place + 1]
    assert [one.outputs[0].token_ids for one in outputs[1:]] == [one.outputs[0].token_ids for one in whole[1:]]
    assert llm.stats.num_failed_drafts == 0
    pairs = {pair for text in texts for pair in itertools.pairwise([-1, *text])}
    shown = set()
    for rows in learner_of(llm).shown:
        shown |= set(zip(rows.previous_ids.tolist(), rows.token_ids.tolist(), strict=True))
    assert {pair for pair in shown if pair[0] >= 0} <= pairs
