"""Trains one EAGLE-3 head, on the target's device, in steps that can be interrupted between any two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import StateDict
from forerun.models.heads.eagle3 import MASK, NUM_INDUCTION_HEADS, Eagle3Head, PEagleHead, canonical_name
from forerun.ops.native.memory import give_back_freed_memory
from forerun.train.attention import FlashUnrolledAttention, UnrolledAttention, unrolled_attention
from forerun.train.batches import Batches
from forerun.train.draft_loss import draft_loss
from forerun.train.induction_heads import attention_loss
from forerun.train.kept_features import FeaturesInMemory, KeptFeatures
from forerun.train.kept_files import write_tensors
from forerun.train.observer import ObservedTexts, Observer
from forerun.train.recipes import from_tensors
from forerun.train.selection import LearnedText

BATCH_TOKENS = 2048
"""Of a step: larger steps at this learning rate learn less from the same texts, but use a GPU better."""

PASS_TOKENS = {"cpu": 2048, "cuda": 1 << 14}
"""Tokens that are computed at once: few take less memory, many fewer calls."""

TAUGHT_STEPS = 300
GIVEN_BACK_EVERY = 8
"""Steps: texts of many lengths leave gaps that the next ones do not fit, and what is given back must be had again, zeroed."""

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What the optimiser knows of each tensor; `step` counts the steps that had a gradient of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3TrainSettings:
    """How a head is trained: AdamW with a linear warm-up and a cosine decay; the losses of `draft_loss` and `attention_loss`.

    Raises:
        ConfigError: a value is out of range.
    """

    num_steps: int
    batch_tokens: int = BATCH_TOKENS  # of a step, prompts included
    pass_tokens: int = PASS_TOKENS["cpu"]  # computed at once, at most, padding included
    num_passes: int = 3  # tokens that are drafted from a place
    masked_every: int = 4  # each n-th part of a batch is also drafted from masks, in one pass (P-EAGLE)
    taught_steps: int = TAUGHT_STEPS  # the first ones, in which induction heads are taught where to look
    measured_every: int = 10  # steps
    decay: float = 0.8  # weight of each later one
    learning_rate: float = 3e-3
    warm_up: float = 0.03  # share of the steps
    least_rate: float = 0.02  # share of the learning rate at the end
    hybrid_share: float = 1 / 3  # of the steps, at the end, that have the hybrid loss
    betas: tuple[float, float] = (0.9, 0.95)
    most_grad_norm: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_tokens", "pass_tokens", "num_passes", "learning_rate", "most_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}; must be above 0")

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate at step `step`."""
        warm = max(1, round(self.warm_up * self.num_steps))
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self.num_steps))
        return min((step + 1) / warm, self.least_rate + (1 - self.least_rate) * cosine)

    def is_hybrid(self, step: int) -> bool:
        """Return whether step `step` has the hybrid loss."""
        return step >= (1 - self.hybrid_share) * self.num_steps


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What a step measured on its own texts, before it changed the head: means over learned places, by depth of the draft.

    `acceptance` is the chance that a drafted token is accepted at temperature 1, `agreement` the share of places where
    head and target have the same first choice among the tokens that can be drafted; both are empty in most steps.
    """

    step: int
    num_tokens: int
    total: Tensor  # the loss, where the head is: who does not read it does not wait for the device
    acceptance: list[float]
    agreement: list[float]

    @property
    def loss(self) -> float:
        """Summed over passes, each of which has a mean over learned places."""
        return self.total.item()


class Eagle3Trainer:
    """A head in training: fp32 masters and the optimiser's moments; products are computed in the target's dtype."""

    def __init__(
        self,
        target: LoadedTarget,
        content: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        texts: Sequence[LearnedText],
        settings: Eagle3TrainSettings,
        kept: KeptFeatures | FeaturesInMemory | None = None,
    ) -> None:
        self.settings = settings
        self.content = dict(content)
        self._num_induction_heads: int = content.get(NUM_INDUCTION_HEADS, 0)
        self.step = 0
        self.num_tokens = 0  # trained on so far, each time they were
        # on the kernels its products would have no gradients; the target itself stays on them
        self._target, self._kernels = replace(target, kernels=None), target.kernels
        self._batches = Batches(
            texts, batch_tokens=settings.batch_tokens, pass_tokens=settings.pass_tokens, seed=settings.seed
        )
        self._device = target.model.device
        self._masters = {
            name: tensor.to(self._device, copy=True).requires_grad_(tensor.is_floating_point())
            for name, tensor in tensors.items()
        }
        self._trained = [tensor for tensor in self._masters.values() if tensor.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0, fused=True
        )
        kind = PEagleHead if MASK in tensors else Eagle3Head
        self._build = from_tensors(kind, canonical_name)
        head = self._head()
        self._build = from_tensors(kind, canonical_name, checks_ids=False)  # of the head as it is at each step
        assert head.target_ids is not None, "the head drafts a part of the vocabulary"
        self._observer = Observer(target, head.needs, head.target_ids, kept)

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors as they are now, fp32."""
        return {name: tensor.detach() for name, tensor in self._masters.items()}

    def observe(self, texts: Sequence[LearnedText]) -> ObservedTexts:
        """Compute what the head learns from texts."""
        return self._observer.observe(texts)

    @torch.no_grad()
    def logits(self, observed: ObservedTexts) -> Tensor:
        """Compute the logits of the first drafted token at learned places from 1 on, [N, V] fp32."""
        head = self._head()
        num_texts, length = observed.token_ids.shape
        features = [observed.features[name][:, :-1].flatten(0, 1) for name in head.needs]
        positions = torch.arange(length - 1, device=self._device).repeat(num_texts)
        attend = unrolled_attention(num_texts, self._device, self._kernels)
        outputs = head.forward(observed.token_ids[:, 1:].flatten(), head.fuse(features), positions, attend)
        return head.logits(outputs[observed.rows * (length - 1) + observed.places - 1]).float()

    def run_step(self) -> StepReport:
        """Train on the next batch."""
        settings = self.settings
        parts = self._batches.parts(self.step)
        num_places = max(1, sum(len(text.places) for part in parts for text in part))
        decayed = settings.decay ** torch.arange(settings.num_passes, device="cpu")
        weights: list[float] = (decayed / num_places).tolist()  # by pass
        is_measured = self.step % settings.measured_every == 0
        measured = torch.zeros(settings.num_passes, 2, dtype=torch.float64, device=self._device)
        total = torch.zeros((), device=self._device)
        for index, part in enumerate(parts):
            # at the weights of all places, not of those drafted from masks: so masks count less than the passes
            of_masks = weights if (index + self.step) % settings.masked_every == 0 else weights[:0]
            loss = self._loss(self._observer.observe(part), weights, of_masks, measured if is_measured else None)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.step % GIVEN_BACK_EVERY == 0:
            give_back_freed_memory()
        clip_grad_norm_(self._trained, settings.most_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.rate(self.step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        num_tokens = sum(len(text.token_ids) for part in parts for text in part)
        self.num_tokens += num_tokens
        means = (measured.cpu() / num_places).T.tolist() if is_measured else [[], []]
        return StepReport(step=self.step, num_tokens=num_tokens, total=total, acceptance=means[0], agreement=means[1])

    def save(self, path: Path) -> None:
        """Save all that training goes on from; the file is either the old one or the new one, whole.

        Raises:
            ConfigError: the disk is full or gone.
        """
        tensors = self.tensors()
        for name, tensor in self._masters.items():
            state = self._optimizer.state.get(tensor, {})
            tensors |= {f"{kind}/{name}": state[kind] for kind in MOMENTS if kind in state}
        metadata = {"step": str(self.step), "num_tokens": str(self.num_tokens)}
        write_tensors(path, tensors, metadata)

    def resume(self, path: Path) -> None:
        """Go on from a file of `save`.

        Raises:
            ConfigError: it is damaged or of another head.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata, names = file.metadata() or {}, set(file.keys())
                self.step, self.num_tokens = int(metadata["step"]), int(metadata["num_tokens"])
                for name, master in self._masters.items():
                    stored = file.get_tensor(name)
                    if not master.requires_grad and not torch.equal(stored.to(self._device), master):
                        raise ValueError(f"{name}: the head in it drafts other tokens")
                    master.data.copy_(stored)
                    if f"exp_avg/{name}" in names:
                        self._optimizer.state[master] = {
                            kind: file.get_tensor(f"{kind}/{name}").to(self._device, copy=True) for kind in MOMENTS
                        }
        except Exception as error:
            raise ConfigError(
                f"{path}: cannot be resumed from ({error}); delete it to train from the beginning"
            ) from error

    def _head(self) -> Eagle3Head:
        head: Eagle3Head = self._build(self.content, StateDict(self._masters), self._target)
        return head

    def _loss(
        self,
        observed: ObservedTexts,
        weights: Sequence[float],
        mask_weights: Sequence[float],
        measured: Tensor | None,
    ) -> Tensor:
        """Sum the losses at learned places of a pass for each of `weights` (training-time test, arXiv 2503.01840).

        For each of `mask_weights` but the first, places are also drafted from masks after the first pass (P-EAGLE, arXiv
        2602.01469). What is measured of the passes is added to `measured`, if it is given.
        """
        head, settings = self._head(), self.settings
        num_texts, length = observed.token_ids.shape
        attend = unrolled_attention(num_texts, self._device, self._kernels)
        weight = self._masters["lm_head.weight"].to(self._target.model.dtype)
        states = head.fuse([observed.features[name].flatten(0, 1) for name in head.needs]).view(num_texts, length, -1)
        loss = torch.zeros((), device=self._device)

        def loss_of(outputs: Tensor, index: int, measured: Tensor | None = None) -> Tensor:
            """The loss of outputs [texts * rows, width], of which row r read token r + 1 + index and predicts the next."""
            num_rows = length - 1 - index
            rows, wanted = observed.rows * num_rows + observed.places - 1 - index, observed.wanted
            if observed.first_place <= index:  # a place that nothing has drafted for: rarely, as prompts are longer
                is_reached = observed.places > index
                rows, wanted = rows[is_reached], wanted[is_reached]
            is_hybrid = settings.is_hybrid(self.step)
            normed = head.normed(outputs[rows])
            return draft_loss(normed, weight, wanted, is_hybrid=is_hybrid, measured=measured, kernels=self._kernels)

        def positions(index: int) -> Tensor:
            return torch.arange(index, length - 1, device=self._device).repeat(num_texts)

        for index in range(min(len(weights), length - 1)):
            num_rows = length - 1 - index
            token_ids = observed.token_ids[:, 1 + index :]
            outputs = head.forward(token_ids.flatten(), states[:, :num_rows].flatten(0, 1), positions(index), attend)
            loss = loss + weights[index] * loss_of(outputs, index, None if measured is None else measured[index])
            states = head.states(outputs).view(num_texts, num_rows, -1)
        if self._num_induction_heads and self.step < settings.taught_steps:
            share = weights[0] * len(observed.places)
            loss = loss + share * self._attention_loss(attend, observed)
        if not isinstance(head, PEagleHead) or head.mask.state is None:
            return loss
        attend = attend.after_first_pass()
        for index in range(1, min(len(mask_weights), length - 1)):
            masks = torch.full(((length - 1 - index) * num_texts,), head.mask.token_id, device=self._device)
            outputs = head.forward(masks, head.mask.state.expand(len(masks), -1), positions(index), attend)
            loss = loss + mask_weights[index] * loss_of(outputs, index)
        return loss

    def _attention_loss(self, attend: UnrolledAttention | FlashUnrolledAttention, observed: ObservedTexts) -> Tensor:
        """The loss of where the induction heads, the last of the only layer, look in the first pass."""
        query, key = (heads[:, -self._num_induction_heads :] for heads in attend.first_pass(0))
        heads_of_key = self.content["num_attention_heads"] // self.content["num_key_value_heads"]
        return attention_loss(query, key[:, ::heads_of_key], observed.token_ids, observed.rows, observed.places)
