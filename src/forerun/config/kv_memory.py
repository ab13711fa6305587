"""How many KV blocks there are, and how long a sequence may be in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from forerun.config.gpu_memory import MemoryShare
from forerun.config.settings import EngineSettings
from forerun.core.control_groups import memory_left
from forerun.drafters.base import Drafter, KeepsKV
from forerun.errors import ConfigError, MemoryBudgetError
from forerun.kv.cache import bytes_per_block
from forerun.models.base import TargetModel

logger = logging.getLogger(__name__)

MOST_CPU_KV_BYTES = 4 << 30
ASSUMED_MEMORY = 16 << 30  # where Python cannot ask the system


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Blocks in the pool and the longest sequence (tokens) that the engine takes."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KVBytes:
    """What KV takes, in bytes.

    `target_block` are the target's keys and values in a block, `drafter_block` what the drafter adds to it: the hidden states that
    it reads and its own entries. `scratch` are all blocks that drafts alone are written to, which lie beside those of texts.
    """

    target_block: int
    drafter_block: int
    scratch: int


def kv_bytes_of(model: TargetModel, drafter: Drafter, *, block_size: int, num_kv_heads: int | None = None) -> KVBytes:
    """What the KV of a target and a drafter takes.

    Args:
        model: the target.
        drafter: its drafter.
        block_size: places in a block.
        num_kv_heads: those that all of the target's processes hold; None: the model's own.

    Raises:
        ConfigError: the target has no hidden states of a name that the drafter needs.
    """
    specs = model.kv_specs
    if num_kv_heads is not None:
        specs = [replace(spec, num_kv_heads=num_kv_heads) for spec in specs]
    widths = feature_widths(model, drafter.needs)
    target = bytes_per_block(specs, block_size=block_size, dtype=model.dtype)
    features = bytes_per_block([], block_size=block_size, dtype=model.dtype, feature_widths=widths)
    if not isinstance(drafter, KeepsKV):
        return KVBytes(target, features, 0)
    scratch = drafter.num_scratch_blocks * (target + features) + drafter.scratch_bytes
    return KVBytes(target, features + drafter.kv_bytes_per_block, scratch)


def plan_kv(
    settings: EngineSettings,
    model: TargetModel,
    drafter: Drafter,
    *,
    num_kv_heads: int | None = None,
    measure: Callable[[], MemoryShare] | None = None,
) -> KVBudget:
    """Fit the KV cache, the drafter's entries included, into memory.

    Args:
        settings: the engine's.
        model: the target.
        drafter: its drafter.
        num_kv_heads: those that all of the target's processes hold; None: the model's own.
        measure: measures a GPU's memory; asked where the settings do not say how much KV there is. None on a CPU.

    Raises:
        ConfigError: max_model_len is above what the model was made for.
        MemoryBudgetError: one sequence of max_model_len does not fit, or the machine has less memory than is asked for.
    """
    wanted = settings.max_model_len
    if wanted is not None and wanted > model.max_model_len:
        raise ConfigError(f"max_model_len: got {wanted}; the model allows at most {model.max_model_len}; lower it")
    taken = kv_bytes_of(model, drafter, block_size=settings.block_size, num_kv_heads=num_kv_heads)
    block_bytes = taken.target_block + taken.drafter_block
    num_blocks, share = settings.num_gpu_blocks_override, None
    if num_blocks is None:
        if settings.kv_cache_memory_bytes is None and measure is not None:
            share = measure()
        kv_bytes = _kv_bytes(settings, share)
        if share is not None:
            kv_bytes = max(0, kv_bytes - taken.scratch)  # which lies in the same memory
        num_blocks = kv_bytes // block_bytes
        longest = wanted or model.max_model_len
        most_useful = settings.max_num_seqs * (-(-longest // settings.block_size) + 1)
        num_blocks = min(num_blocks, most_useful)
    if model.device.type == "cpu" and (total := num_blocks * block_bytes + taken.scratch) > _memory_of_machine():
        raise MemoryBudgetError(
            f"KV memory: {num_blocks} blocks take {total / 2**30:.1f} GiB, more than this machine has "
            f"({_memory_of_machine() / 2**30:.1f} GiB); lower "
            f"{'kv_cache_memory_bytes' if settings.num_gpu_blocks_override is None else 'num_gpu_blocks_override'}"
        )
    num_tokens = num_blocks * settings.block_size
    max_model_len = wanted if wanted is not None else min(model.max_model_len, num_tokens)
    if num_tokens < max_model_len or max_model_len < 2:
        needed = -(-max(2, max_model_len) // settings.block_size) * block_bytes
        raise MemoryBudgetError(
            f"KV memory: one sequence of max_model_len={max(2, max_model_len)} tokens needs {needed / 2**20:.1f} MiB, got "
            f"{num_blocks * block_bytes / 2**20:.1f} MiB ({num_tokens} tokens); "
            f"{_what_to_change(settings, share, needed + taken.scratch)}"
        )
    if wanted is None and max_model_len < model.max_model_len:
        logger.warning(
            "max_model_len is %d, what the KV memory holds; the model allows %d: raise %s for longer sequences",
            max_model_len,
            model.max_model_len,
            "kv_cache_memory_bytes" if share is None else "gpu_memory_utilization",
        )
    return KVBudget(num_blocks, max_model_len)


def _what_to_change(settings: EngineSettings, share: MemoryShare | None, needed: int) -> str:
    """What makes room for `needed` bytes of KV, scratch blocks included."""
    if settings.num_gpu_blocks_override is not None:
        return "lower max_model_len or raise num_gpu_blocks_override"
    if share is None:
        return "lower max_model_len or raise kv_cache_memory_bytes"
    return (
        f"of the GPU {share}; {(needed - share.for_kv) / 2**20:.1f} MiB are missing: lower max_model_len, max_num_batched_tokens "
        f"({settings.max_num_batched_tokens}) or max_num_seqs ({settings.max_num_seqs}), raise gpu_memory_utilization, or take a "
        "smaller model"
    )


def feature_widths(model: TargetModel, needs: frozenset[str]) -> dict[str, int]:
    """Name -> width of the features that a drafter needs.

    Raises:
        ConfigError: the target has none of that name.
    """
    known = {"last_hidden", *(f"hidden.{layer}" for layer in range(model.num_layers + 1))}
    for name in sorted(needs - known):
        raise ConfigError(
            f"drafter: needs the feature {name!r}; this target has last_hidden and hidden.0 to hidden.{model.num_layers}; "
            "use a drafter made for this target"
        )
    return dict.fromkeys(sorted(needs), model.hidden_size)


def _kv_bytes(settings: EngineSettings, share: MemoryShare | None) -> int:
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    if share is not None:
        return max(0, share.for_kv)
    return min(MOST_CPU_KV_BYTES, _available_memory() // 4)


def _available_memory() -> int:
    """Return the bytes of memory that this process can take without swapping, half of all where the system reports no more."""
    left = memory_left()
    return _available_of_machine() if left is None else min(left, _available_of_machine())


def _available_of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return _memory_of_machine() // 2


def _memory_of_machine() -> int:
    if not hasattr(os, "sysconf"):  # Windows
        return ASSUMED_MEMORY
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
