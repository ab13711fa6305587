"""Hidden states of texts that are computed once: by the engine while it writes or by the first epoch, and read by all others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.config.speculative_config import SpeculativeConfig
from forerun.core.whole_file import whole_file
from forerun.drafters.base import Drafter, NoDrafter, TargetInfo
from forerun.errors import ConfigError
from forerun.executor.hidden_states import HiddenStatesStorage
from forerun.models.checkpoint import save_tensors

NAMES = "names.json"


class KeptFeatures:
    """A folder with a file for each text, under its number, in the layout of saved hidden states.

    Attributes:
        names: the hidden states, in their order in the files.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Open the folder, or make it; what was kept of other hidden states is thrown away.

        Raises:
            ConfigError: it cannot be made.
        """
        self._folder, self.names = folder, tuple(names)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if _noted(folder) != list(self.names):
                for path in folder.iterdir():
                    path.unlink()
                with whole_file(folder / NAMES) as part:
                    part.write_text(json.dumps(self.names), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot keep features in {folder} ({error}); leave --keep-features out") from error

    def path(self, number: int) -> Path:
        """The file of a text."""
        return self._folder / f"{number}.safetensors"

    def read(self, number: int, token_ids: Tensor) -> Tensor | None:
        """Return the hidden states of a text's first tokens, [S, features, width], or None if they are not there."""
        try:
            tensors = load_file(self.path(number))
        except (OSError, SafetensorError):  # none, or cut off: computed again
            return None
        if not torch.equal(tensors["token_ids"][: len(token_ids)], token_ids):
            return None
        return tensors["hidden_states"][: len(token_ids)]

    def write(self, number: int, token_ids: Tensor, states: Tensor) -> None:
        """Keep the hidden states of a text's first tokens.

        Raises:
            ConfigError: the disk is full or gone.
        """
        path = self.path(number)
        try:
            with whole_file(path) as part:
                save_tensors({"hidden_states": states.cpu(), "token_ids": token_ids}, str(part))
        except Exception as error:
            raise ConfigError(
                f"cannot write {path} ({error}); make room, or give the same command without --keep-features"
            ) from error

    def written_by_engine(self) -> SpeculativeConfig:
        """The configuration of an engine that keeps them of texts that it writes."""
        storage = HiddenStatesStorage(
            shared_storage_path=self._folder,
            num_writer_threads=1,
            use_synchronization_lock=False,
            allow_custom_save_path=True,
        )
        return SpeculativeConfig(drafter=_Exported(exported=self.names), storage=storage)


def _noted(folder: Path) -> object:
    """The names of what a folder keeps; None where they are not there, or cannot be read."""
    try:
        return json.loads((folder / NAMES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class FeaturesInMemory:
    """Hidden states where the target computes them, as long as there is room.

    Attributes:
        names: the hidden states, in their order.
        room: bytes that are left for more.
    """

    def __init__(self, names: Sequence[str], *, room: int) -> None:
        self.names, self.room = tuple(names), room
        self._states: dict[int, Tensor] = {}  # by the text's number

    def read(self, number: int, token_ids: Tensor) -> Tensor | None:
        """Return the hidden states of a text's first tokens, [S, features, width], or None if they are not there."""
        states = self._states.get(number)
        return None if states is None or len(states) < len(token_ids) else states[: len(token_ids)]

    def write(self, number: int, token_ids: Tensor, states: Tensor) -> None:  # noqa: ARG002 - a number has one text here
        """Keep the hidden states of a text's first tokens, if there is room."""
        if states.nbytes <= self.room:
            self._states[number] = states.clone()
            self.room -= states.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """Settings of a drafter that drafts nothing, but whose hidden states are saved."""

    exported: tuple[str, ...]
    default_num_speculative_tokens: int | None = None

    def build(self, target: TargetInfo) -> Drafter:  # noqa: ARG002 - any target has hidden states
        """See `DrafterConfig`."""
        return NoDrafter(frozenset(self.exported))
