"""The kinds of heads that can be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from forerun.models.base import LoadedTarget, TargetModel
from forerun.models.heads import eagle3, medusa
from forerun.models.heads.dflash import build_dflash
from forerun.models.heads.eagle import EagleHead
from forerun.models.heads.eagle3 import Eagle3Head
from forerun.models.heads.medusa import MedusaHeads
from forerun.models.heads.mlp_speculator import MLPSpeculator
from forerun.models.heads.mtp import MTPHead
from forerun.models.heads.peagle import PEagleHead
from forerun.models.heads.reader import HeadReader
from forerun.models.mtp_layout import DEEPSEEK
from forerun.models.weights import Checkpoint, CheckpointView, Rename, renamed
from forerun.train import beginnings
from forerun.train.batches import Batch
from forerun.train.beginnings import FirstValues
from forerun.train.objectives import each_depth, feature_regression, filled, masked, masked_model, recurrence, unrolled
from forerun.train.parallel_model import ParallelModel

Begin = Callable[[TargetModel, Mapping[str, Any], FirstValues], dict[str, Any]]
"""(target, changes to config.json, values to fill in) -> config.json's content."""

Build = Callable[[Mapping[str, Any], Checkpoint, LoadedTarget], Any]
"""(config.json's content, tensors, target) -> the module that drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How heads of one kind begin, which module they are, and what they learn by."""

    begin: Begin
    build: Build
    objective: Callable[[Any, Batch], Tensor]


def reads(head: Callable[[HeadReader], Any], rename: Rename = str) -> Build:
    """Builds `head` from its tensors, whose published names `rename` translates."""
    return lambda content, checkpoint, target: head(HeadReader(content, renamed(checkpoint, rename), target))


def _mtp(content: Mapping[str, Any], checkpoint: Checkpoint, target: LoadedTarget) -> MTPHead:
    layout = replace(DEEPSEEK, prefix=DEEPSEEK.prefix.format(num_layers=target.model.num_layers))
    part = CheckpointView(checkpoint, layout.own_names(checkpoint.names()))
    return MTPHead(part, layout, target, norm_eps=content["rms_norm_eps"])


RECIPES: dict[str, Recipe] = {
    "eagle": Recipe(
        begin=beginnings.begin_eagle,
        build=reads(EagleHead),
        objective=partial(feature_regression, token_weight=0.1),
    ),
    "eagle3": Recipe(
        begin=beginnings.begin_eagle3,
        build=reads(Eagle3Head, eagle3.canonical_name),
        objective=partial(unrolled, num_passes=5, decay=0.8),
    ),
    "peagle": Recipe(
        begin=beginnings.begin_peagle,
        build=reads(PEagleHead, eagle3.canonical_name),
        objective=partial(masked, num_tokens=4),
    ),
    "pard": Recipe(
        begin=beginnings.begin_pard,
        build=ParallelModel.build,
        objective=partial(masked_model, num_tokens=4),
    ),
    "medusa": Recipe(
        begin=beginnings.begin_medusa,
        build=reads(MedusaHeads, medusa.canonical_name),
        objective=each_depth,
    ),
    "mtp": Recipe(
        begin=beginnings.begin_mtp,
        build=_mtp,
        objective=partial(unrolled, num_passes=3, decay=0.6),
    ),
    "mlp_speculator": Recipe(
        begin=beginnings.begin_mlp_speculator,
        build=reads(MLPSpeculator),
        objective=recurrence,
    ),
    "dflash": Recipe(
        begin=beginnings.begin_dflash,
        build=build_dflash,
        objective=filled,
    ),
}
"""Method of the drafter -> how its heads are trained."""
