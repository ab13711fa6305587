"""The folder of a tuning: what each stage has found, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.confirmation import Round
from forerun.plan.tuning.run_figures import RunFigures
from forerun.plan.tuning.screening import Screened

SERVE_FILE, REPORT_FILE, PICTURE_FILE = "serve.yaml", "tuning.json", "pareto.svg"


class TuningFolder:
    """The files of a tuning.

    `settings.json` says what is tuned; a folder goes on only with the same. `recording*.jsonl.gz` are the answers,
    `rows*.npz` what the target said after drafted tokens,
    `steps*.json` the step times, `screening.json` what was simulated, `rounds.json` the real runs by round.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Open a folder, or begin one.

        Raises:
            ConfigError: it is of another tuning, holds something else, or cannot be written.
        """
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        settings = path / "settings.json"
        if settings.exists():
            _refuse_other(_read(settings), self.identity, path)
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--output: {path} exists and is no folder of a tuning; give another")
        else:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--output: cannot make {path} ({error}); give a place that can be written") from None
            write(settings, self.identity)

    def recording(self, quantization: str | None) -> Path:
        """The file of the answers that the target gives in one format of its weights."""
        return self.path / f"recording{_suffix(quantization)}.jsonl.gz"

    def target_rows(self, quantization: str | None) -> Path:
        """The file of what it said after drafted tokens meanwhile."""
        return self.path / f"rows{_suffix(quantization)}.npz"

    def step_times(self, quantization: str | None) -> Path:
        """The file of what its steps take."""
        return self.path / f"steps{_suffix(quantization)}.json"

    def screened(self, candidates: Mapping[str, Candidate]) -> list[Screened] | None:
        """What was simulated, best first; None if that is still to be done."""
        file = self.path / "screening.json"
        if not file.exists():
            return None
        return [
            Screened(candidate=candidates[name], figures=RunFigures.from_json(figures))
            for name, figures in _read(file)["figures"].items()
        ]

    def keep_screened(self, screened: Sequence[Screened], probed: Sequence[str]) -> None:
        """Keep what was simulated."""
        figures = {one.candidate.name: one.figures.to_json() for one in screened}
        write(self.path / "screening.json", {"probed": sorted(probed), "figures": figures})

    def probed(self) -> list[str]:
        """The candidates for which a short real run stood in for replayed drafts."""
        file = self.path / "screening.json"
        return list(_read(file)["probed"]) if file.exists() else []

    def rounds(self) -> list[Round]:
        """The complete rounds of real runs."""
        file = self.path / "rounds.json"
        if not file.exists():
            return []
        return [{name: RunFigures.from_json(run) for name, run in one.items()} for one in _read(file)]

    def add_round(self, done: Round) -> None:
        """Keep one more round."""
        rounds = [*self.rounds(), done]
        write(self.path / "rounds.json", [{name: run.to_json() for name, run in one.items()} for one in rounds])

    def seconds(self) -> dict[str, float]:
        """What each stage has taken, all pieces of an interrupted tuning together."""
        file = self.path / "seconds.json"
        return _read(file) if file.exists() else {}

    def spend(self, stage: str, seconds: float) -> None:
        """Note that a stage took so much more."""
        spent = self.seconds()
        write(self.path / "seconds.json", spent | {stage: spent.get(stage, 0.0) + seconds})


def write(path: Path, content: Any) -> None:
    """Write a JSON file; an interruption leaves the file as it was."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); delete it, and it is made anew") from None


def _suffix(quantization: str | None) -> str:
    return "" if quantization is None else f"-{quantization}"


def _refuse_other(stored: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> None:
    other = sorted(name for name in {**stored, **given} if stored.get(name) != given.get(name))
    if other:
        found = "; ".join(f"{name} {stored.get(name)!r:.80} instead of {given.get(name)!r:.80}" for name in other)
        raise ConfigError(
            f"--output: {path} is of a tuning with {found}; give the same command to go on, or another folder"
        )
