"""Heads trained on a small language are accepted, and with any slip of the drafter they are not.

A drafter that reads features of the wrong place, or keeps entries that it should have made anew, loses
acceptance and no text, so no comparison of texts would find it. A kind of head joins by a row in KINDS.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from forerun import SamplingParams
from forerun.models.heads.eagle import EagleHead
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.heads.mlp_speculator import MLPSpeculator
from forerun.models.heads.mtp import MTPHead
from forerun.train.trainer import TrainSettings
from tests.engines import engine_of, tiny_llm
from tests.native import needs_kernels
from tests.train import faults
from tests.train.language import LAG, LENGTH, NUM_WORDS, VOCAB_SIZE, walk, write

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
    language: Callable = write

    @property
    def prompts(self):
        """Beginnings of texts that no head was trained on."""
        return self.language(24, length=PROMPT_LENGTH, seed=2).tolist()


AUX = "eagle_aux_hidden_state_layer_ids"

# Few attention heads: one of them looks LAG positions back, so the rest must come from the target's features.
KINDS = {
    "eagle": Kind(
        settings=TrainSettings(num_steps=240, learning_rate=1e-2, warm_up=0.1),
        config={"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        faults={
            **faults.OF_AUTOREGRESSIVE,
            **faults.in_the_layer(EagleHead),
            "state before embedding": faults.swapped("fc.weight"),
        },
    ),
    "eagle3": Kind(
        settings=TrainSettings(num_steps=175, learning_rate=8e-3),
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
    "peagle": Kind(
        settings=TrainSettings(num_steps=600, learning_rate=5e-3),
        config={"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2, AUX: [0, 1, 2]},
        faults={
            "features one place early": faults.features_from(-1),
            "masks one place late": faults.masks_from(1),
            "any block is trusted": faults.any_block_is_trusted,
            "layers counted from one": faults.configured(**{AUX: [1, 2, 3]}),
        },
    ),
    "pard": Kind(
        settings=TrainSettings(num_steps=170, learning_rate=8e-3),
        faults={
            "masks one place late": faults.masks_from(1),
            "masks one place early": faults.masks_from(-1),
            "entries of masks are kept": faults.entries_of_drafts_are_kept,
            "any block is trusted": faults.any_block_is_trusted,
            "another mask": faults.configured(pard_token=8),  # which is no word
        },
    ),
    "mtp": Kind(  # few steps: in more it learns to do without the target's features
        settings=TrainSettings(num_steps=60, learning_rate=1.2e-2),
        faults={
            **faults.OF_AUTOREGRESSIVE,
            **faults.in_the_layer(MTPHead),
            "state before embedding": faults.swapped("model.layers.3.eh_proj.weight"),
        },
    ),
    "dflash": Kind(
        settings=TrainSettings(num_steps=300, learning_rate=8e-3),
        config={"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        faults={
            "features one place early": faults.dflash_features_from(-1),
            "any block is trusted": faults.any_block_is_trusted,
            "features in another order": faults.configured(
                dflash_config={"mask_token_id": VOCAB_SIZE - 1, "target_layer_ids": [1, 0]}
            ),
        },
    ),
    "medusa": Kind(
        settings=TrainSettings(num_steps=100, learning_rate=5e-3),
        faults={
            **faults.in_the_layer(MedusaHeads),
            "features one place early": faults.last_hidden_states_from(-1, reader="medusa"),
            "heads in another order": faults.renamed({"0.": "1.", "1.": "2.", "2.": "0."}),
        },
        language=walk,
    ),
    "mlp_speculator": Kind(
        settings=TrainSettings(num_steps=150, learning_rate=5e-3),
        faults={
            **faults.in_the_layer(MLPSpeculator),
            "features one place early": faults.last_hidden_states_from(-1, reader="mlp_speculator"),
            "steps in another order": faults.renamed(
                {f"{part}.{i}.": f"{part}.{(i + 1) % 3}." for part in ("emb", "proj", "ln", "head") for i in range(3)}
            ),
        },
        language=walk,
    ),
}
STATEFUL = ("eagle", "eagle3")
"""Kinds whose drawn drafts are looked at, for all that are written token by token."""

SLOW = ("eagle", "peagle", "pard", "dflash", "medusa")
"""Kinds whose training takes longest. Their drafts are held against formulas computed anew in `tests/drafters`, too."""


def case_of(kind, *others):
    """One of a test's cases."""
    return pytest.param(kind, *others, marks=pytest.mark.slow if kind in SLOW else ())


every_kind = pytest.mark.parametrize("kind", [case_of(kind) for kind in KINDS])


class Bench:
    """Serves the heads of `KINDS`."""

    def __init__(self, workshop, folder):
        self.workshop, self._folder = workshop, folder

    def head(self, kind):
        """A trained head of this kind."""
        own = KINDS[kind]
        return self.workshop.head(kind, own.settings, own.config, own.language)

    def llm(self, kind, *, head=None, target=None, **changes):
        """An engine that drafts with it, or with `head`."""
        head, target = head or self.head(kind), target or self.workshop.target_of(KINDS[kind].language)
        config = {"method": kind, "num_speculative_tokens": K}
        if kind == "mtp":
            target = replace(target, path=self._beside_target(head))
        else:
            config["model"] = str(head.save(self._folder))
        return tiny_llm(config | changes, target=target)

    def _beside_target(self, head):
        """A folder with the target and the head's tensors beside its own."""
        folder = shutil.copytree(self.workshop.target_folder(write), self._folder, dirs_exist_ok=True)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(dict(head.config) | content))
        save_file(load_file(folder / "model.safetensors") | dict(head.tensors), folder / "model.safetensors")
        return folder


@pytest.fixture
def bench(workshop, tmp_path):
    return Bench(workshop, tmp_path)


def acceptance(llm, prompts, sampling=GREEDY):
    """Accepted / drafted tokens."""
    llm.reset_stats()
    llm.generate(prompts, sampling, use_tqdm=False)
    return llm.stats.speculation.acceptance_rate


@every_kind
def test_a_trained_head_is_accepted(kind, bench):
    assert acceptance(bench.llm(kind), KINDS[kind].prompts) >= FLOOR


@pytest.mark.parametrize(("kind", "fault"), [case_of(kind, fault) for kind in KINDS for fault in KINDS[kind].faults])
def test_with_a_fault_it_is_not(kind, fault, bench, monkeypatch):
    head = KINDS[kind].faults[fault](monkeypatch, bench.head(kind))
    assert acceptance(bench.llm(kind, head=head), KINDS[kind].prompts) < FALLEN


@every_kind
def test_a_warm_prefix_cache_costs_no_acceptance(kind, bench):
    llm, prompts = bench.llm(kind), KINDS[kind].prompts
    cold = acceptance(llm, prompts)
    assert engine_of(llm).scheduler.num_cached_tokens == 0
    assert acceptance(llm, prompts) >= cold - ROUNDING
    assert engine_of(llm).scheduler.num_cached_tokens > 0


@every_kind
def test_nor_does_one_that_was_filled_without_drafts(kind, bench):
    llm = bench.llm(kind)
    off = SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT_LENGTH, ignore_eos=True, speculation="off")
    llm.generate(KINDS[kind].prompts, off, use_tqdm=False)
    assert acceptance(llm, KINDS[kind].prompts) >= FLOOR
    assert engine_of(llm).scheduler.num_cached_tokens > 0


@needs_kernels
@every_kind
def test_on_the_native_kernels_in_bf16_it_is_accepted_alike(kind, bench):
    target = bench.workshop.native_target_of(KINDS[kind].language)
    assert acceptance(bench.llm(kind, target=target), KINDS[kind].prompts) >= FLOOR


@pytest.mark.parametrize("kind", [case_of(kind) for kind in STATEFUL])
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
