"""Writes what a profile's folder has beside profile.json: all steps, Dynamo's files, the page of plots."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from forerun.bench.profiling.stages import PAGE_FILE, SWEEP_FILE
from forerun.bench.profiling.step_sweep import Cells, RoundResult, step_medians, write_sweep
from forerun.errors import ConfigError
from forerun.plan.dynamo_files import (
    DECODE_FILE,
    LEAST_POINTS,
    PREFILL_FILE,
    DecodePoint,
    PrefillPoint,
    write_decode,
    write_mocker,
    write_prefill,
)
from forerun.plan.profile import Profile
from forerun.plan.step_times import FREE_DRAFTING


class Chosen(NamedTuple):
    """The configuration and draft length with the cheapest token, averaged over the measured batches."""

    name: str | None
    num_draft_tokens: int


def write_outputs(
    profile: Profile, rounds: Sequence[RoundResult], folder: Path, *, draft_length: int | None = None
) -> bool:
    """Write sweep.csv, the .npz files of Dynamo's profiler and mocker, and profile.html; False: the page could not be drawn.

    Args:
        profile: what was found.
        rounds: what was measured.
        folder: of the profile.
        draft_length: what all steps count as, as of a server that drafts as it likes; None: each as it was.

    Raises:
        ConfigError: too few batches were measured.
    """
    steps = [step for one in rounds for step in one.steps]
    write_sweep(folder / SWEEP_FILE, steps)
    prefill = prefill_points(rounds)
    num_gpus = profile.tensor_parallel_size
    write_prefill(folder / PREFILL_FILE, prefill, num_gpus=num_gpus)
    max_kv_tokens = profile.num_blocks * profile.block_size
    cells = step_medians(steps, draft_length=draft_length)
    if not _interpolated(cells):
        raise ConfigError(
            f"profile: got {len(cells)} measured batch(es); {LEAST_POINTS} or more must decode for long enough: "
            "measure more --num-sequences, or shorter --contexts"
        )
    chosen = choose(profile, cells)
    for length in _interpolated(cells):
        points = decode_points(profile, cells, chosen.name, length)
        path = folder / f"decode_k{length}" / "raw_data.npz"
        write_decode(path, points, max_kv_tokens=max_kv_tokens, num_gpus=num_gpus)
        write_mocker(
            folder / f"mocker_k{length}.npz",
            profile.step_times,
            prefill,
            num_draft_tokens=length,
            contexts=[point.context for point in points],
            num_sequences=[point.num_sequences for point in points],
            max_kv_tokens=max_kv_tokens,
            drafting=FREE_DRAFTING if chosen.name is None else profile.drafting[chosen.name],
        )
    selected = folder / DECODE_FILE
    selected.parent.mkdir(exist_ok=True)
    shutil.copyfile(folder / f"decode_k{chosen.num_draft_tokens}" / "raw_data.npz", selected)
    if find_spec("matplotlib") is None:
        return False
    from forerun.bench.profiling.page import write_page  # matplotlib: only when it is needed

    if draft_length is not None:
        steps = [replace(step, sample=step.sample.with_draft_length(draft_length)) for step in steps]
    write_page(profile, prefill, cells, steps, folder / PAGE_FILE)
    return True


def prefill_points(rounds: Sequence[RoundResult]) -> list[PrefillPoint]:
    """Each prompt's median over the rounds."""
    by_length: dict[int, list[float]] = {}
    for one in rounds:
        for prompt in one.prompts:
            by_length.setdefault(prompt.isl, []).append(prompt.ttft_seconds)
    return [
        PrefillPoint(isl=isl, ttft_seconds=statistics.median(seconds)) for isl, seconds in sorted(by_length.items())
    ]


def decode_points(profile: Profile, cells: Cells, name: str | None, length: int) -> list[DecodePoint]:
    """The points of one draft length, where a configuration drafts (None: nobody does)."""
    accept_length, points = _accept_length(profile, name, length), []
    for (num_sequences, context, found), plain_seconds in cells.items():
        if found != length:
            continue
        seconds = plain_seconds + _draft_seconds(profile, name, num_sequences, length)
        points.append(
            DecodePoint(
                num_sequences=num_sequences,
                context=context,
                num_draft_tokens=length,
                step_seconds=seconds,
                accept_length=accept_length,
                energy_joules=None if profile.watts is None else profile.watts * seconds,
            )
        )
    return points


def choose(profile: Profile, cells: Cells) -> Chosen:
    """The configuration and draft length whose tokens cost least, averaged over the batches that were measured with it.

    Drafts are compared with plain steps of the same batches, so that a length that was measured with small
    batches only has no advantage.
    """
    best, best_cost = Chosen(None, 0), 1.0
    lengths = _interpolated(cells)
    if lengths[0]:  # a server that always drafts
        return Chosen(next(iter(profile.configs), None), lengths[0])
    for name in profile.configs:
        for length in lengths[1:]:
            ratios = [
                point.itl_seconds / cells[point.num_sequences, point.context, 0]
                for point in decode_points(profile, cells, name, length)
                if (point.num_sequences, point.context, 0) in cells
            ]
            if ratios and statistics.fmean(ratios) < best_cost:
                best, best_cost = Chosen(name, length), statistics.fmean(ratios)
    return best


def _interpolated(cells: Cells) -> list[int]:
    """The draft lengths, from 0, that were measured with enough batches to interpolate; long drafts of many sequences are not."""
    lengths = [length for _, _, length in cells]
    return [length for length in sorted(set(lengths)) if lengths.count(length) >= LEAST_POINTS]


def _accept_length(profile: Profile, name: str | None, length: int) -> float:
    if name is None or not length:
        return 1.0
    acceptance = profile.acceptance[name]
    return acceptance.expected(min(length, acceptance.num_places))


def _draft_seconds(profile: Profile, name: str | None, num_sequences: int, length: int) -> float:
    return 0.0 if name is None or not length else profile.drafting[name].seconds(num_sequences, num_sequences * length)
