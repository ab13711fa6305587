"""Decoders of random weights, on the kernels or of torch calls."""

from __future__ import annotations

import functools
import zlib

import torch

from forerun.models.decoder import build_decoder
from forerun.models.loader import DummyCheckpoint
from forerun.models.packing import Packing
from forerun.ops.native.formats.int8 import quantize
from tests.models.state_dict import InMemoryCheckpoint
from tests.models.test_families import VARIANTS
from tests.native import INT8
from tests.tiny_models import tiny_config

CPU = torch.device("cpu")
ROUTERS = (
    "mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "router.layer.weight",
    "mlp.router.weight",
)  # of experts: never rounded


@functools.cache
def random_source(variant, stored):
    """Configuration and checkpoint of a variant of test_families."""
    architecture, overrides = VARIANTS[variant]
    config = tiny_config(architecture, **overrides)
    shapes = DummyCheckpoint(config, dtype=stored)
    tensors = {name: _random_tensor(name, shapes.shape(name)).to(stored) for name in shapes.names()}
    return config, InMemoryCheckpoint(tensors)


def native_decoder(kernels, variant, *, weight_format):
    """A decoder on the kernels with weights in a format."""
    dtype, packing = weight_format.activations, Packing(kernels, weight_format)
    return build_decoder(*random_source(variant, dtype), dtype=dtype, device=CPU, packing=packing)


@functools.cache
def exact_decoder(variant, *, weight_format):
    """The twin of a native decoder: torch in fp64 on the values that its weights stand for."""
    config, checkpoint = random_source(variant, weight_format.activations)
    if weight_format is INT8:
        rounded = {name: x if name.endswith(ROUTERS) else _rounded_to_int8(x) for name, x in checkpoint.tensors.items()}
        checkpoint = InMemoryCheckpoint(rounded)
    return build_decoder(config, checkpoint, dtype=torch.float64, device=CPU)


def _random_tensor(name, shape):
    """Weights that make no layer close to the identity; the same name gives the same values."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 0.2 * drawn if drawn.ndim > 1 else 0.7 + 0.3 * drawn


def _rounded_to_int8(tensor):
    if tensor.ndim == 1:
        return tensor
    values, scale = quantize(tensor.flatten(0, -2))  # a matrix, or those of all experts one below the other
    return (values * scale[:, None]).view_as(tensor)
