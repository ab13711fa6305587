"""`forerun simulate`: a profiled engine, or many of them, serve a load in virtual time."""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from forerun.cli.command import command
from forerun.cli.console import plain_console
from forerun.cli.options import REPORT, ReportOptions, check_picture
from forerun.core.writable import check_writable_file
from forerun.errors import ConfigError, ForerunError
from forerun.plan.load import Load, parse_load
from forerun.plan.profile import PLAIN, Profile, missing_points
from forerun.plan.simulation.arrivals import SECONDS_OF_DAY, ArrivalPattern
from forerun.plan.simulation.fleet import Fleet, Transfer
from forerun.plan.simulation.profiled import (
    ProfiledEngine,
    ServingCost,
    profiled_engine,
    recorded_requests,
)
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests, with_arrivals
from forerun.plan.simulation.traces import MOONCAKE_PIECE, conversation_requests, read_trace
from forerun.plan.sla import Sla, parse_sla

if TYPE_CHECKING:
    from forerun.plan.simulation.result import SimulationResult

logger = logging.getLogger(__name__)
Arrivals = Literal["steady", "bursts", "day"]

MOST_REQUESTS = 1e15
"""Of a day, or from one burst to the next: as many as can be counted."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What arrives, and when."""

    load: str | None = None
    """Synthetic requests, e.g. "rate=20,isl=3000,osl=300": per second, tokens of prompts and of answers; also isl_cv, osl_cv, cv or burstiness, prefix_hit_rate."""
    trace: Path | None = None
    """Requests of a file: mooncake's .jsonl or that of "forerun serve --request-log", Azure's .csv, or the .json of a load
    test with --save-detailed."""
    conversations: Path | None = None
    """Requests as long as the conversations of a file in ShareGPT's format, at --rate."""
    tokenizer: str | None = None
    """The model whose tokenizer counts their tokens, where the profile's is not here under its name, as a server's: a folder, a known name or a hub id."""
    recorded: bool = False
    """Requests that repeat the texts that the profile recorded, at --rate; needs --config with a trace of drafts."""
    rate: float | None = None
    """Requests per second of --conversations and --recorded."""
    cv: float | None = None
    """Deviation over mean of the times between these: 1 is a Poisson process."""
    num_requests: int = 1000
    """How many, of --load, --conversations and --recorded."""
    arrivals: Arrivals = "steady"
    """Whether the rate is steady, has bursts, or goes through a day, from its lowest to its peak and back."""
    burst_factor: float = 4.0
    """How many times as many requests arrive in a burst."""
    burst_every: float = 60.0
    """Seconds from one burst to the next."""
    burst_length: float = 10.0
    """Seconds of a burst."""
    day_peak: float = 1.8
    """The highest rate of a day over its mean."""
    day_seconds: float = SECONDS_OF_DAY
    """The length of a day."""
    piece_size: int = MOONCAKE_PIECE
    """Tokens that each hash id of mooncake's traces names."""
    time_scale: float = 1.0
    """Let the requests of --trace arrive so many times as fast."""
    prompt_class: str | None = None
    """Acceptance as on the profile's prompts of this class only."""

    def check(self) -> None:
        """Refuse none or several sources of requests, and options that would be ignored.

        Raises:
            ConfigError: an option is missing, has no use, or is out of range.
        """
        given = [name for name in ("load", "trace", "conversations", "recorded") if getattr(self, name)]
        if len(given) != 1:
            raise ConfigError(
                f"requests: got {' and '.join(f'--{one}' for one in given) or 'none'}; give one of --load, --trace, "
                "--conversations or --recorded"
            )
        (source,) = given
        needs_rate = source in ("conversations", "recorded")
        if needs_rate and self.rate is None:
            raise ConfigError(f"rate: missing; --{source} says no times: give --rate, in requests per second")
        self._refuse(("rate", "cv"), useless=not needs_rate, where=f"--{source}, which has its own")
        self._refuse(("tokenizer",), useless=source != "conversations", where=f"--{source}, whose tokens are counted")
        self._refuse(
            ("arrivals", "num_requests"), useless=source == "trace", where="--trace, which says what arrives when"
        )
        self._refuse(("time_scale", "piece_size"), useless=source != "trace", where=f"--{source}")
        bursts, day = ("burst_factor", "burst_every", "burst_length"), ("day_peak", "day_seconds")
        self._refuse(bursts, useless=self.arrivals != "bursts", where=f"--arrivals {self.arrivals}")
        self._refuse(day, useless=self.arrivals != "day", where=f"--arrivals {self.arrivals}")
        if self.num_requests < 1:
            raise ConfigError(f"num_requests: got {self.num_requests}; must be 1 or more")
        for name in ("time_scale", "piece_size"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: got {getattr(self, name):g}; must be above 0")
        if not 0.0 <= self.burst_factor < math.inf:
            raise ConfigError(f"burst_factor: got {self.burst_factor:g}; must be a finite number, at least 0")
        if self.arrivals != "steady" and not self.pattern().requests_per_round <= MOST_REQUESTS:
            raise ConfigError(
                f"arrivals: got {self.pattern().requests_per_round:.3g} requests until the rate begins again; must be at most "
                f"{MOST_REQUESTS:g}: give a lower rate, or a smaller --burst-every or --day-seconds"
            )

    def _refuse(self, names: tuple[str, ...], *, useless: bool, where: str) -> None:
        """Refuse options that would be ignored."""
        for name in names:
            if useless and getattr(self, name) != getattr(type(self), name):
                raise ConfigError(f"{name}: given with {where}; leave it out")

    @property
    def parsed_load(self) -> Load | None:
        """The synthetic load, if there is one."""
        return None if self.load is None else parse_load(self.load)

    def pattern(self) -> ArrivalPattern:
        """When requests arrive, where that is to be drawn."""
        load = self.parsed_load
        if load is not None:
            rate, cv = load.rate, load.cv
        else:
            assert self.rate is not None, "it was checked"
            rate, cv = self.rate, 1.0 if self.cv is None else self.cv
        if self.arrivals == "bursts":
            return ArrivalPattern.bursts(
                rate, factor=self.burst_factor, every=self.burst_every, length=self.burst_length, cv=cv
            )
        if self.arrivals == "day":
            return ArrivalPattern.day(rate, peak=self.day_peak, period=self.day_seconds, cv=cv)
        return ArrivalPattern.steady(rate, cv=cv)

    def unseen_rates(self) -> list[str]:
        """What to tell a user whose requests end before the rate has gone through its day or its first burst."""
        if self.arrivals == "steady":
            return []
        whole = math.ceil(self.pattern().requests_per_round)
        if self.num_requests >= whole:
            return []
        if self.arrivals == "day":
            whole_of, shorter = "a day, which begins at its lowest rate", "--day-seconds"
        else:
            whole_of, shorter = "the time from one burst to the next, which ends with a burst", "--burst-every"
        return [
            f"arrivals: {self.num_requests} requests are {self.num_requests / whole:.1%} of those of {whole_of}: the rest of it is not "
            f"simulated; give --num-requests {whole}, or a smaller {shorter}"
        ]


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The engines that serve."""

    config: str = PLAIN
    """The profile's configuration of drafts, by its name; "plain" drafts nothing."""
    replicas: int = 1
    """Engines; those that decode, with --prefill-replicas."""
    prefill_replicas: int = 0
    """Engines that only read prompts, and hand the KV over."""
    routing: str = "round-robin"
    """What spreads requests over them: round-robin, least-requests, least-tokens, prefix (the most of the prompt in the cache, by load), random or random-of-two."""
    transfer_seconds: float = 0.0
    """What handing the KV of a prompt over takes at least."""
    transfer_gigabytes_per_second: float = float("inf")
    """How much KV is handed over in a second."""
    max_num_seqs: int | None = None
    """The most sequences at once; by default as profiled."""
    max_num_batched_tokens: int | None = None
    """The most tokens of a step; by default as profiled."""
    seconds_per_request: float = 0.0
    """What a server takes of the engine's time for a request: parsing, tokenising."""
    seconds_per_idle_request: float | None = None
    """What it takes for a request that comes while nothing is computed; by default as for any other."""
    seconds_per_step: float = 0.0
    """What it takes for each step that streams anything."""
    seconds_per_chunk: float = 0.0
    """What it takes for each chunk that it streams."""
    gigabytes_per_second: float | None = None
    """Memory bandwidth of the machine; reading weights and context takes longer than in the profile by the ratio of the two."""

    def fleet(self, kv_bytes_per_token: int | None) -> Fleet:
        """The fleet of an engine with so many bytes of KV per token.

        Raises:
            ConfigError: a number is out of range, or the transfer has no use.
        """
        rate = 1e9 * self.transfer_gigabytes_per_second
        has_rate = rate != float("inf")
        if has_rate and kv_bytes_per_token is None:
            raise ConfigError(
                "transfer_gigabytes_per_second: the profile does not say how large the KV of a token is; give "
                "--transfer-seconds instead"
            )
        transfer = Transfer(
            seconds=self.transfer_seconds,
            bytes_per_second=rate,
            bytes_per_token=(kv_bytes_per_token or 0) if has_rate else 0,
        )
        if transfer != Transfer() and not self.prefill_replicas:
            raise ConfigError("transfer: nothing is handed over without --prefill-replicas; leave it out")
        return Fleet(
            replicas=self.replicas,
            prefill_replicas=self.prefill_replicas,
            routing=self.routing,
            transfer=transfer,
        )


@dataclass(frozen=True, kw_only=True)
class SimulationResultOptions:
    """What is reported."""

    sla: str | None = None
    """Limits for goodput, e.g. "ttft=500ms,itl=50ms"."""
    save_result: Path | None = None
    """Write the figures and each request's times to this file, in the JSON of "vllm bench serve"."""
    save_chunks: bool = False
    """Keep the time of each chunk of each answer in that file too."""
    plot: Path | None = None
    """Draw output, queue, KV memory and latencies to this .png, .svg or .pdf file (needs the extra "bench")."""

    def __post_init__(self) -> None:
        check_picture("--plot", self.plot)
        if self.save_chunks and self.save_result is None:
            raise ConfigError("save_chunks: given without save_result; give that too")
        check_writable_file("save_result", self.save_result)

    @property
    def parsed_sla(self) -> Sla | None:
        """The limits, if there are any."""
        return None if self.sla is None else parse_sla(self.sla)


REQUESTS, FLEET, RESULT = RequestOptions(), FleetOptions(), SimulationResultOptions()


@command
def simulate(
    profile: Path,
    /,
    *,
    requests: Annotated[
        RequestOptions, Parameter(name="*", group=Group("Requests", sort_key=1), negative=())
    ] = REQUESTS,
    fleet: Annotated[FleetOptions, Parameter(name="*", group=Group("Engines", sort_key=2), negative=())] = FLEET,
    result: Annotated[
        SimulationResultOptions, Parameter(name="*", group=Group("Result", sort_key=3), negative=())
    ] = RESULT,
    seed: int = 0,
    report: ReportOptions = REPORT,
) -> None:
    """Serve a load with profiled engines in virtual time: the real scheduler and KV accounting, no model.

    Args:
        profile: A folder that "forerun profile" wrote.
        seed: Of everything random; the same seed gives the same bytes.

    Examples:
        forerun simulate PROFILE --load rate=4,isl=300,osl=120 --config suffix --sla ttft=500ms,itl=50ms
        forerun simulate PROFILE --trace mooncake.jsonl --replicas 16 --routing prefix
    """
    requests.check()
    if seed < 0:
        raise ConfigError(f"seed: got {seed}; must be 0 or more")
    if requests.prompt_class is not None and fleet.config == PLAIN:
        raise ConfigError(
            f"prompt_class: got {requests.prompt_class!r} with --config plain, which drafts nothing; it applies to the acceptance "
            "of a configuration of drafts: leave it out, or name one by --config"
        )
    sla = result.parsed_sla
    known = Profile.load(profile)
    if known.version_warning is not None:
        logger.warning("%s", known.version_warning)
    engine = profiled_engine(
        known,
        fleet.config,
        kind=requests.prompt_class,
        gigabytes_per_second=fleet.gigabytes_per_second,
        serving=ServingCost(
            seconds_per_request=fleet.seconds_per_request,
            seconds_per_idle_request=fleet.seconds_per_idle_request,
            seconds_per_step=fleet.seconds_per_step,
            seconds_per_chunk=fleet.seconds_per_chunk,
        ),
        max_num_seqs=fleet.max_num_seqs,
        max_num_batched_tokens=fleet.max_num_batched_tokens,
    )
    arriving = _requests(requests, known, engine, seed)
    found = _run(engine, arriving, fleet.fleet(known.kv_bytes_per_token), seed, keeps_chunks=result.save_chunks)
    warnings = [
        f"not measured: {beyond}; profile further for a sure answer"
        for beyond in missing_points(
            known.steps_of(None if fleet.config == PLAIN else fleet.config), **asdict(engine.largest)
        )
    ]
    warnings += requests.unseen_rates()
    for one in warnings:
        logger.warning("%s", one)
    document = {
        "backend": "forerun simulate",
        "model_id": known.model,
        "config": fleet.config,
        "num_prompts": len(arriving),
        "request_rate": len(arriving) / (arriving[-1].arrival or float("inf")),
        "seed": seed,
        "warnings": warnings,
        **found.to_json(sla),
    }
    if result.save_result is not None:
        whole = document | found.records_to_json()
        result.save_result.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    if result.plot is not None:
        from forerun.bench.simulation_picture import draw_simulation  # matplotlib: only when it is needed

        title = f"{known.model} on {known.machine}, simulated: {fleet.config}, {fleet.replicas} replica(s)"
        draw_simulation(found, title, result.plot, num_blocks=engine.settings.num_blocks, sla=sla)
    report.write(document)
    if not report.json_output:
        _show(found, sla, plain_console())


def _requests(options: RequestOptions, profile: Profile, engine: ProfiledEngine, seed: int) -> list[SimulatedRequest]:
    """What arrives."""
    load = options.parsed_load
    if load is not None:
        return synthetic_requests(load, options.num_requests, seed=seed, pattern=options.pattern())
    if options.trace is not None:
        found = read_trace(options.trace, piece_size=options.piece_size)
        return with_arrivals(found, np.array([one.arrival for one in found]) / options.time_scale)
    times = options.pattern().times(options.num_requests, np.random.default_rng(seed))
    if options.recorded:
        if engine.trace is None:
            raise ConfigError(
                "recorded: the profile has no trace of drafts of this configuration; name another by --config"
            )
        return recorded_requests(engine.trace, times, kind=options.prompt_class, seed=seed)
    assert options.conversations is not None, "it was checked"
    model = options.tokenizer or profile.model
    longest = engine.settings.max_model_len
    return with_arrivals(_conversations(options.conversations, model, longest, len(times), seed), times)


def _conversations(path: Path, model: str, max_model_len: int, count: int, seed: int) -> list[SimulatedRequest]:
    """Requests of a file in ShareGPT's format, in random order, each once before any comes twice.

    Raises:
        ConfigError: there is no tokenizer to count their tokens with, or none of them fits.
    """
    from forerun.bench.sharegpt import read_conversations
    from forerun.models import store
    from forerun.models.tokenizer import load_tokenizer  # only when it is needed

    try:
        tokenizer = load_tokenizer(store.resolve_model(model))
    except ForerunError as error:
        raise ConfigError(
            f"conversations: no tokenizer counts their tokens ({error}); name the model as it is called here by --tokenizer"
        ) from error
    found = conversation_requests(read_conversations(path), tokenizer.encode, max_model_len=max_model_len)
    order = np.concatenate(
        [np.random.default_rng((seed, turn)).permutation(len(found)) for turn in range(-(-count // len(found)))]
    )
    return [found[number] for number in order[:count].tolist()]


def _run(
    engine: ProfiledEngine, requests: list[SimulatedRequest], fleet: Fleet, seed: int, *, keeps_chunks: bool
) -> SimulationResult:
    """Simulate, with a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(total=len(requests), unit="req", disable=not sys.stderr.isatty()) as bar:

        def progress(num_ended: int) -> None:
            bar.update(num_ended - bar.n)

        return engine.simulate(
            requests,
            fleet=fleet,
            seed=seed,
            keeps_chunks=keeps_chunks,
            progress=progress,
        )


def _show(found: SimulationResult, sla: Sla | None, console: Console) -> None:
    """Print the figures as two tables."""
    console.print(
        f"{len(found.requests)} requests in {found.seconds:.1f} s: {found.request_throughput:.2f} requests/s, "
        f"{found.output_throughput:.0f} output tokens/s"
    )
    if sla is not None:
        console.print(f"{found.attainment(sla):.1%} keep all limits: goodput {found.goodput(sla):.2f} requests/s")
    console.print(_latencies(found))
    console.print(_replicas(found))
    length = found.speculation.acceptance_length
    if found.speculation.num_drafts and length is not None:
        console.print(
            f"{length:.2f} tokens per step of a sequence; {found.speculation.acceptance_rate:.1%} of drafted tokens stood"
        )
    if found.energy_joules is not None:
        console.print(f"{found.energy_joules / found.num_output_tokens:.3g} J per output token")


def _latencies(found: SimulationResult) -> Table:
    table = Table(title="latencies, ms")
    for name in ("", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right" if name else "left")
    rows: dict[str, Any] = {"TTFT": "ttft", "TPOT": "tpot", "between chunks": "itl", "end to end": "e2el"}
    for title, name in rows.items():
        values = found.latencies(name)
        cells = [values.mean, *(values.percentile(percent) for percent in (50, 90, 95, 99))]
        table.add_row(title, *(f"{1e3 * cell:.1f}" for cell in cells))
    return table


def _replicas(found: SimulationResult) -> Table:
    table = Table(title="engines")
    for name in ("", "busy", "running", "KV used", "KV peak", "preemptions", "prompts cached"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for number, one in enumerate(found.replicas):
        num_prompt = one.num_prompt_tokens + one.num_cached_tokens
        table.add_row(
            f"{one.kind} {number}",
            f"{one.busy_seconds / found.seconds:.0%}",
            f"{one.num_running:.1f}",
            f"{one.kv_usage:.0%}",
            f"{one.peak_kv_usage:.0%}",
            str(one.num_preemptions),
            f"{one.num_cached_tokens / num_prompt:.0%}" if num_prompt else "-",
        )
    return table
