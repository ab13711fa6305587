"""Options of `forerun bench serve` about what is reported, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from cyclopts import Group, Parameter

from forerun.bench.load.latencies import GOODPUT_METRICS, METRICS
from forerun.bench.load.result_keys import is_taken
from forerun.bench.sensors import POWERCAP
from forerun.cli.pictures import check_picture
from forerun.cli.serve_options import Flag, Words, pairs
from forerun.errors import ConfigError, did_you_mean


@Parameter(name="*", group=Group("Figures", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """What is reported."""

    percentile_metrics: str = "ttft,tpot,itl,icl,e2el"
    """Latencies, with commas: ttft, tpot, itl, icl, e2el, client_queue_time, e2el_including_client_queue."""
    metric_percentiles: str = "99"
    """Percentiles, with commas."""
    goodput: Words = None
    """Goals in milliseconds, e.g. ttft:100 tpot:50 e2el:2000; counts requests that keep all of them."""
    energy_idle_seconds: float = 5.0
    """Where there is a sensor: seconds of rest before the run, for the energy net of it."""
    powercap_root: Path = POWERCAP
    """Where RAPL's counters lie, e.g. in a container's mount."""
    disable_tqdm: Flag = False
    """Show no progress bar."""

    def __post_init__(self) -> None:
        _ = self.metrics, self.percents, self.goals

    @property
    def metrics(self) -> list[str]:
        """Names of the latencies.

        Raises:
            ConfigError: one is unknown.
        """
        names = [name.strip() for name in self.percentile_metrics.split(",")]
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics: got {name!r}{did_you_mean(name, METRICS)}")
        return list(dict.fromkeys(names))

    @property
    def percents(self) -> list[float]:
        """The percentiles.

        Raises:
            ConfigError: one is no number from 0 to 100.
        """
        try:
            percents = [float(part) for part in self.metric_percentiles.split(",")]
        except ValueError:
            percents = [-1.0]
        if not all(0 <= percent <= 100 for percent in percents):
            raise ConfigError(
                f"--metric-percentiles: got {self.metric_percentiles!r}; must be numbers from 0 to 100 with commas "
                "between them, e.g. 50,90,99"
            )
        return percents

    @property
    def goals(self) -> dict[str, float]:
        """Milliseconds by latency.

        Raises:
            ConfigError: one is not KEY:VALUE, or its key or value is wrong.
        """
        goals: dict[str, float] = {}
        for pair in self.goodput or ():
            name, _, text = pair.partition(":")
            try:
                goals[name] = float(text)
            except ValueError:
                raise ConfigError(f"--goodput: got {pair!r}; must be NAME:MILLISECONDS, e.g. ttft:100") from None
            if name not in GOODPUT_METRICS or not goals[name] >= 0:
                raise ConfigError(
                    f"--goodput: got {pair!r}; must be {', '.join(GOODPUT_METRICS)}, with milliseconds from 0 up"
                )
        return goals


@Parameter(name="*", group=Group("Results", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where the result goes."""

    save_result: Flag = False
    """Write the result to a JSON file."""
    save_detailed: Flag = False
    """Write the times, lengths, text and error of each request too."""
    append_result: Flag = False
    """Add the result to the file as a further line."""
    result_dir: Path | None = None
    """The file's folder, made if it is not there; by default the current one."""
    result_filename: str | None = None
    """The file's name; by default LABEL-RATEqps-MODEL-TIME.json."""
    label: str | None = None
    """A name for the run; by default the backend's."""
    metadata: Words = None
    """KEY=VALUE pairs for the result."""
    plot: Path | None = None
    """Draw output, requests and latencies to this .png, .svg or .pdf file (needs the extra "bench")."""

    def __post_init__(self) -> None:
        check_picture("--plot", self.plot)
        for key in self.pairs:
            if is_taken(key):
                raise ConfigError(f"--metadata: got {key}, which the result has itself; give another name")
        if not self.saves:
            for field in fields(self):
                if field.name in ("save_detailed", "result_dir", "result_filename") and getattr(self, field.name):
                    option = f"--{field.name.replace('_', '-')}"
                    raise ConfigError(f"{option}: nothing is saved; give --save-result or --append-result too")

    @property
    def saves(self) -> bool:
        """Whether there is a file of the result."""
        return self.save_result or self.append_result

    @property
    def pairs(self) -> dict[str, str]:
        """The metadata.

        Raises:
            ConfigError: a pair is not KEY=VALUE.
        """
        return pairs("--metadata", self.metadata)

    def path(self, default: str) -> Path:
        """The file, of a default name."""
        return (self.result_dir or Path()) / (self.result_filename or default)
