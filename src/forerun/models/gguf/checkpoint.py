"""The weights of a GGUF file under the names that the decoder reads, in blocks where the file has blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.checkpoint_facts import CheckpointFacts
from forerun.models.config import MOST_EXPERTS
from forerun.models.gguf.architectures import (
    LONGROPE_FACTORS,
    ROPE_FACTORS,
    GGUFArchitecture,
    architecture_of,
    unknown_architecture,
)
from forerun.models.gguf.file import GGUFFile, open_gguf
from forerun.models.gguf.grouped import scaled
from forerun.models.gguf.header import TensorPlace
from forerun.models.gguf.tensors import are_mixed, load_tensor, loaded_bytes
from forerun.ops.block_weight import BlockWeight


class GGUFCheckpoint:
    """A `Checkpoint` of a GGUF file. A tensor is mapped into memory for as long as it is used.

    Beside a weight a factor of all its values may stand ("attn_q.scale", as in NVFP4), and another of the rows that it is
    multiplied with ("attn_q.input_scale"), which counts only where those are rounded to few bits.
    """

    def __init__(self, file: GGUFFile, row: GGUFArchitecture) -> None:
        """Find the decoder's name of each tensor; one that it has no name for keeps its own.

        Raises:
            ModelError: two tensors are for the same place, or a tensor is not of as many experts as it must be.
        """
        self._file = file
        self._row = row
        self._places: dict[str, TensorPlace] = {}
        self._factors: dict[str, TensorPlace] = {}
        for stored, place in file.tensors.items():
            if stored in (ROPE_FACTORS, *LONGROPE_FACTORS.values()):
                continue  # the configuration's
            stem, _, kind = stored.rpartition(".")
            if kind in ("scale", "input_scale") and f"{stem}.weight" in file.tensors:
                if kind == "scale":
                    self._factors |= self._places_of_factors(f"{stem}.weight", place)
                continue
            found = _places_of(row.tensor_name(stored), place)
            if twice := found.keys() & self._places.keys():
                raise ModelError(
                    f"{file.path}: tensors {self._places[twice.pop()].name!r} and {stored!r} are for the same place"
                )
            self._places |= found
        self.facts = CheckpointFacts(
            num_bytes=sum(map(loaded_bytes, self._places.values())),
            is_mixed=are_mixed(file.matrix_types),
            name=f"{file.path} ({file.describe()})",
            remedy="convert the original model again",
        )

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is in the header."""
        return self._places[name].shape

    def load(self, name: str) -> Tensor | BlockWeight:
        """Return a tensor's values as they are stored.

        Raises:
            ModelError: the file cannot be read any more, nothing installed reads the tensor's type, or it has a shape that
                cannot be put into the decoder's order.
        """
        weight = load_tensor(self._places[name])
        if name in self._factors:
            weight = scaled(weight, self._factor(self._factors[name]))
        if self._row.has_pairs and (num_heads := self._num_heads(name)):
            if weight.shape[0] % (2 * num_heads):
                raise self._misshapen(name, f"a multiple of {2 * num_heads} rows: pairs of {num_heads} heads")
            return weight[firsts_before_seconds(weight.shape[0], num_heads)]
        if self._row.norm_offset and name.endswith("norm.weight"):
            if not isinstance(weight, Tensor) or weight.dim() != 1:
                raise self._misshapen(name, "one dimension")
            return weight.float() - self._row.norm_offset
        return weight

    def _places_of_factors(self, weight: str, place: TensorPlace) -> dict[str, TensorPlace]:
        """Where the factor of a weight lies, or of each expert's."""
        name = self._row.tensor_name(weight)
        found = _places_of(name, place)
        if found.keys() != _places_of(name, self._file.tensors[weight]).keys():
            raise ModelError(
                f"{place.file}: tensor {place.name!r} has factors of {len(found)} experts, and {weight!r} another number of them; "
                "convert the original model again"
            )
        return found

    def _factor(self, place: TensorPlace) -> float:
        factor = load_tensor(place)
        if not isinstance(factor, Tensor) or place.shape != (1,) or not factor.isfinite().all():
            raise ModelError(f"{self.facts.name}: tensor {place.name!r} is no single number; {self.facts.remedy}")
        return float(factor)

    def _misshapen(self, name: str, expected: str) -> ModelError:
        shape = list(self.shape(name))
        return ModelError(
            f"{self.facts.name}: tensor {name!r} has shape {shape}, expected {expected}; {self.facts.remedy}"
        )

    def _num_heads(self, name: str) -> int:
        """The number of heads whose rows a tensor of queries or keys has; 0 for other tensors."""
        own = self._file.own
        heads = own.integer("attention.head_count")
        if ".q_proj." in name:
            return heads
        return own.integer_of_layers("attention.head_count_kv", heads) if ".k_proj." in name else 0


def _places_of(name: str, place: TensorPlace) -> dict[str, TensorPlace]:
    """Where the tensor of that name lies, or of each expert, whose numbers take the place of {}.

    Raises:
        ModelError: it is of more experts than a layer has.
    """
    if "{}" not in name:
        return {name: place}
    count, *shape = place.shape
    if not 0 < count <= MOST_EXPERTS:
        raise ModelError(
            f"{place.file}: tensor {place.name!r} is of {count} experts; may be of at most {MOST_EXPERTS}; convert the original "
            "model again"
        )
    size = place.num_bytes // count
    return {
        name.format(number): replace(
            place, shape=tuple(shape) or (1,), start=place.start + number * size, num_bytes=size
        )
        for number in range(count)
    }


def open_gguf_checkpoint(path: Path) -> GGUFCheckpoint:
    """Open the weights of a GGUF file.

    Raises:
        ModelError: the file is damaged, or its architecture has no row.
    """
    file = open_gguf(path)
    row = architecture_of(file)
    if row is None:
        raise unknown_architecture(file)
    return GGUFCheckpoint(file, row)


def firsts_before_seconds(num_rows: int, num_heads: int) -> Tensor:
    """Order rows that lie in pairs (first, second) as the decoder has them: a head's firsts, then its seconds: [num_rows] int64"""
    pairs = torch.arange(num_rows).view(num_heads, -1, 2)
    return pairs.transpose(1, 2).reshape(-1)
