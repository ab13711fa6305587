"""Measures piece after piece: in each, all its configurations answer every group right after one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.auto_speculation.answering import Answers, answer
from benchmarks.auto_speculation.pieces import Measurement, Piece, PieceFile
from benchmarks.auto_speculation.workloads import Request, Workload
from forerun import LLM
from forerun.bench.compare import make_engine
from forerun.bench.instruments import BandwidthProbe, Clock, Progress, Stopwatch, no_progress, read_by_torch
from forerun.bench.outcomes import PLAIN
from forerun.config.settings import EngineSettings
from forerun.models.base import LoadedTarget

NUM_WARMUP_TOKENS = 64

Configs = Mapping[str, Mapping[str, Any]]
"""Name -> speculative_config; plain decoding is not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A piece that is to be measured: one round of a workload with plain decoding and these configurations."""

    workload: str
    round: int
    configs: tuple[str, ...]


def plan_turns(
    workloads: Sequence[str], configs: Sequence[str], *, judged: str, rounds: int, static_at_once: int
) -> Iterator[Turn]:
    """All pieces of a run; each holds plain decoding, the judged configuration and `static_at_once` of the others.

    A whole round with every workload comes before the next one, so that a run that stops early has
    a bit of everything.
    """
    others = [name for name in configs if name != judged]
    for number in range(rounds):
        for workload in workloads:
            for start in range(0, max(1, len(others)), static_at_once):
                some = others[start : start + static_at_once]
                yield Turn(workload=workload, round=number, configs=(PLAIN, judged, *some))


def is_done(turn: Turn, pieces: Sequence[Piece], *, num_groups: int) -> bool:
    """Whether a piece of the file is this one."""
    return any(
        (piece.workload, piece.round, (*piece.configs,), piece.num_groups)
        == (turn.workload, turn.round, turn.configs, num_groups)
        for piece in pieces
    )


@dataclass(slots=True, kw_only=True)
class Runner:
    """Measures turns on engines over one target's weights, and adds them to a file.

    Every piece has engines of its own, so that nothing learnt in one helps in another.
    """

    target: LoadedTarget
    settings: EngineSettings
    configs: Configs
    file: PieceFile
    circumstances: dict[str, Any]
    progress: Progress = no_progress
    clock: Clock = time.perf_counter

    def run(self, turns: Sequence[Turn], make: Callable[[str], Workload], *, seconds: float = float("inf")) -> int:
        """Measure those turns that the file does not hold; none begins after `seconds`.

        Returns the number of turns that are still to be measured.

        Raises:
            ForerunError: the file has pieces measured otherwise, or a configuration does not fit the target.
        """
        self.file.check(self.circumstances, {PLAIN: None, **self.configs})
        start = self.clock()
        num_left = 0
        for turn in turns:
            workload = make(turn.workload)
            if is_done(turn, self.file.read(), num_groups=len(workload.groups)):
                continue
            if self.clock() - start >= seconds:
                num_left += 1
            else:
                self.file.add(self.measure(turn, workload), self.circumstances)
        return num_left

    def measure(self, turn: Turn, workload: Workload) -> Piece:
        """Answer every group with every configuration, in reverse order for every other group."""
        engines = {name: self._engine(name, workload) for name in turn.configs}
        plain = engines[PLAIN]
        read = plain.kernels.read if plain.kernels else read_by_torch
        bandwidth = BandwidthProbe(Stopwatch(plain.device, self.clock), read=read).measure()
        self._warm_up(engines, workload)
        measurements: list[Measurement] = []
        for number, group in enumerate(workload.groups):
            self.progress(
                f"{workload.name}, round {turn.round + 1}, {len(turn.configs)} configurations: "
                f"group {number + 1} of {len(workload.groups)}"
            )
            found = self._answer(engines, group, is_reversed=(turn.round + number) % 2 == 1)
            measurements += [
                Measurement.of(found[name], group=number, config=name, plain=found[PLAIN]) for name in engines
            ]
        return Piece(
            workload=workload.name,
            round=turn.round,
            configs={name: self._config(name) for name in turn.configs},
            num_groups=len(workload.groups),
            num_running=workload.num_running,
            gigabytes_per_second=bandwidth / 1e9,
            measurements=measurements,
        )

    def _engine(self, name: str, workload: Workload) -> LLM:
        settings = replace(self.settings, max_num_seqs=workload.num_running)
        return make_engine(
            name,
            self.target,
            settings,
            self._config(name),
            num_sequences=workload.num_running,
            longest=workload.longest,
        )

    def _config(self, name: str) -> dict[str, Any] | None:
        return None if name == PLAIN else {**self.configs[name]}

    def _answer(self, engines: Mapping[str, LLM], group: Sequence[Request], *, is_reversed: bool) -> dict[str, Answers]:
        names = list(engines)[::-1] if is_reversed else list(engines)
        return {name: answer(engines[name], group, salt="measured", clock=self.clock) for name in names}

    def _warm_up(self, engines: Mapping[str, LLM], workload: Workload) -> None:
        """Answer a batch with a few tokens each."""
        batch = workload.groups[0][: workload.num_running]
        short = [
            replace(request, sampling=replace(request.sampling, max_tokens=NUM_WARMUP_TOKENS)) for request in batch
        ]
        for name, llm in engines.items():
            self.progress(f"{workload.name}: warming up {name}")
            answer(llm, short, salt="warm-up", clock=self.clock)
