"""A list of prompts that is written part by part, with the results in a folder: what Ray Data needs no part in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import forerun
from forerun.core.random_bits import child_seed
from forerun.core.whole_file import whole_file
from forerun.engine.request import as_token_ids
from forerun.errors import ConfigError

MANIFEST = "manifest.json"
DEFAULT_PART_SIZE = 256

Prompt = str | Sequence[int]
"""A text, or token ids."""
PROMPT_MAY_BE = "texts or lists of token ids"


@dataclass(frozen=True, kw_only=True)
class OfflineRun:
    """What is written, and with what: two runs that are equal here give equal results, whichever engine writes which part.

    Args:
        prompts: texts or token ids.
        model: as `LLM` takes it.
        sampling: arguments of `SamplingParams`; without a seed each prompt has one of its own, by its place and `seed`.
        engine: further arguments of `LLM`.
        part_size: prompts of a part.
        seed: draws the seeds of the prompts.

    Raises:
        ConfigError: there are no prompts, a part is empty, or an argument cannot be written as JSON.
    """

    prompts: Sequence[Prompt]
    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    part_size: int = DEFAULT_PART_SIZE
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) or not self.prompts:
            raise ConfigError(
                f"prompts: got {self.prompts!r:.80}; must be a list of at least one text or list of token ids"
            )
        if self.part_size < 1:
            raise ConfigError(f"part_size: got {self.part_size}; must be 1 or more")
        for name in ("sampling", "engine"):
            try:
                json.dumps(dict(getattr(self, name)))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name}: cannot be written as JSON ({error}); may hold texts, numbers, lists and dicts"
                ) from None

    @property
    def num_parts(self) -> int:
        """Parts of the run."""
        return -(-len(self.prompts) // self.part_size)

    def part(self, number: int) -> list[Prompt]:
        """The prompts of a part, token ids as lists.

        Raises:
            RequestError: one is neither a text nor token ids.
        """
        chosen = self.prompts[number * self.part_size : (number + 1) * self.part_size]
        return [one if isinstance(one, str) else as_token_ids("prompts", one, PROMPT_MAY_BE) for one in chosen]

    def seeds(self, number: int) -> list[int]:
        """The seeds of a part's prompts."""
        if (given := self.sampling.get("seed")) is not None:
            return [given] * len(self.part(number))
        first = number * self.part_size
        return [child_seed(self.seed, first + place) for place in range(len(self.part(number)))]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The run as JSON values, its prompts by their digest."""
        digest = hashlib.sha256()
        for number in range(self.num_parts):
            digest.update(json.dumps(self.part(number)).encode())
        described = {
            "version": forerun.__version__,
            "model": self.model,
            "sampling": dict(self.sampling),
            "engine": dict(self.engine),
            "part_size": self.part_size,
            "seed": self.seed,
            "num_prompts": len(self.prompts),
            "prompts_sha256": digest.hexdigest(),
        }
        read: dict[str, Any] = json.loads(json.dumps(described))
        return read


class ResultFolder:
    """The results of a run, a file for each part; a part is there whole or not at all.

    Raises:
        ConfigError: the folder holds the results of another run, or something else.
    """

    def __init__(self, folder: Path, run: OfflineRun) -> None:
        self._folder, self._run = folder, run
        path = folder / MANIFEST
        if path.exists():
            found = json.loads(path.read_text())
            different = [name for name, value in run.manifest.items() if found.get(name) != value]
            if different:
                raise ConfigError(
                    f"{folder}: holds results of another run ({', '.join(different)} differ); give another folder, "
                    "or remove this one"
                )
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: holds no results of such runs, and is not an empty folder; give another")
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(run.manifest, indent=1) + "\n")

    def missing(self) -> list[int]:
        """Parts that have no results yet."""
        return [number for number in range(self._run.num_parts) if not self._path(number).exists()]

    def write(self, number: int, results: Sequence[Mapping[str, Any]]) -> None:
        """Keep the results of a part.

        Raises:
            ValueError: they are not one for each prompt.
        """
        if len(results) != len(self._run.part(number)):
            raise ValueError(f"part {number}: got {len(results)} results for {len(self._run.part(number))} prompts")
        _write(self._path(number), "".join(json.dumps(one) + "\n" for one in results))

    def read(self) -> Iterator[dict[str, Any]]:
        """All results in the order of the prompts.

        Raises:
            ConfigError: parts are missing.
        """
        if missing := self.missing():
            raise ConfigError(
                f"{self._folder}: {len(missing)} of {self._run.num_parts} parts are missing; run it again"
            )
        for number in range(self._run.num_parts):
            with self._path(number).open() as lines:
                yield from map(json.loads, lines)

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.jsonl"


def _write(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text)
