"""Seeded random weights of a configuration's shapes, to time models whose weights are not at hand."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun.errors import ModelError
from forerun.models.config import DecoderConfig, HFConfig
from forerun.models.families import decoder_config, supports
from forerun.models.quiet import quiet_transformers

STD = 0.02  # what most models' weights are initialised with


class DummyCheckpoint:
    """A checkpoint that makes each tensor up when it is asked for; the same name gives the same values.

    Norms are the identity, so that activations neither die nor explode; all else is normal with a
    standard deviation of 0.02.
    """

    def __init__(self, hf_config: HFConfig, *, dtype: torch.dtype) -> None:
        """Take names and shapes from transformers' own model, built without memory.

        Raises:
            ModelError: the architecture is none that the decoder has.
        """
        if not supports(hf_config):
            architecture = (hf_config.architectures or ["none"])[0]
            raise ModelError(
                f"load_format: got 'dummy', but architecture {architecture!r} runs through transformers' own code; "
                "use one that forerun's decoder has, or load real weights"
            )
        self._config = decoder_config(hf_config)
        self._shapes = _stored_shapes(hf_config, self._config)
        self._dtype = dtype

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        """Make one tensor."""
        tensor = torch.empty(self._shapes[name], dtype=self._dtype)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0 - self._config.norm_offset)
        return tensor.normal_(std=STD, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _stored_shapes(hf_config: HFConfig, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that the decoder reads; of a model with other parts, its text part's."""
    with quiet_transformers(), torch.device("meta"):
        from_config: Any = AutoModelForCausalLM.from_config
        model = from_config(hf_config.get_text_config())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    head = shapes.pop("lm_head.weight")
    stored = {config.root + name.removeprefix("model."): shape for name, shape in shapes.items()}
    return stored if config.tied else {**stored, config.head: head}
