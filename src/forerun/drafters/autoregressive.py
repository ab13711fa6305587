"""A drafter that writes with a predictor over KV of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, TargetInfo
from forerun.drafters.choice import Choice, check_sample_method
from forerun.drafters.kv_ledger import KVLedger
from forerun.drafters.passes import Passes, scratch_blocks_per_line
from forerun.drafters.predictor import Predictor
from forerun.drafters.tree import DynamicTree, StaticTree, parse_tree
from forerun.drafters.writers import ChainWriter, DynamicTreeWriter, StaticTreeWriter, Writer
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache, bytes_per_block
from forerun.models.loaded import choose_attention


class Vocabulary(Protocol):
    """What has logits of the target's tokens: a `Predictor`, or a network without KV."""

    target_ids: Tensor | None  # [V] int64, the target's token of each logit; None: V is its vocabulary


@dataclass(frozen=True, slots=True)
class Wording:
    """How a drafter with a predictor chooses its words: `draft_sample_method` (`Choice`) and `draft_tree` (`parse_tree`).

    Raises:
        ConfigError: one is not what it may be, or the two do not fit.
    """

    sample_method: str = "greedy"
    tree: StaticTree | DynamicTree | None = None

    @classmethod
    def parse(cls, sample_method: str, draft_tree: object) -> Wording:
        """Check the user's values."""
        check_sample_method(sample_method)
        tree = parse_tree(draft_tree)
        if isinstance(tree, DynamicTree) and sample_method != "greedy":
            raise ConfigError(
                f"draft_sample_method: got {sample_method!r} with a dynamic draft_tree, which takes the likeliest tokens; "
                "must be 'greedy'; or give a static tree"
            )
        return cls(sample_method, tree)

    @property
    def default_num_tokens(self) -> int | None:
        """K where the user gives none: the size of a static tree."""
        return self.tree.num_nodes if isinstance(self.tree, StaticTree) else None

    def writer(self, target: TargetInfo, predictor: Vocabulary) -> Writer:
        """What writes so with `predictor`.

        Raises:
            ConfigError: the tree has more nodes than a draft may have.
        """
        self.check_size(target.num_speculative_tokens)
        choice = Choice(self.sample_method, vocab_size=target.vocab_size, target_ids=predictor.target_ids)
        if self.tree is None:
            return ChainWriter(choice, num_tokens=target.num_speculative_tokens)
        if isinstance(self.tree, DynamicTree):
            return DynamicTreeWriter(self.tree, target_ids=predictor.target_ids)
        return StaticTreeWriter(choice, self.tree)

    def check_size(self, num_tokens: int) -> None:
        """Raise `ConfigError` if a static tree has more nodes than the `num_tokens` of a draft."""
        if isinstance(self.tree, StaticTree) and self.tree.num_nodes > num_tokens:
            raise ConfigError(
                f"draft_tree: has {self.tree.num_nodes} nodes, num_speculative_tokens allows {num_tokens}; "
                "raise it or leave nodes out"
            )

    def check_depth(self, num_tokens: int, *, deepest: int) -> None:
        """Raise `ConfigError` if a draft of `num_tokens` can be deeper than the `deepest` that its checkpoint predicts."""
        if self.tree is None and num_tokens > deepest:
            raise ConfigError(
                f"num_speculative_tokens: got {num_tokens}; the checkpoint predicts {deepest} tokens ahead; lower it, "
                "or give a draft_tree"
            )
        if self.tree is not None and self.tree.depth > deepest:
            raise ConfigError(
                f"draft_tree: is {self.tree.depth} levels deep; the checkpoint predicts {deepest} tokens ahead; "
                "leave levels out"
            )


class Autoregressive:
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
        cache = KVCache(
            self._predictor.kv_specs,
            num_blocks=num_blocks + self.num_scratch_blocks,
            block_size=block_size,
            dtype=self._predictor.dtype,
            device=self._predictor.device,
        )
        self._passes = Passes(
            self._predictor,
            choose_attention(self._predictor.kv_specs, self._target.itself.kernels),
            cache,
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
        drafts = self._writer.write(self._passes, lines, context.features)
        for line, table, start in zip(lines, tables, starts, strict=True):
            if line.is_wanted:
                self._ledger.note(line.request.sequence, table, start, line.request.num_computed)
        return drafts

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._ledger.stop(sequence)
