"""The exhaustive sweep: every configuration run for real, in interleaved rounds; each run is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.tuning.folder import write
from forerun.errors import ConfigError
from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.choice import Rounds
from forerun.plan.tuning.run_figures import RunFigures


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A JSON file with what is swept, and for each round and configuration its figures and the seconds that the run took."""

    path: Path

    def read(self, identity: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The runs so far, by "round/name"; none if there is no file yet.

        Raises:
            ConfigError: the file is of another sweep.
        """
        if not self.path.exists():
            return {}
        content = json.loads(self.path.read_text(encoding="utf-8"))
        if content["sweep"] != json.loads(json.dumps(identity)):
            raise ConfigError(f"{self.path}: is of another sweep; give the same options, or another --output")
        runs: dict[str, dict[str, Any]] = content["runs"]
        return runs

    def write(self, identity: Mapping[str, Any], runs: Mapping[str, Any]) -> None:
        """Write the file anew."""
        write(self.path, {"sweep": identity, "runs": runs})


def sweep(
    candidates: Sequence[Candidate],
    run: Callable[[Candidate, int], RunFigures],
    file: SweepFile,
    identity: Mapping[str, Any],
    *,
    rounds: int,
    is_time_up: Callable[[], bool],
) -> int:
    """Run what is still missing, every other round in reverse order; return how many runs are still to be done."""
    runs = file.read(identity)
    turns = [
        (f"{number}/{one.name}", one, number)
        for number in range(rounds)
        for one in (candidates if number % 2 == 0 else candidates[::-1])
    ]
    missing = [turn for turn in turns if turn[0] not in runs]
    for place, (key, candidate, number) in enumerate(missing):
        if is_time_up():
            return len(missing) - place
        start = time.monotonic()
        figures = run(candidate, number)
        runs[key] = {"figures": figures.to_json(), "seconds": time.monotonic() - start}
        file.write(identity, runs)
    return 0


def rounds_of(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[RunFigures]]:
    """The figures of each configuration by round."""
    found: dict[str, list[RunFigures]] = {}
    for key in sorted(runs, key=lambda key: int(key.partition("/")[0])):
        found.setdefault(key.partition("/")[2], []).append(RunFigures.from_json(runs[key]["figures"]))
    return found


def seconds_of(runs: Mapping[str, Mapping[str, Any]]) -> float:
    """What all runs took, engines and warm-ups included."""
    return sum(float(one["seconds"]) for one in runs.values())


def check_complete(rounds: Rounds) -> None:
    """Refuse a sweep in which some configuration has fewer rounds than another.

    Raises:
        ConfigError: there is one; the error names it.
    """
    most = max(map(len, rounds.values()), default=0)
    for name, runs in rounds.items():
        if len(runs) < most:
            raise ConfigError(f"the sweep is not complete: {name} has {len(runs)} of {most} rounds; run it on")
