"""Self-drafting: the target drafts with its weights in int8 or int4, or with its first layers alone.

It needs no other checkpoint and no training. Early exit is LayerSkip's idea (arXiv 2404.16710) on a
model that was not trained for it; the first layers' KV of the committed text is the target's own, so
nothing is computed or kept twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.core.draft import Draft
from forerun.core.integers import check_integer
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, TargetInfo
from forerun.drafters.device_chains import DeviceChains
from forerun.drafters.draft_model import load_beside
from forerun.drafters.neural.device import ChainNetwork, TargetsEntries, device_chains
from forerun.drafters.neural.device_trees import device_trees
from forerun.drafters.neural.forward import ModelPredictor, PagedPasses, scratch_blocks_per_sequence
from forerun.drafters.neural.kv import KVDrafter
from forerun.drafters.neural.sampling import DraftSampling, DraftSamplingConfig
from forerun.drafters.neural.writers import make_writer
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.models.decoder import Decoder
from forerun.ops.cuda.table import DeviceTable, RuleTable
from forerun.ops.native.attention import block_table
from forerun.ops.native.formats import check_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfConfig(DraftSamplingConfig):
    """What drafts: the target with `quantization` "int8" or "int4", or its first `exit_layer` layers.

    Raises:
        ConfigError: neither or both are given, or a value is out of range.
    """

    quantization: str | None = None
    exit_layer: int | None = None

    def __post_init__(self) -> None:
        DraftSamplingConfig.__post_init__(self)
        if (self.quantization is None) == (self.exit_layer is None):
            raise ConfigError(
                f"speculative_config: method 'self' got quantization={self.quantization!r} and exit_layer="
                f"{self.exit_layer!r}; give one of them: quantization='int4' or 'int8', or the number of layers to compute"
            )
        check_quantization(self.quantization, setting="quantization (of the drafter)")
        if self.exit_layer is not None and self.draft_tensor_parallel_size != 1:
            raise ConfigError(
                f"draft_tensor_parallel_size: got {self.draft_tensor_parallel_size} with exit_layer; the target's layers are "
                "computed by all of its processes anyway; leave it out"
            )
        if self.exit_layer is not None:
            check_integer("exit_layer", self.exit_layer, least=1, do="give the number of layers to compute")

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter.

        Raises:
            ConfigError: the target has no files to load again, no native kernels, or fewer layers.
        """
        if self.exit_layer is not None:
            return EarlyExit(_first_layers(target, self.exit_layer), target, sampling=self.sampling)
        if target.itself.path is None:
            raise ConfigError(
                f"speculative_config: method 'self' in {self.quantization} loads the target's files again; it has none"
            )
        model = load_beside(
            target.itself.for_drafter(self.draft_tensor_parallel_size),
            target.itself.path,
            quantization=self.quantization,
            max_model_len=target.max_model_len,
            load_format=target.itself.load_format,
        )
        predictor = ModelPredictor(model)
        writer = make_writer(self.sampling, target, predictor)
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

    A draft writes to these layers behind the committed text, where the target's next pass overwrites it,
    or in scratch blocks.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, model: Decoder, target: TargetInfo, *, sampling: DraftSampling) -> None:
        self.kv_bytes_per_block = self.scratch_bytes = 0
        self._predictor = ModelPredictor(model)
        self._writer = make_writer(sampling, target, self._predictor)
        self._scratch_per_sequence = scratch_blocks_per_sequence(self._writer.num_places, block_size=target.block_size)
        self.num_scratch_blocks = self._scratch_per_sequence * target.max_num_seqs
        self._target = target

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Write to the target's cache."""
        self._cache, self._num_blocks = target_cache, num_blocks
        self._attention = self._target.itself.attention_for(self._predictor.kv_specs)
        self._passes = PagedPasses(
            self._predictor,
            self._attention,
            target_cache,
            num_blocks=num_blocks,
            scratch_per_sequence=self._scratch_per_sequence,
        )

    def on_device(self, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]) -> DeviceChains | None:
        """See `DraftsOnDevice`: chains and trees."""
        network = ChainNetwork(
            predictor=self._predictor,
            attention=self._attention,
            cache=self._cache,
            num_blocks=self._num_blocks,
            scratch_per_slot=self._scratch_per_sequence,
            max_model_len=self._predictor.max_model_len,
            entries=TargetsEntries(),
            most_unread=1,
        )
        given = (network, self._writer, table, rules, sample)
        return device_chains(*given) or device_trees(*given)

    def start(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""

    def num_unread(self, request: DraftRequest) -> int:  # noqa: ARG002 - nothing is read for any
        """See `ReadsTexts`: the target has read all."""
        return 0

    def propose(self, context: DraftContext) -> list[Draft]:
        """Draft for all sequences together."""
        max_model_len = self._predictor.max_model_len
        sequences = [
            self._passes.sequence(
                number,
                request,
                block_table(request.block_ids),
                num_read=request.num_computed,
                max_model_len=max_model_len,
            )
            for number, request in enumerate(context.requests)
        ]
        return self._writer.write(self._passes, sequences, context.features)

    def stop(self, sequence: Sequence) -> None:
        """Do nothing: no state was kept."""
