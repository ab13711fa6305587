"""Multi-token prediction layers of the target's own checkpoint, as heads (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.errors import ConfigError, ModelError
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import CheckpointView, dense, open_checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.config_file import read_config
from forerun.models.decoder import Decoder
from forerun.models.heads.reader import HeadReader
from forerun.models.model_folder import find_gguf
from forerun.models.mtp_layout import BLOCK, MTPLayout, find_layout, num_mtp_layers
from forerun.models.packing import Packing
from forerun.ops.attention import Attend
from forerun.ops.native.chains import NativeChains

logger = logging.getLogger(__name__)

Block = Callable[[Tensor, Tensor, Attend], Tensor]
"""A decoder layer: [T, hidden_size], positions [T], attention -> [T, hidden_size]"""


def load_mtp(target: LoadedTarget, *, quantization: str | None = None) -> MTPHead:
    """Load the first MTP layer that comes with the target; `quantization` as for `HeadReader`.

    Raises:
        ConfigError: the target was made in memory or is a .gguf file.
        ModelError: it has no MTP layers, or tensors of them are missing, surplus, damaged or of another shape.
    """
    path = target.path
    if path is None:
        raise ConfigError("speculative_config: method 'mtp' reads the target's files; it has none; use another method")
    if find_gguf(path) is not None:
        raise ConfigError(
            f"speculative_config: method 'mtp': {path} is GGUF, which is read without MTP layers; "
            "use the model's safetensors, or another method"
        )
    hf, checkpoint = read_config(path), open_checkpoint(path)
    layout = find_layout(hf, checkpoint.names())
    if layout is None:
        raise ModelError(
            f"{path}: method 'mtp' needs multi-token prediction layers; the weights have none of a known layout "
            f"(config.json names {num_mtp_layers(hf)}); use a model that comes with them, or another method"
        )
    if num_mtp_layers(hf) > 1:
        logger.warning(
            "%s has %d MTP layers; the first drafts all tokens, the other %d are not used",
            path,
            num_mtp_layers(hf),
            num_mtp_layers(hf) - 1,
        )
    part = CheckpointView(checkpoint, layout.own_names(checkpoint.names()))
    try:
        return MTPHead(part, layout, target, norm_eps=hf.get_text_config().rms_norm_eps, quantization=quantization)
    except ModelError as error:
        raise ModelError(f"{path}: MTP layer {layout.prefix.removesuffix('.')!r}: {error}") from error


class MTPHead:
    """A decoder layer like the target's on [normed embedding of the token; normed state]; see `MTPLayout`.

    Of several layers only the first is used, once for each drafted token: it has a KV entry for each committed token.
    """

    target_ids: Tensor | None = None
    chains: NativeChains | None = None

    def __init__(
        self,
        part: CheckpointView,
        layout: MTPLayout,
        target: LoadedTarget,
        *,
        norm_eps: float,
        quantization: str | None = None,
    ) -> None:
        model = target.model
        self.needs: tuple[str, ...] = ("last_hidden" if layout.takes_normed else f"hidden.{model.num_layers}",)
        self.dtype, self.device, self.max_model_len = model.dtype, model.device, model.max_model_len
        self._layout = layout
        offset = 1.0 if layout.zero_centred else 0.0
        if isinstance(model, Decoder):
            reader = HeadReader({}, part, target, quantization=quantization)
            config = replace(model.config, norm_offset=1.0) if layout.zero_centred else model.config
            self._block, self.kv_specs = _decoder_block(reader, config)
        else:
            block, parts = part.split(BLOCK)
            reader = HeadReader({}, parts, target, quantization=quantization)
            self._block, self.kv_specs = _transformers_block(
                block, target, norm_offset=offset, quantization=quantization
            )
        self._stream_dtype = reader.stream_dtype
        width, prefix = model.hidden_size, layout.prefix
        norms = (layout.embedding_norm, layout.state_norm, layout.output_norm)
        self._embedding_norm, self._state_norm, self._output_norm = (
            reader.norm(prefix + name, width, norm_eps, offset=offset) for name in norms
        )
        self._projection = reader.linear(prefix + layout.projection, width, 2 * width)
        self._embed = reader.embedding(f"{prefix}{layout.embedding}.weight", width=width)
        self._head = reader.head(f"{prefix}{layout.head}.weight", outputs=model.vocab_size, width=width)
        reader.finish()

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        return features[0].to(self._stream_dtype)

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `DraftHead`."""
        embedded = self._embed(token_ids).to(self._stream_dtype)
        if self._layout.zeroes_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        parts = [self._embedding_norm(embedded), self._state_norm(states)]
        hidden = self._projection(torch.cat(parts if self._layout.embedding_first else parts[::-1], dim=-1))
        return self._block(hidden, positions, attend).to(self._stream_dtype)

    def states(self, outputs: Tensor) -> Tensor:
        """See `DraftHead`."""
        return self._output_norm(outputs) if self._layout.recycles_normed else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """See `DraftHead`."""
        return self._head(self._output_norm(outputs))


def _decoder_block(reader: HeadReader, config: DecoderConfig) -> tuple[Block, list[LayerKVSpec]]:
    """Read a layer like the decoder's last."""
    config = replace(config, root="", windows=config.windows[-1:], ropes=config.ropes[-1:])
    layers, rotations = reader.layers(config), reader.rotations(config)
    spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
    return lambda hidden, positions, attend: layers(hidden, rotations(positions), attend, 0, 1), [spec]


def _transformers_block(
    part: CheckpointView, target: LoadedTarget, *, norm_offset: float, quantization: str | None
) -> tuple[Block, list[LayerKVSpec]]:
    """Read a layer like the last of a target that runs in transformers' own code.

    Architectures whose own norms are centred on 0 all have linear attention, and are refused as targets.
    """
    # here: importing transformers' modelling code takes 120 MB
    from forerun.models.transformers_model import TransformersModel, load_one_layer

    model = target.model
    assert isinstance(model, TransformersModel), "a target that is not a Decoder is a TransformersModel"
    weights = {name: dense(part.load(name)) for name in part.names()}
    if norm_offset:
        weights |= {name: w.float() + norm_offset for name, w in weights.items() if name.endswith("norm.weight")}
    packing = None
    if target.kernels:
        packing = Packing.choose(target.kernels, dtype=model.dtype, quantization=quantization)
    layer = load_one_layer(model, weights, packing)
    return layer.run_layers, layer.kv_specs
