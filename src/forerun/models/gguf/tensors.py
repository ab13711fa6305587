"""Maps the tensors of GGUF files into memory: floats as tensors, matrices in blocks as they are."""

from __future__ import annotations

import importlib
import logging
import mmap
import warnings
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ModelError, one_line
from forerun.models.gguf.header import TensorPlace
from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight

logger = logging.getLogger(__name__)

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
WIDENED_AT_ONCE = 1 << 22  # weights


def load_tensor(place: TensorPlace) -> Tensor | BlockWeight:
    """Return the values of a tensor as they are stored, mapped from the file for as long as they are used.

    Types that are neither floats nor blocks of `BLOCK_FORMATS` are widened to fp32 by the gguf package.

    Raises:
        ModelError: the file cannot be read any more, or the type needs the gguf package and there is none.
    """
    kind = place.type.name
    if kind in FLOATS:
        return _mapped(place).view(FLOATS[kind]).view(place.shape)
    outputs, inputs = (1, *place.shape)[-2:]
    if kind in BLOCK_FORMATS and len(place.shape) <= 2:
        mapped = _MappedBytes(place)
        data = mapped.tensor.view(outputs, -1)
        blocks = BlockWeight(format=kind, shape=(outputs, inputs), data=data, forget=mapped.forget)
        return blocks if len(place.shape) == 2 else blocks.dequantize().view(place.shape)
    return _widened(place)


def _mapped(place: TensorPlace) -> Tensor:
    """[bytes] uint8, which must not be written to."""
    return _MappedBytes(place).tensor


class _MappedBytes:
    """The bytes of a tensor, mapped from its file.

    Raises:
        ModelError: the file cannot be read any more.
    """

    def __init__(self, place: TensorPlace) -> None:
        self._before = place.start % mmap.ALLOCATIONGRANULARITY  # bytes that are mapped before the tensor's
        try:
            with place.file.open("rb") as stream:
                self._map = mmap.mmap(
                    stream.fileno(),
                    self._before + place.num_bytes,
                    access=mmap.ACCESS_READ,
                    offset=place.start - self._before,
                )
            content = np.frombuffer(self._map, np.uint8, place.num_bytes, offset=self._before)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{place.file}: tensor {place.name!r} cannot be read ({one_line(error)}); download it again"
            ) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it must not be written to
            self.tensor = torch.from_numpy(content)

    def forget(self, begin: int, end: int) -> None:
        """Give back the memory of the pages that lie within bytes [begin, end), where the system does so."""
        first = -(-(self._before + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self._before + end) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _widened(place: TensorPlace) -> Tensor:
    """The values in fp32 of a type that only the gguf package knows."""
    quants, kinds = _gguf_package(place)
    _say_widened(place.type.name)
    content = _mapped(place).view(-1, place.type.bytes).numpy()
    values = torch.empty(len(content), place.type.weights)
    step = WIDENED_AT_ONCE // place.type.weights
    try:
        for first in range(0, len(content), step):
            part = quants.dequantize(content[first : first + step], kinds[place.type.name])
            values[first : first + step] = torch.from_numpy(np.asarray(part, dtype=np.float32))
    except (NotImplementedError, ValueError) as error:
        raise ModelError(
            f"{place.file}: tensor {place.name!r} is of type {place.type.name}, which cannot be read ({one_line(error)}); "
            "use another quantization of the model"
        ) from error
    return values.view(place.shape)


def _gguf_package(place: TensorPlace) -> Any:
    try:
        return importlib.import_module("gguf.quants"), importlib.import_module("gguf").GGMLQuantizationType
    except ImportError as error:
        raise ModelError(
            f"{place.file}: tensor {place.name!r} is of type {place.type.name}, which is read with the package gguf; "
            "run 'pip install gguf', or use another quantization of the model"
        ) from error


@lru_cache
def _say_widened(kind: str) -> None:
    logger.warning("weights of type %s are widened to fp32, since no kernel computes such blocks", kind)
