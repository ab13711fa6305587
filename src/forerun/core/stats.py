"""Counts of drafting and verifying, and the time of each phase of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from forerun.core.draft import NO_DRAFT, Draft

PHASES = ("schedule", "build", "launch", "forward", "wait", "verify", "commit", "draft")
"""The phases of a step, in order."""


PREDICTION = "prediction"
"""The `source` of drafts that are taken from the text that a client expects."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts over verified steps of one sequence, or the sum over many.

    A step is one sequence getting one verdict, its draft possibly empty. Position i counts from 0:
    the i-th token after the last committed one (a tree's position is a node's depth - 1). A
    position is *reached* when all before it were accepted and the draft went that far.
    `by_drafter` has the counts of the steps that each drafter drafted for, of a draft by several those of its own nodes.
    """

    num_steps: int = 0
    num_drafts: int = 0  # steps with a non-empty draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    reached_per_position: list[int] = field(default_factory=list)
    by_drafter: dict[str, SpeculationStats] = field(default_factory=dict)  # by its `source`

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None before the first draft."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, bonus included: 1 + accepted / steps; None before the first step."""
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts whose token at each position was accepted (vLLM's per-position rate)."""
        return [a / self.num_drafts for a in self.accepted_per_position]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Acceptance at each position given that it was reached."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted_per_position, self.reached_per_position, strict=True)]

    @property
    def drafted_per_step(self) -> dict[str, float]:
        """Mean draft tokens of each drafter over all steps, those of others included: the rows that it costs a step."""
        return {name: counts.num_draft_tokens / self.num_steps for name, counts in self.by_drafter.items()}

    @property
    def gained_per_step(self) -> dict[str, float]:
        """Mean accepted tokens of each drafter over all steps: its share of `acceptance_length`, whose rest is 1."""
        return {name: counts.num_accepted_tokens / self.num_steps for name, counts in self.by_drafter.items()}

    def record(self, draft: Draft, accepted: Sequence[int], *, times: int = 1) -> None:
        """Count a verdict, or `times` equal ones: the nodes `accepted` of `draft`, from the root down, stood."""
        if draft is NO_DRAFT:
            self.num_steps += times
            return
        num_drafted, num_accepted = len(draft.token_ids), len(accepted)
        depth, went_on = draft.depth, num_drafted > 0 and not draft.is_leaf(accepted[-1] if accepted else -1)
        self._count(num_drafted, num_accepted, depth, times, went_on=went_on)
        if draft.sources is not None:
            self._record_each(draft, draft.sources, accepted, times)
        elif draft.source is not None:
            self._of_drafter(draft.source)._count(num_drafted, num_accepted, depth, times, went_on=went_on)

    def _of_drafter(self, source: str) -> SpeculationStats:
        found = self.by_drafter.get(source)
        if found is None:
            found = self.by_drafter[source] = SpeculationStats()
        return found

    def _record_each(self, draft: Draft, sources: Sequence[str], accepted: Sequence[int], times: int) -> None:
        """Count for each drafter its own nodes of one draft, at their depths; reached are those whose parents stood."""
        stood, depths = set(accepted), draft.depths()
        for source in dict.fromkeys(sources):
            own = [node for node, drafter in enumerate(sources) if drafter == source]
            reached = {depths[node] for node in own if draft.parent(node) < 0 or draft.parent(node) in stood}
            counts = self._of_drafter(source)
            counts.num_steps += times
            counts.num_drafts += times
            counts.num_draft_tokens += times * len(own)
            counts._make_room(max(depths[node] for node in own))
            for depth in reached:
                counts.reached_per_position[depth - 1] += times
            for node in stood.intersection(own):
                counts.num_accepted_tokens += times
                counts.accepted_per_position[depths[node] - 1] += times

    def _count(self, num_drafted: int, num_accepted: int, depth: int, times: int, *, went_on: bool) -> None:
        """Count drafts of that depth, which went on behind what was accepted or did not."""
        self.num_steps += times
        if not num_drafted:
            return
        self.num_drafts += times
        self.num_draft_tokens += times * num_drafted
        self.num_accepted_tokens += times * num_accepted
        reached, stood = self.reached_per_position, self.accepted_per_position
        self._make_room(depth)
        for position in range(num_accepted):
            reached[position] += times
            stood[position] += times
        if went_on:
            reached[num_accepted] += times

    def _make_room(self, depth: int) -> None:
        """Let there be counts of so many positions."""
        num_missing = depth - len(self.reached_per_position)
        if num_missing > 0:
            self.reached_per_position.extend([0] * num_missing)
            self.accepted_per_position.extend([0] * num_missing)

    def add(self, other: SpeculationStats, *, sign: int = 1) -> None:
        """Add the counts of `other` to these (`sign` -1: take them away)."""
        self.num_steps += sign * other.num_steps
        self.num_drafts += sign * other.num_drafts
        self.num_draft_tokens += sign * other.num_draft_tokens
        self.num_accepted_tokens += sign * other.num_accepted_tokens
        self._make_room(len(other.reached_per_position))
        for position, count in enumerate(other.reached_per_position):
            self.reached_per_position[position] += sign * count
            self.accepted_per_position[position] += sign * other.accepted_per_position[position]
        for drafter, counts in other.by_drafter.items():
            self.by_drafter.setdefault(drafter, SpeculationStats()).add(counts, sign=sign)

    def copy(self) -> SpeculationStats:
        """The same counts, apart from these."""
        counts = SpeculationStats()
        counts.add(self)
        return counts

    def since(self, earlier: SpeculationStats) -> SpeculationStats:
        """What was counted after `earlier` was copied from these."""
        counts = self.copy()
        counts.add(earlier, sign=-1)
        return counts


@dataclass(slots=True)
class PredictionCounts:
    """What became of the tokens that were drafted from a client's prediction, in OpenAI's terms.

    An accepted token stands in the text. A rejected one was verified and does not: the target chose
    another, or a stop rule cut the text before it.
    """

    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Which executor computes the steps, on which device, and with which kernels."""

    name: str
    device: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.name} on {self.device} ({self.kernels})"


@dataclass(slots=True)
class StepTimes:
    """Seconds spent in each phase of a step, or the sum over many steps.

    Where a GPU computes the whole step by itself, the host is busy with other steps meanwhile. Then `forward` is by the GPU's own
    clock, from where it is launched to its end (what is sent before counts as idle), `launch` and `wait` are the host's part
    of it, and `idle` are the seconds in which the GPU had nothing to do before the step, though sequences were waiting for it.
    """

    schedule: float = 0.0  # choose sequences and rows, reserve KV
    build: float = 0.0  # tensors of the forward pass
    launch: float = 0.0  # hand the step to a device that computes it alone
    forward: float = 0.0
    wait: float = 0.0  # for the result of such a step
    verify: float = 0.0  # sampling rules, sampling, acceptance
    commit: float = 0.0  # append tokens, stop rules, text, KV accounting
    draft: float = 0.0
    idle: float = 0.0  # of the device; no phase, as it may lie in any of them
    num_steps: int = 0
    num_replayed_steps: int = 0  # of these, by a CUDA graph

    @property
    def spent(self) -> float:
        """Seconds that a step takes before the next one can be under way, drafting aside.

        Where a device computes it alone it is those of the device, which waits for the host only while it is idle.
        """
        if self.launch:
            return self.forward + max(0.0, self.idle - self.draft)
        return self.schedule + self.build + self.forward + self.verify

    @property
    def host_overhead(self) -> float:
        """Seconds of the host's own work, drafting aside."""
        return self.schedule + self.build + self.launch + self.verify + self.commit

    @property
    def milliseconds_per_step(self) -> dict[str, float]:
        """Mean milliseconds of each phase; empty before the first step."""
        return {phase: 1e3 * getattr(self, phase) / self.num_steps for phase in PHASES} if self.num_steps else {}

    def since(self, earlier: StepTimes) -> StepTimes:
        """What was added after `earlier` was copied from these."""
        return StepTimes(**{one.name: getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)})

    def add(self, other: StepTimes) -> None:
        """Add the times of `other` to these."""
        self.schedule += other.schedule
        self.build += other.build
        self.launch += other.launch
        self.forward += other.forward
        self.wait += other.wait
        self.verify += other.verify
        self.commit += other.commit
        self.draft += other.draft
        self.idle += other.idle
        self.num_replayed_steps += other.num_replayed_steps
        self.num_steps += other.num_steps
