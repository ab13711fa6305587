"""The cells of a run, i.e. its requests, and the order in which contenders answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.peers.engines import Contender
from benchmarks.peers.prompts import PromptSets

PLAIN_MAX_TOKENS, CODE_MAX_TOKENS, CHAT_MAX_TOKENS = 256, 192, 128
BATCH_SIZE = 8
NUM_PLAIN_CELLS = 3
CURVE = {"rows": [1, 8, 16], "context": 256, "repeats": 9}
SPECULATED_KINDS = ("code", "chat")

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One request that all contenders concerned answer one right after the other."""

    kind: str  # plain, batch, prefill, curve, code, chat
    index: int
    request: str
    arguments: dict[str, Any]

    def concerns(self, contender: Contender) -> bool:
        """Whether the contender is measured: with speculation only on the kinds for it, without on all."""
        return contender.speculation is None or self.kind in SPECULATED_KINDS


def make_cells(prompts: PromptSets) -> list[Cell]:
    """All cells of a round; the first one is plain, and used to measure memory."""
    return [
        *_generations("plain", [[prompt] for prompt in prompts.plain[:NUM_PLAIN_CELLS]], PLAIN_MAX_TOKENS),
        *_generations("batch", [_repeated(prompts.plain, BATCH_SIZE)], PLAIN_MAX_TOKENS),
        *_generations("prefill", [[prompt] for prompt in prompts.prefill[:NUM_PLAIN_CELLS]], 1),
        Cell(kind="curve", index=0, request="curve", arguments=CURVE),
        *_generations("code", [[prompt] for prompt in prompts.code], CODE_MAX_TOKENS),
        *_generations("chat", [[prompt] for prompt in prompts.chat], CHAT_MAX_TOKENS),
    ]


def _generations(kind: str, batches: Sequence[list[list[int]]], max_tokens: int) -> list[Cell]:
    return [
        Cell(kind=kind, index=index, request="generate", arguments={"prompts": batch, "max_tokens": max_tokens})
        for index, batch in enumerate(batches)
    ]


def _repeated(items: Sequence[Item], count: int) -> list[Item]:
    return [items[i % len(items)] for i in range(count)]


def one_of_each_kind(cells: Sequence[Cell]) -> list[Cell]:
    """The first cell of each kind, to warm up with."""
    return list({cell.kind: cell for cell in reversed(cells)}.values())[::-1]


def turn(items: Sequence[Item], number: int) -> list[Item]:
    """The items in order on even turns, reversed on odd ones, so that a drift of the machine favours none."""
    return list(items if number % 2 == 0 else reversed(items))
