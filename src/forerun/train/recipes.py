"""The kinds of heads that can be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from forerun.models.base import TargetModel
from forerun.models.heads.eagle import EagleHead
from forerun.models.heads.eagle3 import Eagle3Head, canonical_name
from forerun.models.heads.reader import HeadReader, Rename
from forerun.train.batches import Batch
from forerun.train.beginnings import FirstValues, begin_eagle, begin_eagle3
from forerun.train.objectives import feature_regression, unrolled

Begin = Callable[[TargetModel, Mapping[str, Any], FirstValues], dict[str, Any]]
"""(target, changes to config.json, values to fill in) -> config.json's content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How heads of one kind begin, which module they are, and what they learn by.

    `rename` as for `HeadReader.open`.
    """

    begin: Begin
    head: Callable[[HeadReader], Any]
    objective: Callable[[Any, Batch], Tensor]
    rename: Rename = str


RECIPES: dict[str, Recipe] = {
    "eagle": Recipe(begin=begin_eagle, head=EagleHead, objective=partial(feature_regression, token_weight=0.1)),
    "eagle3": Recipe(
        begin=begin_eagle3, head=Eagle3Head, objective=partial(unrolled, num_passes=5, decay=0.8), rename=canonical_name
    ),
}
"""Method of the drafter -> how its heads are trained."""
