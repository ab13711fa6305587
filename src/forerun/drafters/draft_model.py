"""Drafts by a smaller model of the same vocabulary (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, TargetInfo
from forerun.drafters.chain_writer import ChainWriter, check_sample_method, scratch_blocks_per_chain
from forerun.drafters.kv_ledger import KVLedger
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache, bytes_per_block
from forerun.models.base import TargetModel
from forerun.models.loaded import LoadedTarget
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from forerun.models.store import resolve_model

QUANTIZATIONS = (None, "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """vLLM's keys: which model drafts, in which weights, how its tokens are chosen, and how far it may go.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    quantization: str | None = None
    draft_sample_method: str = "greedy"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        check_sample_method(self.draft_sample_method)
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization (of the drafter): got {self.quantization!r}; may be None or 'int8'")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len (of the drafter): got {self.max_model_len}; must be 1 or more")

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The user must say how many."""
        return None

    def build(self, target: TargetInfo) -> Drafter:
        """Load the model.

        Raises:
            ConfigError: its vocabulary is not the target's, or `max_model_len` is above what it was made for.
            ModelError: it cannot be loaded.
        """
        model = load_beside(target.itself, resolve_model(str(self.model)), quantization=self.quantization)
        if model.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculative_config: draft model {self.model} has a vocabulary of {model.vocab_size} tokens, "
                f"the target of {target.vocab_size}; must be the same; use a draft model of the target's family"
            )
        if self.max_model_len is not None and self.max_model_len > model.max_model_len:
            raise ConfigError(
                f"max_model_len (of the drafter): got {self.max_model_len}; the draft model allows at most "
                f"{model.max_model_len}; lower it"
            )
        return DraftModel(
            model,
            target,
            sample_method=self.draft_sample_method,
            max_model_len=self.max_model_len or model.max_model_len,
        )


def load_beside(target: LoadedTarget, path: Path, *, quantization: str | None) -> TargetModel:
    """Load a drafter's model on the target's device, in its dtype and on its kernels.

    Raises:
        ConfigError: int8 is asked for where there are no native kernels.
        ModelError: it cannot be loaded.
    """
    packing = None
    if target.kernels is not None:
        weight_dtype = torch.int8 if quantization == "int8" else target.model.dtype
        packing = Packing(target.kernels, weight_dtype=weight_dtype)
    elif quantization is not None:
        raise ConfigError(
            f"quantization (of the drafter): got {quantization!r}, which the native CPU kernels compute; "
            "the target does not run on them; leave it out"
        )
    return load_model(path, dtype=target.model.dtype, device=target.model.device, packing=packing)


class DraftModel:
    """A whole model with KV of its own, in the target's blocks.

    Before it drafts it reads what it has not read yet of a text. So it may be kept waiting, find a
    prefix in the cache, or lose its blocks to preemption: the ledger says where it stands.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, model: TargetModel, target: TargetInfo, *, sample_method: str, max_model_len: int) -> None:
        self.kv_bytes_per_block = bytes_per_block(model.kv_specs, block_size=target.block_size, dtype=model.dtype)
        self.num_scratch_blocks = scratch_blocks_per_chain(target) * target.max_num_seqs
        self._model = model
        self._target = target
        self._sample_method = sample_method
        self._max_model_len = max_model_len

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Make the cache: an entry of its own for each of the target's places, and the scratch blocks."""
        block_size = target_cache.block_size
        self._ledger = KVLedger(num_blocks, block_size=block_size)
        cache = KVCache(
            self._model.kv_specs,
            num_blocks=num_blocks + self.num_scratch_blocks,
            block_size=block_size,
            dtype=self._model.dtype,
            device=self._model.device,
        )
        self._writer = ChainWriter(
            self._model, cache, self._target, num_blocks=num_blocks, sample_method=self._sample_method
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
        chains = [
            self._writer.chain(number, request, start=start, num_tokens=self._num_tokens(request))
            for number, (request, start) in enumerate(zip(requests, starts, strict=True))
        ]
        drafts = self._writer.write(chains)
        for chain, table, start in zip(chains, tables, starts, strict=True):
            if chain.num_tokens:
                self._ledger.note(chain.request.sequence, table, start, chain.request.num_computed)
        return drafts

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._ledger.stop(sequence)

    def _num_tokens(self, request: DraftRequest) -> int:
        """How many tokens to draft; none for a text beyond the drafter's own limit."""
        room = self._max_model_len - len(request.sequence)
        return max(0, min(request.max_tokens, request.max_depth, room))
