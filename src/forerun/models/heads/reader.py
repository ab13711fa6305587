"""Reads a trained head beside the target that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config import DecoderConfig, NormNames, NotCoveredError
from forerun.models.config_file import config_like
from forerun.models.decoder import Layers, TorchLayers, make_rotaries, rotation_of
from forerun.models.families import decoder_config
from forerun.models.folder import CONFIG_FILE, read_json
from forerun.models.layers import DecoderLayer, Product, read_layer, read_rms_norm
from forerun.models.loaded import LoadedTarget
from forerun.models.packing import Packing, can_pack
from forerun.models.quiet import one_line
from forerun.models.weights import Checkpoint, Rename, WeightReader, renamed
from forerun.ops.layers import Embedding, Head, Linear, RMSNorm
from forerun.ops.native.layers import NativeRMSNorm, PackedHead
from forerun.ops.rotary import Rotary, RotaryTable, Rotation

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Models whose layers heads are made of -> transformers' model_type."""

COMPARED_ROWS = 4096  # of two tables, at a time


class HeadReader:
    """Reads a head's parts in the target's dtype, packed for the native kernels where the target's weights are.

    `content` is the head's config.json; `weights` reads what has no method here. Hidden states between
    parts are of `stream_dtype`.
    """

    def __init__(self, content: Mapping[str, Any], checkpoint: Checkpoint, target: LoadedTarget) -> None:
        model, kernels = target.model, target.kernels
        self.content = content
        self.target = target
        self.weights = WeightReader(checkpoint, dtype=model.dtype, device=model.device)
        self.stream_dtype = torch.float32 if kernels else model.dtype
        self._packing = Packing.choose(kernels, dtype=model.dtype) if kernels else None

    @classmethod
    def open(cls, folder: Path, target: LoadedTarget, *, rename: Rename = str) -> HeadReader:
        """Open a folder; `rename` gives each tensor the name that the head's code has for it.

        Raises:
            ModelError: config.json or the weights are missing or damaged.
        """
        return cls(read_json(folder / CONFIG_FILE), renamed(open_checkpoint(folder), rename), target)

    def linear(self, name: str, outputs: int, inputs: int) -> Product:
        """A matrix, with a bias if the checkpoint has one."""
        read = self.weights.linear([name], [outputs], width=inputs, bias=f"{name}.bias" in self.weights)
        return self.packed(read)

    def packed(self, linear: Linear) -> Product:
        """The same on the kernels, if there are any."""
        return self._packing.linear(linear.weight, linear.bias) if self._packing else linear

    def norm(self, name: str, width: int, eps: float, *, offset: float = 0.0) -> RMSNorm | NativeRMSNorm:
        """An RMSNorm; `offset` is added to its weight."""
        norm = read_rms_norm(self.weights, f"{name}.weight", width, eps, offset=offset)
        return self._packing.norm(norm) if self._packing else norm

    def layers(self, config: DecoderConfig, *, first_norms: NormNames | None = None) -> Layers:
        """A stack of decoder layers; `first_norms` are layer 0's, if they are not those of all."""
        configs = [replace(config, norms=first_norms or config.norms), *[config] * (config.num_layers - 1)]
        return self.stack([read_layer(self.weights, own, index=index) for index, own in enumerate(configs)], config)

    def stack(self, layers: Sequence[DecoderLayer], config: DecoderConfig) -> Layers:
        """Layers one after the other, packed if there are kernels."""
        if self._packing and can_pack(config):
            return self._packing.layers(layers, config, rotation_of(config))
        return TorchLayers([self._packed_products(layer) for layer in layers], rotation_of(config))

    def rotations(self, config: DecoderConfig) -> Rotations:
        """What the layers rotate rows by."""
        rotaries = make_rotaries(config, self.stream_dtype, self.weights.device)
        return Rotations(RotaryTable(rotary) if self._packing else rotary for rotary in rotaries.values())

    def embedding(self, name: str = "embed_tokens.weight", *, width: int) -> Callable[[Tensor], Tensor]:
        """[T] -> [T, width]: the head's own table, or the target's embedding where that is the same or there is none.

        Raises:
            ModelError: its shape is not [the target's vocab_size, width], or there is none and the target's is of another width.
        """
        model = self.target.model
        if name not in self.weights:
            self._check_shared(name, width)
            return model.embed
        table = self.weights.tensor(name, (model.vocab_size, width))
        if width == model.hidden_size and self._is_same(table, model.embed):
            return model.embed
        return Embedding(table, 1.0, self.stream_dtype)

    def head(self, name: str = "lm_head.weight", *, outputs: int, width: int) -> Callable[[Tensor], Tensor]:
        """[R, width] -> [R, outputs] fp32: the head's own, or the target's where that is the same or there is none.

        Raises:
            ModelError: its shape is not [outputs, width], or there is none and the target's is of another shape.
        """
        model = self.target.model
        if name not in self.weights:
            self._check_shared(name, width)
            if outputs != model.vocab_size:
                raise ModelError(
                    f"checkpoint: tensor {name!r} is missing, expected shape {[outputs, width]}; a reduced vocabulary "
                    "needs a head of its own; download the checkpoint again"
                )
            return model.logits
        weight = self.weights.tensor(name, (outputs, width))
        if tuple(weight.shape) == (model.vocab_size, model.hidden_size) and self._is_same(weight, model.head_rows):
            return model.logits
        return self.packed_head(weight)

    def packed_head(self, weight: Tensor) -> Head | PackedHead:
        """A head of these weights [outputs, width], on the kernels if there are any."""
        return PackedHead(self._packing.linear(weight)) if self._packing else Head(Linear(weight))

    def finish(self) -> None:
        """Check that every tensor was read.

        Raises:
            ModelError: the checkpoint has tensors that the head has no place for.
        """
        self.weights.finish()

    def _packed_products(self, layer: DecoderLayer) -> DecoderLayer:
        """The same with its products on the kernels, if there are any: they take any width, and the stream's dtype."""
        qkv, output, gate_up, down = (
            self.packed(product) if isinstance(product, Linear) else product
            for product in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        )
        return replace(
            layer,
            attention=replace(layer.attention, qkv=qkv, output=output),
            mlp=replace(layer.mlp, gate_up=gate_up, down=down),
        )

    def _check_shared(self, name: str, width: int) -> None:
        if width != self.target.model.hidden_size:
            raise ModelError(
                f"checkpoint: tensor {name!r} is missing, and the target's, of width {self.target.model.hidden_size}, "
                f"does not fit a head of hidden_size {width}; use a head that was trained for this target"
            )

    def _is_same(self, table: Tensor, read_rows: Callable[[Tensor], Tensor]) -> bool:
        """Whether the target has the same rows [vocab_size, hidden_size]; a second copy would only cost memory."""
        for start in range(0, len(table), COMPARED_ROWS):
            ids = torch.arange(start, min(start + COMPARED_ROWS, len(table)), device=table.device)
            if not torch.equal(table[ids], read_rows(ids).to(table.dtype)):
                return False
        return True


def head_config(content: Mapping[str, Any], *, architecture: str) -> DecoderConfig:
    """The layers of a head whose config.json is like that of a model of `architecture`.

    Raises:
        ModelError: a value is missing or impossible, or the layers have no code for it.
    """
    model_type = ARCHITECTURES[architecture]
    values = {key: value for key, value in content.items() if key not in ("architectures", "model_type", "auto_map")}
    try:
        return decoder_config(config_like(model_type, architecture, values))
    except NotCoveredError as error:
        raise ModelError(f"{CONFIG_FILE} of the head: {error}") from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{CONFIG_FILE} of the head: cannot be used ({one_line(error)}); mend it") from error


class Rotations:
    """What a head's layers rotate rows by: see `Decoder.rotations`."""

    def __init__(self, rotaries: Iterable[Rotary | RotaryTable]) -> None:
        self._rotaries = list(rotaries)

    def __call__(self, positions: Tensor) -> list[Rotation | None]:
        """[T] int64 -> none first, then each distinct rope's."""
        return [None, *(rotary.rotation(positions) for rotary in self._rotaries)]
