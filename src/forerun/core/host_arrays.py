"""Arrays on the host as compiled code reads them, row by row."""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

HostArray: TypeAlias = "npt.NDArray[Any] | array[int] | array[float]"
"""A NumPy array, or one of the standard library.

The latter's address costs next to nothing. The former's costs more than what most functions of a step compute: after a pass all
code comes from memory, and NumPy has more of it.
"""


def address_of(numbers: HostArray) -> int:
    """Where contiguous numbers lie, as long as nobody changes how many they are."""
    if isinstance(numbers, array):
        return numbers.buffer_info()[0]
    address: int = numbers.__array_interface__["data"][0]  # a third of `ctypes`' time
    return address


def as_numpy(numbers: HostArray, dtype: npt.DTypeLike, *, num_rows: int) -> npt.NDArray[Any]:
    """The same numbers as a NumPy array; those of the standard library as `num_rows` rows."""
    if isinstance(numbers, array):
        return (
            np.frombuffer(numbers, dtype=numbers.typecode)
            .astype(dtype, copy=False)
            .reshape(num_rows, -1 if num_rows else 0)
        )
    return np.asarray(numbers, dtype=dtype)
