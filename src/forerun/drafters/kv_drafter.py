"""A drafter that keeps KV of its own and writes with a predictor over it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing

from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, TargetInfo
from forerun.drafters.kv_ledger import KVLedger
from forerun.drafters.passes import Line, Passes, scratch_blocks_per_line
from forerun.drafters.predictor import Predictor
from forerun.drafters.writers import Writer
from forerun.kv.cache import KVCache, bytes_per_block
from forerun.models.loaded import choose_attention


class KVDrafter:
    """Writes with a predictor whose KV lies in the target's blocks.

    Before it drafts it reads what it has not read yet of a text. So it may be kept waiting, find a
    prefix in the cache, or lose its blocks to preemption: the ledger says where it stands. Only entries
    of committed tokens, made from the target's own features, are noted there; what a draft leaves in
    the cache is written over.
    """

    def __init__(self, predictor: Predictor, target: TargetInfo, writer: Writer, *, max_model_len: int) -> None:
        self.needs = predictor.needs
        self.kv_bytes_per_block = bytes_per_block(
            predictor.kv_specs, block_size=target.block_size, dtype=predictor.dtype
        )
        self._scratch_per_line = scratch_blocks_per_line(writer.num_places, block_size=target.block_size)
        self.num_scratch_blocks = self._scratch_per_line * target.max_num_seqs
        self._predictor = predictor
        self._target = target
        self._writer = writer
        self._max_model_len = max_model_len

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Make the cache: an entry of its own for each of the target's places, and the scratch blocks."""
        block_size = target_cache.block_size
        self._ledger = KVLedger(num_blocks, block_size=block_size)
        self._cache = KVCache(
            self._predictor.kv_specs,
            num_blocks=num_blocks + self.num_scratch_blocks,
            block_size=block_size,
            dtype=self._predictor.dtype,
            device=self._predictor.device,
        )
        self._attention = choose_attention(self._predictor.kv_specs, self._target.itself.kernels)
        self._passes = Passes(
            self._predictor,
            self._attention,
            self._cache,
            num_blocks=num_blocks,
            scratch_per_line=self._scratch_per_line,
        )

    def start(self, sequence: Sequence) -> None:
        """Know the sequence."""
        self._ledger.start(sequence)

    def propose(self, context: DraftContext) -> list[Draft]:
        """Read what is new, then draft, all sequences together."""
        requests = context.requests
        tables = [request.block_ids.tolist() for request in requests]
        starts = [
            self._ledger.num_valid(request.sequence, table, request.num_computed)
            for request, table in zip(requests, tables, strict=True)
        ]
        lines = [
            self._passes.line(number, request, start=start, longest=self._max_model_len)
            for number, (request, start) in enumerate(zip(requests, starts, strict=True))
        ]
        wanted = [line.is_wanted for line in lines]
        self._catch_up([line for line in lines if line.is_wanted], context.features)
        drafts = self._writer.write(self._passes, lines, context.features)
        for line, table, start, was_wanted in zip(lines, tables, starts, wanted, strict=True):
            end = line.request.num_computed if line.is_wanted else line.start
            if was_wanted and end > start:
                self._ledger.note(line.request.sequence, table, start, end)
        return drafts

    def _catch_up(self, lines: Listing[Line], features: Mapping[str, Tensor]) -> None:
        """Read of the texts what one step may, earlier requests first; what stays behind gets no draft yet.

        A step of the engine has a budget of tokens that the target reads; the drafter reads no more.
        What the last step committed is read in any case: that is part of drafting.
        """
        num_left = self._target.max_num_batched_tokens
        for line in lines:
            num_unread = line.request.num_computed - line.start
            if num_unread <= self._target.num_speculative_tokens:
                continue
            if num_unread > num_left:
                line.max_tokens = 0
                self._read_until(line, line.start + num_left, features)
            num_left -= min(num_unread, num_left)

    def _read_until(self, line: Line, end: int, features: Mapping[str, Tensor]) -> None:
        self._passes.read_until(line, end, features)

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._ledger.stop(sequence)
