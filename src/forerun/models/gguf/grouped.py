"""Types of blocks that no kernel computes, kept in groups of 16 codes of eight bits with an fp32 scale, which hold them exactly.

The gguf package reads the weights, most of which a block names by their place in a codebook. Here the scales are read of
which they are multiples: a weight divided by its scale is a small whole number.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ModelError, one_line
from forerun.models.gguf.header import TensorPlace
from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight

READ_AT_ONCE = 1 << 22  # weights
GROUPS = BLOCK_FORMATS["GROUPS16"]

Blocks = np.ndarray  # [n, bytes of a block] uint8
Scales = np.ndarray  # [n, groups] fp32, of groups of 16 weights or more


def _half(blocks: Blocks, place: int) -> Scales:
    """The fp16 number that begins at a byte: [n, 1]"""
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: Blocks, first: int, last: int) -> np.ndarray:
    """Of each byte in [first, last) the low four bits, then the high ones: [n, 2 * bytes] fp32"""
    packed = blocks[:, first:last, None] >> np.array([0, 4], np.uint8) & 15
    return packed.reshape(len(blocks), -1).astype(np.float32)


def _words(blocks: Blocks, first: int, last: int, dtype: type[np.unsignedinteger[Any]]) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, first:last]).view(dtype)


def _of_iq1_m(blocks: Blocks) -> Scales:
    words = _words(blocks, 48, 56, np.uint16)
    bits = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    scale = np.bitwise_or.reduce(bits, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    steps = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    return scale * (2 * steps + 1).astype(np.float32) / 8


def _of_nvfp4(blocks: Blocks) -> Scales:
    """Unsigned floats of 4 exponent bits and 3 mantissa bits; half of each, since the codes' values are doubled."""
    stored = blocks[:, :4].astype(np.int32)
    exponent, mantissa = stored >> 3 & 15, stored & 7
    scale = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    return np.where(stored == 0x7F, 0.0, scale / 2).astype(np.float32)


SCALES: dict[str, Callable[[Blocks], Scales]] = {
    "IQ1_S": lambda blocks: (
        _half(blocks, 0) * (2 * (_words(blocks, 34, 50, np.uint16) >> 12 & 7) + 1).astype(np.float32) / 8
    ),
    "IQ1_M": _of_iq1_m,
    "IQ2_XXS": lambda blocks: (
        _half(blocks, 0) * ((_words(blocks, 2, 66, np.uint32)[:, 1::2] >> 28).astype(np.float32) + np.float32(0.5)) / 4
    ),
    "IQ2_XS": lambda blocks: _half(blocks, 0) * (_nibbles(blocks, 66, 74) + np.float32(0.5)) / 4,
    "IQ2_S": lambda blocks: _half(blocks, 0) * (_nibbles(blocks, 74, 82) + np.float32(0.5)) / 4,
    "IQ3_XXS": lambda blocks: (
        _half(blocks, 0) * ((_words(blocks, 66, 98, np.uint32) >> 28).astype(np.float32) + np.float32(0.5)) / 2
    ),
    "IQ3_S": lambda blocks: _half(blocks, 0) * (2 * _nibbles(blocks, 106, 110) + 1),
    "TQ1_0": lambda blocks: _half(blocks, 52),
    "TQ2_0": lambda blocks: _half(blocks, 64),
    "NVFP4": _of_nvfp4,
}
"""The scales of which a block's weights are whole multiples, by type."""


def load_grouped(place: TensorPlace, content: Tensor) -> BlockWeight | Tensor:
    """Return a matrix in groups of 16, or in fp32 where groups cannot hold it: where a scale is no number.

    Args:
        place: of the matrix, whose type is one of `SCALES`.
        content: its bytes.

    Raises:
        ModelError: see `read_values`.
    """
    kind, (outputs, inputs) = place.type, place.shape
    data = torch.empty(outputs * inputs // GROUPS.weights, GROUPS.bytes, dtype=torch.uint8)
    first = 0
    for blocks, values in read_values(place, content):
        groups = _groups(blocks, values, SCALES[kind.name])
        if groups is None:
            return widened(place, content)
        data[first : first + len(groups)] = torch.from_numpy(groups)
        first += len(groups)
    return BlockWeight(format=GROUPS.name, shape=(outputs, inputs), data=data.view(outputs, -1))


def scaled(weight: BlockWeight | Tensor, factor: float) -> BlockWeight | Tensor:
    """A weight with all values times a factor, which the scales of its groups bear."""
    if isinstance(weight, Tensor):
        return weight.float() * factor
    groups = weight.as_groups16()
    numbers = groups.data.view(-1, GROUPS.bytes)[:, :8]
    numbers.view(torch.float32).mul_(factor)
    return groups


def grouped_bytes(place: TensorPlace) -> int:
    """The bytes of a tensor in groups of 16."""
    return place.num_bytes // place.type.bytes * place.type.weights // GROUPS.weights * GROUPS.bytes


def _groups(blocks: Blocks, values: np.ndarray, scales_of: Callable[[Blocks], Scales]) -> np.ndarray | None:
    """Blocks of GROUPS16 [n * weights / 16, 24] with the values [n, weights] fp32; None where they are no whole multiples."""
    by_group = values.reshape(-1, GROUPS.weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = scales_of(blocks)
        scale = np.repeat(scales, values.shape[1] // GROUPS.weights // scales.shape[1], axis=1).reshape(-1, 1)
        codes = np.where(scale == 0, 0, np.rint(by_group / scale))
        if not (np.abs(codes) <= 127).all() or not np.array_equal(codes * scale, by_group):
            return None
    numbers = np.concatenate([scale, np.full_like(scale, -0.0)], axis=1)
    return np.concatenate([numbers.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)


def widened(place: TensorPlace, content: Tensor) -> Tensor:
    """The values of a type that only the gguf package knows, in fp32.

    Raises:
        ModelError: see `read_values`.
    """
    values = torch.empty(place.num_bytes // place.type.bytes, place.type.weights)
    first = 0
    for _, part in read_values(place, content):
        values[first : first + len(part)] = torch.from_numpy(part)
        first += len(part)
    return values.view(place.shape)


def read_values(place: TensorPlace, content: Tensor) -> Iterator[tuple[Blocks, np.ndarray]]:
    """The blocks of a tensor and their values by the gguf package, some at a time: [n, bytes] uint8, [n, weights] fp32.

    Raises:
        ModelError: there is no such package, or it does not read the type either.
    """
    quants, kinds = _gguf_package(place)
    blocks = content.view(-1, place.type.bytes).numpy()
    step = READ_AT_ONCE // place.type.weights
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step]
        try:
            with np.errstate(invalid="ignore"):  # scales that are no numbers
                values = quants.dequantize(some, kinds[place.type.name])
        except (KeyError, NotImplementedError, ValueError) as error:  # KeyError: the package is older than the type
            raise ModelError(
                f"{place.file}: tensor {place.name!r} is of type {place.type.name}, which cannot be read "
                f"({one_line(error)}); use another quantization of the model"
            ) from error
        yield some, np.asarray(values, dtype=np.float32)


def _gguf_package(place: TensorPlace) -> Any:
    try:
        return importlib.import_module("gguf.quants"), importlib.import_module("gguf").GGMLQuantizationType
    except ImportError as error:
        raise ModelError(
            f"{place.file}: tensor {place.name!r} is of type {place.type.name}, which is read with the package gguf; "
            "run 'pip install gguf', or use another quantization of the model"
        ) from error
