"""Recorded texts in an engine's cache: the target reads each at once (teacher forcing), and drafters find what decoding leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.errors import MemoryBudgetError
from forerun.llm import LLM


class ForcedText:
    """A text whose KV, and the hidden states that the drafter needs, are in the cache, those of its last token left out.

    A drafter may see only the committed beginning. It may write behind that, to the rest of the last block that
    the beginning reaches into, as the target would overwrite it there. Here the target has read on already, so
    `opened_at` puts that rest back. Made by `forced_texts`.
    """

    def __init__(self, llm: LLM, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        self._executor = llm.executor
        self._block_size = llm.executor.cache.block_size
        self._block_ids = np.array(blocks[:-1], dtype=np.int32)
        self._spare = blocks[-1]
        self._kept = -1  # the block that the spare one is a copy of
        self._compute(token_ids[:-1], chunk=llm.settings.max_num_batched_tokens)

    @contextmanager
    def opened_at(self, num_computed: int) -> Iterator[npt.NDArray[np.int32]]:
        """The blocks of the first `num_computed` tokens; whatever is written behind these is undone at the end."""
        last, num_partial = divmod(num_computed, self._block_size)
        if num_partial and last != self._kept:
            self._copy(int(self._block_ids[last]), self._spare)
            self._kept = last
        yield self._block_ids[: last + (num_partial > 0)]
        if num_partial:
            self._copy(self._spare, int(self._block_ids[last]), first=num_partial)

    def _copy(self, source: int, destination: int, *, first: int = 0) -> None:
        """Copy the places of a block from `first` on."""
        places = self._tensor(range(first, self._block_size))
        self._executor.cache.move(source * self._block_size + places, destination * self._block_size + places)

    def _compute(self, token_ids: Sequence[int], *, chunk: int) -> None:
        """Let the target read the tokens as it reads a prompt, in chunks."""
        for start in range(0, len(token_ids), chunk):
            rows = token_ids[start : start + chunk]
            places = np.arange(start, start + len(rows))
            slots = self._block_ids[places // self._block_size] * self._block_size + places % self._block_size
            batch = ForwardBatch(
                token_ids=self._tensor(rows),
                positions=self._tensor(places),
                slot_mapping=self._tensor(slots),
                sequences=[SequenceRows(num_context=start, num_rows=len(rows), block_ids=self._block_ids)],
                block_size=self._block_size,
                logits_rows=self._tensor(()),
                features=self._executor.drafting.drafter.needs,
            )
            self._executor.forward(batch, self._executor.prepare_pass(batch))

    def _tensor(self, values: Sequence[int] | npt.NDArray[np.integer]) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self._executor.model.device)


@contextmanager
def forced_texts(llm: LLM, texts: Sequence[Sequence[int]]) -> Iterator[list[ForcedText]]:
    """Texts (token ids) whose KV and hidden states are in an engine's cache; their memory is given back at the end.

    The passes are those of the engine's own executor: on the native kernels a row has the bits that it has in
    decoding. Must be inside `LocalExecutor.as_in_a_step`.

    Raises:
        MemoryBudgetError: the cache is too small for the texts.
    """
    pool, size = llm.engine.parts.pool, llm.executor.cache.block_size
    held: list[list[int]] = []
    try:
        for text in texts:
            blocks = pool.take(num_blocks_for(len(text), block_size=size))
            if blocks is None:
                raise MemoryBudgetError(
                    f"KV memory: {pool.num_blocks} blocks of {size} tokens do not hold {len(texts)} texts of up to "
                    f"{max(map(len, texts))} tokens; raise num_gpu_blocks_override"
                )
            held.append(blocks)
        yield [ForcedText(llm, text, blocks) for text, blocks in zip(texts, held, strict=True)]
    finally:
        for blocks in held:
            pool.give_back(blocks)


def num_blocks_for(num_tokens: int, *, block_size: int) -> int:
    """KV blocks that a text of so many tokens takes, with the spare one."""
    return -(-(num_tokens - 1) // block_size) + 1
