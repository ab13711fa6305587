"""Judges drafters on recorded texts, in seconds: under matching, what stands of a draft depends on the text alone.

A drafter that learns from the target is shown the recorded candidates of the rows on the text's path.
What the target would have said after drafted tokens that did not stand is not recorded, so such a drafter
knows a little less here than in an engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from forerun.bench.instruments import Clock
from forerun.bench.pass_costs import PassCosts
from forerun.bench.recording import RecordedText, Recording
from forerun.config.speculative_config import resolve_speculative
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence as TokenSequence
from forerun.core.stats import SpeculationStats, StepTimes
from forerun.core.step import StepRecord
from forerun.drafters.base import DraftRequest, TargetInfo, VerifiedRows, computes_with_a_model
from forerun.drafters.guard import GuardedDrafter
from forerun.engine.speculation import SpeculationControl
from forerun.errors import ConfigError, ForerunError
from forerun.models.base import LoadedTarget
from forerun.verify.matching import MatchingConfig, match

DRAFTING = 0.005
"""Cost of a draft, in passes over one row, where nobody knows how long such a pass takes."""

PASS_SECONDS = 0.005
"""How long it takes then, as far as the control of draft lengths can see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTarget(TargetInfo):
    """What a drafter knows of a target of which there is only a recording."""

    @property
    def itself(self) -> LoadedTarget:
        """There is none."""
        raise ConfigError(
            "the drafter computes with a model, whose passes are not recorded; "
            "give methods that draft from the text alone, or use forerun profile, where the model reads the texts too"
        )


@dataclass(slots=True)
class ReplayedText:
    """The steps that write one text after its first token."""

    num_tokens: int  # after the first
    rows: list[int] = field(default_factory=list)  # of each step
    drafting: list[float] = field(default_factory=list)  # cost of each draft that was asked for, in passes
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    drafting_seconds: float = 0.0

    def speed_up(self, costs: PassCosts) -> float:
        """Over plain decoding, prefill left out."""
        return self.num_tokens / self.passes(costs)

    def passes(self, costs: PassCosts) -> float:
        """The cost of all steps, in passes over one row."""
        return sum(map(costs.of, self.rows)) + sum(self.drafting)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """What one configuration gains on one kind of texts.

    Speed-ups are over plain decoding at the assumed costs, without prefill: of all texts together, of the
    median text, of the worst one.
    """

    kind: str
    name: str
    speculative: str
    num_texts: int
    tokens_per_step: float
    rows_per_step: float
    speed_up: float
    median_speed_up: float
    worst_speed_up: float
    worst_text: int  # its number within its kind
    drafting_microseconds: float  # of a step, measured
    num_failed_drafts: int
    speculation: SpeculationStats

    def to_json(self) -> dict[str, Any]:
        """All fields but `speculation`, as JSON."""
        figures = asdict(self)
        del figures["speculation"]
        return figures


def judge_recording(
    recording: Recording,
    configs: Mapping[str, Mapping[str, Any]],
    costs: PassCosts,
    *,
    clock: Clock = time.thread_time,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ReplayOutcome]:
    """Replay every configuration over every kind of texts.

    A drafter meets the texts of a kind one after the other, and begins each kind knowing nothing.

    Args:
        recording: the texts; those of one token have nothing to draft and are left out.
        configs: name -> speculative_config.
        costs: of a pass over the rows of one sequence.
        clock: times the drafters; by default it counts this thread's processor time, whatever else runs.
        progress: is called with the state of the work.

    Raises:
        ForerunError: a configuration is wrong or needs a model; the message names it.
    """
    outcomes = []
    for kind, texts in recording.by_kind.items():
        longer = [text for text in texts if len(text.answer_ids) > 1]
        if not longer:
            continue
        for name, config in configs.items():
            progress(f"{kind}: {name}")
            try:
                outcomes.append(_judge(name, config, longer, recording.info.vocab_size, costs, clock))
            except ForerunError as error:
                raise type(error)(f"{name}: {error}") from error
    return outcomes


def _judge(
    name: str,
    config: Mapping[str, Any],
    texts: Sequence[RecordedText],
    vocab_size: int,
    costs: PassCosts,
    clock: Clock,
) -> ReplayOutcome:
    speculative = resolve_speculative(config)
    if not isinstance(speculative.verifier, MatchingConfig):
        raise ConfigError(
            f"rejection_sample_method: got {config.get('rejection_sample_method')!r}; what stands is replayed as matching has it, "
            "which is the default: leave it out, or use forerun bench compare"
        )
    longest = max(len(text.prompt_ids) + len(text.answer_ids) for text in texts)
    target = RecordedTarget(
        vocab_size=vocab_size, max_model_len=longest, num_speculative_tokens=speculative.num_speculative_tokens
    )
    drafting = GuardedDrafter(speculative.drafter.build(target), vocab_size=vocab_size, source=speculative.method)
    if computes_with_a_model(drafting.drafter):
        raise ConfigError(
            "the drafter reads hidden states of the target, or keeps KV beside its, which are not recorded; leave it out, or use "
            "forerun bench compare"
        )
    steps_clock = StepsClock(clock)
    drafting.use_clock(steps_clock)
    replayer = Replayer(drafting, speculative.control(), costs, steps_clock)
    found = [replayer.replay(text, number) for number, text in enumerate(texts)]
    speculation = SpeculationStats()
    for one in found:
        speculation.add(one.speculation)
    speed_ups = [one.speed_up(costs) for one in found]
    num_steps = sum(len(one.rows) for one in found)
    return ReplayOutcome(
        kind=texts[0].kind,
        name=name,
        speculative=speculative.describe(),
        num_texts=len(texts),
        tokens_per_step=sum(one.num_tokens for one in found) / num_steps,
        rows_per_step=sum(sum(one.rows) for one in found) / num_steps,
        speed_up=sum(one.num_tokens for one in found) / sum(one.passes(costs) for one in found),
        median_speed_up=statistics.median(speed_ups),
        worst_speed_up=min(speed_ups),
        worst_text=speed_ups.index(min(speed_ups)),
        drafting_microseconds=1e6 * sum(one.drafting_seconds for one in found) / num_steps,
        num_failed_drafts=drafting.num_failures,
        speculation=speculation,
    )


@dataclass(slots=True)
class StepsClock:
    """The clock of an engine whose steps take what is added to `passed`; a draft takes what it takes in `real` time."""

    real: Clock = time.thread_time
    passed: float = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.real() + self.passed


@dataclass(frozen=True, slots=True)
class Replayer:
    """Writes recorded texts in an engine's steps, with its own drafter and its own control of draft lengths.

    The control, and a drafter that goes by `clock`, see steps that take what `costs` say; `clock` times the drafter.
    """

    drafting: GuardedDrafter
    control: SpeculationControl
    costs: PassCosts
    clock: StepsClock = field(default_factory=StepsClock)

    def replay(self, text: RecordedText, number: int = 0) -> ReplayedText:
        """The steps that write a text of two tokens or more, as sequence `number`."""
        answer = text.answer_ids
        sequence = TokenSequence(
            seq_id=number,
            prompt_ids=text.prompt_ids,
            output_ids=[],
            sampling=SamplingParams(temperature=text.temperature),
            seed=number,
        )
        found, seconds = ReplayedText(len(answer) - 1), self.costs.seconds or PASS_SECONDS
        limit = self._limit(found, NO_DRAFT)
        draft = self._after_step(text, sequence, 0, found, limit)  # the first step reads the prompt
        while len(sequence.output_ids) < len(answer):
            num_context = len(sequence) - 1
            (length,) = self.control.choose([draft], num_rows=1, num_sequences=1, num_context_tokens=num_context)
            verified = draft.first(length)
            limit = self._limit(found, verified)
            accepted = standing_nodes(verified, answer, len(sequence.output_ids))
            step_seconds = self.costs.of(1 + len(verified)) * seconds
            self.clock.passed += step_seconds
            found.rows.append(1 + len(verified))
            found.speculation.record(verified, accepted)
            num_before = len(found.drafting)
            draft = self._after_step(text, sequence, len(accepted), found, limit)
            drafting = found.drafting[num_before:]
            self.control.observe(
                StepRecord(
                    num_rows=1 + len(verified),
                    num_context_tokens=num_context,
                    num_asked=len(drafting),
                    verified=[(verified, tuple(accepted))],
                    times=StepTimes(forward=step_seconds, draft=sum(drafting) * seconds),
                )
            )
        self.drafting.stop(sequence)
        return found

    def _limit(self, found: ReplayedText, verifying: Draft) -> int:
        """The most nodes to draft in a step that is planned, before the fate of what it verifies is known."""
        return self.control.limit_of(found.speculation, self.control.draft_limit(1), verifying=verifying)

    def _after_step(
        self, text: RecordedText, sequence: TokenSequence, num_accepted: int, found: ReplayedText, limit: int
    ) -> Draft:
        """Commit a step's tokens, let the drafter learn from its rows, and draft at most `limit` nodes for the next one."""
        min_survival = self.control.min_survival
        done = len(sequence.output_ids)
        rows = rows_on_path(text, sequence, num_accepted, num_candidates=self.drafting.num_candidates)
        sequence.output_ids += text.answer_ids[done : done + num_accepted + 1]
        room = len(text.answer_ids) - len(sequence.output_ids)
        if not room:
            return NO_DRAFT
        start = self.clock()
        if self.drafting.num_candidates:
            self.drafting.learn(rows)
        self.drafting.start(sequence)
        # one place is the target's own token's: a draft deeper than the rest could never be used
        depth = min(limit, room - 1)
        draft = NO_DRAFT
        if depth:
            request = DraftRequest(sequence, limit, depth, min_survival=min_survival)
            (draft,) = self.drafting.propose([request], {})
        taken = self.clock() - start
        found.drafting_seconds += taken
        if depth:
            found.drafting.append(taken / self.costs.seconds if self.costs.seconds else DRAFTING)
        return draft


def drafts_from_text(config: Mapping[str, Any], vocab_size: int) -> bool:
    """Whether a configuration's drafter needs no model; one that is wrong in another way counts as one that does."""
    speculative = resolve_speculative(config)
    target = RecordedTarget(
        vocab_size=vocab_size, max_model_len=64, num_speculative_tokens=speculative.num_speculative_tokens
    )
    try:
        return not computes_with_a_model(speculative.drafter.build(target))
    except Exception:  # a class of the user's own may miss the model in any way
        return False


def rows_on_path(
    text: RecordedText, sequence: TokenSequence, num_accepted: int, *, num_candidates: int
) -> VerifiedRows:
    """The rows of a step that the text came to: the last committed token's, and those of accepted draft tokens."""
    first = len(sequence.output_ids)
    end = first + num_accepted + 1
    tokens = [*text.prompt_ids, *text.answer_ids[:end]]
    place = len(text.prompt_ids) + first  # of the first new token: its row is that of the token before
    previous = [-1, *tokens]
    return VerifiedRows(
        token_ids=np.array(tokens[place - 1 : place + num_accepted], dtype=np.int64),
        previous_ids=np.array(previous[place - 1 : place + num_accepted], dtype=np.int64),
        candidate_ids=text.candidate_ids[first:end, :num_candidates],
        candidate_logits=text.candidate_logprobs[first:end, :num_candidates],
        salts=[(0, num_accepted + 1, sequence.cache_salt)],
    )


def standing_nodes(draft: Draft, answer: list[int], done: int) -> tuple[int, ...]:
    """The nodes of a draft that matching accepts, from the root down, where `done` tokens of the answer are committed."""
    return match(draft, _Text(answer, done, draft)).accepted


@dataclass(slots=True)
class _Text:
    """The target of a draft, known where the text came: there matching asks."""

    answer: list[int]
    done: int
    draft: Draft
    is_greedy = True

    def token(self, node: int) -> int:
        """The text's token after a node of its own path."""
        return self.answer[self.done + len(self.draft.path(node))]

    def probs(self, node: int) -> Tensor:
        """Not recorded."""
        raise AssertionError(f"matching asks for tokens alone, not for the distribution after node {node}")
