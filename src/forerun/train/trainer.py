"""Trains a head of any kind on texts for one target, in memory; `forerun train` has `eagle3_trainer` instead."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import StateDict
from forerun.models.model_folder import CONFIG_FILE, SINGLE_FILE
from forerun.train.initial_weights import InitialWeights
from forerun.train.kept_files import write_tensors, write_text
from forerun.train.recipes import RECIPES
from forerun.train.target import observe

logger = logging.getLogger(__name__)

STEPS_PER_LOG = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings of training by AdamW with a linear warm-up and a cosine decay to zero.

    Raises:
        ConfigError: a value is out of range.
    """

    num_steps: int = 1000
    batch_size: int = 16  # texts
    learning_rate: float = 1e-4
    warm_up: float = 0.03  # share of the steps
    betas: tuple[float, float] = (0.9, 0.95)
    most_grad_norm: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "learning_rate", "most_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}; must be above 0")
        if not 0 <= self.warm_up <= 1:
            raise ConfigError(f"warm_up: got {self.warm_up}; must be from 0 to 1")

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate at step `step`."""
        warm = max(1, round(self.warm_up * self.num_steps))
        return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / self.num_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint:
    """A head in its published layout: the content of config.json, and tensors by name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def save(self, folder: Path) -> Path:
        """Write the head to `folder`, a value for `speculative_config["model"]`, and return the folder.

        Raises:
            ConfigError: the disk is full or gone.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / SINGLE_FILE, self.tensors, {"format": "pt"})
        write_text(folder / CONFIG_FILE, json.dumps(dict(self.config), indent=2) + "\n")
        return folder


def train_head(
    kind: str,
    target: LoadedTarget,
    texts: Sequence[Sequence[int]],
    settings: TrainSettings | None = None,
    *,
    config: Mapping[str, Any] | None = None,
) -> HeadCheckpoint:
    """Train a head on texts.

    The module in training is the one that drafts: each step builds it from the tensors, as drafting will
    from their file.

    Args:
        kind: a key of `RECIPES`.
        target: the model that the head will draft for.
        texts: token ids; texts that the target generated itself train best.
        settings: of the optimiser, or None for the defaults.
        config: changes to the head's config.json, which otherwise follows the target.

    Raises:
        ConfigError: there is no such kind, the target runs on the native kernels, or texts do not fit the target.
        ModelError: `config` is impossible for the head.
    """
    settings = settings or TrainSettings()
    if kind not in RECIPES:
        raise ConfigError(f"kind of head: got {kind!r}; may be {', '.join(RECIPES)}")
    if target.kernels is not None or target.on_device is not None:
        raise ConfigError("target: runs on kernels, which have no gradients; load it for torch")
    recipe = RECIPES[kind]
    first = InitialWeights(_count_tokens(texts, target), seed=settings.seed)
    content = recipe.init(target.model, config or {}, first)
    shortest, least = min(map(len, texts)), recipe.least_text(content)
    if shortest < least:
        raise ConfigError(
            f"texts: got one of {shortest} tokens; each must have at least {least} for a head of kind {kind!r}; leave shorter "
            "ones out"
        )
    tensors = {name: _master(tensor, target.model.device) for name, tensor in first.tensors.items()}
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.rate)
    batches = shuffled(texts, size=settings.batch_size, seed=settings.seed)
    for step, chosen in enumerate(islice(batches, settings.num_steps)):
        head = recipe.build(content, StateDict(tensors), target)
        loss = recipe.loss(head, observe(target, chosen, frozenset(head.needs)))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        clip_grad_norm_(trained, settings.most_grad_norm)
        optimizer.step()
        schedule.step()
        if step % STEPS_PER_LOG == 0 or step == settings.num_steps - 1:
            logger.info("step %d of %d: loss %.4f", step + 1, settings.num_steps, loss.item())
    return HeadCheckpoint(config=content, tensors={name: tensor.detach() for name, tensor in tensors.items()})


def shuffled(texts: Sequence[Sequence[int]], *, size: int, seed: int) -> Iterator[list[Sequence[int]]]:
    """Yield batches of `size` texts without end: all texts in random order, then all again in another."""
    source = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(len(texts), generator=source).tolist()
        yield [texts[index] for index in waiting[:size]]
        del waiting[:size]


def _count_tokens(texts: Sequence[Sequence[int]], target: LoadedTarget) -> Tensor:
    """Count how often each token of the vocabulary occurs, [vocab_size].

    Raises:
        ConfigError: there are no texts, one is too short or too long, or a token id is not the target's.
    """
    vocab_size, longest = target.model.vocab_size, target.model.max_model_len
    lengths = [len(text) for text in texts]
    if not lengths or min(lengths) < 2 or max(lengths) > longest:
        found = f"{min(lengths)} to {max(lengths)} tokens" if lengths else "none"
        raise ConfigError(f"texts: got {found}; each must have 2 to {longest}; cut longer ones, leave shorter ones out")
    token_ids = torch.tensor([token for text in texts for token in text])
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ConfigError(
            f"texts: got token ids from {int(token_ids.min())} to {int(token_ids.max())}; must be from 0 to "
            f"{vocab_size - 1}; use the target's tokenizer"
        )
    return torch.bincount(token_ids, minlength=vocab_size)


def _master(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy in fp32 to train; integer and boolean tensors are returned as they are."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(device, torch.float32, copy=True).requires_grad_()
