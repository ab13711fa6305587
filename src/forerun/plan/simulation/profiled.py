"""The engine that a profile describes, ready to be simulated: its step times, its limits, and how one configuration drafts."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from forerun.core.random_bits import key_of
from forerun.core.step import SequenceSpec, StepPlan
from forerun.engine.adaptive import AdaptiveLength
from forerun.engine.simulation import DecodeSeconds, SimulationSettings
from forerun.engine.speculation import FixedLength, SpeculationControl
from forerun.errors import ConfigError, did_you_mean
from forerun.executor.simulated import DraftSeconds, drafting_is_free
from forerun.executor.simulated_text import NOTHING_DRAFTED, ConditionalAcceptance, Drafted, Drafting, DraftShape
from forerun.plan.draft_trace import DraftTrace
from forerun.plan.drafter_memory import num_blocks
from forerun.plan.profile import PLAIN, SCHEDULE, Profile, chooses_lengths
from forerun.plan.simulation.arrivals import Floats
from forerun.plan.simulation.fleet import Fleet, request_seed
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.simulation.result import SimulationResult
from forerun.plan.simulation.simulate import ONE_REPLICA, simulate
from forerun.plan.step_times import FREE_DRAFTING, DraftingCost, StepShape, StepTimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """Seconds by which a server around the engine makes its steps longer: for new requests, steps that write, and their chunks.

    Server and engine share a processor, and a profile that was made in one process does not know what the server takes.
    Reading a request takes longer while the engine computes, since both want the same cores: `seconds_per_idle_request` is
    for requests that come while it computes nothing; None: they take as long as any other.

    Raises:
        ConfigError: one is negative or not finite.
    """

    seconds_per_request: float = 0.0
    seconds_per_step: float = 0.0
    seconds_per_chunk: float = 0.0
    seconds_per_idle_request: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ConfigError(f"{one.name}: got {value:g}; must be a number, at least 0")

    def of_requests(self, num_new: int, num_sequences: int) -> float:
        """Seconds that `num_new` requests add to the step of `num_sequences` that begins with them.

        Where all sequences are new, the engine computed nothing before.
        """
        per_request = self.seconds_per_request
        if num_new == num_sequences and self.seconds_per_idle_request is not None:
            per_request = self.seconds_per_idle_request
        return per_request * num_new

    def of_step(self, num_chunks: int) -> float:
        """Seconds that streaming so many chunks adds to a step."""
        return self.seconds_per_step + self.seconds_per_chunk * num_chunks if num_chunks else 0.0


NOT_SERVED = ServingCost()
"""The engine in a process of its own."""


@dataclass(slots=True)
class LargestStep:
    """The most that any step of a simulation had of what its time depends on; prompts' rows count apart."""

    num_rows: int = 0
    num_sequences: int = 0
    num_context_tokens: int = 0
    prompt_rows: int = 0

    def note(self, num_rows: int, num_sequences: int, num_context_tokens: int, prompt_rows: int = 0) -> None:
        """Note a step."""
        if num_rows > self.num_rows:
            self.num_rows = num_rows
        if num_sequences > self.num_sequences:
            self.num_sequences = num_sequences
        if num_context_tokens > self.num_context_tokens:
            self.num_context_tokens = num_context_tokens
        if prompt_rows > self.prompt_rows:
            self.prompt_rows = prompt_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledEngine:
    """An engine to simulate, and what makes the control of draft lengths of each replica.

    `longest` is the most nodes of a draft that are known of its configuration, `largest` the largest step of all
    simulations with it so far.
    """

    settings: SimulationSettings
    longest: int
    largest: LargestStep
    make_control: Callable[[], SpeculationControl]
    trace: DraftTrace | None = None  # None: acceptance comes from rates, or nothing is drafted
    watts: float | None = None  # of an engine that steps; None: nobody knows
    idle_watts: float = 0.0  # of one that does not

    def simulate(
        self,
        requests: Sequence[SimulatedRequest],
        *,
        fleet: Fleet = ONE_REPLICA,
        seed: int = 0,
        keeps_chunks: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> SimulationResult:
        """Serve requests in virtual time; those that name a text repeat it. See `simulate`."""
        settings = self.settings
        if isinstance(settings.drafting, TracedDrafting):
            settings = replace(settings, drafting=settings.drafting.follow(requests, seed=seed))
        found = simulate(
            settings,
            requests,
            fleet=fleet,
            make_control=self.make_control,
            seed=seed,
            keeps_chunks=keeps_chunks,
            progress=progress,
        )
        if self.watts is None:
            return found
        busy = sum(one.busy_seconds for one in found.replicas)
        idle = found.engine_seconds(since=found.start, until=found.start + found.seconds) - busy
        return replace(found, energy_joules=busy * self.watts + idle * self.idle_watts)


def profiled_engine(
    profile: Profile,
    name: str = PLAIN,
    *,
    kind: str | None = None,
    gigabytes_per_second: float | None = None,
    serving: ServingCost = NOT_SERVED,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> ProfiledEngine:
    """The engine of a profile with one of its configurations.

    A configuration of which the profile has a trace drafts what its drafter would at each place of recorded
    texts; else drafts stand at the profile's rates.

    Args:
        profile: what was measured.
        name: of the configuration; "plain" drafts nothing.
        kind: class of prompts whose acceptance counts; None: all.
        gigabytes_per_second: what the machine's memory gives now; reading weights and context takes as much longer
            than in the profile as that is less. None: as in the profile.
        serving: what a server around it takes.
        max_num_seqs, max_num_batched_tokens: other limits than the profile's.

    Raises:
        ConfigError: the profile has no such configuration or class, or the engine would refuse the limits.
    """
    step_times = profile.steps_of(None if name == PLAIN else name)
    if gigabytes_per_second is not None:
        step_times = step_times.scaled(memory=_memory_factor(profile, gigabytes_per_second))
    drafting, trace, longest, cost = None, None, 0, FREE_DRAFTING
    config: Mapping[str, Any] | None = None
    if name != PLAIN:
        if name not in profile.configs:
            raise ConfigError(f"config: got {name!r}{did_you_mean(name, [PLAIN, *profile.configs])}")
        config = profile.configs[name]
        cost = profile.drafting.get(name, FREE_DRAFTING)
        drafting, trace, longest = _drafting(profile, name, kind)
    max_num_seqs = profile.max_num_seqs if max_num_seqs is None else max_num_seqs
    if max_num_batched_tokens is None:
        max_num_batched_tokens = profile.max_num_batched_tokens
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens: got {max_num_batched_tokens}; must be at least max_num_seqs ({max_num_seqs}), one for each "
            "sequence: raise it, or lower max_num_seqs"
        )
    largest, blocks = LargestStep(), num_blocks(profile, config)
    settings = SimulationSettings(
        step_seconds=step_seconds(step_times, serving, largest),
        decode_seconds=decode_seconds(step_times, serving, largest),
        draft_seconds=draft_seconds(cost),
        drafting=drafting,
        vocab_size=profile.vocab_size,
        num_blocks=blocks,
        block_size=profile.block_size,
        max_model_len=min(profile.max_model_len, blocks * profile.block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return ProfiledEngine(
        settings=settings,
        longest=longest,
        largest=largest,
        make_control=lambda: (
            FixedLength(num_speculative_tokens=longest) if name in profile.served_steps else control_of(config, longest)
        ),
        trace=trace,
        watts=profile.watts,
        idle_watts=profile.idle_watts or 0.0,
    )


def control_of(config: Mapping[str, Any] | None, longest: int) -> SpeculationControl:
    """A fresh control of draft lengths, as a `speculative_config` asks for it.

    Args:
        config: the configuration; None: nothing is drafted.
        longest: the longest draft that is known of it.
    """
    if config is None:
        return FixedLength(num_speculative_tokens=0)
    num_tokens = min(config.get("num_speculative_tokens", longest), longest)
    if chooses_lengths(config):
        return AdaptiveLength(num_tokens)
    schedule = config.get(SCHEDULE) or ()
    return FixedLength(num_speculative_tokens=num_tokens, schedule=tuple(sorted(map(tuple, schedule))))


def step_seconds(step_times: StepTimeModel, serving: ServingCost, largest: LargestStep) -> Callable[[StepPlan], float]:
    """What a planned step takes: computed, and served; the largest one is noted."""

    def seconds(plan: StepPlan) -> float:
        shape = StepShape.of_plan(plan)
        largest.note(*shape[:4])
        computed = step_times.of_shape(shape)
        if serving == NOT_SERVED:
            return computed
        num_chunks = sum([one.reaches_end for one in plan.sequences])
        return computed + serving.of_step(num_chunks) + serving.of_requests(len(plan.new), len(plan.sequences))

    return seconds


def decode_seconds(step_times: StepTimeModel, serving: ServingCost, largest: LargestStep) -> DecodeSeconds:
    """What `step_seconds` says of steps in which nobody reads a prompt."""

    def seconds(num_rows: int, num_sequences: int, num_context_tokens: int) -> float:
        largest.note(num_rows, num_sequences, num_context_tokens)
        computed = step_times.seconds(
            num_rows=num_rows, num_sequences=num_sequences, num_context_tokens=num_context_tokens
        )
        return computed + serving.of_step(num_sequences)

    return seconds


def draft_seconds(cost: DraftingCost) -> DraftSeconds:
    """What a measured cost of drafting says of a step."""
    return drafting_is_free if cost == FREE_DRAFTING else cost.seconds


def _memory_factor(profile: Profile, gigabytes_per_second: float) -> float:
    """How many times as long reading from memory takes as in the profile.

    Raises:
        ConfigError: the profile does not say its bandwidth, or the one given is not above 0.
    """
    if profile.gigabytes_per_second is None or not gigabytes_per_second > 0:
        raise ConfigError(
            f"gigabytes_per_second: got {gigabytes_per_second:g}, and the profile has {profile.gigabytes_per_second}; both "
            "must be above 0: probe the memory, or leave it out"
        )
    return profile.gigabytes_per_second / gigabytes_per_second


def _drafting(profile: Profile, name: str, kind: str | None) -> tuple[Drafting, DraftTrace | None, int]:
    """How a configuration drafts, as its trace says, else at its rates; the trace; and the tokens of its longest draft."""
    if name in profile.traces:
        trace = profile.trace(name)
        return TracedDrafting(trace, kind=kind), trace, trace.num_speculative_tokens
    found = profile.acceptance_for(name, kind)
    return ConditionalAcceptance(found.conditional, found.proposed), None, len(found.conditional)


class TracedDrafting:
    """The drafts that a drafter made at each place of recorded texts.

    A request that repeats a recorded text meets exactly its drafts. Any other one meets at each place those of the
    same place in a text of its class that is chosen by its seed, and behind that text's end those of another,
    longer one.

    Args:
        trace: the drafts.
        kind: class of the texts that requests without a class meet; None: all.
        requests: by their seeds; None: `follow` will say.

    Raises:
        ConfigError: no text of a class that requests meet has a draft.
    """

    def __init__(
        self,
        trace: DraftTrace,
        *,
        kind: str | None = None,
        requests: Mapping[int | None, SimulatedRequest] | None = None,
    ) -> None:
        self._trace = trace
        self._kind = kind
        self._requests = {} if requests is None else requests
        met = [one.kind or kind for one in self._requests.values() if one.text is None]
        kinds = {kind} if requests is None else set(met)
        self._texts = {found: _RecordedTexts.of(trace, found) for found in sorted(kinds, key=str)}

    @classmethod
    def repeating(cls, trace: DraftTrace) -> TracedDrafting:
        """For requests that repeat the recorded texts, each with its text's number as its seed."""
        requests: dict[int | None, SimulatedRequest] = {
            text: SimulatedRequest(
                arrival=0.0,
                num_prompt_tokens=trace.num_prompt_tokens[text].item(),
                num_output_tokens=trace.num_answer_tokens(text),
                text=text,
            )
            for text in range(trace.num_texts)
        }
        return cls(trace, requests=requests)

    def follow(self, requests: Sequence[SimulatedRequest], *, seed: int) -> TracedDrafting:
        """The same for a simulation of these requests with this seed."""
        by_seed: dict[int | None, SimulatedRequest] = {
            request_seed(seed, number): one for number, one in enumerate(requests)
        }
        return TracedDrafting(self._trace, kind=self._kind, requests=by_seed)

    def draft(self, spec: SequenceSpec, position: int, *, limit: int, depth: int, min_survival: float) -> Drafted:
        """See `Drafting`."""
        request = self._requests[spec.sampling.seed]
        place = position - request.num_prompt_tokens
        if request.text is None:
            text, place = self._texts[request.kind or self._kind].at(place, key_of(spec.seed))
        else:
            text = request.text
        draft = self._trace.draft(text, place)
        if draft.survival is not None and draft.survival and draft.survival[-1] < min_survival:
            limit = min(limit, _num_likely(draft.survival, min_survival))
        draft = draft.within(limit=limit, depth=depth)
        if not draft.num_nodes:
            return NOTHING_DRAFTED
        shape = DraftShape(draft.num_nodes, draft.parents, draft.survival, draft.source)
        return Drafted(shape, draft.right_nodes)


@dataclass(frozen=True, slots=True)
class _RecordedTexts:
    """The recorded texts of a class of prompts, the shortest answer first."""

    numbers: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, trace: DraftTrace, kind: str | None) -> _RecordedTexts:
        """Those with more than the token that the prompt's own step writes."""
        lengths = {number: trace.num_answer_tokens(number) for number in trace.texts_of(kind)}
        numbers = sorted((number for number, length in lengths.items() if length > 1), key=lengths.__getitem__)
        if not numbers:
            raise ConfigError(
                f"trace of {trace.name}: has no text of class {kind!r}{did_you_mean(str(kind), sorted(set(trace.kinds)))}"
            )
        return cls(numbers, [lengths[number] for number in numbers])

    def at(self, place: int, key: int) -> tuple[int, int]:
        """The text and its place that stand for a place of an answer; places of no text are those from the first on again."""
        chosen = key % len(self.numbers)
        if place < self.lengths[chosen]:
            return self.numbers[chosen], place
        place = 1 + (place - 1) % (self.lengths[-1] - 1)
        shorter = bisect_right(self.lengths, place)
        return self.numbers[shorter + key % (len(self.numbers) - shorter)], place


def _num_likely(survival: Sequence[float], least: float) -> int:
    """How many of falling chances are at least so high."""
    return bisect_right(survival, -least, key=lambda chance: -chance)


def recorded_requests(
    trace: DraftTrace, times: Floats, *, kind: str | None = None, seed: int = 0
) -> list[SimulatedRequest]:
    """Requests that repeat recorded texts, in random order, each once before any comes twice.

    Args:
        trace: of the texts.
        times: when they arrive.
        kind: class of prompts; None: all.
        seed: of the order.
    """
    numbers = trace.texts_of(kind)
    if not numbers:
        raise ConfigError(
            f"trace of {trace.name}: got class {kind!r}{did_you_mean(str(kind), sorted(set(trace.kinds)))}"
        )
    source = random.Random(seed)
    order: list[int] = []
    while len(order) < len(times):
        order += source.sample(numbers, len(numbers))
    return [
        SimulatedRequest(
            arrival=arrival,
            num_prompt_tokens=(num_prompt := trace.num_prompt_tokens[text].item()),
            num_output_tokens=trace.num_answer_tokens(text),
            piece_hashes=(text,),
            piece_size=num_prompt,
            text=text,
        )
        for arrival, text in zip(times.tolist(), order, strict=False)
    ]
