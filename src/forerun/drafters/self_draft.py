"""The target as its own drafter: with its weights rounded to int8, or leaving after its first layers.

No other checkpoint, no training. Leaving early is LayerSkip's idea (arXiv 2404.16710) on a model that
was not trained for it; the first layers' KV of the committed text is the target's own, so nothing is
computed or kept twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, TargetInfo
from forerun.drafters.draft_model import load_beside
from forerun.drafters.kv_drafter import KVDrafter
from forerun.drafters.passes import Passes, scratch_blocks_per_line
from forerun.drafters.predictor import ModelPredictor
from forerun.drafters.wording import WordedConfig, Wording
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.models.decoder import Decoder
from forerun.models.loaded import choose_attention
from forerun.ops.native.formats import check_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfConfig(WordedConfig):
    """Which cheaper self drafts: `quantization` "int8", or the first `exit_layer` layers.

    Raises:
        ConfigError: none of the two is given, or both are, or a value is out of range.
    """

    quantization: str | None = None
    exit_layer: int | None = None

    def __post_init__(self) -> None:
        WordedConfig.__post_init__(self)
        if (self.quantization is None) == (self.exit_layer is None):
            raise ConfigError(
                f"speculative_config: method 'self' got quantization={self.quantization!r} and exit_layer="
                f"{self.exit_layer!r}; give one of them: quantization='int8', or the number of layers to compute"
            )
        check_quantization(self.quantization, setting="quantization (of the drafter)")
        if self.exit_layer is not None and (not isinstance(self.exit_layer, int) or self.exit_layer < 1):
            raise ConfigError(f"exit_layer: got {self.exit_layer!r}; must be an integer of 1 or more")

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter.

        Raises:
            ConfigError: the target has no files to load again, no native kernels, or not so many layers.
        """
        if self.exit_layer is not None:
            return EarlyExit(_first_layers(target, self.exit_layer), target, wording=self.wording)
        if target.itself.path is None:
            raise ConfigError("speculative_config: method 'self' in int8 loads the target's files again; it has none")
        model = load_beside(target.itself, target.itself.path, quantization=self.quantization)
        predictor = ModelPredictor(model)
        writer = self.wording.writer(target, predictor)
        return KVDrafter(predictor, target, writer, max_model_len=model.max_model_len)


def _first_layers(target: TargetInfo, num_layers: int) -> Decoder:
    model = target.itself.model
    if not isinstance(model, Decoder):
        raise ConfigError(
            "exit_layer: this target runs through transformers' own code, which has no way out before its last layer; "
            "use another method"
        )
    if num_layers >= model.num_layers:
        raise ConfigError(f"exit_layer: got {num_layers}; must be from 1 to {model.num_layers - 1} for this target")
    return model.first_layers(num_layers)


class EarlyExit:
    """The target's first layers, its final norm and its head, over the target's own KV.

    What a draft writes to these layers lies behind the committed text, where the target's next pass
    writes too, or in scratch blocks.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, model: Decoder, target: TargetInfo, *, wording: Wording) -> None:
        self.kv_bytes_per_block = 0
        self._predictor = ModelPredictor(model)
        self._writer = wording.writer(target, self._predictor)
        self._scratch_per_line = scratch_blocks_per_line(self._writer.num_places, block_size=target.block_size)
        self.num_scratch_blocks = self._scratch_per_line * target.max_num_seqs
        self._target = target

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Write to the target's cache."""
        self._passes = Passes(
            self._predictor,
            choose_attention(self._predictor.kv_specs, self._target.itself.kernels),
            target_cache,
            num_blocks=num_blocks,
            scratch_per_line=self._scratch_per_line,
        )

    def start(self, sequence: Sequence) -> None:
        """Keep nothing."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Draft for all sequences together."""
        lines = [
            self._passes.line(number, request, start=request.num_computed, longest=self._predictor.max_model_len)
            for number, request in enumerate(context.requests)
        ]
        return self._writer.write(self._passes, lines, context.features)

    def stop(self, sequence: Sequence) -> None:
        """Nothing was kept."""
