"""A fake LLM with scripted answers and the interface that the command line uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from forerun.cli.options import EngineOptions
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.outputs import Origin, StreamDelta
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats, StepTimes
from forerun.errors import RequestError


class FakeTokenizer:
    """Every character is a token, its id its code point."""

    has_chat_template = True
    chat_template: str | None = None

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    special_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def whole_text(self, token_id: int) -> str:
        return chr(token_id)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))


@dataclass
class FakeLLM:
    """Streams `answer` in steps: `accepted` characters from a draft and one of the target's own each.

    With speculation off a step gives one character, of `plain_answer` if that is set. `before_step`
    is called before each step, `max_prompt` is the longest prompt in characters.
    """

    answer: str = "A fine answer."
    plain_answer: str | None = None
    accepted: int = 3
    max_prompt: int = 10_000
    finish_reason: str = "stop"
    stop_reason: str | None = None
    before_step: Callable[[], None] = lambda: None
    prompts: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    num_closed: int = 0

    def __post_init__(self) -> None:
        self.reset_stats()
        self.speculative = SimpleNamespace(describe=lambda: "fake, K=3")

    def reset_stats(self) -> None:
        self.stats = SimpleNamespace(speculation=SpeculationStats(), times=StepTimes())

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def stream(self, prompts: Any, sampling_params: SamplingParams) -> Iterator[StreamDelta]:
        self.prompts.append(prompts)
        self.params.append(sampling_params)
        if len(prompts) > self.max_prompt:
            raise RequestError(f"prompt: got {len(prompts)} tokens; must be at most {self.max_prompt}; shorten it")
        return self._steps(sampling_params.speculation == "off")

    def stream_chat(self, messages: Any, sampling_params: SamplingParams) -> Iterator[StreamDelta]:
        return self.stream([dict(message) for message in messages], sampling_params)

    def _steps(self, plain: bool) -> Iterator[StreamDelta]:
        text = self.plain_answer if plain and self.plain_answer is not None else self.answer
        width = 1 if plain else self.accepted + 1
        try:
            for start in range(0, max(1, len(text)), width):
                self.before_step()
                yield self._delta(text[start : start + width], last=start + width >= len(text))
        finally:
            self.num_closed += 1

    def _delta(self, piece: str, *, last: bool) -> StreamDelta:
        draft = Draft(tuple(range(self.accepted))) if len(piece) > 1 else NO_DRAFT
        self.stats.speculation.record(draft, range(len(piece) - 1))
        return StreamDelta(
            request_id="0",
            index=0,
            text=piece,
            token_ids=[ord(char) for char in piece],
            origins=[Origin.ACCEPTED] * (len(piece) - 1) + [Origin.BONUS],
            finish_reason=self.finish_reason if last else None,
            stop_reason=self.stop_reason if last else None,
        )


@dataclass
class FakeLoader:
    """Stands where the command line loads a model, and remembers with what options."""

    llm: FakeLLM
    models: list[str] = field(default_factory=list)
    options: list[EngineOptions] = field(default_factory=list)

    def __call__(self, model: str, options: EngineOptions) -> FakeLLM:
        self.models.append(model)
        self.options.append(options)
        return self.llm
