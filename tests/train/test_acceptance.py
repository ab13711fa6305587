"""Heads trained on a small language are accepted, and with any slip of the drafter they are not.

A drafter that reads features of the wrong place, or keeps entries that it should have made anew, loses
acceptance and no text, so no comparison of texts would find it. A kind of head joins by a row in KINDS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from forerun import SamplingParams
from forerun.models.heads.eagle import EagleHead
from forerun.train.trainer import TrainSettings
from tests.engines import engine_of, tiny_llm
from tests.native import needs_kernels
from tests.train import faults
from tests.train.language import LAG, LENGTH, NUM_WORDS, write

K = 3
FLOOR = 0.88
FALLEN = 0.75
"""A head as it should be is accepted at FLOOR or above, with a fault below FALLEN."""

ROUNDING = 0.01  # what the same drafts may lose where sums are made in another order

PROMPT_LENGTH = 11
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT_LENGTH, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a head is trained here, and what may go wrong with it (`faults`)."""

    settings: TrainSettings
    config: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, Callable]


AUX = "eagle_aux_hidden_state_layer_ids"

# Few attention heads: what one looking back LAG places cannot see, the target's features must tell.
KINDS = {
    "eagle": Kind(
        settings=TrainSettings(num_steps=350, learning_rate=1e-2, warm_up=0.1),
        config={"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        faults={
            **faults.OF_AUTOREGRESSIVE,
            "before the final norm": faults.needing(EagleHead, "hidden.3"),
            "state before embedding": faults.swapped("fc.weight"),
        },
    ),
    "eagle3": Kind(
        settings=TrainSettings(num_steps=250, learning_rate=8e-3),
        config={
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "draft_vocab_size": NUM_WORDS,
            AUX: [0, 1, 2],
        },
        faults={
            **faults.OF_AUTOREGRESSIVE,
            "layers counted from one": faults.configured(**{AUX: [1, 2, 3]}),
            "state before embedding": faults.swapped(*(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")),
            "without d2t": faults.without_d2t,
        },
    ),
}


class Bench:
    """Serves the heads of `KINDS`."""

    def __init__(self, workshop, folder):
        self.workshop, self._folder = workshop, folder

    def head(self, kind):
        """A trained head of this kind."""
        return self.workshop.head(kind, KINDS[kind].settings, KINDS[kind].config)

    def llm(self, kind, *, head=None, target=None, **changes):
        """An engine that drafts with it, or with `head`."""
        folder = (head or self.head(kind)).save(self._folder)
        config = {"method": kind, "model": str(folder), "num_speculative_tokens": K}
        return tiny_llm(config | changes, target=target or self.workshop.target)


@pytest.fixture
def bench(workshop, tmp_path):
    return Bench(workshop, tmp_path)


def acceptance(llm, prompts, sampling=GREEDY):
    """Accepted / drafted tokens."""
    llm.reset_stats()
    llm.generate(prompts, sampling, use_tqdm=False)
    return llm.stats.speculation.acceptance_rate


PROMPTS = write(24, length=PROMPT_LENGTH, seed=2).tolist()
"""Beginnings of texts that no head was trained on."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_is_accepted(kind, bench):
    assert acceptance(bench.llm(kind), PROMPTS) >= FLOOR


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind in KINDS for fault in KINDS[kind].faults])
def test_with_a_fault_it_is_not(kind, fault, bench, monkeypatch):
    head = KINDS[kind].faults[fault](monkeypatch, bench.head(kind))
    assert acceptance(bench.llm(kind, head=head), PROMPTS) < FALLEN


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_prefix_cache_costs_no_acceptance(kind, bench):
    llm = bench.llm(kind)
    cold = acceptance(llm, PROMPTS)
    assert engine_of(llm).scheduler.num_cached_tokens == 0
    assert acceptance(llm, PROMPTS) >= cold - ROUNDING
    assert engine_of(llm).scheduler.num_cached_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_one_that_was_filled_without_drafts(kind, bench):
    llm = bench.llm(kind)
    off = SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT_LENGTH, ignore_eos=True, speculation="off")
    llm.generate(PROMPTS, off, use_tqdm=False)
    assert acceptance(llm, PROMPTS) >= FLOOR
    assert engine_of(llm).scheduler.num_cached_tokens > 0


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_native_kernels_in_bf16_it_is_accepted_alike(kind, bench):
    assert acceptance(bench.llm(kind, target=bench.workshop.native_target), PROMPTS) >= FLOOR


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("choice", "verifier", "floor"), [("coupled", "matching", 0.4), ("probabilistic", "standard", 0.55)]
)
def test_drawn_drafts_are_accepted_where_the_next_word_is_open(kind, choice, verifier, floor, bench):
    """A text begins with any words: of certain bets on them hardly one in NUM_WORDS stands."""
    beginnings = write(100, length=1, seed=3).tolist()
    sampling = [SamplingParams(temperature=1.0, seed=i, max_tokens=LAG - 1, ignore_eos=True) for i in range(100)]
    assert acceptance(bench.llm(kind), beginnings, sampling) < 0.1
    drawn = bench.llm(kind, draft_sample_method=choice, rejection_sample_method=verifier)
    assert acceptance(drawn, beginnings, sampling) >= floor
