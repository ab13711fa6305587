"""What a method of quantization is to the reader of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.checkpoint_facts import CheckpointFacts
from forerun.ops.block_weight import BlockWeight

Parts = Mapping[str, Tensor]
"""The tensors of one weight by their suffix, such as "qweight"."""

Shapes = Mapping[str, tuple[int, ...]]
"""Their shapes, by suffix."""


@dataclass(frozen=True, slots=True)
class PartKind:
    """What a part of a weight has to be: its dtype one of `dtypes`, its number of dimensions one of `dimensions`."""

    dtypes: tuple[torch.dtype, ...]
    dimensions: tuple[int, ...] = (2,)

    def check_shape(self, name: str, suffix: str, shape: tuple[int, ...]) -> None:
        """Check the number of dimensions of a part of the weight `name`, and that it is not empty.

        Raises:
            ModelError: it is another, or a dimension is 0.
        """
        if len(shape) not in self.dimensions or 0 in shape:
            raise ModelError(
                f"{name}: its part {suffix!r} has shape {list(shape)}, expected {' or '.join(map(str, self.dimensions))} "
                "dimensions, none of them 0; download the model again"
            )

    def check_dtype(self, name: str, suffix: str, dtype: torch.dtype) -> None:
        """Check the dtype of a part of the weight `name`.

        Raises:
            ModelError: it is another.
        """
        if dtype not in self.dtypes:
            raise ModelError(
                f"{name}: its part {suffix!r} is of {dtype}, expected {' or '.join(map(str, self.dtypes))}; "
                "download the model again"
            )


WORDS = PartKind((torch.int32,))
SCALES = PartKind((torch.float16, torch.bfloat16, torch.float32))
INTEGERS = PartKind((torch.int32, torch.int64), (1,))

Kinds = Mapping[str, PartKind]
"""What the parts of a weight have to be, by suffix."""


class QuantizedLayout(Protocol):
    """How a checkpoint stores a weight [outputs, inputs] in several tensors: a module's, each with a suffix of its own.

    Or the weights of a layer's experts, [experts * outputs, inputs], whose tensors join their suffixes by an underscore.
    """

    main: ClassVar[str]
    """The suffix by which a quantized module is known."""

    @property
    def needed(self) -> Kinds:
        """The parts that each weight has."""
        ...

    @property
    def optional(self) -> Kinds:
        """Those that some have."""
        ...

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return a weight's shape from those of its parts: [outputs, inputs], or [experts, outputs, inputs]."""
        ...

    def load(self, name: str, parts: Parts) -> BlockWeight | Tensor:
        """Return the weight `name`, with just the values that its parts define; each of them is of its kind.

        Raises:
            ModelError: parts do not fit each other, or the values have no block format.
        """
        ...


class TensorSource(Protocol):
    """The stored tensors by name: a `Checkpoint` without block weights."""

    @property
    def facts(self) -> CheckpointFacts:
        """What is known of it as a whole."""
        ...

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without loading it."""
        ...

    def load(self, name: str) -> Tensor:
        """Load one tensor, on the CPU, in the dtype in which it is stored."""
        ...


MethodReader = Callable[[Mapping[str, Any]], QuantizedLayout]
"""Reads a `quantization_config`; raises `ModelError` where it asks for what is not supported."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a method, for errors that say what may be."""

    method: str
    key: str

    def refuse(self, got: object, may_be: str) -> ModelError:
        """The error for a value that is not supported."""
        return ModelError(
            f"quantization_config ({self.method}): {self.key}: got {got!r}; may be {may_be}; "
            "use the original model, or a GGUF of it"
        )


def expect_shape(name: str, suffix: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Check the shape of a part.

    Raises:
        ModelError: it is another.
    """
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{name}: its part {suffix!r} has shape {list(tensor.shape)}, expected {list(shape)}; download the model again"
        )
