"""Walks recorded texts token by token and asks an engine's drafter at every place: its drafts, wherever steps may come to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from forerun.bench.instruments import Clock, Progress, no_progress
from forerun.bench.recording import RecordedText
from forerun.bench.replay import rows_on_path, standing_nodes
from forerun.bench.teacher_forcing import ForcedText, forced_texts
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.random_bits import child_seed
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence as TokenSequence
from forerun.core.stats import StepTimes
from forerun.core.step import StepRecord
from forerun.drafters.base import DraftRequest, KeepsPools, computes_with_a_model
from forerun.drafters.guard import GuardedDrafter
from forerun.engine.speculation import SpeculationControl
from forerun.llm import LLM
from forerun.ops.sampling import SamplingRules
from forerun.plan.step_times import StepTimeModel

WALKED_AT_ONCE = 8
"""Texts that a drafter with a model drafts for together: that costs it little more than one of them."""

SAID_EVERY = 16  # places, to who watches

PLACE_WEIGHT = 1.0 / 64  # in running means over places


@dataclass(slots=True, kw_only=True)
class _WalkedText:
    """A text, as far as it has been walked."""

    text: RecordedText
    sequence: TokenSequence
    rules: SamplingRules
    forced: ForcedText | None  # None where the drafter goes by the tokens alone
    drafts: list[Draft] = field(default_factory=lambda: [NO_DRAFT])  # by place of the answer; the first has none

    @property
    def place(self) -> int:
        """The next place to draft from."""
        return len(self.drafts)

    @contextmanager
    def request(self, *, limit: int, min_survival: float) -> Iterator[DraftRequest]:
        """What an engine asks at this place, where one place of the answer is left for the target's own token."""
        request = DraftRequest(
            self.sequence,
            limit,
            min(limit, len(self.text.answer_ids) - self.place - 1),
            rules=self.rules,
            min_survival=min_survival,
        )
        if self.forced is None:
            yield request
            return
        num_computed = len(self.sequence) - 1
        with self.forced.opened_at(num_computed) as block_ids:
            yield replace(request, num_computed=num_computed, block_ids=block_ids)


class EnginePace:
    """The clock of an engine that serves one sequence by the drafts of a walk, for drafters that weigh their time against its.

    An engine comes to one place in so many as a step there gives tokens, and verifies there what its control
    chooses: a place counts as that share of a step, on average of the latest places, and of the time of its draft.

    Args:
        control: of draft lengths.
        step_times: what its steps take, drafting left out.
        clock: real time, in which the drafter computes.
    """

    def __init__(
        self,
        control: SpeculationControl,
        step_times: StepTimeModel,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._control = control
        self._step_times = step_times
        self._clock = clock
        self._passed = 0.0
        self._share = 0.0  # of a step that a place is, running mean; 0: not known
        self._place_seconds = 0.0  # of that share of steps, running mean

    def __call__(self) -> float:
        """Seconds."""
        return self._clock() + self._passed

    def min_survival(self) -> float:
        """The least chance of a node that the engine would ask for at the next place."""
        self._control.draft_limit(1)
        return self._control.min_survival

    def pass_place(self, draft: Draft, text: RecordedText, place: int, *, draft_seconds: float) -> None:
        """Go on to the next token of a text.

        Args:
            draft: what was drafted at this place.
            text: the text.
            place: of its answer.
            draft_seconds: that drafting has just taken, which an engine pays once a step, not at each place.
        """
        num_context_tokens = len(text.prompt_ids) + place - 1
        (length,) = self._control.choose([draft], num_rows=1, num_sequences=1, num_context_tokens=num_context_tokens)
        verified = draft.first(length)
        accepted = standing_nodes(verified, text.answer_ids, place)
        seconds = self._step_times.seconds(num_rows=1 + length, num_sequences=1, num_context_tokens=num_context_tokens)
        self._control.observe(
            StepRecord(
                num_rows=1 + length,
                num_context_tokens=num_context_tokens,
                num_asked=1,
                verified=[(verified, accepted)],
                times=StepTimes(forward=seconds, draft=draft_seconds),
            )
        )
        share = 1.0 / (1 + len(accepted))
        weight = PLACE_WEIGHT if self._share else 1.0
        self._share += (share - self._share) * weight
        self._place_seconds += (share * seconds - self._place_seconds) * weight
        self._passed += self._place_seconds - (1.0 - self._share) * draft_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWalk:
    """Asks a drafter for its longest draft at every place of recorded texts, each place with all before it committed.

    The drafter meets the texts as in an engine that writes one token in each step, and learns of each row that the text
    came to. One that remembers texts or learns from the target meets them one after the other; others, several at a
    time. Where it needs hidden states or KV, the target reads each text at once before.

    Args:
        llm: the engine, with room for `WALKED_AT_ONCE` texts; its drafter must be new.
        min_survival: nodes with less chance need not be drafted, see `DraftRequest`.
        pace: what a drafter that goes by a clock sees, which says `min_survival` then; None: the real clock, as if the
            target took no time.
        progress: is called with the state of the work.
    """

    llm: LLM
    min_survival: float = 0.0
    pace: EnginePace | None = None
    progress: Progress = no_progress

    def drafts(self, texts: Sequence[tuple[RecordedText, int]]) -> Iterator[list[Draft]]:
        """Yield for each text, given with its request's seed, its drafts by place of the answer, without their `probs`."""
        size = self._num_at_once
        if self.pace is not None:
            self._drafting.use_clock(self.pace)
        for start in range(0, len(texts), size):
            group = texts[start : start + size]
            with self.llm.executor.as_in_a_step():
                found = self._walk(group, start, f"texts {start + 1} to {start + len(group)} of {len(texts)}")
            yield from found

    @property
    def _drafting(self) -> GuardedDrafter:
        return self.llm.executor.drafting

    @property
    def _num_at_once(self) -> int:
        drafter = self._drafting.drafter
        remembers = bool(self._drafting.num_candidates) or isinstance(drafter, KeepsPools)
        return 1 if remembers or not computes_with_a_model(drafter) else WALKED_AT_ONCE

    def _walk(self, texts: Sequence[tuple[RecordedText, int]], start: int, name: str) -> list[list[Draft]]:
        """Walk some texts together, the first of them number `start`."""
        with ExitStack() as stack:
            forced: Sequence[ForcedText | None] = [None] * len(texts)
            if computes_with_a_model(self._drafting.drafter):
                self.progress(f"the target reads {name}")
                tokens = [[*text.prompt_ids, *text.answer_ids] for text, _ in texts]
                forced = stack.enter_context(forced_texts(self.llm, tokens))
            walked = [
                self._begin(text, seed, start + number, one)
                for number, ((text, seed), one) in enumerate(zip(texts, forced, strict=True))
            ]
            for one in walked:  # a drafter reads each prompt by itself, as it may read only so much in a step
                self._draft([one])
            longest = max(len(text.answer_ids) for text, _ in texts)
            for place in range(2, longest):
                if place % SAID_EVERY == 0:
                    self.progress(f"place {place} of {longest}, {name}")
                self._draft(walked)
            for one in walked:
                one.sequence.output_ids += one.text.answer_ids[len(one.sequence.output_ids) :]
                self._drafting.stop(one.sequence)
        return [one.drafts for one in walked]

    def _begin(self, text: RecordedText, seed: int, number: int, forced: ForcedText | None) -> _WalkedText:
        sampling = SamplingParams(temperature=text.temperature, seed=seed)
        return _WalkedText(
            text=text,
            sequence=TokenSequence(
                seq_id=number,
                prompt_ids=text.prompt_ids,
                output_ids=[],
                sampling=sampling,
                seed=child_seed(seed, 0),
            ),
            rules=SamplingRules(sampling, prompt_ids=text.prompt_ids, vocab_size=self.llm.vocab_size),
            forced=forced,
        )

    def _draft(self, walked: Sequence[_WalkedText]) -> None:
        """Commit a token of each text that has not ended, and draft after it."""
        drafting = self._drafting
        asked = []
        for one in walked:
            place, answer = one.place, one.text.answer_ids
            if place == len(answer):
                continue
            size = drafting.num_candidates
            rows = rows_on_path(one.text, one.sequence, 0, num_candidates=size) if size else None
            one.sequence.output_ids.append(answer[place - 1])
            if rows is not None:
                drafting.learn(rows)
            drafting.start(one.sequence)
            if place < len(answer) - 1:
                asked.append(one)
            else:
                one.drafts.append(NO_DRAFT)  # the last place is the target's own token's
        limit = self.llm.speculative.num_speculative_tokens
        with ExitStack() as stack:
            min_survival = self.min_survival if self.pace is None else self.pace.min_survival()
            requests = [stack.enter_context(one.request(limit=limit, min_survival=min_survival)) for one in asked]
            start = time.perf_counter()
            drafts = drafting.propose(requests, self.llm.executor.cache.features) if requests else []
            seconds = time.perf_counter() - start
        for one, draft in zip(asked, drafts, strict=True):
            if self.pace is not None:
                self.pace.pass_place(draft, one.text, one.place, draft_seconds=seconds / len(asked))
            one.drafts.append(draft if draft.probs is None else replace(draft, probs=None))
