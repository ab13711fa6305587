"""Opens a model's weights: safetensors in a folder, read one tensor at a time, or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ModelError, one_line
from forerun.models.model_folder import find_gguf
from forerun.models.weights import Checkpoint

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
GIT_LFS_POINTER = b"version https://git-lfs"


class SafetensorsCheckpoint:
    """Tensors of one or more safetensors files, memory-mapped while they are read.

    A file is opened again for each tensor: the pages of a mapping that stays open would stay in memory.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Open the files; only their headers are read.

        Raises:
            ModelError: a file is missing, truncated or not a safetensors file, or two hold the same tensor.
        """
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            shard = _open(path)
            for name in shard.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if name in self._files:
                    raise ModelError(
                        f"{path}: tensor {name!r} is in {self._files[name].name} too; download the model again"
                    )
                self._files[name] = path
                self._shapes[name] = tuple(shard.get_slice(name).get_shape())

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
            tensor: Tensor = _open(path).get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"{path}: tensor {name!r} cannot be read ({one_line(error)}); download it again"
            ) from error
        return tensor


def save_tensors(tensors: dict[str, Tensor], path: str | Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that may be read by whoever may read new files; safetensors lets only the owner."""
    path = Path(path)
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the weights of a model folder (safetensors, or GGUF if there is nothing else) or of a .gguf file.

    Raises:
        ModelError: there are no weights, only pickled ones, or they are damaged.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        from forerun.models.gguf import load_gguf  # here: importing transformers takes 100 MB

        return load_gguf(gguf)[1]
    if (path / SINGLE_FILE).exists():
        return SafetensorsCheckpoint([path / SINGLE_FILE])
    if (path / INDEX_FILE).exists():
        return _open_shards(path / INDEX_FILE)
    raise _no_weights(path)


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
