"""EAGLE: a small head drafts from the target's own hidden states (arXiv 2401.15077, 2406.16858, 2503.01840, 2602.01469)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.neural.forward import HeadPredictor
from forerun.drafters.neural.head_config import TrainedHeadConfig
from forerun.drafters.neural.kv import KVDrafter, check_max_model_len, resolve_max_model_len
from forerun.drafters.neural.parallel import MaskWriter, check_parallel_drafting, make_tree_builder
from forerun.drafters.neural.writers import Writer, make_writer
from forerun.errors import ConfigError
from forerun.models.base import DraftHead, LoadedTarget
from forerun.models.heads.eagle import load_eagle
from forerun.models.heads.eagle3 import load_eagle3, load_peagle
from forerun.models.store import resolve_model

logger = logging.getLogger(__name__)


class LoadHead(Protocol):
    """Loads a head's folder for a target, its own matrices rounded to the format that `quantization` names."""

    def __call__(self, folder: Path, target: LoadedTarget, *, quantization: str | None = None) -> DraftHead:
        """Load it; raises as `load_eagle` does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(TrainedHeadConfig):
    """vLLM's keys: the head's checkpoint, those of `TrainedHeadConfig`, and the longest text to draft for.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    max_model_len: int | None = None

    load: ClassVar[LoadHead] = load_eagle

    def __post_init__(self) -> None:
        TrainedHeadConfig.__post_init__(self)
        check_max_model_len(self.max_model_len)

    def build(self, target: TargetInfo) -> Drafter:
        """Load the head.

        Raises:
            ConfigError: the tree is too large, or `max_model_len` is above what the head was made for, or a
                quantization is asked for where the target does not compute on the kernels in bfloat16.
            ModelError: the head cannot be loaded or was not made for this target.
        """
        shared = target.itself.for_drafter(self.draft_tensor_parallel_size)
        head = type(self).load(resolve_model(str(self.model)), shared, quantization=self.quantization)
        predictor = HeadPredictor(head)
        return self._drafter(target, predictor, make_writer(self.sampling, target, predictor))

    def check_has_head(self, drafter: Drafter) -> None:
        """See `BuildsWithHead`: it always has one."""

    def build_with_head(self, folder: Path, target: TargetInfo, *, before: Drafter) -> Drafter:  # noqa: ARG002 - it knows no texts
        """See `BuildsWithHead`."""
        return replace(self, model=str(folder)).build(target)

    def _drafter(self, target: TargetInfo, predictor: HeadPredictor, writer: Writer) -> Drafter:
        max_model_len = resolve_max_model_len(self.max_model_len, allowed=predictor.max_model_len)
        return KVDrafter(predictor, target, writer, max_model_len=max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(EagleConfig):
    """The settings of EAGLE-3's head, or with `parallel_drafting` of P-EAGLE's, which drafts all tokens in one pass."""

    parallel_drafting: bool = False

    load: ClassVar[LoadHead] = load_eagle3

    def __post_init__(self) -> None:
        EagleConfig.__post_init__(self)
        check_parallel_drafting(self.parallel_drafting)

    def build(self, target: TargetInfo) -> Drafter:
        """Load the head; see `EagleConfig.build`."""
        if not self.parallel_drafting:
            return EagleConfig.build(self, target)
        shared = target.itself.for_drafter(self.draft_tensor_parallel_size)
        head = load_peagle(resolve_model(str(self.model)), shared, quantization=self.quantization)
        predictor = HeadPredictor(head)
        builder = make_tree_builder(self.sampling, target, predictor)
        if head.num_trained is not None and builder.depth > head.num_trained:
            logger.warning(
                "drafts may be %d tokens deep; this head was trained to draft %d in a pass, later ones will seldom be right",
                builder.depth,
                head.num_trained,
            )
        return self._drafter(target, predictor, MaskWriter(builder, head.mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The settings of P-EAGLE's head alone (arXiv 2602.01469)."""

    parallel_drafting: bool = True

    def __post_init__(self) -> None:
        Eagle3Config.__post_init__(self)
        if not self.parallel_drafting:
            raise ConfigError("parallel_drafting: got False with method 'peagle'; leave it out, or say 'eagle3'")
