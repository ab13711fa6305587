"""The tensors that stay on the device from step to step, and those that one step lays out: records without behaviour.

Letters in shapes: S slots of sequences, L longest text, B blocks of a sequence, K most nodes of a draft, N sequences of a
step, T rows of a step, R rows of it after which a token is drawn, D most rows of a path, V vocabulary, W = ceil(V / 32) words
of a bit mask. An entry of -1 in a list of slots is padding: no function reads or writes what belongs to it. Integers are int32
unless something else is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HAS_PENALTIES, HAS_BIAS, HAS_ALLOWED, HAS_MIN_LENGTH = 1, 2, 4, 8
"""Bits of `RuleTable.flags`: which edits of the logits a sequence asks for."""


BLOCK_TABLE, DRAFT_TOKENS, DRAFT_PARENTS, DRAFT_SIZES, COMPUTED = range(5)
"""What of a `DeviceTable` the host may change: the first number of a change, see `steps.place`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTable:
    """The sampling rules of each slot's request, what penalties count, and what ends its text.

    `allowed` and `in_prompt` are bit masks: token t is bit t % 32 of word t // 32.
    """

    flags: Tensor  # [S]
    seeds: Tensor  # [S] int64, the bits of the unsigned seed
    temperature: Tensor  # [S] fp32; 0: greedy
    floor: Tensor  # [S] fp32, `truncation.floor_of(min_p)`
    top_k: Tensor  # [S]; 0: off
    top_p: Tensor  # [S] fp64; 1: off
    repetition: Tensor  # [S] fp32; 1: off
    frequency: Tensor  # [S] fp32
    presence: Tensor  # [S] fp32
    counts: Tensor  # [S, V] how often the output holds each token
    in_prompt: Tensor  # [S, W] which tokens the prompt holds
    allowed: Tensor  # [S, W] `allowed_token_ids`
    min_length: Tensor  # [S] tokens, prompt included, before which no stop token may come
    max_length: Tensor  # [S] tokens, prompt included, of the longest text
    stop_ids: Tensor  # [S, ...] padded with -1: tokens that end the text, from `min_length` on
    bias_ids: Tensor  # [S, ...] padded with -1, each token once
    bias_values: Tensor  # [S, ...] fp32

    @classmethod
    def empty(
        cls, num_slots: int, vocab_size: int, *, device: torch.device, most_stop_ids: int = 8, most_biases: int = 32
    ) -> RuleTable:
        """Greedy requests without any edit."""
        words = -(-vocab_size // 32)

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

        return cls(
            flags=full(),
            seeds=full(dtype=torch.int64),
            temperature=full(dtype=torch.float32),
            floor=full(value=-torch.inf, dtype=torch.float32),
            top_k=full(),
            top_p=full(value=1.0, dtype=torch.float64),
            repetition=full(value=1.0, dtype=torch.float32),
            frequency=full(dtype=torch.float32),
            presence=full(dtype=torch.float32),
            counts=full(vocab_size),
            in_prompt=full(words),
            allowed=full(words),
            min_length=full(),
            max_length=full(value=torch.iinfo(torch.int32).max),
            stop_ids=full(most_stop_ids, value=-1),
            bias_ids=full(most_biases, value=-1),
            bias_values=full(most_biases, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """What the device knows of each sequence between two steps.

    Node i of a slot's draft continues node `draft_parents[i]`; -1 is the last committed token, and a parent comes before its
    children. Places before `computed` hold KV. A text that has ended gets neither rows nor tokens.
    """

    tokens: Tensor  # [S, L] prompt and output
    lengths: Tensor  # [S] committed tokens
    computed: Tensor  # [S] leading places with KV; lengths - 1 while a text is being written
    ended: Tensor  # [S] 1 where a stop token or the length has ended the text, or nothing could be drawn
    block_table: Tensor  # [S, B] cache blocks in order
    draft_tokens: Tensor  # [S, K]
    draft_parents: Tensor  # [S, K]
    draft_sizes: Tensor  # [S]

    @classmethod
    def empty(
        cls, num_slots: int, *, max_length: int, num_blocks: int, most_drafted: int, device: torch.device
    ) -> DeviceTable:
        """No text in any slot."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=torch.int32, device=device)

        return cls(
            tokens=zeros(max_length),
            lengths=zeros(),
            computed=zeros(),
            ended=zeros(),
            block_table=zeros(num_blocks),
            draft_tokens=zeros(most_drafted),
            draft_parents=zeros(most_drafted),
            draft_sizes=zeros(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Which sequences a step computes, and how much of each: what the host sends."""

    slots: Tensor  # [N] -1: padding
    tails: Tensor  # [N] committed tokens to compute, from place `computed` on
    most_drafted: Tensor  # [N] at most so many nodes of the draft are verified
    ends: Tensor  # [N] 1 where the tail reaches the last committed token: only then is anything drafted or committed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step: each sequence's tail, then its draft, packed one sequence after the other.

    The k-th row of a sequence is written to place `computed` + k of its text. A row at that very position reads all places up
    to its own through the block table (`num_linear` = position + 1). Another one, a node beside a tree's first branch, reads
    `num_linear` places so, and the rest of its path, itself included, at `path_slots`.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T] place in the text: a node's is its depth after the tail
    slots: Tensor  # [T] slot of its sequence; -1: padding
    parents: Tensor  # [T] row that it continues; -1: a token computed earlier
    kv_slots: Tensor  # [T] int64, where its key and value go; -1: nowhere
    num_linear: Tensor  # [T]
    path_slots: Tensor  # [T, D]
    first_rows: Tensor  # [N + 1] each sequence's first row; the last: the number of rows
    judged: Tensor  # [R] the rows after which a token is drawn, those of a sequence together, in order; -1: padding
    first_judged: Tensor  # [N + 1] place in `judged` of each sequence's first; the last: how many there are

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_sequences: int,
        *,
        longest_path: int,
        device: torch.device,
        num_judged: int | None = None,
    ) -> StepRows:
        """Padding only; `num_judged` None: a token may be drawn after every row."""

        def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            tokens=full(num_rows),
            positions=full(num_rows),
            slots=full(num_rows, value=-1),
            parents=full(num_rows, value=-1),
            kv_slots=full(num_rows, value=-1, dtype=torch.int64),
            num_linear=full(num_rows),
            path_slots=full(num_rows, longest_path),
            first_rows=full(num_sequences + 1),
            judged=full(num_rows if num_judged is None else num_judged, value=-1),
            first_judged=full(num_sequences + 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What the match walk found for each sequence of a step."""

    accepted: Tensor  # [N, K] nodes of the accepted path, -1 behind it
    num_accepted: Tensor  # [N]
    tokens: Tensor  # [N, K + 1] the path's tokens and the target's own after it; -1 behind them
    num_tokens: Tensor  # [N] 0 where nothing is committed

    @classmethod
    def empty(cls, num_sequences: int, most_drafted: int, *, device: torch.device) -> Verdicts:
        """Nothing accepted."""

        def full(*shape: int, value: int = 0) -> Tensor:
            return torch.full((num_sequences, *shape), value, dtype=torch.int32, device=device)

        return cls(
            accepted=full(most_drafted, value=-1),
            num_accepted=full(),
            tokens=full(most_drafted + 1, value=-1),
            num_tokens=full(),
        )
