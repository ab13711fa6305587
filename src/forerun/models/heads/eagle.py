"""EAGLE-1 and -2's head: one decoder layer on the target's last hidden state (arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.errors import ModelError
from forerun.models.base import LoadedTarget
from forerun.models.config import PRE_NORMS, NormNames
from forerun.models.heads.reader import ARCHITECTURES, HeadReader, head_config
from forerun.ops.attention import Attend
from forerun.ops.native.chains import NativeChains

FIRST_NORMS = NormNames(None, None, PRE_NORMS.mlp_in, None)  # layer 0 has no norm before its attention


def load_eagle(folder: Path, target: LoadedTarget, *, quantization: str | None = None) -> EagleHead:
    """Load a published EAGLE-1 or -2 checkpoint; `quantization` as for `HeadReader`.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target.
    """
    rename = methodcaller("removeprefix", "model.")
    with HeadReader.open(folder, target, rename=rename, quantization=quantization) as reader:
        return EagleHead(reader)


class EagleHead:
    """x = fc([embedding of the token; state]), one or more layers, the target's head; the output is the next state.

    States are the target's after its final norm; the head itself has no final norm.
    """

    needs: tuple[str, ...] = ("last_hidden",)
    target_ids: Tensor | None = None
    chains: NativeChains | None = None

    def __init__(self, reader: HeadReader) -> None:
        content, model = reader.content, reader.target.model
        named = (content.get("architectures") or ["LlamaForCausalLM"])[0]
        architecture = named if named in ARCHITECTURES else "LlamaForCausalLM"
        config = replace(head_config(content, architecture=architecture, max_model_len=model.max_model_len), root="")
        if "midlayer.self_attn.q_proj.weight" in reader.weights or "d2t" in reader.weights:
            raise ModelError("checkpoint: is of EAGLE-3; set method='eagle3'")
        width = config.hidden_size
        if width != model.hidden_size or config.vocab_size != model.vocab_size:
            raise ModelError(
                f"EAGLE head: has hidden_size {width} and vocab_size {config.vocab_size}, the target {model.hidden_size} "
                f"and {model.vocab_size}; use a head that was trained for this target"
            )
        self.dtype, self.device = model.dtype, model.device
        self.max_model_len = config.max_model_len
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
        self.kv_specs = [spec] * config.num_layers
        self._stream_dtype = reader.stream_dtype
        self._embed = reader.embedding(width=width)
        self._fc = reader.linear("fc", width, 2 * width)
        self._layers = reader.layers(config, first_norms=FIRST_NORMS)
        self._rotations = reader.rotations(config)
        self._head = reader.head(outputs=config.vocab_size, width=width)
        reader.finish()

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        return features[0].to(self._stream_dtype)

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `DraftHead`."""
        hidden = self._fc(torch.cat([self._embed(token_ids), states], dim=-1))
        return self._layers(hidden, self._rotations(positions), attend, 0, len(self.kv_specs))

    def states(self, outputs: Tensor) -> Tensor:
        """See `DraftHead`."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """See `DraftHead`."""
        return self._head(outputs)
