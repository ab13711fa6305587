"""The workloads: chat, chat at temperature 1, code edits, text that nothing can guess, and full batches of chat and code."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from pathlib import Path

from benchmarks.prompt_files import first_turns, rename_wishes
from forerun.bench.profiling.stages import digest
from forerun.bench.prompts import encode_prompt
from forerun.core.sampling_params import SamplingParams
from forerun.errors import ConfigError, ForerunError
from forerun.models.tokenizer import Tokenizer

MAX_TOKENS = 256
NUM_CODE_EDITS = 64
NUM_RANDOM = 20  # prompts of random tokens, and as many questions
NUM_RANDOM_TOKENS = 128
RANDOM_TEMPERATURE = 1.5  # the model's words no longer make sentences
BATCH_SIZES = (8, 16, 32, 64)
REQUESTS_PER_RUNNING = 4  # requests of a group / sequences that run at once


class PromptError(ForerunError):
    """A prompt set has too few prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with its sampling parameters, which fix its text."""

    prompt: list[int]  # token ids
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in groups: every configuration answers a group right after the others did.

    All requests of a group are given at once; `num_running` of them run at a time.
    """

    name: str
    groups: list[list[Request]]
    num_running: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(len(request.prompt) for group in self.groups for request in group) + MAX_TOKENS

    def first(self, num_prompts: int | None) -> Workload:
        """The workload of its first prompts alone; None, or where several run at a time: all of it."""
        return self if self.num_running > 1 else replace(self, groups=self.groups[:num_prompts])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """Where prompts come from: a .jsonl file of "turns" as in MT-Bench, a folder of .py or .jsonl.gz files."""

    chat: Path
    code: Path

    def digest(self) -> str:
        """A few letters, by which measurements with other prompts are told apart."""
        return digest([*first_turns(self.chat), *self.rename_wishes()])

    def rename_wishes(self) -> Iterator[str]:
        """Wishes to edit code."""
        return islice(rename_wishes(self.code), NUM_CODE_EDITS)


@dataclass(frozen=True, slots=True)
class WorkloadMaker:
    """Makes the workloads from the files, with a model's tokenizer."""

    tokenizer: Tokenizer
    files: PromptFiles
    vocab_size: int
    names: tuple[str, ...] = field(
        default=("chat-greedy", "chat-sampled", "code", "random", *(f"batch-{size}" for size in BATCH_SIZES)),
        init=False,
    )

    def make(self, name: str) -> Workload:
        """The workload of this name.

        Raises:
            ConfigError: there is none.
            PromptError: the files have too few prompts.
        """
        if name not in self.names:
            raise ConfigError(f"workloads: got {name!r}; may be {', '.join(self.names)}")
        if name == "chat-greedy":
            return Workload(name=name, groups=_one_by_one(self._chat(), temperature=0.0))
        if name == "chat-sampled":
            return Workload(name=name, groups=_one_by_one(self._chat(), temperature=1.0))
        if name == "code":
            return Workload(name=name, groups=_one_by_one(self._code(), temperature=0.0))
        if name == "random":
            prompts = _in_turn(self._random(), self._chat()[:NUM_RANDOM])
            return Workload(name=name, groups=_one_by_one(prompts, temperature=RANDOM_TEMPERATURE, ignore_eos=True))
        return self._batch(name, int(name.removeprefix("batch-")))

    def _batch(self, name: str, num_running: int) -> Workload:
        """Chat and code in turn, in groups of more than run at once, so that one that ends makes room for the next."""
        requests = _requests(_in_turn(self._chat(), self._code()), temperature=0.0)
        size = REQUESTS_PER_RUNNING * num_running
        groups = [requests[start : start + size] for start in range(0, max(1, len(requests) - size + 1), size)]
        return Workload(name=name, groups=groups, num_running=num_running)

    def _chat(self) -> list[list[int]]:
        """First turns in random order, since the file is sorted by category."""
        questions = first_turns(self.files.chat)
        random.Random(0).shuffle(questions)
        return [encode_prompt(self.tokenizer, question) for question in questions]

    def _code(self) -> list[list[int]]:
        edits = [encode_prompt(self.tokenizer, wish) for wish in self.files.rename_wishes()]
        if not edits:
            raise PromptError(f"{self.files.code}: got no Python file of 400 to 1500 characters with a function")
        return edits

    def _random(self) -> list[list[int]]:
        source = random.Random(0)
        return [[source.randrange(self.vocab_size) for _ in range(NUM_RANDOM_TOKENS)] for _ in range(NUM_RANDOM)]


def _one_by_one(prompts: Sequence[list[int]], *, temperature: float, ignore_eos: bool = False) -> list[list[Request]]:
    return [[request] for request in _requests(prompts, temperature=temperature, ignore_eos=ignore_eos)]


def _requests(prompts: Sequence[list[int]], *, temperature: float, ignore_eos: bool = False) -> list[Request]:
    return [
        Request(
            prompt=prompt,
            sampling=SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos, seed=seed),
        )
        for seed, prompt in enumerate(prompts)
    ]


def _in_turn(first: Sequence[list[int]], second: Sequence[list[int]]) -> list[list[int]]:
    """One of the first, one of the second, and so on; where one kind runs out, the rest of the other."""
    return [prompt for prompt in chain.from_iterable(zip_longest(first, second)) if prompt is not None]
