"""Reads checkpoints: the tensors of a model by name, from safetensors files, a GGUF file or memory."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ModelError, one_line
from forerun.models.checkpoint_facts import CheckpointFacts
from forerun.models.config import ExpertNames, ExpertStacks
from forerun.models.model_folder import CONFIG_FILE, INDEX_FILE, QUANTIZATION_KEY, SINGLE_FILE, find_gguf, read_json
from forerun.models.quantized import quantized_layout
from forerun.models.quantized.checkpoint import QuantizedCheckpoint
from forerun.ops.block_weight import BlockLinear, BlockWeight, JoinedWeight
from forerun.ops.layers import Linear

logger = logging.getLogger(__name__)

PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
GIT_LFS_POINTER = b"version https://git-lfs"
REOPENED_AFTER = 64 << 20  # bytes read
HARMLESS_SURPLUS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # recomputed from the configuration

Rename = Callable[[str], str]
"""Maps the stored name of a tensor to the name that its reader uses."""


class Checkpoint(Protocol):
    """Tensors by name, loaded one at a time."""

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

    def load(self, name: str) -> Tensor | BlockWeight:
        """Load one tensor, on the CPU, in the dtype or the blocks in which it is stored."""
        ...


class StateDict:
    """A `Checkpoint` whose tensors are all in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.facts = CheckpointFacts(num_bytes=sum(tensor.nbytes for tensor in self._tensors.values()))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> Tensor:
        """Return the tensor itself, not a copy."""
        return self._tensors[name]


class SafetensorsCheckpoint:
    """Tensors of one or more safetensors files, memory-mapped while they are read.

    A file is opened again after each 64 MB: the pages of a mapping that stays open would stay in memory. To open it
    takes longer than to read a small tensor, since its header lists all of them.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Open the files; only their headers are read.

        Raises:
            ModelError: a file is missing, truncated or not a safetensors file, or two hold the same tensor.
        """
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open_path: Path | None = None
        self._num_read = 0  # bytes, of the file that is open
        num_bytes = 0
        for path in files:
            shard = _open(path)
            num_bytes += path.stat().st_size
            for name in shard.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if name in self._files:
                    raise ModelError(
                        f"{path}: tensor {name!r} is in {self._files[name].name} too; download the model again"
                    )
                self._files[name] = path
                self._shapes[name] = tuple(shard.get_slice(name).get_shape())
        self.facts = CheckpointFacts(num_bytes=num_bytes)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is read from the header."""
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        """Load one tensor, in the dtype of the file, on the CPU.

        Raises:
            ModelError: the file cannot be read.
        """
        path = self._files[name]
        try:
            if path != self._open_path or self._num_read >= REOPENED_AFTER:
                self._file, self._open_path, self._num_read = _open(path), path, 0
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"{path}: tensor {name!r} cannot be read ({one_line(error)}); download it again"
            ) from error
        self._num_read += tensor.nbytes
        return tensor


class CheckpointView:
    """A `Checkpoint` of some of another's tensors under other names: name -> stored name."""

    def __init__(self, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self.facts = checkpoint.facts

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._checkpoint.shape(self._stored[name])

    def load(self, name: str) -> Tensor | BlockWeight:
        """See `Checkpoint`."""
        return self._checkpoint.load(self._stored[name])

    def split(self, prefix: str) -> tuple[CheckpointView, CheckpointView]:
        """Return a view of the tensors whose names begin with `prefix`, and one of the others."""
        inside = {own: stored for own, stored in self._stored.items() if own.startswith(prefix)}
        outside = {own: stored for own, stored in self._stored.items() if own not in inside}
        return CheckpointView(self._checkpoint, inside), CheckpointView(self._checkpoint, outside)


@dataclass(frozen=True, slots=True)
class _ExpertPlace:
    """Where one expert's part of a tensor of all experts is: some of the outputs of expert `number`."""

    stack: str
    layer: str  # the beginning of the names of its layer's tensors
    number: int
    outputs: slice


class UnstackedExperts:
    """A `Checkpoint` of which a tensor of all experts of a layer stands as one for each expert, under the names of a mixture.

    Args:
        checkpoint: the tensors; matrices in blocks lie as [experts * outputs, inputs].
        names: of each expert's tensors.
        stacks: names of those of all; a tensor of another number of dimensions stays as it is.
    """

    def __init__(self, checkpoint: Checkpoint, names: ExpertNames, stacks: ExpertStacks) -> None:
        self._checkpoint = checkpoint
        self.facts = checkpoint.facts
        self._are_transposed = stacks.are_transposed
        self._are_interleaved = stacks.are_interleaved
        self._places: dict[str, _ExpertPlace] = {}
        self._layer = ""
        self._stacks: dict[str, Tensor | BlockWeight] = {}  # of that layer, as all its experts are read in turn
        gates_and_ups, downs = (names.gate, names.up), (names.down,)
        for stack, parts, kind, dimensions in (
            (stacks.gate_up, gates_and_ups, "weight", 3),
            (stacks.down, downs, "weight", 3),
            (stacks.gate_up_bias, gates_and_ups, "bias", 2),
            (stacks.down_bias, downs, "bias", 2),
        ):
            for name in checkpoint.names():
                if stack is None or not name.endswith(f".{stack}") or len(checkpoint.shape(name)) != dimensions:
                    continue
                layer = name.removesuffix(stack)
                self._places |= {
                    f"{layer}{part.format(number)}.{kind}": _ExpertPlace(name, layer, number, outputs)
                    for part, outputs in zip(parts, self._shares(name, len(parts)), strict=True)
                    for number in range(checkpoint.shape(name)[0])
                }
        stacked = {place.stack for place in self._places.values()}
        self._names = (checkpoint.names() - stacked) | self._places.keys()

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return frozenset(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        place = self._places.get(name)
        if place is None:
            return self._checkpoint.shape(name)
        outputs, *inputs = self._shape_of_one(place.stack)
        return len(range(outputs)[place.outputs]), *inputs

    def load(self, name: str) -> Tensor | BlockWeight:
        """See `Checkpoint`."""
        place = self._places.get(name)
        if place is None:
            return self._checkpoint.load(name)
        if place.layer != self._layer:
            self._layer, self._stacks = place.layer, {}
        if place.stack not in self._stacks:
            self._stacks[place.stack] = self._checkpoint.load(place.stack)
        found = self._stacks[place.stack]
        if isinstance(found, BlockWeight):
            outputs = self._shape_of_one(place.stack)[0]
            return found[place.number * outputs : (place.number + 1) * outputs][place.outputs]
        own = found[place.number]
        return (own.mT if self._are_transposed and own.dim() == 2 else own)[place.outputs]

    def _shape_of_one(self, stack: str) -> tuple[int, ...]:
        """Outputs of an expert's part of a tensor, and of a matrix its inputs."""
        _, *sizes = self._checkpoint.shape(stack)
        return tuple(reversed(sizes) if self._are_transposed else sizes)

    def _shares(self, stack: str, count: int) -> list[slice]:
        """The outputs of each of `count` matrices that lie in one."""
        outputs = self._shape_of_one(stack)[0]
        if self._are_interleaved:
            return [slice(first, outputs, count) for first in range(count)]
        return [slice(outputs * place // count, outputs * (place + 1) // count) for place in range(count)]


def unstacked(checkpoint: Checkpoint, names: ExpertNames) -> Checkpoint:
    """The checkpoint with tensors of each expert; as it is where none has all experts of a layer."""
    for stacks in names.stacks:
        if any(name.endswith(f".{stacks.gate_up}") for name in checkpoint.names()):
            return UnstackedExperts(checkpoint, names, stacks)
    return checkpoint


def renamed(checkpoint: Checkpoint, rename: Rename) -> CheckpointView:
    """Return a view of all tensors of a checkpoint under other names.

    Raises:
        ModelError: two tensors get the same name.
    """
    stored: dict[str, str] = {}
    for name in sorted(checkpoint.names()):
        own = rename(name)
        if own in stored:
            raise ModelError(f"checkpoint: tensors {stored[own]!r} and {name!r} are for the same place")
        stored[own] = name
    return CheckpointView(checkpoint, stored)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the weights of a model folder (safetensors, or GGUF if there is nothing else) or of a .gguf file.

    Raises:
        ModelError: there are no weights, only pickled ones, or they are damaged.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        from forerun.models.gguf.checkpoint import open_gguf_checkpoint

        return open_gguf_checkpoint(gguf)
    if (path / SINGLE_FILE).exists():
        return _in_blocks(path, SafetensorsCheckpoint([path / SINGLE_FILE]))
    if (path / INDEX_FILE).exists():
        return _in_blocks(path, _open_shards(path / INDEX_FILE))
    raise _no_weights(path)


def _in_blocks(path: Path, checkpoint: SafetensorsCheckpoint) -> Checkpoint:
    """The checkpoint, or one of whole weights in blocks where the configuration says that it is quantized."""
    settings = read_json(path / CONFIG_FILE).get(QUANTIZATION_KEY) if (path / CONFIG_FILE).exists() else None
    return QuantizedCheckpoint(checkpoint, quantized_layout(settings)) if settings else checkpoint


def save_tensors(tensors: dict[str, Tensor], path: str | Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that may be read by whoever may read new files; safetensors lets only the owner."""
    path = Path(path)
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


class WeightReader:
    """Reads a model's tensors, in its dtype and on its device, and notes which have been read.

    Matrices in blocks are widened to the dtype, unless `keeps_blocks`: then they stay as they are. So do matrices that are
    stored in one of `kept_dtypes`; if fp32 is among them, vectors are fp32. Where `needs_matrices` is False, matrices are
    checked, but stand as tensors without memory, of torch's device "meta": their packed form is at hand.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps_blocks: bool = False,
        kept_dtypes: frozenset[torch.dtype] = frozenset(),
        needs_matrices: bool = True,
    ) -> None:
        self.dtype = dtype
        self._vector_dtype = torch.float32 if torch.float32 in kept_dtypes else dtype
        self._kept_dtypes = kept_dtypes
        self.device = device
        self._keeps_blocks = keeps_blocks
        self._needs_matrices = needs_matrices
        self._checkpoint = checkpoint
        self._facts = checkpoint.facts
        self._names = checkpoint.names()
        self._unread = set(self._names)

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the checkpoint has."""
        return self._checkpoint.shape(name)

    def tensor(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        """Load one tensor, in the model's dtype for such tensors if `dtype` is None.

        Raises:
            ModelError: it is missing or has another shape.
        """
        found = self._load(name, shape)
        dtype = dtype or (self._vector_dtype if len(shape) == 1 else self.dtype)
        if isinstance(found, Tensor):
            return found.to(self.device, dtype, copy=True)
        return _written(found, torch.empty(shape, dtype=dtype, device=self.device))

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor | BlockWeight:
        """Load one matrix that is packed, in blocks if it is stored so and blocks are kept.

        Raises:
            ModelError: as `tensor`.
        """
        if self._needs_matrices:
            return self._kept(self._load(name, shape))
        self._check(name, shape)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def linear(self, names: Sequence[str], rows: Sequence[int], *, width: int, bias: bool) -> Linear | BlockLinear:
        """Load projections of the same input, stored under `names` with `rows` outputs each, as one matrix.

        Raises:
            ModelError: a part is missing or has another shape.
        """
        if not self._needs_matrices:
            return self._unread_linear(names, rows, width=width, bias=bias)
        biases = [self.tensor(f"{name}.bias", (count,)) for name, count in zip(names, rows, strict=True) if bias]
        joined_bias = torch.cat(biases) if bias else None
        parts = [self._load(f"{name}.weight", (count, width)) for name, count in zip(names, rows, strict=True)]
        if len(dtypes := {self._kept_dtype(part) for part in parts}) > 1 or None in dtypes:
            kept = [self._kept(part) for part in parts]
            only = kept[0] if len(kept) == 1 else None
            return BlockLinear(only if isinstance(only, BlockWeight) else JoinedWeight(tuple(kept)), joined_bias)
        weight = torch.empty(sum(rows), width, dtype=dtypes.pop(), device=self.device)
        for end, count in zip(accumulate(rows), rows, strict=True):
            _written(parts.pop(0), weight[end - count : end])
        return Linear(weight, joined_bias)

    def _unread_linear(self, names: Sequence[str], rows: Sequence[int], *, width: int, bias: bool) -> Linear:
        for name, count in zip(names, rows, strict=True):
            self._check(f"{name}.weight", (count, width))
            if bias:
                self._check(f"{name}.bias", (count,))
        return Linear(torch.empty(sum(rows), width, dtype=self.dtype, device="meta"))

    def tie(self, name: str, weight: Tensor | BlockWeight) -> None:
        """Accept a stored copy, if there is one, of a matrix that the configuration ties to `weight`.

        Raises:
            ModelError: the copy differs.
        """
        if name not in self._unread:
            return
        if isinstance(weight, Tensor) and weight.is_meta:  # the two were compared when they were packed
            self._check(name, tuple(weight.shape))
        elif not _are_equal(dense(self._kept(self._load(name, weight.shape))), dense(weight)):
            raise ModelError(
                f"{name}: differs from the embedding, but the configuration ties the two; set tie_word_embeddings to false"
            )

    def finish(self, unused_prefixes: tuple[str, ...] = ()) -> None:
        """Check that every tensor was read, except those of `unused_prefixes` and known harmless ones.

        Raises:
            ModelError: the checkpoint has tensors that the model has no place for.
        """
        surplus = sorted(
            name
            for name in self._unread
            if not HARMLESS_SURPLUS.fullmatch(name)
            and not name.startswith(unused_prefixes)
            and not self._adds_nothing(name)
        )
        if surplus:
            more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
            raise ModelError(
                f"{self._facts.name}: got surplus tensor {surplus[0]!r}{more}; the configuration has no place for it; "
                f"{self._facts.remedy}"
            )

    def _adds_nothing(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, as AutoGPTQ writes one for layers that have none."""
        is_bias = self._facts.is_mixed and name.endswith(".bias")
        return is_bias and not dense(self._checkpoint.load(name)).any()

    def _kept(self, found: Tensor | BlockWeight) -> Tensor | BlockWeight:
        """A matrix as the model keeps it."""
        dtype = self._kept_dtype(found)
        if isinstance(found, Tensor):
            return found.to(self.device, dtype, copy=True)
        if dtype is not None:
            return _written(found, torch.empty(found.shape, dtype=dtype, device=self.device))
        if found.format == "GROUPS16":
            _say_larger(self._facts.name)
        return found

    def _kept_dtype(self, found: Tensor | BlockWeight) -> torch.dtype | None:
        """The dtype in which the model keeps a matrix; None: in blocks."""
        if isinstance(found, Tensor):
            return found.dtype if found.dtype in self._kept_dtypes else self.dtype
        return None if self._keeps_blocks else self.dtype

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor | BlockWeight:
        self._check(name, shape)
        return self._checkpoint.load(name)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Note a tensor as read; an error where it is missing or of another shape."""
        if name not in self._names:
            raise ModelError(
                f"{self._facts.name}: tensor {name!r} is missing, expected shape {list(shape)}; download the model again"
            )
        found = self._checkpoint.shape(name)
        if found != shape:
            raise ModelError(
                f"{self._facts.name}: tensor {name!r} has shape {list(found)}, expected {list(shape)}; {self._facts.remedy}"
            )
        self._unread.discard(name)


def dense(weight: Tensor | BlockWeight) -> Tensor:
    """The values of a weight, in fp32 if it is in blocks."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of any dtypes have the same values."""
    wide = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.to(wide), second.to(wide))


def _written(weight: Tensor | BlockWeight, values: Tensor) -> Tensor:
    """Write a weight's values into `values`, without a second copy in memory."""
    return values.copy_(weight) if isinstance(weight, Tensor) else weight.dequantize_into(values)


@cache
def _say_larger(checkpoint: str) -> None:
    """Say once of a checkpoint that some of its blocks take more memory than in their file."""
    logger.warning(
        "%s: weights with blocks or scales that no kernel computes take 1.5 bytes each, exactly as they are: in groups of 16 codes of 8 bits",
        checkpoint,
    )


def _open_shards(index: Path) -> SafetensorsCheckpoint:
    """Open the files that an index names, and check that they have its tensors."""
    weight_map = _weight_map(index)
    checkpoint = SafetensorsCheckpoint(index.parent / name for name in sorted(set(weight_map.values())))
    absent = sorted(weight_map.keys() - checkpoint.names())
    if absent:
        raise ModelError(
            f"{index}: lists tensor {absent[0]!r} in {weight_map[absent[0]]}, which does not have it"
            f"{f' ({len(absent)} such tensors)' if len(absent) > 1 else ''}; download the model again"
        )
    return checkpoint


def _weight_map(index: Path) -> Mapping[str, str]:
    """Read the index's map from tensor to file, each a plain file name."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files (no 'weight_map'); download it again") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: got file {name!r}; must be a file beside the index; download it again")
    return dict(weight_map)


def _open(path: Path) -> Any:
    """Open one safetensors file."""
    if not path.is_file():
        raise ModelError(f"{path}: the file is missing; download the model again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER
        remedy = "it is a Git LFS pointer; run 'git lfs pull'" if is_pointer else "download it again"
        raise ModelError(f"{path}: damaged or not a safetensors file ({one_line(error)}); {remedy}") from error


def _conversion(folder: Path, pickled: list[str]) -> str:
    """Return how to convert pickled weights to safetensors: Python for one file, which may be a head's."""
    if len(pickled) > 1:
        return "with transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
    return (
        f"with Python, import torch, safetensors.torch; safetensors.torch.save_file({{name: weight.contiguous().clone() "
        f"for name, weight in torch.load({str(folder / pickled[0])!r}, weights_only=True).items()}}, "
        f"{str(folder / SINGLE_FILE)!r})"
    )


def _no_weights(folder: Path) -> ModelError:
    """Return the error for a folder without usable weights: what it holds, and what to do."""
    pickled = sorted({file.name for pattern in PICKLE_PATTERNS for file in folder.glob(pattern)})
    if pickled:
        return ModelError(
            f"{folder}: has only pickled weights ({pickled[0]}), which can run any code when opened; get the safetensors "
            f"version or convert them to safetensors: {_conversion(folder, pickled)}"
        )
    other = sorted(file.name for file in (*folder.glob("*.safetensors"), *folder.glob("*.gguf")))
    found = f"found {', '.join(other[:3])}" if other else "found none"
    return ModelError(f"{folder}: no weights; must hold {SINGLE_FILE}, {INDEX_FILE} or one .gguf file, {found}")
