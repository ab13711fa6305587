"""Dynamo's files of measured latencies: those of its profiler, which its planner reads, and those of its mocker.

Keys and units are those of ai-dynamo 1.4 (its profiler's `raw_data.npz`, its mocker's `planner_profile_data`):
milliseconds, tokens per second and GPU. Our keys stand beside them, which Dynamo does not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.errors import ConfigError
from forerun.plan.step_times import FREE_DRAFTING, DraftingCost, StepTimeModel

Floats = npt.NDArray[np.float64]

PREFILL_FILE = Path("selected_prefill_interpolation/raw_data.npz")
DECODE_FILE = Path("selected_decode_interpolation/raw_data.npz")
LEAST_POINTS = 3  # of a sweep, to interpolate

PREFILL_KEYS = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
DECODE_KEYS = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu", "max_kv_tokens")
MOCKER_KEYS = (
    "prefill_isl",
    "prefill_ttft_ms",
    "decode_active_kv_tokens",
    "decode_context_length",
    "decode_itl",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """A measured prompt: its tokens, and seconds to its first token on an idle engine."""

    isl: int
    ttft_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """Measured steps of one shape: sequences, tokens of context of each, draft length, seconds with drafting.

    `accept_length` is the mean tokens that a step of such drafts yields per sequence.
    """

    num_sequences: int
    context: int
    num_draft_tokens: int
    step_seconds: float
    accept_length: float = 1.0
    energy_joules: float | None = None  # of a step

    @property
    def itl_seconds(self) -> float:
        """Mean seconds from one token of a sequence to its next."""
        return self.step_seconds / self.accept_length


def write_prefill(path: Path, points: Sequence[PrefillPoint], *, num_gpus: int = 1) -> None:
    """Write the prefill sweep; the machine without a GPU counts as one.

    Raises:
        ConfigError: there are too few points.
    """
    if len(points) < LEAST_POINTS:
        raise ConfigError(
            f"prefill: got {len(points)} input length(s); Dynamo interpolates between {LEAST_POINTS} or more: "
            "profile with more --input-lengths"
        )
    ordered = sorted(points, key=lambda point: point.isl)
    isl = np.array([point.isl for point in ordered], dtype=np.float64)
    ttft = np.array([point.ttft_seconds for point in ordered])
    _save(path, prefill_isl=isl, prefill_ttft=1e3 * ttft, prefill_thpt_per_gpu=isl / ttft / num_gpus)


def write_decode(path: Path, points: Sequence[DecodePoint], *, max_kv_tokens: int, num_gpus: int = 1) -> None:
    """Write the decode sweep of one draft length.

    Raises:
        ConfigError: there are too few points.
    """
    if len(points) < LEAST_POINTS:
        raise ConfigError(
            f"decode: got {len(points)} point(s); Dynamo interpolates between {LEAST_POINTS} or more: "
            "profile with more --num-sequences or --contexts"
        )
    sequences = np.array([point.num_sequences for point in points], dtype=np.float64)
    contexts = np.array([point.context for point in points], dtype=np.float64)
    itl = np.array([point.itl_seconds for point in points])
    energy = [np.nan if point.energy_joules is None else point.energy_joules for point in points]
    arrays = {
        "x_kv_usage": sequences * contexts / max_kv_tokens,
        "y_context_length": contexts,
        "z_itl": 1e3 * itl,
        "z_thpt_per_gpu": sequences / itl / num_gpus,
        "max_kv_tokens": np.array([max_kv_tokens]),
        "z_step_ms": np.array([1e3 * point.step_seconds for point in points]),
        "z_accept_length": np.array([point.accept_length for point in points]),
        "batch": sequences,
        "K": np.array([point.num_draft_tokens for point in points]),
    }
    if not np.isnan(energy).any():
        arrays["z_energy_j"] = np.array(energy)
    _save(path, **arrays)


def write_mocker(
    path: Path,
    model: StepTimeModel,
    prefill: Sequence[PrefillPoint],
    *,
    num_draft_tokens: int,
    contexts: Sequence[int],
    num_sequences: Sequence[int],
    max_kv_tokens: int,
    drafting: DraftingCost = FREE_DRAFTING,
) -> None:
    """Write the mocker's table of whole steps of one draft length: not divided by the tokens that they yield.

    The mocker draws accepted tokens by itself (`aic_nextn_accept_rates`); with latencies per token they
    would count twice.

    Args:
        path: of the .npz file.
        model: what steps take.
        prefill: the measured prompts.
        num_draft_tokens: K of each sequence in every step.
        contexts: tokens of each sequence, the rows of the table.
        num_sequences: that run at once, from 1; with the contexts they give the columns, tokens in the KV cache.
        max_kv_tokens: the most that the KV cache holds.
        drafting: what it takes to draft for all sequences of a step.
    """
    lengths = np.array(sorted(set(contexts)), dtype=np.float64)
    tokens = {min(n * c, max_kv_tokens) for n in num_sequences for c in contexts}
    active = np.array(sorted(tokens), dtype=np.float64)
    itl = np.empty((len(active), len(lengths)))
    for row, kv_tokens in enumerate(active):
        for column, context in enumerate(lengths):
            running = max(1, round(kv_tokens / context))
            num_drafted = running * num_draft_tokens
            itl[row, column] = (drafting.seconds(running, num_drafted) if num_drafted else 0.0) + model.seconds(
                num_rows=running + num_drafted, num_sequences=running, num_context_tokens=int(kv_tokens)
            )
    ordered = sorted(prefill, key=lambda point: point.isl)
    _save(
        path,
        prefill_isl=np.array([point.isl for point in ordered], dtype=np.float64),
        prefill_ttft_ms=np.array([1e3 * point.ttft_seconds for point in ordered]),
        decode_active_kv_tokens=active,
        decode_context_length=lengths,
        decode_itl=1e3 * itl,
    )


def read_arrays(path: Path, keys: Sequence[str], *, others: Sequence[str] = ()) -> dict[str, Floats]:
    """The arrays of an .npz file: all of `keys`, and of `others` those that it has.

    Raises:
        ConfigError: the file cannot be read, lacks an array, or has an empty one or a number that is not finite.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            missing = [key for key in keys if key not in found.files]
            if missing:
                raise ConfigError(f"{path}: lacks {', '.join(missing)}; has {', '.join(found.files) or 'nothing'}")
            arrays = {key: np.asarray(found[key], dtype=np.float64) for key in (*keys, *others) if key in found.files}
    except ConfigError:
        raise
    except Exception as problem:  # whatever readers of zip, zlib and numpy make of damaged bytes
        raise ConfigError(f"{path}: cannot be read ({problem}); give an .npz file of a profile") from None
    for key, array in arrays.items():
        if not array.size:
            raise ConfigError(f"{path}: {key} has no numbers; must have at least one: profile again")
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            place = ", ".join(map(str, bad[0]))
            raise ConfigError(f"{path}: {key}[{place}] is {array[tuple(bad[0])]}; must be finite: profile again")
    return arrays


def _save(path: Path, **arrays: npt.NDArray[np.generic]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)  # type: ignore[arg-type]
