"""Maps the tensors of GGUF files into memory: floats as tensors, matrices in blocks as they are."""

from __future__ import annotations

import logging
import mmap
import warnings

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ModelError, one_line
from forerun.models.gguf.grouped import SCALES, grouped_bytes, load_grouped, widened
from forerun.models.gguf.header import TensorPlace
from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight

logger = logging.getLogger(__name__)

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def are_mixed(types: frozenset[str]) -> bool:
    """Whether some matrices of these types are in blocks, or in bf16 beside other floats.

    Each then stays as it is, and rows are bf16.
    """
    in_blocks = BLOCK_FORMATS.keys() | SCALES.keys()
    return bool(types & in_blocks) or ("BF16" in types and len(types) > 1)


def loaded_bytes(place: TensorPlace) -> int:
    """The bytes of what `load_tensor` returns."""
    return grouped_bytes(place) if place.type.name in SCALES else place.num_bytes


def load_tensor(place: TensorPlace) -> Tensor | BlockWeight:
    """Return the values of a tensor as they are stored, mapped from the file for as long as they are used.

    Matrices in blocks that no kernel computes become groups of 16 (see `grouped`). Nothing computes in fp64: such numbers
    are rounded to fp32, which is said.

    Raises:
        ModelError: the file cannot be read any more, or the type needs the gguf package and there is none.
    """
    kind = place.type.name
    if kind in FLOATS:
        values = _mapped(place).view(FLOATS[kind]).view(place.shape)
        return _rounded(place, values) if kind == "F64" else values
    outputs, inputs = (1, *place.shape)[-2:]
    if kind in BLOCK_FORMATS and len(place.shape) <= 2:
        mapped = _MappedBytes(place)
        data = mapped.tensor.view(outputs, -1)
        blocks = BlockWeight(format=kind, shape=(outputs, inputs), data=data, forget=mapped.forget)
        return blocks if len(place.shape) == 2 else blocks.dequantize().view(place.shape)
    if kind in SCALES and len(place.shape) == 2:
        return load_grouped(place, _mapped(place))
    return widened(place, _mapped(place))


def _rounded(place: TensorPlace, values: Tensor) -> Tensor:
    """Numbers of fp64 in fp32; said where that changes one."""
    rounded = values.float()
    if not torch.equal(rounded.double(), values):
        logger.warning(
            "%s: tensor %r is rounded from 64 bits to 32, in which weights are computed at most", place.file, place.name
        )
    return rounded


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
