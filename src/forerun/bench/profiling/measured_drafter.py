"""What a profile knows of a drafter: what it costs in an engine, and what of its drafts stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from forerun.bench.compare import make_engine
from forerun.bench.instruments import Clock, Progress, no_progress
from forerun.bench.profiling.drafting import measure_drafting_cost, measure_live
from forerun.bench.profiling.stages import digest
from forerun.bench.profiling.traces import trace_drafts
from forerun.bench.recording import Recording
from forerun.config.kv_memory import kv_bytes_of
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_trace import DraftTrace
from forerun.plan.profile import TRACES_FOLDER
from forerun.plan.step_times import DraftingCost, StepTimeModel

CHECKED_TOKENS = 64  # room for these is enough to make an engine


def drafter_stage(name: str) -> str:
    """By the configuration's name, in letters that any file may have: their order may be another when a profile goes on."""
    return f"drafter-{digest(name)}"


class MeasuredDrafter(NamedTuple):
    """What was measured of a drafter: its cost, its acceptance by class of prompts, its trace's place in the folder.

    `block_bytes` is what it adds to each KV block, `scratch_bytes` what blocks take that its drafts alone are written to; None where
    an older forerun measured it.
    """

    cost: DraftingCost
    acceptance: dict[str, AcceptanceProfile]
    trace: str | None
    block_bytes: int | None
    scratch_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """The record that `from_json` reads."""
        acceptance = {key: one.to_json() for key, one in self.acceptance.items()}
        return self._asdict() | {"cost": self.cost.to_json(), "acceptance": acceptance}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> MeasuredDrafter:
        """What `to_json` gave."""
        acceptance = {key: AcceptanceProfile.from_json(one) for key, one in record["acceptance"].items()}
        return cls(
            DraftingCost.from_json(record["cost"]),
            acceptance,
            record["trace"],
            record.get("block_bytes"),
            record.get("scratch_bytes"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterMeasurement:
    """Measures drafters on a profile's recorded texts.

    Args:
        target: the model that wrote them.
        settings: of an engine; KV memory follows from the texts.
        recording: the texts.
        step_times: what steps take, drafting left out.
        folder: of the profile; it gets the traces.
        progress: is called with the state of the work.
        clock: times the steps.
    """

    target: LoadedTarget
    settings: EngineSettings
    recording: Recording
    step_times: StepTimeModel
    folder: Path
    progress: Progress = no_progress
    clock: Clock = time.perf_counter

    def measure(self, name: str, config: Mapping[str, Any]) -> MeasuredDrafter:
        """A drafter's cost in an engine; its acceptance by its trace, or where texts do not decide it, in an engine.

        Raises:
            ForerunError: the configuration (named in the message) does not fit the model.
        """
        target, recording, progress = self.target, self.recording, self.progress
        running = replace(self.settings, pools_folder=None)  # where these answers would take the place of users'
        trace = trace_drafts(
            name,
            config,
            recording,
            target,
            self.settings,
            step_times=self.step_times,
            progress=progress,
        )
        cost = measure_drafting_cost(
            name, target, running, config, recording.texts, self.step_times, progress=progress, clock=self.clock
        )
        kinds = list(recording.by_kind)
        where: str | None = None
        if trace is not None:
            where = f"{TRACES_FOLDER}/{digest(name)}.npz"
            (self.folder / TRACES_FOLDER).mkdir(exist_ok=True)
            trace.save(self.folder / where)
            acceptance = {name: _acceptance(trace)} | _by_kind(name, kinds, trace)
        else:
            num_tokens = recording.info.max_tokens
            live = measure_live(
                name, target, running, config, recording.texts, num_tokens=num_tokens, progress=progress
            )
            acceptance = {name: live.acceptance()}
            acceptance |= {f"{name}/{kind}": live.acceptance(kind) for kind in kinds}
        return MeasuredDrafter(cost, acceptance, where, *self._memory(name, config))

    def _memory(self, name: str, config: Mapping[str, Any]) -> tuple[int, int]:
        """What a drafter adds to each KV block, and what blocks take that its drafts alone are written to."""
        llm = make_engine(name, self.target, self.settings, config, num_sequences=1, longest=CHECKED_TOKENS)
        ranks = self.target.ranks
        taken = kv_bytes_of(
            self.target.model,
            llm.executor.drafting.drafter,
            block_size=self.settings.block_size,
            num_kv_heads=None if ranks is None else ranks.num_kv_heads,
        )
        return taken.drafter_block, taken.scratch


def _acceptance(trace: DraftTrace, kind: str | None = None) -> AcceptanceProfile:
    """What stands of drafts as long as the answers can judge: these must go on for two tokens more."""
    return trace.acceptance(trace.longest_judged(kind), kind=kind)


def _by_kind(name: str, kinds: Sequence[str], trace: DraftTrace) -> dict[str, AcceptanceProfile]:
    """Acceptance by class of prompts; classes whose texts are too short for a draft have none."""
    found = {}
    for kind in kinds:
        try:
            found[f"{name}/{kind}"] = _acceptance(trace, kind)
        except ConfigError:
            continue
    return found
