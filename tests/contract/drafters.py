"""Drafters that put the contract to the test, beside the real ones."""

from __future__ import annotations

import random

import pytest

from forerun.core.draft import NO_DRAFT, Draft


class Stub:
    """A drafter that keeps no state; subclasses say what they draft."""

    needs = frozenset()

    def __init__(self, target):
        self.target = target
        self.random = random.Random(0)
        self.started = set()

    def start(self, sequence):
        self.started.add(sequence.seq_id)

    def stop(self, sequence):
        self.started.remove(sequence.seq_id)

    def propose(self, context):
        return [self.draft(request) for request in context.requests]


class BadDrafter(Stub):
    """Drafts random tokens: nearly all wrong."""

    def draft(self, request):
        return Draft(tuple(self.random.randrange(self.target.vocab_size) for _ in range(request.max_tokens)))


class RandomTreeDrafter(Stub):
    """Drafts random trees of random tokens."""

    def draft(self, request):
        size = request.max_tokens
        parents = tuple(self.random.randrange(-1, node) for node in range(size))
        return Draft(tuple(self.random.randrange(self.target.vocab_size) for _ in range(size)), parents)


class MoodyDrafter(Stub):
    """Silent, late, too long, impossible or failing, by turns."""

    def propose(self, context):
        mood = self.random.randrange(5)
        if mood == 0:
            raise RuntimeError("not today")
        if mood == 1:
            return []
        return [self.draft(request) for request in context.requests]

    def draft(self, request):
        return self.random.choice(
            [
                NO_DRAFT,
                Draft((-3,)),
                Draft((self.target.vocab_size,)),
                Draft((1, 2), (1, 0)),
                Draft(tuple(range(60))),
                Draft((3, 4, 5), (-1, -1, 0)),
            ]
        )


def oracle(answers, *, wrong_every):
    """A class that knows each prompt's plain output and drafts trees that hold it among wrong branches.

    `answers` maps prompt ids (tuple) to output ids. The right child is the last of its siblings, so
    an accepted path is never contiguous; every `wrong_every`-th depth has no right child.
    """

    class OracleTreeDrafter(Stub):
        def draft(self, request):
            sequence = request.sequence
            done = len(sequence.output_ids)
            future = answers.get(tuple(sequence.prompt_ids), [])[done:]
            token_ids, parents, last = [], [], -1
            for depth, right in enumerate(future[: request.max_depth]):
                wrong = (right + 1 + depth) % self.target.vocab_size
                token_ids += [wrong, wrong if (done + depth) % wrong_every == 0 else right]
                parents += [last, last]
                last = len(token_ids) - 1
            return Draft(tuple(token_ids[: request.max_tokens]), tuple(parents[: request.max_tokens]))

    return OracleTreeDrafter


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_spec_factor": 3.0}

CASES = {
    "plain": None,
    "ngram": NGRAM,
    "suffix": SUFFIX,
    "suffix-tree": SUFFIX | {"suffix_decoding_tree": True},
    "recycle": {"method": "recycle", "draft_confidence_threshold": 0.0},
    "recycle-chain": {"method": "recycle", "recycle_tree": False, "num_speculative_tokens": 4},
    "recycle-tiny-table": {"method": "recycle", "recycle_max_bytes": 30_000},
    "auto": {"method": "auto"},
    "auto-without-memory": {"method": "auto", "auto_memory": 0, "num_speculative_tokens": 4},
    "auto-with-model": {"method": "auto", "drafter": {"method": "draft_model", "model": "tiny"}},
    "auto-moody": {"method": "auto", "drafter": {"method": MoodyDrafter}},
    "adaptive": {"method": RandomTreeDrafter, "num_speculative_tokens": 7, "enable_adaptive_verification": True},
    "draft-model": {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 5},
    "draft-model-coupled": {
        "method": "draft_model",
        "model": "tiny",
        "num_speculative_tokens": 3,
        "draft_sample_method": "coupled",
    },
    "pard": {"method": "pard", "model": "tiny-pard", "num_speculative_tokens": 5},
    "pard-tree": {"method": "pard", "model": "tiny-pard", "draft_tree": [3, 2, 1]},
    "draft-model-tree": {"method": "draft_model", "model": "tiny", "draft_tree": [3, 2, 1]},
    "draft-model-dynamic-tree": {
        "method": "draft_model",
        "model": "tiny",
        "num_speculative_tokens": 9,
        "draft_tree": {"top_k": 3, "depth": 4},
    },
    "eagle": {"method": "eagle", "model": "tiny-eagle", "num_speculative_tokens": 4},
    "eagle-tree": {"method": "eagle", "model": "tiny-eagle", "draft_tree": [3, 2, 1]},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 4},
    "peagle": {"method": "peagle", "model": "tiny-peagle", "num_speculative_tokens": 4},
    "peagle-dynamic-tree": {
        "method": "peagle",
        "model": "tiny-peagle",
        "num_speculative_tokens": 8,
        "draft_tree": {"top_k": 3, "depth": 4},
    },
    "eagle3-dynamic-tree": {
        "method": "eagle3",
        "model": "tiny-eagle3",
        "num_speculative_tokens": 8,
        "draft_tree": {"top_k": 3, "depth": 4},
    },
    "medusa": {"method": "medusa", "model": "tiny-medusa", "num_speculative_tokens": 4},
    "medusa-tree": {"method": "medusa", "model": "tiny-medusa", "draft_tree": [3, 2, 1]},
    "medusa-dynamic-tree": {
        "method": "medusa",
        "model": "tiny-medusa",
        "num_speculative_tokens": 9,
        "draft_tree": {"top_k": 4, "depth": 4},
    },
    "mlp-speculator": {"method": "mlp_speculator", "model": "tiny-mlp-speculator", "num_speculative_tokens": 4},
    "mlp-speculator-tree": {"method": "mlp_speculator", "model": "tiny-mlp-speculator", "draft_tree": [3, 2, 1]},
    "draft-model-foreign": {
        "method": "draft_model",
        "model": "foreign",
        "use_heterogeneous_vocab": True,
        "num_speculative_tokens": 4,
        "draft_sample_method": "coupled",
    },
    "dflash": {"method": "dflash", "model": "tiny-dflash", "num_speculative_tokens": 5},
    "dflash-coupled": {
        "method": "dflash",
        "model": "tiny-dflash",
        "num_speculative_tokens": 3,
        "draft_sample_method": "coupled",
    },
    "dflash-tree": {"method": "dflash", "model": "tiny-dflash", "draft_tree": [3, 2, 1]},
    "self-exit": {"method": "self", "exit_layer": 2, "num_speculative_tokens": 4},
    "hybrid": {
        "method": "hybrid",
        "num_speculative_tokens": 6,
        "drafters": [
            {"method": "suffix", "suffix_decoding_max_spec_factor": 3.0, "min_draft_tokens": 3},
            {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 4},
        ],
    },
    "hybrid-self": {
        "method": "hybrid",
        "num_speculative_tokens": 5,
        "drafters": [
            {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
            {"method": "recycle"},
            {"method": MoodyDrafter, "num_speculative_tokens": 3},
            {"method": "self", "exit_layer": 2, "draft_sample_method": "probabilistic"},
        ],
    },
    "extract": {
        "method": "extract_hidden_states",
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}},
    },
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "bad": {"method": BadDrafter, "num_speculative_tokens": 5},
    "random-tree": {"method": RandomTreeDrafter, "num_speculative_tokens": 7},
    "moody": {"method": MoodyDrafter, "num_speculative_tokens": 5},
    "zero": NGRAM | {"num_speculative_tokens": 0},
}
"""Every drafter of the project stands here and so inherits the contract; a new one adds a row."""

OWN_KV = ("draft-model", "draft-model-tree", "pard", "eagle", "eagle3", "peagle", "dflash", "mtp", "hybrid")
"""Drafters with KV of their own, which goes from engine to engine with the target's."""

REPRESENTATIVE = (
    *("plain", "ngram", "suffix-tree", "recycle", "auto", "auto-with-model", "auto-moody", "adaptive"),
    *("moody", "random-tree", "extract", "hybrid", "hybrid-self", "oracle-tree"),
    *("draft-model", "draft-model-dynamic-tree", "draft-model-foreign", "pard", "self-exit", "mtp"),
    *("eagle-tree", "eagle3", "peagle", "dflash", "medusa-tree", "mlp-speculator"),
)
"""Each class of drafter and each form of draft once: what a claim is made over that holds for one row as for its like."""


def usually(drafters, *, chosen=REPRESENTATIVE):
    """The parameters of a test, of which those beside `chosen` run with the slow ones."""
    return [pytest.param(drafter, marks=() if drafter in chosen else pytest.mark.slow) for drafter in drafters]
