"""Forward passes of an engine's own executor, over sequences of random tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.errors import ConfigError
from forerun.executor.local import LocalExecutor
from forerun.kv.block_table import BlockTable
from forerun.llm import LLM
from forerun.models.config import DecoderConfig

PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """A forward pass over `num_sequences` sequences of `context` tokens each, with `rows` new rows of each."""

    context: int
    num_sequences: int
    rows: int


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The bytes that a forward pass must read: each weight once, and the KV of the context.

    Divided by the memory's bandwidth they give a lower bound of the time of a pass of few rows.
    """

    config: DecoderConfig
    dtype: torch.dtype  # of the KV
    weights: int = field(kw_only=True)  # of all matrices, see `Decoder.weight_bytes`

    def kv(self, context: int) -> int:
        """Bytes of the keys and values that one sequence's next token reads after `context` tokens, windows applied."""
        seen = sum(context if window is None else min(context, window) for window in self.config.windows)
        return seen * 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize


class RandomSequences:
    """Sequences of random tokens whose KV is in an engine's cache; made by `random_sequences`."""

    def __init__(self, executor: LocalExecutor, tables: Sequence[BlockTable]) -> None:
        self._executor = executor
        self._tables = tables
        self._random = torch.Generator().manual_seed(0)

    def batch(self, shape: PassShape, *, all_logits: bool = True) -> ForwardBatch:
        """The rows after the first `shape.context` tokens, as when drafts are verified: logits of each row."""
        tables = self._tables[: shape.num_sequences]
        places = [np.asarray(table.slots(shape.context, shape.rows), dtype=np.int64) for table in tables]
        num_rows = shape.num_sequences * shape.rows
        positions = torch.arange(shape.context, shape.context + shape.rows).repeat(shape.num_sequences)
        return ForwardBatch(
            token_ids=self._tokens(num_rows),
            positions=positions.to(self._device),
            slot_mapping=torch.from_numpy(np.concatenate(places)).to(self._device),
            sequences=[
                SequenceRows(num_context=shape.context, num_rows=shape.rows, block_ids=table.block_ids)
                for table in tables
            ],
            block_size=self._executor.cache.block_size,
            logits_rows=torch.arange(0 if all_logits else num_rows - 1, num_rows, device=self._device),
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one whole pass, the layers' common preparation included; logits of the batch's rows."""
        with torch.inference_mode():
            return self._executor.forward(batch, self._executor.prepare_pass(batch)).logits

    def prefill(self, num_tokens: int) -> None:
        """Compute the KV of the first sequence's first tokens and give the others a copy each."""
        for start in range(0, num_tokens, PREFILL_ROWS):
            rows = min(PREFILL_ROWS, num_tokens - start)
            self.forward(self.batch(PassShape(context=start, num_sequences=1, rows=rows), all_logits=False))
        for table in self._tables[1:]:
            self.copy_first(table.slots(0, num_tokens))

    def copy_first(self, slots: Sequence[int]) -> None:
        """Copy the KV of the first sequence's first tokens to other slots, one for each token."""
        source = torch.as_tensor(self._tables[0].slots(0, len(slots)), device=self._device)
        self._executor.cache.move(source, torch.as_tensor(slots, device=self._device))

    @property
    def _device(self) -> torch.device:
        return self._executor.model.device

    def _tokens(self, count: int) -> Tensor:
        vocab_size = self._executor.model.vocab_size
        return torch.randint(vocab_size, (count,), generator=self._random).to(self._device)


@contextmanager
def random_sequences(llm: LLM, shapes: Sequence[PassShape]) -> Iterator[RandomSequences]:
    """Sequences for passes of these shapes; their KV memory is the engine's, and is given back at the end.

    Raises:
        ConfigError: a shape is longer than the engine's sequences, or there is not enough KV memory for all.
    """
    pool, context = llm.engine.parts.pool, max(shape.context for shape in shapes)
    longest = context + max(shape.rows for shape in shapes)
    if longest > llm.max_model_len:
        raise ConfigError(
            f"contexts, rows: got sequences of {longest} tokens in sum; max_model_len is {llm.max_model_len}; "
            "ask for less or raise max_model_len"
        )
    tables: list[BlockTable] = []
    try:
        for index in range(max(shape.num_sequences for shape in shapes)):
            tables.append(BlockTable(pool, block_size=llm.executor.cache.block_size))
            if not tables[-1].allocate(longest):
                raise ConfigError(
                    f"sequences: KV memory holds {index} of {longest} tokens each; "
                    "raise kv_cache_memory_bytes or ask for fewer or shorter ones"
                )
        sequences = RandomSequences(llm.executor, tables)
        sequences.prefill(context)
        yield sequences
    finally:
        for table in tables:
            table.free()
