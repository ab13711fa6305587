"""Block and traversal verification with real noise, over many steps, and what they leave unseen."""

import itertools
import math
from collections import Counter

import torch

from forerun.core.draft import Draft
from forerun.core.random_bits import Stream
from forerun.core.sampling_params import SamplingParams
from forerun.ops.sampling import SamplingRules, draw_token
from forerun.verify.base import VerifyRequest
from forerun.verify.block import BlockConfig
from tests.verify.exact import random_model, reversed_model
from tests.verify.judged import judged_of, rows_preferring

VERIFIER = BlockConfig().build(3)
VOCAB_SIZE, NUM_TOKENS, NUM_TEXTS = 3, 4, 4000
TARGET = random_model("target", vocab_size=VOCAB_SIZE)
DRAFTER = reversed_model(TARGET)


def drawn_chain(start, *, seed):
    """A chain of two from `DRAFTER`, its noise keyed by the step."""
    token_ids, rows = (), []
    for node in range(2):
        rows.append(DRAFTER((*start, *token_ids)))
        noise = {"seed": seed, "position": 1 + len(start), "stream": Stream.DRAFT, "index": node}
        token_ids += (draw_token(torch.tensor(rows[-1]), **noise),)
    return Draft(token_ids, None, torch.tensor(rows))


def decoded(seed):
    """A text of `NUM_TOKENS` written in several verified steps."""
    rules = SamplingRules(SamplingParams(), prompt_ids=[0], vocab_size=VOCAB_SIZE)
    output_ids = []
    while len(output_ids) < NUM_TOKENS:
        draft = drawn_chain(output_ids, seed=seed)
        places = [(*output_ids, *draft.token_ids[:depth]) for depth in range(len(draft) + 1)]
        logits = torch.tensor([TARGET(path) for path in places]).log()
        judged = VerifyRequest(
            draft=draft, first_row=0, rules=rules, seed=seed, position=1 + len(output_ids), output_ids=output_ids
        )
        verdict = VERIFIER.verify(logits, [judged])[0]
        output_ids += [*draft.token_ids[: len(verdict.accepted)], verdict.token_id]
    return tuple(output_ids[:NUM_TOKENS])


def test_texts_of_many_steps_follow_the_target():
    counts = Counter(decoded(seed) for seed in range(NUM_TEXTS))
    statistic = 0.0
    for text in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS):
        expected = NUM_TEXTS * math.prod(TARGET(text[:i])[text[i]] for i in range(NUM_TOKENS))
        statistic += (counts[text] - expected) ** 2 / expected
    degrees = VOCAB_SIZE**NUM_TOKENS - 1
    assert statistic < degrees + 10 * math.sqrt(2 * degrees)


def test_branches_that_cannot_be_reached_are_never_shaped():
    seen = []

    def note(output_ids, logits):
        seen.append(output_ids)
        return logits

    draft = Draft((3, 1, 4, 5), (-1, -1, 0, 2))  # 3 is out of the top 1, so 4 and 5 cannot be reached
    judged = judged_of(draft, top_k=1, logits_processors=[note])
    verdict = VERIFIER.verify(rows_preferring(1, 0, 6, 0, 0), [judged])[0]
    assert (verdict.accepted, verdict.token_id, seen) == ((1,), 6, [[], [1]])


def test_a_very_long_chain_is_judged():
    draft = Draft((1,) * 3000)
    verdict = VERIFIER.verify(rows_preferring(*[1] * 3001) * 50, [judged_of(draft)])[0]
    assert len(verdict.accepted) == 3000
