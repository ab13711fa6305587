"""Prompts whose speculated texts are held against the plain ones: a thousand on a GPU, a dozen on a CPU."""

from __future__ import annotations

import random

from forerun import SamplingParams
from tests.contract.drafters import CASES
from tests.engines import EOS, VOCAB_SIZE, tiny_llm

DRAFTERS = [
    *("ngram", "suffix-tree", "recycle", "auto", "draft-model", "draft-model-dynamic-tree", "pard-tree", "eagle-tree"),
    *(
        "eagle3",
        "eagle3-dynamic-tree",
        "peagle",
        "medusa-tree",
        "mlp-speculator",
        "dflash",
        "self-exit",
        "hybrid",
        "mtp",
        "moody",
    ),
]
"""One or two of each kind, by their names in the contract."""

LONGEST_PROMPT, MOST_TOKENS = 60, 40


def prompts(count):
    """Random prompts, half of which repeat themselves, so that there is something to look up."""
    source = random.Random(7)
    made = []
    for i in range(count):
        words = [source.randrange(EOS + 1, VOCAB_SIZE) for _ in range(source.randint(1, LONGEST_PROMPT // 3))]
        made.append(words * 3 if i % 2 else words)
    return made


def sampling(count, *, seeded):
    """Greedy, or sampled with a seed and one of some rules; of each length."""
    rules = [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.05}, {"presence_penalty": 0.6, "frequency_penalty": 0.3}]
    return [
        SamplingParams(
            **({"temperature": 0.9, "seed": i, **rules[i % len(rules)]} if seeded else {"temperature": 0}),
            max_tokens=1 + i % MOST_TOKENS,
        )
        for i in range(count)
    ]


def texts(target, name, count, *, seeded, **settings):
    """The token ids that an engine with a drafter of the contract writes; "plain" drafts nothing."""
    llm = tiny_llm(CASES[name], target=target, **settings)
    outputs = llm.generate(prompts(count), sampling(count, seeded=seeded), use_tqdm=False)
    assert [output.error for output in outputs] == [None] * count
    if name != "plain":
        assert llm.stats.speculation.num_draft_tokens > 0, "what drafts nothing proves nothing"
    return [output.outputs[0].token_ids for output in outputs]


def differing(found, expected):
    """The places of texts that differ, and of the first token that does."""
    return {
        i: next((at for at, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))
        for i, (ours, plain) in enumerate(zip(found, expected, strict=True))
        if ours != plain
    }
