"""Multi-token prediction: a layer of the target's own checkpoint drafts from its hidden states (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters.base import Drafter, TargetInfo
from forerun.drafters.neural.forward import HeadPredictor
from forerun.drafters.neural.head_config import TrainedHeadConfig
from forerun.drafters.neural.kv import KVDrafter
from forerun.drafters.neural.writers import make_writer
from forerun.models.heads.mtp import load_mtp


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(TrainedHeadConfig):
    """The keys of `TrainedHeadConfig`; the layer that drafts comes with the target.

    Raises:
        ConfigError: a value is out of range.
    """

    def build(self, target: TargetInfo) -> Drafter:
        """Load the layer.

        Raises:
            ConfigError: the tree is too large, or the target has no safetensors.
            ModelError: it has no such layer, or the layer is damaged.
        """
        head = load_mtp(target.itself.for_drafter(self.draft_tensor_parallel_size), quantization=self.quantization)
        predictor = HeadPredictor(head)
        writer = make_writer(self.sampling, target, predictor)
        return KVDrafter(predictor, target, writer, max_model_len=head.max_model_len)
