"""EAGLE: a one-layer head drafts from the target's own hidden states (arXiv 2401.15077, 2406.16858, 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forerun.drafters.autoregressive import Autoregressive, Wording
from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.predictor import HeadPredictor
from forerun.errors import ConfigError
from forerun.models.heads.base import DraftHead
from forerun.models.heads.eagle import load_eagle
from forerun.models.heads.eagle3 import load_eagle3
from forerun.models.loaded import LoadedTarget
from forerun.models.store import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """vLLM's keys: the head's checkpoint, how its tokens are chosen (`Wording`), and how far it may go.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    draft_sample_method: str = "greedy"
    draft_tree: Any = None
    max_model_len: int | None = None

    load: ClassVar[Callable[[Path, LoadedTarget], DraftHead]] = load_eagle

    def __post_init__(self) -> None:
        Wording.parse(self.draft_sample_method, self.draft_tree)
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len (of the drafter): got {self.max_model_len}; must be 1 or more")

    @property
    def wording(self) -> Wording:
        """How tokens are chosen."""
        return Wording.parse(self.draft_sample_method, self.draft_tree)

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The size of a static tree; of other drafts the user must say how many."""
        return self.wording.default_num_tokens

    def build(self, target: TargetInfo) -> Drafter:
        """Load the head.

        Raises:
            ConfigError: the tree is too large, or `max_model_len` is above what the head was made for.
            ModelError: the head cannot be loaded or was not made for this target.
        """
        head = type(self).load(resolve_model(str(self.model)), target.itself)
        if self.max_model_len is not None and self.max_model_len > head.max_model_len:
            raise ConfigError(
                f"max_model_len (of the drafter): got {self.max_model_len}; the head allows at most "
                f"{head.max_model_len}; lower it"
            )
        predictor = HeadPredictor(head)
        writer = self.wording.writer(target, predictor)
        return Autoregressive(predictor, target, writer, max_model_len=self.max_model_len or head.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(EagleConfig):
    """The same for EAGLE-3's head."""

    load: ClassVar[Callable[[Path, LoadedTarget], DraftHead]] = load_eagle3
