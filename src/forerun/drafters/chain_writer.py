"""Drafts written token by token by a model: one forward pass per token, for all sequences together."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.core.draft import Draft
from forerun.drafters.base import DraftRequest, TargetInfo
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.models.base import TargetModel
from forerun.models.loaded import choose_attention
from forerun.ops.noise import Stream
from forerun.ops.sampling import draw_token, target_probs, target_token

SAMPLE_METHODS = ("greedy", "probabilistic", "coupled")
MOST_ROWS = 512  # of text that a drafter has yet to read, in one pass


def check_sample_method(name: str) -> None:
    """Raise `ConfigError` unless `name` is a way to choose drafted tokens."""
    if name not in SAMPLE_METHODS:
        raise ConfigError(f"draft_sample_method: got {name!r}; may be {', '.join(SAMPLE_METHODS)}")


@dataclass(slots=True, kw_only=True)
class Chain:
    """A draft on its way: first `unread`, the committed tokens from place `start` on that the model has no entries for.

    `table` are the blocks of all places that reading and drafting write to, `num_tokens` the longest
    draft that is wanted.
    """

    request: DraftRequest
    unread: list[int]
    start: int
    table: npt.NDArray[np.int32]
    num_tokens: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def draft(self) -> Draft:
        """What has been written."""
        return Draft(tuple(self.token_ids), None, torch.stack(self.probs) if self.probs else None)


def scratch_blocks_per_chain(target: TargetInfo) -> int:
    """Blocks that hold what a draft writes beyond the blocks of the committed text."""
    return -(-target.num_speculative_tokens // target.block_size) + 1


class ChainWriter:
    """Writes chains with a model over a paged cache, whose scratch blocks follow `num_blocks` of the sequences'.

    `sample_method` chooses the tokens: "greedy" the likeliest; "probabilistic" draws them by the
    request's rules and tells the probabilities, for verifiers that use them; "coupled" draws with the
    noise that the target will draw with, so that the two agree as often as their distributions overlap
    (compare arXiv 2408.07978), for the matching verifier. Greedy requests get greedy drafts.
    """

    def __init__(
        self, model: TargetModel, cache: KVCache, target: TargetInfo, *, num_blocks: int, sample_method: str
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = choose_attention(model, target.itself.kernels)
        self._block_size = target.block_size
        self._num_blocks = num_blocks
        self._scratch_per_chain = scratch_blocks_per_chain(target)
        self._sample_method = sample_method

    def chain(self, number: int, request: DraftRequest, *, start: int, num_tokens: int) -> Chain:
        """Chain `number` of a step: the model has entries for the first `start` tokens, and at most `num_tokens` are wanted."""
        first_scratch = self._num_blocks + number * self._scratch_per_chain
        scratch = np.arange(first_scratch, first_scratch + self._scratch_per_chain, dtype=np.int32)
        num_used = -(-request.num_computed // self._block_size)
        return Chain(
            request=request,
            unread=request.sequence.tokens_from(start),
            start=start,
            table=np.concatenate([request.block_ids[:num_used], scratch]),
            num_tokens=num_tokens,
        )

    def write(self, chains: Listing[Chain]) -> list[Draft]:
        """The drafts; of a chain that wants no tokens nothing is read either."""
        growing = [chain for chain in chains if chain.num_tokens]
        for chain in growing:
            self._read_in_parts(chain)
        while growing:
            logits = self._forward(growing, wants_logits=True)
            for chain, row, likeliest in zip(growing, logits, logits.argmax(-1).tolist(), strict=True):
                chain.start += len(chain.unread)
                chain.unread = [self._choose(chain, row, likeliest)]
                chain.token_ids += chain.unread
            growing = [chain for chain in growing if len(chain.token_ids) < chain.num_tokens]
        return [chain.draft for chain in chains]

    def _read_in_parts(self, chain: Chain) -> None:
        """Read so much of a long text that what is left fits in one pass: no pass grows with the prompt."""
        rest = chain.unread
        while len(rest) > MOST_ROWS:
            chain.unread, rest = rest[:MOST_ROWS], rest[MOST_ROWS:]
            self._forward([chain], wants_logits=False)
            chain.start += MOST_ROWS
        chain.unread = rest

    def _forward(self, chains: Listing[Chain], *, wants_logits: bool) -> Tensor:
        """Compute all unread tokens; logits [len(chains), vocab_size] after the last of each."""
        counts = [len(chain.unread) for chain in chains]
        positions = np.concatenate(
            [np.arange(chain.start, chain.start + n) for chain, n in zip(chains, counts, strict=True)]
        )
        tables = np.concatenate(
            [
                chain.table[np.arange(chain.start, chain.start + n) // self._block_size]
                for chain, n in zip(chains, counts, strict=True)
            ]
        )
        slots = tables.astype(np.int64) * self._block_size + positions % self._block_size
        last_rows = np.cumsum(counts) - 1 if wants_logits else np.empty(0, dtype=np.int64)
        batch = ForwardBatch(
            token_ids=self._tensor(np.array([token for chain in chains for token in chain.unread], dtype=np.int64)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            sequences=[
                SequenceRows(num_context=chain.start, num_rows=n, block_ids=chain.table)
                for chain, n in zip(chains, counts, strict=True)
            ],
            block_size=self._block_size,
            logits_rows=self._tensor(last_rows),
        )
        return self._model.forward(batch, self._attention.begin(batch, self._cache)).logits

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)

    def _choose(self, chain: Chain, row: Tensor, likeliest: int) -> int:
        """The chain's next token."""
        sequence, rules, path = chain.request.sequence, chain.request.rules, chain.token_ids
        if self._sample_method == "greedy" or rules is None or rules.is_greedy:
            return likeliest
        if self._sample_method == "coupled":
            position = len(sequence) + len(path)
            return target_token(rules, row, sequence.output_ids, path, seed=sequence.seed, position=position)
        probs = target_probs(rules, row, sequence.output_ids, path)
        chain.probs.append(probs)
        # keyed by the draft's first position: a draw for a path that is thrown away never decides again
        return draw_token(probs, seed=sequence.seed, position=len(sequence), stream=Stream.DRAFT, index=len(path))
