"""Measures the cost of a speculative step: T(n), the time of a forward pass over n rows, plus the drafter's time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from forerun.bench.instruments import (
    BandwidthProbe,
    Clock,
    Interrupted,
    Progress,
    Stopwatch,
    no_progress,
    read_by_torch,
    whole_rounds,
)
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.passes import PassBytes, PassShape, RandomSequences, random_sequences
from forerun.core.sampling_params import SamplingParams
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.models.decoder import Decoder

ROWS = (1, 2, 4, 6, 8, 12, 16, 32)
CONTEXTS = (256, 1024)
SEQUENCES = (8, 32)
REPEATS = 15
NUM_WARMUP_ROUNDS = 2

# of the generation whose drafts are timed
NUM_PATTERN_TOKENS = 32
NUM_PATTERNS = 4
NUM_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The times of a forward pass of one shape.

    `ratio` is to T(1), one row of one sequence at the same context. `bandwidth_share` is the time that
    the memory needs to deliver `num_bytes` / the time taken, or None if the bytes are unknown. Both are
    medians of each round's own value, so that a drift of the machine does not affect them.
    """

    context: int  # tokens of each sequence in the KV cache
    num_sequences: int
    rows: int  # of each sequence
    milliseconds: float  # median
    ratio: float
    num_bytes: int | None  # the pass must read
    bandwidth_share: float | None
    all_milliseconds: list[float]  # by round


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """All points, and the settings of the measurement."""

    model: str
    dtype: str
    device: str
    kernels: str
    machine: str
    repeats: int
    weight_bytes: int | None  # each pass must read, or None where that is not known
    gigabytes_per_second: float  # median
    all_gigabytes_per_second: list[float]  # by round
    points: list[CurvePoint]

    @property
    def one_row_milliseconds(self) -> float:
        """T(1): one row of one sequence, after the shortest context."""
        return self.points[0].milliseconds

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return asdict(self)


class _Round(NamedTuple):
    """A whole round: bytes per second of the memory, and seconds of every shape."""

    bandwidth: float
    seconds: dict[PassShape, float]


def keep_costs(llm: LLM, curve: Curve) -> None:
    """Let the next engine with this model on this machine begin with the curve's costs, see `config.cost_profile`."""
    costs = llm.cost_profile.load()
    for all_times in zip(*(point.all_milliseconds for point in curve.points), strict=True):  # round by round
        for point, milliseconds in zip(curve.points, all_times, strict=True):
            costs.observe(
                num_rows=point.rows * point.num_sequences,
                num_sequences=point.num_sequences,
                num_context_tokens=point.context * point.num_sequences,
                seconds=milliseconds / 1e3,
            )
    llm.cost_profile.save(costs)


def measure_curve(
    llm: LLM,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    sequences: Sequence[int] = SEQUENCES,
    repeats: int = REPEATS,
    progress: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> Curve:
    """Time whole forward passes with all logits, warm, in interleaved rounds.

    Args:
        llm: the engine to measure. It must be idle; its KV memory is used and freed.
        rows: numbers of rows of one sequence, n for verifying a draft of n - 1 tokens; 1 is always measured.
        contexts: tokens of each sequence that are in the KV cache.
        sequences: numbers of sequences of one row each.
        repeats: rounds; each measures all shapes in another order, and the memory's bandwidth.
        progress: is called with the state of the measurement.
        clock: times the passes.

    Raises:
        ConfigError: a number is below 1, or the KV memory does not hold the sequences.
        Interrupted: Ctrl-C came after a whole round.
    """
    check_counts(rows=rows, contexts=contexts, sequences=sequences, repeats=[repeats])
    shapes = _shapes(rows, contexts, sequences)
    stopwatch = Stopwatch(llm.device, clock)
    probe = BandwidthProbe(stopwatch, read=llm.kernels.read if llm.kernels else read_by_torch)
    progress("computing the contexts")
    with random_sequences(llm, shapes) as passes:
        rounds = _run_rounds(passes, shapes, repeats=repeats, stopwatch=stopwatch, probe=probe, progress=progress)
    limit = _pass_bytes(llm)
    speeds = [one.bandwidth / 1e9 for one in rounds]
    curve = Curve(
        model=llm.settings.model,
        dtype=str(llm.dtype).removeprefix("torch."),
        device=str(llm.device),
        kernels=describe_kernels(llm),
        machine=describe_machine(llm.device),
        repeats=len(rounds),
        weight_bytes=None if limit is None else limit.weights,
        gigabytes_per_second=statistics.median(speeds),
        all_gigabytes_per_second=speeds,
        points=[_point(shape, rounds, limit) for shape in shapes],
    )
    if len(rounds) < repeats:
        raise Interrupted(curve, f"{len(rounds)} of {repeats} rounds")
    return curve


def check_counts(**counts: Sequence[int]) -> None:
    """Refuse numbers that `measure_curve` does not take, before anything is loaded.

    Raises:
        ConfigError: one is below 1, or there are no `contexts`.
    """
    for name, values in counts.items():
        if any(value < 1 for value in values):
            raise ConfigError(f"{name}: got {min(values)}; must be 1 or more")
    if not counts["contexts"]:
        raise ConfigError("contexts: got none; give one or more")


def _shapes(rows: Sequence[int], contexts: Sequence[int], sequences: Sequence[int]) -> list[PassShape]:
    """All distinct shapes; in each context one row of one sequence comes first."""
    return [
        PassShape(context=context, num_sequences=num_sequences, rows=num_rows)
        for context in sorted(set(contexts))
        for num_sequences, num_rows in sorted({(1, 1), *((1, n) for n in rows), *((n, 1) for n in sequences)})
    ]


def _run_rounds(
    passes: RandomSequences,
    shapes: Sequence[PassShape],
    *,
    repeats: int,
    stopwatch: Stopwatch,
    probe: BandwidthProbe,
    progress: Progress,
) -> list[_Round]:
    """Measure everything once per round, so that a drift of the machine affects all shapes alike.

    Where Ctrl-C comes after a whole round, those before it are returned.
    """
    batches = {shape: passes.batch(shape) for shape in shapes}
    order = random.Random(0)

    def measure(shown: str) -> _Round:
        progress(shown)
        bandwidth = probe.measure()
        seconds = {
            shape: stopwatch.seconds(partial(passes.forward, batches[shape]))
            for shape in order.sample(shapes, len(shapes))
        }
        return _Round(bandwidth, seconds)

    for _ in range(NUM_WARMUP_ROUNDS):
        measure("warming up")
    return whole_rounds(lambda number: measure(f"round {number + 1} of {repeats}"), repeats)


def _pass_bytes(llm: LLM) -> PassBytes | None:
    """What a pass must read; None for a model that only transformers knows, and where rows choose the experts that are read."""
    model = llm.executor.model
    if not isinstance(model, Decoder) or model.config.experts is not None:
        return None
    return PassBytes(model.config, llm.dtype, weights=model.weight_bytes)


def _point(shape: PassShape, rounds: Sequence[_Round], limit: PassBytes | None) -> CurvePoint:
    seconds = [one.seconds[shape] for one in rounds]
    one_row = PassShape(context=shape.context, num_sequences=1, rows=1)
    num_bytes = None if limit is None else limit.weights + shape.num_sequences * limit.kv(shape.context)
    shares = [num_bytes / one.bandwidth / one.seconds[shape] for one in rounds if num_bytes is not None]
    return CurvePoint(
        context=shape.context,
        num_sequences=shape.num_sequences,
        rows=shape.rows,
        milliseconds=1e3 * statistics.median(seconds),
        ratio=statistics.median(one.seconds[shape] / one.seconds[one_row] for one in rounds),
        num_bytes=num_bytes,
        bandwidth_share=statistics.median(shares) if shares else None,
        all_milliseconds=[1e3 * taken for taken in seconds],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingCost:
    """The costs of one short generation after its first token; ratios without a denominator are None."""

    speculative: str
    num_steps: int
    num_draft_tokens: int
    milliseconds_per_draft_token: float | None
    draft_token_share: float | None  # of T(1), a pass over one row
    draft_milliseconds_per_step: float
    host_milliseconds_per_step: float  # all but the forward pass and drafting; on a GPU, with the wait for the pass
    forward_milliseconds_per_step: float
    acceptance_rate: float | None  # accepted / drafted
    acceptance_length: float | None  # tokens per step, bonus included

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return asdict(self)


def check_drafting(llm: LLM) -> None:
    """Refuse an engine in which `measure_drafting` has no room, before anything is measured.

    Raises:
        ConfigError: its sequences are too short.
    """
    needed = NUM_PATTERN_TOKENS * NUM_PATTERNS + NUM_TOKENS
    if llm.max_model_len < needed:
        raise ConfigError(
            f"max_model_len: got {llm.max_model_len}; a drafter is measured on a text of {needed} tokens; raise it, or leave "
            "out what names a drafter"
        )


def measure_drafting(llm: LLM, one_row_milliseconds: float, *, num_tokens: int = NUM_TOKENS) -> DraftingCost:
    """Decode greedily after a repetitive prompt, in which prompt lookup finds matches.

    A first run warms up; prefill, the drafter's too, is not counted. `one_row_milliseconds` is T(1), which the
    cost of a drafted token is divided by.
    """
    vocab_size = llm.executor.model.vocab_size
    pattern = torch.randint(vocab_size, (NUM_PATTERN_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for salt in ("warm-up", "measured"):
        deltas = llm.stream({"prompt_token_ids": pattern * NUM_PATTERNS, "cache_salt": salt}, sampling)
        next(deltas)
        llm.reset_stats()
        for _ in deltas:
            pass
    times, counts = llm.stats.times, llm.stats.speculation
    per_step = 1e3 / times.num_steps
    per_token = 1e3 * times.draft / counts.num_draft_tokens if counts.num_draft_tokens else None
    return DraftingCost(
        speculative=llm.speculative.describe(),
        num_steps=times.num_steps,
        num_draft_tokens=counts.num_draft_tokens,
        milliseconds_per_draft_token=per_token,
        draft_token_share=None if per_token is None else per_token / one_row_milliseconds,
        draft_milliseconds_per_step=times.draft * per_step,
        host_milliseconds_per_step=times.host_overhead * per_step,
        forward_milliseconds_per_step=times.forward * per_step,
        acceptance_rate=counts.acceptance_rate,
        acceptance_length=counts.acceptance_length,
    )
