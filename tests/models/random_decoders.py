"""Decoders of random weights, on the kernels or of torch calls."""

from __future__ import annotations

import functools
import zlib

import torch

from forerun.models.decoder import build_decoder
from forerun.models.loader import DummyCheckpoint
from forerun.models.packing import Packing
from forerun.ops.native.packed import quantize
from tests.models.state_dict import InMemoryCheckpoint
from tests.models.test_families import VARIANTS
from tests.tiny_models import tiny_config

CPU = torch.device("cpu")


def activation_dtype(weight_dtype):
    """What a model with packed weights of a dtype computes in."""
    return torch.float32 if weight_dtype == torch.float32 else torch.bfloat16


@functools.cache
def random_source(variant, weight_dtype):
    """Configuration and checkpoint of a variant of test_families."""
    architecture, overrides = VARIANTS[variant]
    config, stored = tiny_config(architecture, **overrides), activation_dtype(weight_dtype)
    shapes = DummyCheckpoint(config, dtype=stored)
    tensors = {name: _random_tensor(name, shapes.shape(name)).to(stored) for name in shapes.names()}
    return config, InMemoryCheckpoint(tensors)


def native_decoder(kernels, variant, *, dtype):
    """A decoder on the kernels with weights in `dtype`; int8 ones beside bf16 activations."""
    packing = Packing(kernels, weight_dtype=dtype)
    return build_decoder(*random_source(variant, dtype), dtype=activation_dtype(dtype), device=CPU, packing=packing)


@functools.cache
def exact_decoder(variant, *, dtype):
    """The twin of a native decoder: torch in fp64 on the values that its weights stand for."""
    config, checkpoint = random_source(variant, dtype)
    if dtype == torch.int8:
        checkpoint = InMemoryCheckpoint({name: _rounded_to_int8(x) for name, x in checkpoint.tensors.items()})
    return build_decoder(config, checkpoint, dtype=torch.float64, device=CPU)


def _random_tensor(name, shape):
    """Weights that make no layer close to the identity; the same name gives the same values."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 0.2 * drawn if drawn.ndim > 1 else 0.7 + 0.3 * drawn


def _rounded_to_int8(tensor):
    if tensor.ndim == 1:
        return tensor
    values, scale = quantize(tensor)
    return values * scale[:, None]
