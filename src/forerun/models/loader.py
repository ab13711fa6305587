"""Loads a model: forerun's decoder where a family's row covers it, else transformers' own code."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.base import TargetModel
from forerun.models.checkpoint import Checkpoint, dense, open_checkpoint
from forerun.models.checkpoint_facts import CheckpointFacts
from forerun.models.config import DecoderConfig, ExpertsConfig, HFConfig
from forerun.models.config_file import read_config, read_transformers_config
from forerun.models.decoder import build_decoder
from forerun.models.families import decoder_config, supports
from forerun.models.loading_progress import shown_loading
from forerun.models.model_folder import QUANTIZATION_KEY, find_gguf
from forerun.models.packed_cache import PackedCache, PackedModel
from forerun.models.packing import Packing
from forerun.models.transformers_logging import quiet_transformers
from forerun.ops.native.memory import map_file, map_or_read

if TYPE_CHECKING:
    from forerun.models.column_parallel import ColumnParallel

CPU = torch.device("cpu")
OF_EXPERTS = re.compile(r"\.(mlp|block_sparse_moe)\.")  # in transformers' names of a mixture's weights
DUMMY_STD = 0.02  # what most models' weights are initialised with


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    packing: Packing | None = None,
    columns: ColumnParallel | None = None,
    max_model_len: int | None = None,
    shows_progress: bool = False,
    before_copying: Callable[[], object] | None = None,
) -> TargetModel:
    """Load the model in a Hugging Face folder or a .gguf file.

    Args:
        path: the folder or file.
        dtype: of weights, activations and KV, or None for the checkpoint's.
        device: where it computes.
        packing: packs the weights for the native kernels, or None for torch.
        columns: takes one rank's part of layers that torch computes, or None for all of them.
        max_model_len: tokens of the longest text, where other ropes are for longer ones; see `DecoderConfig.for_texts_of`.
        shows_progress: show a progress bar if it takes long.
        before_copying: waits until memory is free that kept weights would else be copied beside, see `map_or_read`.

    Raises:
        ModelError: path, configuration, weights or architecture cannot be used.
    """
    config = read_config(path)
    if not supports(config) or (_is_faster_in_transformers(config, device) and _is_read_by_transformers(path, config)):
        from forerun.models.transformers_model import (
            load_transformers_model,  # here: importing transformers' modelling code takes 120 MB
        )

        return load_transformers_model(path, config, dtype=dtype, device=device, packing=packing)
    stored = open_checkpoint(path)
    dtype = dtype or _stored_dtype(config, stored)
    build = partial(build_decoder, dtype=dtype, device=device, max_model_len=max_model_len)
    with shown_loading(stored) if shows_progress else nullcontext(stored) as checkpoint:
        if packing is None:
            return build(config, checkpoint, columns=columns)
        model = PackedModel(path=path, format=packing.format.name, level=packing.kernels.level, dtype=str(dtype))
        # one of several processes copies its part out of the file, so it maps the whole without reading it
        read = partial(map_or_read, before_copying=before_copying) if packing.num_ranks == 1 else map_file
        expected_bytes = packing.expected_bytes(stored)
        with PackedCache.of_environment().weights(model, expected_bytes=expected_bytes, read=read) as kept:
            return build(config, checkpoint, packing=packing.keeping(kept))


def _is_faster_in_transformers(config: HFConfig, device: torch.device) -> bool:
    """Whether transformers' own code computes a model faster than forerun's decoder, which goes from expert to expert on a GPU."""
    return device.type != "cpu" and decoder_config(config).experts is not None


def _is_read_by_transformers(path: Path, config: HFConfig) -> bool:
    """Whether transformers reads the weights of a model that forerun's decoder has: those that are neither in GGUF nor quantized."""
    return find_gguf(path) is None and not config.to_dict().get(QUANTIZATION_KEY)


def load_dummy(
    path: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    packing: Packing | None = None,
    columns: ColumnParallel | None = None,
    max_model_len: int | None = None,
    shows_progress: bool = False,
    before_copying: Callable[[], object] | None = None,  # noqa: ARG001
) -> TargetModel:
    """Make a model of seeded random weights from its configuration alone, to time models whose weights are not at hand.

    Args:
        path: the folder or .gguf file; its weights are not read.
        dtype: of weights, activations and KV, or None for the configuration's, bfloat16 where it names none.
        device: where it computes.
        packing: packs the weights for the native kernels, or None for torch.
        columns: takes one rank's part of layers that torch computes, or None for all of them.
        max_model_len: tokens of the longest text, where other ropes are for longer ones; see `DecoderConfig.for_texts_of`.
        shows_progress: show a progress bar if it takes long.
        before_copying: not called, since nothing is kept.

    Raises:
        ModelError: path, configuration or architecture cannot be used.
    """
    config = read_transformers_config(path)
    named = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    made = DummyCheckpoint(config, dtype=dtype or named, device=device)
    with shown_loading(made) if shows_progress else nullcontext(made) as checkpoint:
        return build_decoder(
            config,
            checkpoint,
            dtype=dtype or named,
            device=device,
            packing=packing,
            columns=columns,
            max_model_len=max_model_len,
        )


def expected_bytes(path: Path, *, dtype: torch.dtype | None) -> int | None:
    """Bytes that a model's weights will take where torch computes, read from its files' headers; None where that is not known.

    Raises:
        ModelError: path, configuration or weights cannot be used.
    """
    config = read_config(path)
    if not supports(config):
        return None
    checkpoint, own = open_checkpoint(path), decoder_config(config)
    width = (dtype or _stored_dtype(config, checkpoint)).itemsize
    names = (name for name in checkpoint.names() if name.startswith(own.root) or name == own.head)
    return sum(width * math.prod(checkpoint.shape(name)) for name in names)


LOADERS = {"auto": load_model, "dummy": load_dummy}
"""How weights are read, by the setting `load_format`."""


def _stored_dtype(config: HFConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that the configuration names, else that of the weights."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return dense(checkpoint.load(min(checkpoint.names()))).dtype


class DummyCheckpoint:
    """A `Checkpoint` of seeded random tensors, made when they are loaded; the same name gives the same values.

    They are made where they are used, as a GPU makes billions of them while a CPU makes millions: the values are those of the kind
    of device. Norms are the identity, so that activations neither vanish nor explode; all other weights are normal.
    """

    def __init__(self, hf_config: HFConfig, *, dtype: torch.dtype, device: torch.device = CPU) -> None:
        """Take names and shapes from transformers' model, built without memory.

        Raises:
            ModelError: the decoder does not have the architecture.
        """
        if not supports(hf_config) or _is_faster_in_transformers(hf_config, device):
            architecture = (hf_config.architectures or ["none"])[0]
            raise ModelError(
                f"load_format: got 'dummy', but architecture {architecture!r} runs through transformers' own code; "
                "use one that forerun's decoder has, or load real weights"
            )
        self._config = decoder_config(hf_config)
        self._shapes = _stored_shapes(hf_config, self._config)
        self._dtype = dtype
        self._device = device
        self.facts = CheckpointFacts(num_bytes=dtype.itemsize * sum(map(math.prod, self._shapes.values())))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        """Make one tensor."""
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0 - self._config.norm_offset)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return tensor.normal_(std=DUMMY_STD, generator=generator)


def _stored_shapes(hf_config: HFConfig, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that the decoder reads; of a model with other parts, its text part's."""
    from transformers import AutoModelForCausalLM  # here: importing transformers takes 100 MB

    with quiet_transformers(), torch.device("meta"):
        from_config: Any = AutoModelForCausalLM.from_config
        model = from_config(hf_config.get_text_config())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    head = shapes.pop("lm_head.weight")
    stored = {config.root + name.removeprefix("model."): shape for name, shape in shapes.items()}
    if config.experts is not None:  # which transformers stacks
        stored = {name: shape for name, shape in stored.items() if not OF_EXPERTS.search(name)}
        stored |= _expert_shapes(config, config.experts)
    return stored if config.tied else {**stored, config.head: head}


def _expert_shapes(config: DecoderConfig, experts: ExpertsConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the layers' mixtures of experts."""
    width, inner, names = config.hidden_size, experts.inner_size, experts.names
    of_layer = {names.router: (experts.num_experts, width)}
    for number in range(experts.num_experts):
        of_layer |= {name.format(number): (inner, width) for name in (names.gate, names.up)}
        of_layer[names.down.format(number)] = (width, inner)
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in of_layer.items()}
    if experts.bias:
        tensors |= {f"{name}.bias": shape[:1] for name, shape in of_layer.items()}
    return {
        f"{config.root}layers.{layer}.{name}": shape
        for layer in range(config.num_layers)
        for name, shape in tensors.items()
    }
