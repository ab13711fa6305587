"""The folder of a tuning: what each stage has found, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from forerun.bench.profiling.stages import differences
from forerun.core.held_folder import held_folder
from forerun.core.whole_file import whole_file
from forerun.core.writable import check_writable_folder
from forerun.errors import ConfigError
from forerun.plan.step_times import StepTimeModel
from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.confirmation import Round
from forerun.plan.tuning.run_figures import RunFigures
from forerun.plan.tuning.screening import Screened

T = TypeVar("T")

SERVE_FILE, REPORT_FILE, PICTURE_FILE = "serve.yaml", "tuning.json", "pareto.svg"


class TuningFolder:
    """The files of a tuning.

    `settings.json` says what is tuned; a folder goes on only with the same. `recording*.jsonl.gz` are the answers,
    `rows*.npz` what the target said after drafted tokens,
    `steps*.json` the step times, `screening.json` what was simulated, `rounds.json` the real runs by round.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, begins: bool = True) -> None:
        """Open a folder, or begin one; without `begins` see whether it could be, and write nothing.

        Raises:
            ConfigError: it is of another tuning, holds something else, or cannot be written.
        """
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        settings = path / "settings.json"
        if settings.exists():
            _refuse_other(_parsed(settings, dict) or {}, self.identity, path)
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--output: {path} exists and is no folder of a tuning; give another")
        else:
            check_writable_folder("--output", path)
            if not begins:
                return
            path.mkdir(parents=True, exist_ok=True)
            write(settings, self.identity)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this process alone.

        Raises:
            ConfigError: another process goes on with the tuning.
        """
        with held_folder(self.path, "--output", f"goes on with the tuning in {self.path}"):
            yield

    def recording(self, quantization: str | None) -> Path:
        """The file of the answers that the target gives in one format of its weights."""
        return self.path / f"recording{_suffix(quantization)}.jsonl.gz"

    def target_rows(self, quantization: str | None) -> Path:
        """The file of what it said after drafted tokens meanwhile."""
        return self.path / f"rows{_suffix(quantization)}.npz"

    def step_times(self, quantization: str | None) -> StepTimeModel | None:
        """What its steps take; None if that is still to be measured."""
        return _parsed(self._steps_file(quantization), StepTimeModel.from_json)

    def keep_step_times(self, quantization: str | None, found: StepTimeModel) -> None:
        """Keep what its steps take."""
        write(self._steps_file(quantization), found.to_json())

    def _steps_file(self, quantization: str | None) -> Path:
        return self.path / f"steps{_suffix(quantization)}.json"

    def screened(self) -> list[Screened] | None:
        """What was simulated, best first; None if that is still to be done."""

        def parse(record: Any) -> list[Screened]:
            return [
                Screened(candidate=Candidate.from_json(one["candidate"]), figures=RunFigures.from_json(one["figures"]))
                for one in record["screened"]
            ]

        return _parsed(self.path / "screening.json", parse)

    def keep_screened(self, screened: Sequence[Screened], probed: Sequence[str]) -> None:
        """Keep what was simulated."""
        found = [{"candidate": one.candidate.to_json(), "figures": one.figures.to_json()} for one in screened]
        write(self.path / "screening.json", {"probed": sorted(probed), "screened": found})

    def probed(self) -> list[str]:
        """The candidates for which a short real run stood in for replayed drafts."""
        return _parsed(self.path / "screening.json", lambda record: [str(name) for name in record["probed"]]) or []

    def rounds(self) -> list[Round]:
        """The complete rounds of real runs."""

        def parse(record: Any) -> list[Round]:
            return [{name: RunFigures.from_json(run) for name, run in one.items()} for one in record]

        return _parsed(self.path / "rounds.json", parse) or []

    def add_round(self, done: Round) -> None:
        """Keep one more round."""
        rounds = [*self.rounds(), done]
        write(self.path / "rounds.json", [{name: run.to_json() for name, run in one.items()} for one in rounds])

    def seconds(self) -> dict[str, float]:
        """What each stage has taken, all pieces of an interrupted tuning together."""

        def parse(record: Any) -> dict[str, float]:
            return {name: float(seconds) for name, seconds in record.items()}

        return _parsed(self.path / "seconds.json", parse) or {}

    def spend(self, stage: str, seconds: float) -> None:
        """Note that a stage took so much more."""
        spent = self.seconds()
        write(self.path / "seconds.json", spent | {stage: spent.get(stage, 0.0) + seconds})


def write(path: Path, content: Any) -> None:
    """Write a JSON file; an interruption leaves the file as it was."""
    with whole_file(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); delete it, and it is made anew") from None


def _parsed(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What a file holds; None where there is none.

    Raises:
        ConfigError: it is damaged.
    """
    if not path.exists():
        return None
    record = _read(path)
    try:
        return parse(record)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: is damaged ({why}); delete it, and it is made anew") from None


def _suffix(quantization: str | None) -> str:
    return "" if quantization is None else f"-{quantization}"


def _refuse_other(stored: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> None:
    found = "; ".join(
        f"{name} {there!r:.80} instead of {here!r:.80}" for name, there, here in sorted(differences(stored, given))
    )
    if found:
        raise ConfigError(
            f"--output: {path} is of a tuning with {found}; give the same command to go on, or another folder"
        )
