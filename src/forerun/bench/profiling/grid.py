"""What a profile measures: input lengths, sequences, contexts and draft lengths, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from forerun.config.speculative_config import MAX_SPECULATIVE_TOKENS
from forerun.errors import ConfigError
from forerun.plan.dynamo_files import LEAST_POINTS
from forerun.plan.step_times import StepTimeModel

MOST_ROWS = 384
"""Decoding rows of a step that are measured; beyond them costs go on in a straight line."""

MIXED_ROWS = (64, 256)
"""Tokens of the prompts that are read while others decode."""

DRAFTING_BATCHES = {1: 3, 4: 1, 16: 1}
"""Sizes of the batches in which the cost of drafting is measured, and how many of each for each class of prompts: a single text has
few steps with drafts."""

DRAFTING_TOKENS = 64  # of each answer there

RECORDED_AT_ONCE = 8  # texts
SECONDS_OF_SETUP = 0.05  # of a batch: copies of KV, requests
NUM_WARMUP_ROUNDS = 1


class Cell(NamedTuple):
    """A batch whose steps are measured, with drafts of every length in turn."""

    num_sequences: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileGrid:
    """What is measured in each round, and how many rounds there are.

    Raises:
        ConfigError: a list is empty or has a number that is too small, or what is there gives no curve.
    """

    input_lengths: tuple[int, ...]
    num_sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    rounds: int
    steps: int = 2  # of each draft length, in each batch of a round
    num_texts: int = 3  # recorded of each kind of prompts, at most
    max_tokens: int = 128  # of a recorded text

    def __post_init__(self) -> None:
        least = {"input_lengths": 3, "num_sequences": 2, "contexts": 1, "draft_lengths": 1}
        for name, count in least.items():
            values, smallest = getattr(self, name), 0 if name == "draft_lengths" else 1
            if len(set(values)) < count:
                raise ConfigError(
                    f"{name}: got {len(set(values))} different value(s) ({', '.join(map(str, values)) or 'none'}); "
                    f"give {count} or more, so that times can be interpolated"
                )
            if min(values) < smallest:
                raise ConfigError(f"{name}: got {min(values)}; must be {smallest} or more")
        if self.longest_draft > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(f"draft_lengths: got {self.longest_draft}; must be {MAX_SPECULATIVE_TOKENS} or less")
        num_batches = len(set(self.num_sequences)) * len(set(self.contexts))
        if num_batches < LEAST_POINTS:
            raise ConfigError(
                f"num_sequences, contexts: got {num_batches} batches; give {LEAST_POINTS} or more, "
                "so that times can be interpolated"
            )
        for name in ("rounds", "steps", "num_texts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}; must be 1 or more")
        if self.max_tokens < 8:
            raise ConfigError(f"max_tokens: got {self.max_tokens}; must be 8 or more, so that drafts can be judged")

    @property
    def longest_draft(self) -> int:
        """The largest K."""
        return max(self.draft_lengths)

    def cells(self) -> Iterator[Cell]:
        """The batches of a round."""
        for context in sorted(set(self.contexts)):
            for num_sequences in sorted(set(self.num_sequences)):
                yield Cell(num_sequences, context)

    def jobs(self) -> list[Cell | int]:
        """What a round measures: its batches, and prompts by their lengths."""
        return [*self.cells(), *sorted(set(self.input_lengths))]

    def lengths_for(self, num_sequences: int) -> tuple[int, ...]:
        """The draft lengths that a batch is measured with: those of no more than `MOST_ROWS` rows."""
        lengths = sorted(set(self.draft_lengths), reverse=True)
        return tuple(length for length in lengths if num_sequences * (length + 1) <= MOST_ROWS or not length)

    def within(self, *, max_model_len: int, max_num_seqs: int, num_slots: int) -> ProfileGrid:
        """The part of the grid that an engine has room for.

        Args:
            max_model_len: tokens of its longest sequence.
            max_num_seqs: sequences that it runs at once.
            num_slots: tokens that its KV memory holds.

        Raises:
            ConfigError: too little is left; the message says of what.
        """
        spare = self.tokens_beyond_context
        room = max_model_len - spare
        contexts = tuple(context for context in self.contexts if context <= room)
        longest = max(contexts, default=0)
        sequences = tuple(
            count
            for count in self.num_sequences
            if count <= max_num_seqs and (count + 1) * (longest + spare + MIXED_ROWS[-1]) + longest <= num_slots
        )
        try:
            return replace(
                self,
                input_lengths=tuple(length for length in self.input_lengths if length < max_model_len),
                num_sequences=sequences,
                contexts=contexts,
            )
        except ConfigError as error:
            raise ConfigError(
                f"{error}; max_model_len {max_model_len}, max_num_seqs {max_num_seqs} and KV memory for {num_slots} tokens "
                "leave no more"
            ) from None

    def left_out(self, part: ProfileGrid) -> str:
        """What a part of the grid has not, for people; empty where it has all."""
        found = {
            name: sorted(set(getattr(self, name)) - set(getattr(part, name)))
            for name in ("input_lengths", "num_sequences", "contexts")
        }
        return "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in found.items() if values)

    @property
    def tokens_beyond_context(self) -> int:
        """Tokens that a measured sequence may write, and its draft."""
        return self.num_batch_steps * 2 + self.longest_draft + 32

    @property
    def num_batch_steps(self) -> int:
        """Steps of a batch."""
        return len(set(self.draft_lengths)) * self.steps + 3

    def seconds_of_round(self, times: StepTimeModel) -> float:
        """About how long a round takes where steps take `times`."""
        seconds = sum(times.ttft_seconds(length) for length in self.input_lengths)
        for cell in self.cells():
            context = cell.num_sequences * cell.context
            seconds += SECONDS_OF_SETUP
            seconds += times.ttft_seconds(min(cell.context, 16) * cell.num_sequences)  # after their last full blocks
            seconds += times.ttft_seconds(MIXED_ROWS[-1])  # a prompt beside
            for length in self.lengths_for(cell.num_sequences):
                rows = cell.num_sequences * (length + 1)
                seconds += self.steps * times.seconds(
                    num_rows=rows, num_sequences=cell.num_sequences, num_context_tokens=context
                )
        return seconds

    def seconds_of_rounds(self, times: StepTimeModel) -> float:
        """About how long all rounds take, with those that warm up and the contexts that are copied."""
        return (NUM_WARMUP_ROUNDS + self.rounds) * self.seconds_of_round(times) + times.ttft_seconds(max(self.contexts))

    def seconds_of_texts(self, times: StepTimeModel, *, num_kinds: int, num_configs: int, num_with_model: int) -> float:
        """About how long it takes to record the texts, and to draft on them with every configuration.

        `num_with_model` of these draft with a model: at every place of the texts, each time for about as long as a step.
        """
        num_texts, size = self.num_texts * num_kinds, RECORDED_AT_ONCE
        step = times.seconds(num_rows=size, num_sequences=size, num_context_tokens=size * 256)
        places = -(-num_texts // size) * self.max_tokens
        recording = places * step * 1.3  # log probabilities are kept
        # without drafts, and at most as many with them
        num_steps = 2 * DRAFTING_TOKENS * sum(DRAFTING_BATCHES.values())
        reading = num_texts * times.ttft_seconds(256 + self.max_tokens)
        return (
            recording + num_configs * (2.0 + num_steps * num_kinds * step) + num_with_model * (places * step + reading)
        )

    def to_json(self) -> dict[str, Any]:
        """All fields, tuples as lists."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ProfileGrid:
        """The grid of a record that `to_json` made."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**values)


GRIDS: dict[str, ProfileGrid] = {
    "quick": ProfileGrid(
        input_lengths=(32, 128, 512, 1024),
        num_sequences=(1, 4, 16, 32),
        contexts=(128, 1024),
        draft_lengths=(0, 2, 5),
        rounds=2,
    ),
    "short": ProfileGrid(
        input_lengths=(16, 64, 128, 256, 512, 1024),
        num_sequences=(1, 2, 4, 8, 16, 32),
        contexts=(128, 1024),
        draft_lengths=(0, 1, 3, 5, 8),
        rounds=3,
    ),
    "usual": ProfileGrid(
        input_lengths=(16, 64, 128, 256, 512, 1024, 2048),
        num_sequences=(1, 2, 4, 8, 16, 32, 64),
        contexts=(128, 512, 1536),
        draft_lengths=(0, 1, 2, 3, 5, 8, 12),
        rounds=4,
        num_texts=4,
        max_tokens=256,
    ),
    "long": ProfileGrid(
        input_lengths=(16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048),
        num_sequences=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
        contexts=(128, 512, 1536),
        draft_lengths=(0, 1, 2, 3, 4, 5, 6, 8, 12, 16),
        rounds=8,
        num_texts=16,
        max_tokens=256,
    ),
}
"""Grids from the quickest to the longest."""

ROUGH_GRID = ProfileGrid(
    input_lengths=(4, 16, 64),
    num_sequences=(1, 2, 4),
    contexts=(16,),
    draft_lengths=(0, 4),
    rounds=1,
    steps=3,
)
"""Enough to estimate how long the others take."""

DEFAULT_GRID = "usual"
SERVER_GRID = "short"
"""Of a server, which reads every context anew."""
