"""Reads the parts of a trained head, and shares those of the target that it has in common with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError, ModelError, one_line
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import Checkpoint, Rename, WeightReader, dense, open_checkpoint, renamed
from forerun.models.config import DecoderConfig, NormNames, NotCoveredError
from forerun.models.config_file import config_like
from forerun.models.decoder import Layers, TorchLayers, make_rotaries, rotation_of
from forerun.models.families import FAMILIES, decoder_config
from forerun.models.kept_weights import KeptWeights, Unkept
from forerun.models.layers import DecoderLayer, Product, read_layer, read_rms_norm
from forerun.models.model_folder import CONFIG_FILE, read_json
from forerun.models.on_device import is_dense
from forerun.models.packed_cache import PackedCache, PackedModel
from forerun.models.packing import Packing, can_pack
from forerun.ops.block_weight import BlockLinear, BlockWeight
from forerun.ops.cuda.decoder_layers import DeviceHead, DeviceRMSNorm, DeviceRotary
from forerun.ops.layers import Embedding, Head, Linear, RMSNorm
from forerun.ops.native.formats.blocks import row_bits_of
from forerun.ops.native.layers import NativeRMSNorm, PackedHead
from forerun.ops.rotary import Rotary, RotaryTable, Rotation

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose layers heads have."""

COMPARED_ROWS = 4096  # of two tables, at a time
LEAST_KEPT_BYTES = 4 << 20  # of a head's files: less is packed as soon as mapped


class HeadReader:
    """Reads a head's parts in the target's dtype, for the kernels that compute the target where there are any.

    `content` is the head's config.json; `weights` reads tensors for which there is no method here. Hidden
    states between parts are of `stream_dtype`.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        checkpoint: Checkpoint,
        target: LoadedTarget,
        *,
        quantization: str | None = None,
        kept: KeptWeights | None = None,
        checks_ids: bool = True,
    ) -> None:
        """Begin reading; `quantization` names the format that matrices are rounded to, None leaves them as they are.

        `kept` has what an earlier start packed of the head, or keeps what is packed now. Without `checks_ids` maps of token ids
        are taken for right: they were checked before, and a GPU is waited for to look at them.

        Raises:
            ConfigError: a quantization is asked for where the target does not run on the kernels in bf16.
        """
        model = target.model
        self.content = content
        self.target = target
        self.checks_ids = checks_ids
        self.stream_dtype = torch.float32 if target.kernels or target.on_device else model.dtype
        packing = _packing_for(target, quantization)
        self._packing = packing.keeping(kept) if packing and kept else packing
        self.weights = WeightReader(
            checkpoint,
            dtype=model.dtype,
            device=model.device,
            needs_matrices=self._packing is None or self._packing.needs_weights,
        )

    @classmethod
    @contextmanager
    def open(
        cls, folder: Path, target: LoadedTarget, *, rename: Rename = str, quantization: str | None = None
    ) -> Iterator[HeadReader]:
        """Open a folder, and keep what is packed for the next start; `rename` maps tensors' names to those that the head reads.

        Raises:
            ModelError: config.json or the weights are missing or damaged.
            ConfigError: see `__init__`.
        """
        content, checkpoint = read_json(folder / CONFIG_FILE), renamed(open_checkpoint(folder), rename)
        packing = _packing_for(target, quantization)
        if packing is None:
            yield cls(content, checkpoint, target)
            return
        model = PackedModel(
            path=folder,
            format=f"head-{packing.format.name}",
            level=packing.kernels.level,
            dtype=f"{target.model.dtype} for {target.model.vocab_size} x {target.model.hidden_size}",
        )
        cache = replace(PackedCache.of_environment(), least_bytes=LEAST_KEPT_BYTES)
        with cache.weights(model, log_level=logging.INFO) as kept:
            yield cls(content, checkpoint, target, quantization=quantization, kept=kept)

    def linear(self, name: str, outputs: int, inputs: int) -> Product:
        """Read a matrix, and its bias if the checkpoint has one."""
        read = self.weights.linear([name], [outputs], width=inputs, bias=f"{name}.bias" in self.weights)
        return self.packed(read, name=name)

    def packed(self, linear: Linear | BlockLinear, *, name: str | None = None) -> Product:
        """Hand a matrix to the kernels, if there are any; what is packed is kept under `name` if it has one."""
        if self.target.on_device is not None and isinstance(linear, Linear):
            return self.target.on_device.linear(linear.weight, linear.bias)
        return self._packing.linear(linear.weight, linear.bias, name=name) if self._packing else linear

    def norm(
        self, name: str, width: int, eps: float, *, offset: float = 0.0
    ) -> RMSNorm | NativeRMSNorm | DeviceRMSNorm:
        """Read an RMSNorm; `offset` is added to its weight."""
        norm = read_rms_norm(self.weights, f"{name}.weight", width, eps, offset=offset)
        if self.target.on_device is not None:
            return self.target.on_device.norm(norm)
        return self._packing.norm(norm) if self._packing else norm

    def layers(self, config: DecoderConfig, *, first_norms: NormNames | None = None) -> Layers:
        """Read a stack of decoder layers; `first_norms` are layer 0's, if they differ from the others'."""
        configs = [replace(config, norms=first_norms or config.norms), *[config] * (config.num_layers - 1)]
        return self.stack([read_layer(self.weights, own, index=index) for index, own in enumerate(configs)], config)

    def stack(self, layers: Sequence[DecoderLayer], config: DecoderConfig) -> Layers:
        """Stack layers, on the kernels if there are any."""
        packing, ranks, on_device = self._packing, self.target.drafter_ranks, self.target.on_device
        stacked: Layers
        if on_device is not None and all(is_dense(layer) for layer in layers):
            stacked = on_device.layers(layers, config, rotation_of(config))
        elif packing and can_pack(config):
            stacked = packing.layers(layers, config, rotation_of(config))
        else:
            products = [self._packed_products(layer, f"layer.{index}") for index, layer in enumerate(layers)]
            stacked = TorchLayers(products, rotation_of(config))
        return stacked if ranks is None else ranks.layers(stacked, config)

    def rotations(self, config: DecoderConfig) -> Rotations:
        """Make the rotary embeddings of the layers."""
        rotaries = make_rotaries(config, self.stream_dtype, self.weights.device).values()
        if self.target.on_device is not None:
            return Rotations(self.target.on_device.rotary(rotary) for rotary in rotaries)
        return Rotations(RotaryTable(rotary) if self._packing else rotary for rotary in rotaries)

    def embedding(self, name: str = "embed_tokens.weight", *, width: int) -> Callable[[Tensor], Tensor]:
        """Read an embedding [T] -> [T, width]: the head's, or the target's if that is equal or the checkpoint has none.

        Raises:
            ModelError: its shape is not [the target's vocab_size, width], or it is missing and the target's has another width.
        """
        model = self.target.model
        if name not in self.weights:
            self._check_shared(name, width)
            return model.embed
        table = self.weights.tensor(name, (model.vocab_size, width))
        if width == model.hidden_size and self._is_same(table, model.embed):
            return model.embed
        if self.target.on_device is not None:
            return self.target.on_device.embedding(table)
        return Embedding(table, 1.0, self.stream_dtype)

    def head(self, name: str = "lm_head.weight", *, outputs: int, width: int) -> Callable[[Tensor], Tensor]:
        """Read a head [R, width] -> [R, outputs] fp32: its own, or the target's if that is equal or the checkpoint has none.

        Raises:
            ModelError: its shape is not [outputs, width], or it is missing and the target's has another shape.
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
        if (outputs, width) != (model.vocab_size, model.hidden_size):
            return self._head_of(self.weights.matrix(name, (outputs, width)), self._packing)
        weight = self.weights.tensor(name, (outputs, width))
        return model.logits if self._is_same(weight, model.head_rows) else self.packed_head(weight)

    def packed_head(self, weight: Tensor) -> Head | PackedHead | DeviceHead:
        """Make a head of these weights [outputs, width], on the kernels if there are any; it is packed at every start."""
        return self._head_of(weight, self._packing and self._packing.keeping(Unkept()))

    def _head_of(self, weight: Tensor | BlockWeight, packing: Packing | None) -> Head | PackedHead | DeviceHead:
        if self.target.on_device is not None:
            return self.target.on_device.head(dense(weight))
        ranks = self.target.drafter_ranks
        head = Head(Linear(dense(weight))) if packing is None else PackedHead(packing.head(weight))
        return head if ranks is None else ranks.head(head)

    def finish(self) -> None:
        """Check that every tensor was read.

        Raises:
            ModelError: the checkpoint has tensors that the head does not read.
        """
        self.weights.finish()

    def _packed_products(self, layer: DecoderLayer, name: str) -> DecoderLayer:
        """Pack a layer's matrices for the kernels, if there are any: those take any width, and the stream's dtype."""

        def packed(part: str, product: Product) -> Product:
            return self.packed(product, name=f"{name}.{part}") if isinstance(product, Linear) else product

        return layer.with_products(packed)

    def _check_shared(self, name: str, width: int) -> None:
        if width != self.target.model.hidden_size:
            raise ModelError(
                f"checkpoint: tensor {name!r} is missing, and the target's, of width {self.target.model.hidden_size}, "
                f"does not fit a head of hidden_size {width}; use a head that was trained for this target"
            )

    def _is_same(self, table: Tensor, read_rows: Callable[[Tensor], Tensor]) -> bool:
        """Return whether the target has the same rows [vocab_size, hidden_size], so that no second copy is needed."""
        for start in range(0, len(table), COMPARED_ROWS):
            ids = torch.arange(start, min(start + COMPARED_ROWS, len(table)), device=table.device)
            if not torch.equal(table[ids], read_rows(ids).to(table.dtype)):
                return False
        return True


def _packing_for(target: LoadedTarget, quantization: str | None) -> Packing | None:
    """How a head's matrices are packed for the kernels; None where there are none.

    Where they are rounded to blocks, the rows that they are multiplied with are of eight bits: drafts need not be exact.
    """
    check_quantized_head(quantization, target)
    if target.kernels is None:
        return None
    row_bits = row_bits_of("auto" if quantization is None else "int8", target.kernels.level)
    return Packing.choose(target.kernels, dtype=target.model.dtype, quantization=quantization, row_bits=row_bits)


def check_quantized_head(quantization: str | None, target: LoadedTarget) -> None:
    """Raise `ConfigError` where a head's weights cannot be rounded: the kernels multiply them with rows that come in bf16."""
    if quantization is not None and (target.kernels is None or target.model.dtype != torch.bfloat16):
        raise ConfigError(
            f"quantization (of the drafter): got {quantization!r}, which the native CPU kernels compute in bfloat16; "
            f"the target computes in {str(target.model.dtype).removeprefix('torch.')}"
            f"{'' if target.kernels else ' without them'}; leave it out"
        )


def head_config(content: Mapping[str, Any], *, architecture: str, max_model_len: int | None = None) -> DecoderConfig:
    """Resolve the layers of a head whose config.json is like that of a model of `architecture`.

    `max_model_len` is the target's, see `DecoderConfig.for_texts_of`. Whether its rows see later ones, which those of a text must
    not, is the head's own affair.

    Raises:
        ModelError: a value is missing, impossible or not covered.
    """
    model_type = FAMILIES[architecture].model_type
    others = ("architectures", "model_type", "auto_map", "is_causal")
    values = {key: value for key, value in content.items() if key not in others}
    values.setdefault("eos_token_id", 0)  # it ends no text; without one transformers would be imported, for two seconds
    try:
        return decoder_config(config_like(model_type, architecture, values), max_model_len=max_model_len)
    except NotCoveredError as error:
        raise ModelError(f"{CONFIG_FILE} of the head: {error}") from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{CONFIG_FILE} of the head: cannot be used ({one_line(error)}); mend it") from error


class Rotations:
    """The rotary embeddings of a head's layers; see `Decoder.rotations`."""

    def __init__(self, rotaries: Iterable[Rotary | RotaryTable | DeviceRotary]) -> None:
        self._rotaries = list(rotaries)

    @property
    def tables(self) -> list[RotaryTable]:
        """Those that are looked up: all of a head on the kernels."""
        return [rotary for rotary in self._rotaries if isinstance(rotary, RotaryTable)]

    def __call__(self, positions: Tensor) -> list[Rotation | None]:
        """Return the rotations of positions [T] int64: None, then each distinct rope's."""
        return [None, *(rotary.rotation(positions) for rotary in self._rotaries)]


def read_target_ids(reader: HeadReader, *, num_draft: int) -> Tensor | None:
    """Read the target's token of each of `num_draft` logits from `d2t`, whose entry i is that token's id minus i.

    Returns None if the head drafts the whole vocabulary.

    Raises:
        ModelError: d2t is missing, has a token outside the vocabulary or one token twice, or t2d contradicts it.
    """
    vocab_size, weights = reader.target.model.vocab_size, reader.weights
    if "d2t" not in weights:
        if num_draft == vocab_size:
            return None
        raise ModelError(
            f"checkpoint: has no d2t, but a draft vocabulary of {num_draft} tokens for the target's {vocab_size}; "
            "download the checkpoint again"
        )
    offsets = weights.tensor("d2t", (num_draft,), dtype=torch.int64)
    target_ids = torch.arange(num_draft, device=offsets.device) + offsets
    if reader.checks_ids:
        _check_ids("d2t", target_ids, vocab_size)
    if "t2d" in weights:
        drafted = weights.tensor("t2d", (vocab_size,), dtype=torch.bool)
        if reader.checks_ids and (int(drafted.sum()) != num_draft or not drafted[target_ids].all()):
            raise ModelError(
                f"t2d: marks {int(drafted.sum())} tokens of the target, d2t {num_draft}, and they must be the same; "
                "download the checkpoint again"
            )
    return target_ids


def read_token_map(reader: HeadReader) -> Tensor | None:
    """Read the target's token of each logit from `token_map`, which has their ids in any order (vLLM's Medusa).

    Returns None if the heads draft the whole vocabulary.

    Raises:
        ModelError: `truncated_vocab_size` differs from the map's length, or the map has a token outside the
            vocabulary or one token twice.
    """
    vocab_size, weights = reader.target.model.vocab_size, reader.weights
    num_mapped = weights.shape("token_map")[0] if "token_map" in weights else vocab_size
    asked = reader.content.get("truncated_vocab_size")
    if asked not in (None, num_mapped):
        raise ModelError(
            f"{CONFIG_FILE} of the head: truncated_vocab_size: got {asked!r}, the checkpoint has tokens for {num_mapped}; "
            "download the checkpoint again"
        )
    if "token_map" not in weights:
        return None
    target_ids = weights.tensor("token_map", (num_mapped,), dtype=torch.int64)
    _check_ids("token_map", target_ids, vocab_size)
    return target_ids


def _check_ids(name: str, target_ids: Tensor, vocab_size: int) -> None:
    """Check that a map has no token outside the target's vocabulary, and none twice."""
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if outside.any():
        draft_id = int(outside.nonzero()[0])
        raise ModelError(
            f"{name}: draft token {draft_id} is the target's {int(target_ids[draft_id])}; must be from 0 to "
            f"{vocab_size - 1}; use a head that was trained for this target"
        )
    if len(set(target_ids.tolist())) != len(target_ids):
        raise ModelError(f"{name}: two draft tokens are the same of the target; download the checkpoint again")
