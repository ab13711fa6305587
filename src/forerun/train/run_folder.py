"""The folder of a training run: what its stages have kept, so that each goes on where it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.held_folder import held_folder
from forerun.errors import ConfigError
from forerun.train.kept_files import unfinished, write_text
from forerun.train.measuring import Measurement
from forerun.train.texts import WrittenText, read_texts

WORK = "training"  # subfolder of the output
SETTINGS = "settings.json"  # in it: what a run cannot change on the way
TEXTS = "texts.bin"  # likewise
ORIGINS = "origin.json"  # likewise: settings of the runs that wrote the texts, if those were others


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        seconds: spent in each stage.
        done: stages that are complete.
        num_steps: of training, once that has begun.
        estimated: budget and epochs for which an estimate has said that the run comes to something.
        extent: budget and epochs that `num_steps` was planned for.
        measured: measurements of heads, by the head's step.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    num_steps: int | None = None
    estimated: dict[str, float | None] = field(default_factory=dict)
    extent: dict[str, float | None] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


class RunFolder:
    """The files of a run: `training/` in the output folder holds what is needed to go on, and may be deleted at the end."""

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        """Open a run's folder, or begin one.

        Args:
            output: the folder of the head.
            identity: the settings that a run cannot change on the way.

        Raises:
            ConfigError: the folder is of a run with other settings, holds something else, or cannot be written.
        """
        self.output, self.work = output, output / WORK
        self.texts, self.state = self.work / TEXTS, self.work / "state.safetensors"
        self.origins = self.work / ORIGINS
        self.heads, self.features = self.work / "heads", self.work / "features"
        self.compared = self.work / "compared"  # a head, while the engine's logits are held against the trainer's
        self._progress_file = self.work / "progress.json"
        settings_file = self.work / SETTINGS
        if is_begun(output):
            _check_same(_read_settings(settings_file), dict(identity), output)
        elif not self._may_begin():
            raise ConfigError(f"--output: {output} exists and is no folder of a training run; give another")
        else:
            try:
                self.heads.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--output: cannot make {output} ({error}); give a place that can be written"
                ) from error
            write_text(settings_file, json.dumps(dict(identity), indent=2) + "\n")
        self.progress = self._load()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, as it is now, for this process alone.

        Raises:
            ConfigError: another process goes on with the run.
        """
        with held_folder(self.work, "--output", f"goes on with the run in {self.output}"):
            self.progress = self._load()
            yield

    def keep_private(self) -> None:
        """Let only the owner read what is needed to go on, as he alone may read the pools of users that texts come from.

        Raises:
            ConfigError: the folder is another's, or on a disk that knows no owners.
        """
        try:
            self.work.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"--output: cannot keep others from reading {self.work}, where texts of users will lie ({error}); give a "
                "folder of your own"
            ) from error

    def head(self, step: int) -> Path:
        """The folder of the head as it was after a step."""
        return self.heads / f"step-{step:06}"

    def saved_steps(self) -> list[int]:
        """The steps after which a head was kept, ascending."""
        found = self.heads.glob("step-*/model.safetensors")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def check_extent(self, given: Mapping[str, float | None]) -> None:
        """Refuse another budget or other epochs than those that the training was planned for.

        Raises:
            ConfigError: they differ.
        """
        planned = self.progress.extent
        for name, value in given.items():
            if self.progress.num_steps is not None and planned.get(name) != value:
                raise ConfigError(
                    f"--{name}: got {value}, but the {self.progress.num_steps} steps of the training in {self.output} were "
                    f"planned for {planned.get(name)}; give that to go on, or another --output with --texts {self.output}"
                )

    def spend(self, stage: str, seconds: float) -> None:
        """Note that a stage took so much more time."""
        self.progress.seconds[stage] = self.progress.seconds.get(stage, 0.0) + seconds
        self.save()

    def finish(self, stage: str) -> None:
        """Note that a stage is complete."""
        self.progress.done.append(stage)
        self.save()

    def is_done(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return stage in self.progress.done

    @property
    def measured(self) -> dict[int, Measurement]:
        """Measurements, by the head's step."""
        return {int(step): Measurement.from_json(content) for step, content in self.progress.measured.items()}

    def save(self) -> None:
        """Keep the progress."""
        write_text(self._progress_file, json.dumps(asdict(self.progress), indent=2) + "\n")

    def _may_begin(self) -> bool:
        """Whether nothing is in the folder but what a run leaves there that was interrupted before its settings were written."""
        begun = {self.work, self.heads, unfinished(self.work / SETTINGS)}
        if not self.output.exists():
            return True
        return self.output.is_dir() and all(path in begun for path in self.output.rglob("*"))

    def _load(self) -> Progress:
        if not self._progress_file.exists():
            return Progress()
        try:
            return Progress(**json.loads(self._progress_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self._progress_file}: cannot be read ({error}); delete it") from error


def is_begun(output: Path) -> bool:
    """Whether a run has begun in a folder: it goes on there or not at all."""
    return (output / WORK / SETTINGS).exists()


def texts_of_run(output: Path, fingerprint: str) -> tuple[list[WrittenText], list[dict[str, Any]]]:
    """Read the texts of another run so far, and the settings of those that wrote them: it, or those that it took them from.

    Raises:
        ConfigError: there are none, or another model wrote them than the one with this fingerprint.
    """
    work = output / WORK
    try:
        written = json.loads((work / SETTINGS).read_text(encoding="utf-8"))
        texts = read_texts(work / TEXTS)
        writers = read_origins(work / ORIGINS) or [written]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--texts: {output} holds no texts of a training run ({error}); give the --output of one"
        ) from None
    if written.get("fingerprint") != fingerprint:
        raise ConfigError(f"--texts: {output} is of another model; give texts that this one wrote")
    return texts, writers


def read_origins(path: Path) -> list[dict[str, Any]]:
    """Read the settings of the runs that wrote the texts of one which took them; none where it wrote them itself.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    if not path.exists():
        return []
    stored = json.loads(path.read_text(encoding="utf-8"))
    return stored if isinstance(stored, list) else [stored]  # there was one before several could be


def _read_settings(path: Path) -> dict[str, Any]:
    """Read a run's settings.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise TypeError("is no object")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give another --output") from error
    return stored


def _check_same(stored: Mapping[str, Any], given: Mapping[str, Any], output: Path) -> None:
    stored = {"chat_template": given.get("chat_template"), **stored}  # older runs did not note theirs
    other = [name for name in {**stored, **given} if stored.get(name) != given.get(name)]
    if other:
        found = ", ".join(f"{name} {stored.get(name)!r} instead of {given.get(name)!r}" for name in sorted(other))
        raise ConfigError(
            f"--output: {output} is of a run with {found}; give the same command to go on, or another folder, with "
            f"--texts {output} to train on the texts that were written"
        )
