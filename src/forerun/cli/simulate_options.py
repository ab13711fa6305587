"""The options of `forerun simulate`: what arrives and when, the engines that serve, what is reported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.cli.options import check_picture
from forerun.core.writable import check_writable_file
from forerun.errors import ConfigError
from forerun.plan.load import Load, parse_load
from forerun.plan.profile import PLAIN, Profile
from forerun.plan.simulation.arrivals import SECONDS_OF_DAY, ArrivalPattern
from forerun.plan.simulation.fleet import Fleet, Transfer
from forerun.plan.simulation.profiled import ProfiledEngine, ServingCost, profiled_engine
from forerun.plan.simulation.traces import MOONCAKE_PIECE
from forerun.plan.sla import Sla, parse_sla

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

    def engine(self, profile: Profile, *, kind: str | None) -> ProfiledEngine:
        """One of the engines, with acceptance as on prompts of a class, or of all.

        Raises:
            ConfigError: the profile lacks the configuration or the class, or a number is out of range.
        """
        return profiled_engine(
            profile,
            self.config,
            kind=kind,
            gigabytes_per_second=self.gigabytes_per_second,
            serving=ServingCost(
                seconds_per_request=self.seconds_per_request,
                seconds_per_idle_request=self.seconds_per_idle_request,
                seconds_per_step=self.seconds_per_step,
                seconds_per_chunk=self.seconds_per_chunk,
            ),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

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
