"""What a method of quantization is to the reader of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from forerun.errors import ModelError
from forerun.models.checkpoint_facts import CheckpointFacts
from forerun.ops.block_weight import BlockWeight

Parts = Mapping[str, Tensor]
"""The tensors of one weight by their suffix, such as "qweight"."""

Shapes = Mapping[str, tuple[int, ...]]
"""Their shapes, by suffix."""


class QuantizedLayout(Protocol):
    """How a checkpoint stores a weight [outputs, inputs] in several tensors: a module's, each with a suffix of its own."""

    main: ClassVar[str]
    """The suffix by which a quantized module is known."""

    needed: ClassVar[frozenset[str]]
    """The suffixes of all parts that each weight has."""

    optional: ClassVar[frozenset[str]]
    """Those of parts that some have."""

    def shape(self, shapes: Shapes) -> tuple[int, int]:
        """Return a weight's shape from those of its parts."""
        ...

    def load(self, name: str, parts: Parts) -> BlockWeight | Tensor:
        """Return the weight `name`, with just the values that its parts define.

        Raises:
            ModelError: a part is missing or of a wrong shape, or the values have no block format.
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
