"""The table of heads that can be trained: initial weights, module and loss of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from forerun.models.base import LoadedTarget, MaskToken, TargetModel
from forerun.models.checkpoint import Checkpoint, CheckpointView, Rename, renamed
from forerun.models.config_file import read_mask_token
from forerun.models.decoder import build_decoder
from forerun.models.heads import eagle3, medusa
from forerun.models.heads.dflash import build_dflash
from forerun.models.heads.eagle import EagleHead
from forerun.models.heads.eagle3 import Eagle3Head, PEagleHead
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.heads.mlp_speculator import MLPSpeculator
from forerun.models.heads.mtp import MTPHead
from forerun.models.heads.reader import HeadReader
from forerun.models.mtp_layout import DEEPSEEK
from forerun.train import initial_weights
from forerun.train.initial_weights import InitialWeights
from forerun.train.objectives import (
    PardModel,
    dflash_loss,
    eagle_loss,
    medusa_loss,
    mlp_speculator_loss,
    pard_loss,
    peagle_loss,
    unrolled_loss,
)
from forerun.train.target import Batch

Init = Callable[[TargetModel, Mapping[str, Any], InitialWeights], dict[str, Any]]
"""(target, changes to config.json, tensors to add to) -> config.json's content."""

Build = Callable[[Mapping[str, Any], Checkpoint, LoadedTarget], Any]
"""(config.json's content, tensors, target) -> the module that drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train heads of one kind.

    `least_text` says, by config.json's content, how many tokens a text must have to teach anything.
    """

    init: Init
    build: Build
    loss: Callable[[Any, Batch], Tensor]
    least_text: Callable[[Mapping[str, Any]], int] = lambda content: 2  # noqa: ARG005 - a token and its next


def from_tensors(head: Callable[[HeadReader], Any], rename: Rename = str, *, checks_ids: bool = True) -> Build:
    """Make a `Build` of `head` from its tensors, whose published names `rename` translates; for `checks_ids` see `HeadReader`."""
    return lambda content, checkpoint, target: head(
        HeadReader(content, renamed(checkpoint, rename), target, checks_ids=checks_ids)
    )


def _mtp(content: Mapping[str, Any], checkpoint: Checkpoint, target: LoadedTarget) -> MTPHead:
    layout = replace(DEEPSEEK, prefix=DEEPSEEK.prefix.format(num_layers=target.model.num_layers))
    part = CheckpointView(checkpoint, layout.own_names(checkpoint.names()))
    return MTPHead(part, layout, target, norm_eps=content["rms_norm_eps"])


def _pard(content: Mapping[str, Any], checkpoint: Checkpoint, target: LoadedTarget) -> PardModel:
    config = AutoConfig.for_model(**content)
    model = build_decoder(config, checkpoint, dtype=target.model.dtype, device=target.model.device)
    return PardModel(model=model, mask=MaskToken(read_mask_token(content, vocab_size=model.vocab_size)))


RECIPES: dict[str, Recipe] = {
    "eagle": Recipe(
        init=initial_weights.init_eagle,
        build=from_tensors(EagleHead),
        loss=partial(eagle_loss, token_weight=0.1),
    ),
    "eagle3": Recipe(
        init=initial_weights.init_eagle3,
        build=from_tensors(Eagle3Head, eagle3.canonical_name),
        loss=partial(unrolled_loss, num_passes=5, decay=0.8),
    ),
    "peagle": Recipe(
        init=initial_weights.init_peagle,
        build=from_tensors(PEagleHead, eagle3.canonical_name),
        loss=partial(peagle_loss, num_tokens=4),
    ),
    "pard": Recipe(
        init=initial_weights.init_pard,
        build=_pard,
        loss=partial(pard_loss, num_tokens=4),
    ),
    "medusa": Recipe(
        init=initial_weights.init_medusa,
        build=from_tensors(MedusaHeads, medusa.canonical_name),
        loss=medusa_loss,
    ),
    "mtp": Recipe(
        init=initial_weights.init_mtp,
        build=_mtp,
        loss=partial(unrolled_loss, num_passes=3, decay=0.6),
    ),
    "mlp_speculator": Recipe(
        init=initial_weights.init_mlp_speculator,
        build=from_tensors(MLPSpeculator),
        loss=mlp_speculator_loss,
    ),
    "dflash": Recipe(
        init=initial_weights.init_dflash,
        build=build_dflash,
        loss=dflash_loss,
        least_text=lambda content: content["block_size"] + 1,
    ),
}
"""Method of the drafter -> how its heads are trained."""
