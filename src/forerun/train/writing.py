"""Lets the target write the texts that a head learns from: many conversations at once, on the engine."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forerun.core.outputs import CompletionOutput, RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.engine.client import EngineClient, EngineRequest
from forerun.errors import RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.train.conversations import ChatMarks, Plan, Plans
from forerun.train.kept_features import KeptFeatures
from forerun.train.texts import Span, TextFile, WrittenText

LEAST_QUESTION = 3  # tokens of a question that is worth an answer
LEAST_ANSWER = 2  # tokens: shorter ones teach nothing
QUESTION_TEMPERATURE = 0.8  # at 1 a small model asks nonsense, and seldom comes to an end


NUM_AT_ONCE = {"cpu": 128, "cuda": 256}
"""Conversations: with so many a GPU waits for the host, which plans each of them in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingLimits:
    """How long the parts of a conversation may be, in tokens, and how many conversations are had at once."""

    most_conversation: int = 1024
    most_question: int = 128
    most_answer: int = 320
    num_at_once: int = NUM_AT_ONCE["cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the target is asked to continue, and how."""

    prompt_ids: list[int]
    sampling: SamplingParams


Conversation = Generator[Ask, CompletionOutput, WrittenText]
"""Yields what is asked, is sent what was answered, and returns the text."""


def converse(plan: Plan, marks: ChatMarks, tokenizer: Tokenizer, limits: WritingLimits, *, seed: int) -> Conversation:
    """Have one conversation, a function of the plan and the seed: it is the same whatever is written beside it.

    It ends early where a question is none, an answer has no end, or there is no room; without any answer the
    text has no tokens.
    """
    chance = random.Random(f"answers {seed} {plan.number}")
    ids: list[int] = []
    spans: list[Span] = []
    for turn, given in enumerate(plan.questions):
        before = marks.following if turn else marks.begin
        question = given
        if question is None:
            opening = "" if turn else plan.opening
            begun = _joined(ids, tokenizer, f"{before}{opening}")
            room = min(limits.most_question, limits.most_conversation - len(begun))
            if room < LEAST_QUESTION:
                break
            sampling = _sampling(chance, temperature=QUESTION_TEMPERATURE, top_p=0.95, max_tokens=room)
            reply = yield Ask(prompt_ids=begun, sampling=sampling)
            question = _question(opening, reply, tokenizer)
            if question is None:
                break
        asked = _joined(ids, tokenizer, f"{before}{question}{marks.answer}")
        room = min(limits.most_answer, limits.most_conversation - len(asked))
        if room < LEAST_ANSWER:
            break
        sampling = _sampling(chance, temperature=plan.temperature, top_p=1.0, max_tokens=room)
        reply = yield Ask(prompt_ids=asked, sampling=sampling)
        if len(reply.token_ids) < LEAST_ANSWER:
            break
        ids = [*asked, *reply.token_ids]
        spans.append((len(asked), len(ids)))
        if reply.finish_reason != "stop":
            break
    return WrittenText(
        number=plan.number,
        temperature=plan.temperature,
        token_ids=np.asarray(ids, dtype=np.uint32),
        spans=tuple(spans),
    )


def write_texts(
    client: EngineClient,
    tokenizer: Tokenizer,
    plans: Plans,
    file: TextFile,
    *,
    seed: int,
    limits: WritingLimits,
    goes_on: Callable[[int], bool],
    kept: KeptFeatures | None = None,
) -> None:
    """Have the conversations that `file` lacks, and add each to it when it has ended.

    `goes_on` is told before each step of the engine how many conversations run, and says whether new ones may begin;
    those that run are always finished, since short ones would be too many otherwise. The engine of `kept` writes
    the hidden states of each conversation.

    Raises:
        ConfigError: the file cannot be written.
        RequestError: the target failed.
    """
    marks_of = functools.lru_cache(maxsize=256)(lambda system: ChatMarks.read(tokenizer, system=system))
    waiting = _numbers(plans, {text.number for text in file.texts})
    talks = _Talks(client, file, kept)
    try:
        while True:
            may_begin = goes_on(len(talks.running))
            while may_begin and len(talks.running) < limits.num_at_once:
                number = next(waiting, None)
                if number is None:
                    break
                plan = plans.plan(number)
                talks.begin(number, converse(plan, marks_of(plan.system), tokenizer, limits, seed=seed))
            if not talks.running:
                return
            for output in client.step().finished:
                talks.go_on(output)
    finally:
        for request_id in talks.running:
            client.abort(request_id)


class _Talks:
    """The conversations that are being had, each with one request in the engine, under its number."""

    def __init__(self, client: EngineClient, file: TextFile, kept: KeptFeatures | None) -> None:
        self._client, self._file, self._kept = client, file, kept
        self.running: dict[str, Conversation] = {}

    def begin(self, number: int, conversation: Conversation) -> None:
        """Begin a conversation."""
        self._advance(str(number), conversation, None)

    def go_on(self, output: RequestOutput) -> None:
        """Give a conversation what it asked for."""
        conversation = self.running.pop(output.request_id)
        if output.error is not None:
            raise RequestError(f"the target failed while it wrote: {output.error}")
        self._advance(output.request_id, conversation, output.outputs[0])

    def _advance(self, request_id: str, conversation: Conversation, reply: CompletionOutput | None) -> None:
        """Take a conversation from its beginning or a reply to what it asks next; where it asks no more, its text is kept."""
        try:
            ask = next(conversation) if reply is None else conversation.send(reply)
        except StopIteration as ended:
            self._file.append(ended.value)
        else:
            self._submit(request_id, conversation, ask)

    def _submit(self, request_id: str, conversation: Conversation, ask: Ask) -> None:
        sampling = ask.sampling if self._kept is None else _keeping(ask.sampling, self._kept.path(int(request_id)))
        self._client.accept(EngineRequest(request_id=request_id, prompt_ids=ask.prompt_ids, sampling=sampling))
        self._client.submit(request_id)
        self.running[request_id] = conversation


def _numbers(plans: Plans, done: set[int]) -> Iterator[int]:
    """Numbers of the conversations that are still to be had."""
    number = 0
    while plans.count is None or number < plans.count:
        if number not in done:
            yield number
        number += 1


def _sampling(chance: random.Random, *, temperature: float, top_p: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=chance.getrandbits(32), detokenize=False
    )


def _keeping(sampling: SamplingParams, path: Path) -> SamplingParams:
    """Sampling whose hidden states are saved at `path`, over those of what was asked before in this conversation."""
    keeping = {"hidden_states_path": str(path), "include_output_tokens": True}
    return replace(sampling, extra_args={"kv_transfer_params": keeping})


def _joined(ids: list[int], tokenizer: Tokenizer, text: str) -> list[int]:
    """Append a text that begins with what ends an answer; an answer that has ended has that already."""
    more = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, *(more[1:] if ids and more[:1] == ids[-1:] else more)]


def _question(opening: str, reply: CompletionOutput, tokenizer: Tokenizer) -> str | None:
    """The question that the model invented from `opening` on, or None if it found no end or is empty."""
    begun = tokenizer.encode(opening, add_special_tokens=False) if opening else []
    if reply.finish_reason != "stop" or len(begun) + len(reply.token_ids) < LEAST_QUESTION:
        return None
    return tokenizer.decode([*begun, *reply.token_ids], skip_special_tokens=True).strip() or None
