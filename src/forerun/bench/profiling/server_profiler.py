"""Measures a server through its OpenAI interface and vLLM's metrics: what steps take with what it drafts, seen by a client."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from forerun.bench.instruments import Advance, Progress, Work, no_advance, no_progress
from forerun.bench.load.answer import Answer, LoadRequest
from forerun.bench.load.client import Endpoint, ask
from forerun.bench.load.server import PREFIX, DraftCounts, Server, parse_metrics
from forerun.bench.profiling.grid import Cell, ProfileGrid
from forerun.bench.profiling.output import write_outputs
from forerun.bench.profiling.stages import Stages, digest, held_stages
from forerun.bench.profiling.step_sweep import DECODE, PREFILL, MeasuredPrompt, MeasuredStep, RoundResult
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.profile import SERVERS_KERNELS, Profile, check_config
from forerun.plan.step_times import FREE_DRAFTING, StepSample, StepTimeModel

TIMEOUT = aiohttp.ClientTimeout(total=30 * 60)  # seconds
CONFIG = "server"
"""The name of the configuration that a server runs."""

CACHE_INFO = "vllm:cache_config_info"
LEAST_STEPS = 3  # of all sequences at once, to take a mean of
NUM_TOKENS = 128  # tokens of each sequence once the prompts are read; drafts write several in a step
REPEATED = 32  # tokens of a prompt that repeat
ASKED_AT_ONCE = 4  # prompts whose drafts are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """A server, what it was started with as far as it does not say so itself, and what is measured.

    `speculative_config` is its own; None: it drafts nothing. `num_kv_tokens`: tokens that its KV memory holds; None: as its
    metrics say (forerun's and vLLM's do). Prompts of the sweeps are random token ids below `vocab_size`, which must be in the
    model's vocabulary.
    """

    url: str
    model: str
    prompts: Mapping[str, Sequence[str]]  # texts by class
    grid: ProfileGrid
    max_num_seqs: int
    max_num_batched_tokens: int
    speculative_config: Mapping[str, Any] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    tensor_parallel_size: int = 1
    num_kv_tokens: int | None = None
    block_size: int = 16
    vocab_size: int = 1000
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_seconds: float = 0.0  # for the server to be ready

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--server: got {self.url!r}; must be a URL such as http://127.0.0.1:8000")
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(self, name)}; must be 1 or more")
        config = self.speculative_config
        if config is not None and not isinstance(config.get("method"), str):
            raise ConfigError(
                f"--speculative-config: got method {config.get('method')!r}; give the one that the server was started with"
            )
        if config is not None:
            check_config("--speculative-config", config, do="write it so, or leave it out")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a server says of itself."""

    version: str
    max_model_len: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class _RoughTimes:
    """Seconds of a prompt's token and of a step, of one request alone."""

    prompt_token: float
    step: float

    def of_job(self, job: Cell | int) -> float:
        """Seconds of a measurement, where steps of many sequences take as long as of one."""
        if isinstance(job, int):
            return job * self.prompt_token
        return job.num_sequences * job.context * self.prompt_token + NUM_TOKENS * self.step


def profile_server(
    task: ServerTask,
    folder: Path,
    *,
    overwrite: bool = False,
    progress: Progress = no_progress,
    announce: Progress = no_progress,
    advance: Advance = no_advance,
) -> Profile:
    """Measure a server, which must have nothing else to do, and write its profile.

    A client cannot choose K, nor see drafting apart: steps are those of the server's own configuration, and
    cost what they cost with drafting and with its interface.

    Raises:
        ConfigError: the server is not ready, has no such model, refuses a prompt, or does not say what is needed.
    """
    return asyncio.run(_ServerProfiler(task, folder, overwrite, progress, announce, advance).run())


@dataclass(slots=True)
class _ServerProfiler:
    """Runs the stages of a server's profile that have not been run, and writes it; see `profile_server`."""

    task: ServerTask
    folder: Path
    overwrite: bool
    progress: Progress
    announce: Progress
    advance: Advance

    async def run(self) -> Profile:
        started = time.monotonic()
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
            client = _Client(self.task, session)
            await client.server.wait(self.task.wait_seconds)
            facts = await client.facts()
            grid = self.task.grid.within(
                max_model_len=facts.max_model_len,
                max_num_seqs=self.task.max_num_seqs,
                num_slots=facts.num_blocks * facts.block_size,
            )
            await self._check_speculation(grid, client)
            identity = self._identity(facts, grid)
            with held_stages(self.folder, identity, overwrite=self.overwrite, started=started) as stages:
                return await self._measure(client, facts, grid, stages)

    async def _measure(self, client: _Client, facts: _Facts, grid: ProfileGrid, stages: Stages) -> Profile:
        num_ended = len(stages.names())
        if num_ended:
            self.announce(f"{self.folder} has {num_ended} finished stage(s); going on from there")
        times = await self._rough_times(grid, facts, client, stages)
        of_round = sum(map(times.of_job, grid.jobs()))
        of_texts = times.step * grid.max_tokens * self._num_batches_of_texts(grid)
        work = Work(grid.rounds * of_round + of_texts, self.advance)
        self.announce(f"about {work.seconds:.0f} s")
        if left_out := self.task.grid.left_out(grid):
            self.announce(f"the server has no room for {left_out}: not measured")
        acceptance = await self._acceptance(grid, client, stages)
        work.add(of_texts)
        rounds: list[RoundResult] = []
        for number in range(grid.rounds):
            found = stages.load(f"round-{number}", RoundResult.from_json)
            if found is None:
                found = await self._round(number, grid, facts, client, lambda job: work.add(times.of_job(job)))
                stages.keep(f"round-{number}", found.to_json())
            else:
                work.add(of_round)
            rounds.append(found)
        profile = self._profile(facts, grid, rounds, acceptance, seconds=stages.seconds)
        length = _draft_length(acceptance)
        if not write_outputs(profile, rounds, self.folder, draft_length=length):
            self.announce("there is no page of plots, as matplotlib is not installed; pip install 'forerun[bench]'")
        profile.save(self.folder)
        return profile

    def _num_batches_of_texts(self, grid: ProfileGrid) -> int:
        """How often prompts are sent, some at once, to see the fate of drafts."""
        return sum(-(-len(texts[: grid.num_texts]) // ASKED_AT_ONCE) for texts in self.task.prompts.values())

    def _profile(
        self,
        facts: _Facts,
        grid: ProfileGrid,
        rounds: Sequence[RoundResult],
        acceptance: dict[str, AcceptanceProfile],
        *,
        seconds: float,
    ) -> Profile:
        length = _draft_length(acceptance)
        step_times = StepTimeModel.fit([step.sample.with_draft_length(length) for one in rounds for step in one.steps])
        return Profile(
            model=self.task.model,
            machine=self.task.url,
            kernels=SERVERS_KERNELS,
            dtype=self.task.dtype,
            quantization=self.task.quantization,
            tensor_parallel_size=self.task.tensor_parallel_size,
            version=facts.version,
            gigabytes_per_second=None,
            weight_bytes=None,
            kv_bytes_per_token=None,
            vocab_size=self.task.vocab_size,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_num_seqs=self.task.max_num_seqs,
            max_num_batched_tokens=self.task.max_num_batched_tokens,
            max_model_len=facts.max_model_len,
            step_times=step_times,
            served_steps={CONFIG: step_times} if acceptance else {},
            has_plain_steps=not acceptance,
            configs={CONFIG: dict(self.task.speculative_config or {})} if acceptance else {},
            drafting={CONFIG: FREE_DRAFTING} if acceptance else {},
            acceptance=acceptance,
            conditions={
                "grid": grid.to_json(),
                "drafting": "in the step times, as a client cannot tell it apart",
                "energy": "not counted at a server",
                "seconds": round(seconds, 1),
            },
        )

    def _identity(self, facts: _Facts, grid: ProfileGrid) -> dict[str, Any]:
        task = self.task
        return {
            "model": task.model,
            "server": task.url,
            "version": facts.version,
            "max_num_seqs": task.max_num_seqs,
            "max_num_batched_tokens": task.max_num_batched_tokens,
            "speculative_config": None if task.speculative_config is None else dict(task.speculative_config),
            "dtype": task.dtype,
            "quantization": task.quantization,
            "tensor_parallel_size": task.tensor_parallel_size,
            "max_model_len": facts.max_model_len,
            "prompts_digest": {kind: digest(list(texts)) for kind, texts in task.prompts.items()},
            "num_kv_tokens": facts.num_blocks * facts.block_size,
            "grid": grid.to_json(),
        }

    async def _check_speculation(self, grid: ProfileGrid, client: _Client) -> None:
        """Hold what the user says of the server's drafts against its counters, on a prompt of each class.

        Raises:
            ConfigError: it drafts and should not, or does not count its drafts.
        """
        url, config = self.task.url, self.task.speculative_config
        if config is not None:
            if await client.server.draft_counts() is None:
                raise ConfigError(
                    f"--speculative-config: {url}/metrics has no {PREFIX}*, by which acceptance is measured; start the server "
                    "without speculation, or profile one that counts its drafts"
                )
            return
        first = [texts[0] for texts in self.task.prompts.values()]
        if (await client.fate(first, grid.max_tokens)).num_stood:
            raise ConfigError(
                f"--speculative-config: {url} drafts, by its own counters; say what it was started with, e.g. "
                "--speculative-config.method suffix --speculative-config.num-speculative-tokens 8"
            )

    async def _rough_times(self, grid: ProfileGrid, facts: _Facts, client: _Client, stages: Stages) -> _RoughTimes:
        """What prompts and steps take, roughly: at most, as the first request of a server may be slow."""
        kept = stages.load("estimate", lambda record: _RoughTimes(**record))
        if kept is not None:
            return kept
        self.progress("a prompt, to estimate the rest")
        longest = max(grid.input_lengths)
        (answer,) = await client.answers([client.random_prompt(longest, min(16, facts.max_model_len - longest))])
        chunks = [chunk.seconds for chunk in answer.chunks]
        step = (chunks[-1] - chunks[0]) / max(1, len(chunks) - 1) if chunks else 0.0
        found = _RoughTimes(max(answer.ttft, 1e-3) / longest, max(step, 1e-3))
        stages.keep("estimate", asdict(found))
        return found

    async def _acceptance(self, grid: ProfileGrid, client: _Client, stages: Stages) -> dict[str, AcceptanceProfile]:
        """What became of the server's drafts by class of prompts, by its own counters; empty where it drafts nothing."""

        def parse(record: dict[str, Any]) -> dict[str, AcceptanceProfile]:
            return {name: AcceptanceProfile.from_json(one) for name, one in record.items()}

        kept = stages.load("drafter", parse)
        if kept is not None:
            return kept
        total, fates = _Fate(), {}
        for kind, texts in self.task.prompts.items():
            self.progress(f"drafts on {kind}")
            fate = await client.fate(texts[: grid.num_texts], grid.max_tokens)
            if fate.num_steps:
                fates[f"{CONFIG}/{kind}"] = fate
                total.add(fate)
        if not total.num_stood and self.task.speculative_config is not None:
            raise ConfigError(
                f"--speculative-config: {self.task.url} drafted nothing for these prompts; profile it without speculation, or "
                "give --prompts that it drafts for"
            )
        found = {}
        if total.num_stood:
            whole = total.profile()
            found = {CONFIG: whole} | {name: fate.profile(whole.num_places) for name, fate in fates.items()}
        stages.keep("drafter", {name: one.to_json() for name, one in found.items()})
        return found

    async def _round(
        self,
        number: int,
        grid: ProfileGrid,
        facts: _Facts,
        client: _Client,
        on_job: Callable[[Cell | int], object],
    ) -> RoundResult:
        """Each prompt length and each batch once, in an order of its own; `on_job` is called after each."""
        result, jobs = RoundResult(gigabytes_per_second=None), grid.jobs()
        random.Random(number).shuffle(jobs)
        for place, job in enumerate(jobs):
            self.progress(f"round {number + 1} of {grid.rounds}: {place} of {len(jobs)} measurements")
            if isinstance(job, int):
                (answer,) = await client.answers([client.random_prompt(job, 1)])
                result.prompts.append(MeasuredPrompt(isl=job, ttft_seconds=answer.ttft))
                sample = StepSample(
                    num_rows=0, num_sequences=0, num_context_tokens=0, num_prompt_rows=job, seconds=answer.ttft
                )
                result.steps.append(_step(PREFILL, number, Cell(0, job), sample))
            else:
                found = await self._measure_batch(job, facts, client)
                if found is not None:
                    result.steps.append(_step(DECODE, number, job, found))
            on_job(job)
        return result

    async def _measure_batch(self, cell: Cell, facts: _Facts, client: _Client) -> StepSample | None:
        """The mean step while all sequences of a batch decode; None where they did not for long enough."""
        wanted = NUM_TOKENS + cell.num_sequences * cell.context // self.task.max_num_batched_tokens
        output_len = min(wanted, facts.max_model_len - cell.context)
        before = await client.server.draft_counts()
        answers = await client.answers(
            [client.random_prompt(cell.context, output_len) for _ in range(cell.num_sequences)]
        )
        drafts = await client.drafted_since(before)
        seconds = mean_step(answers)
        if seconds is None:
            return None
        num_steps = sum(len(answer.chunks) for answer in answers) / len(answers)
        num_drafted = round(drafts.num_draft_tokens / num_steps) if drafts is not None else 0
        return StepSample(
            num_rows=cell.num_sequences + num_drafted,
            num_sequences=cell.num_sequences,
            num_context_tokens=cell.num_sequences * (cell.context + output_len // 2),
            num_draft_tokens=num_drafted,
            seconds=seconds,
        )


def _draft_length(acceptance: Mapping[str, AcceptanceProfile]) -> int:
    """The drafted tokens that each step of a sequence counts as: all places that were ever reached."""
    return acceptance[CONFIG].num_places if acceptance else 0


class _Client:
    """Asks a server, and reads what it says of itself."""

    def __init__(self, task: ServerTask, session: aiohttp.ClientSession) -> None:
        self.server = Server(session, task.url, task.headers)
        self._task = task
        self._session = session
        self._random = random.Random()  # no seed: a server may know earlier prompts

    async def facts(self) -> _Facts:
        """What the server says of itself, and the task where it does not.

        Raises:
            ConfigError: it has no such model, or its limits are not known, or others than the task says.
        """
        task, server = self._task, self.server
        listed = await server.page("/v1/models")
        try:
            models = {str(one["id"]): one for one in json.loads(listed or "")["data"]}
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"--server: {task.url}/v1/models names no model; is it an OpenAI-compatible server? Give its key, where it asks "
                "for one, by OPENAI_API_KEY"
            ) from None
        if task.model not in models:
            raise ConfigError(f"model: {task.url} has no {task.model!r}; it has {', '.join(models) or 'none'}")
        longest = models[task.model].get("max_model_len")
        metrics = parse_metrics(await server.page("/metrics") or "")
        info = next((one.labels for one in metrics if one.name == CACHE_INFO), {})
        blocks, size = info.get("num_gpu_blocks", ""), info.get("block_size", "")
        block_size = int(size) if size.isdecimal() else task.block_size
        num_blocks = int(blocks) if blocks.isdecimal() else (task.num_kv_tokens or 0) // block_size
        if blocks.isdecimal() and task.num_kv_tokens not in (None, num_blocks * block_size):
            raise ConfigError(
                f"--num-kv-tokens: got {task.num_kv_tokens}, and {task.url}/metrics says {num_blocks * block_size}; leave it out"
            )
        if not num_blocks:
            raise ConfigError(
                f"--num-kv-tokens: {task.url} does not say how many tokens its KV memory holds; give the number"
            )
        return _Facts(
            version=await server.version() or "unknown",
            max_model_len=int(longest) if longest else num_blocks * block_size,
            num_blocks=num_blocks,
            block_size=block_size,
        )

    def random_prompt(self, num_tokens: int, output_len: int) -> LoadRequest:
        """A prompt of random tokens; for a server that drafts some of them again and again, so that look-ups find drafts."""
        num_random = num_tokens if self._task.speculative_config is None else min(num_tokens, REPEATED)
        ids = self._random.choices(range(10, self._task.vocab_size), k=num_random)
        return LoadRequest((ids * -(-num_tokens // num_random))[:num_tokens], output_len)

    async def answers(self, requests: Sequence[LoadRequest], *, chat: bool = False) -> list[Answer]:
        """Send requests at once and read their answers.

        Raises:
            ConfigError: one failed.
        """
        endpoint = Endpoint(
            url=f"{self._task.url}/v1/{'chat/' if chat else ''}completions",
            backend="openai-chat" if chat else "openai",
            model=self._task.model,
            body={"temperature": 0} if chat else {"temperature": 0, "ignore_eos": True},
            headers=self._task.headers,
        )
        asked = [ask(self._session, endpoint, one, f"profile-{number}") for number, one in enumerate(requests)]
        answers = await asyncio.gather(*asked)
        for answer in answers:
            if answer.error is not None:
                raise ConfigError(
                    f"--server: {self._task.url} failed a request ({answer.error}); what was measured is kept"
                )
        return answers

    async def drafted_since(self, before: DraftCounts | None) -> DraftCounts | None:
        """What the server has drafted since its counters said `before`; None: nothing, or it does not count."""
        after = await self.server.draft_counts()
        return None if before is None or after is None else after.since(before)

    async def fate(self, texts: Sequence[str], max_tokens: int) -> _Fate:
        """What became of the drafts for some prompts; steps are counted where nothing was drafted, too."""
        before = await self.server.draft_counts()
        answers: list[Answer] = []
        for start in range(0, len(texts), ASKED_AT_ONCE):
            requests = [LoadRequest(text, max_tokens) for text in texts[start : start + ASKED_AT_ONCE]]
            answers += await self.answers(requests, chat=True)
        drafts = await self.drafted_since(before)
        num_tokens = sum(max(0, (answer.num_output_tokens or 0) - 1) for answer in answers)
        return _Fate(num_tokens) if drafts is None else _Fate.of(drafts, num_tokens)


@dataclass(slots=True)
class _Fate:
    """Steps that could verify a draft, and how many stood at each place; of no place where nothing was drafted."""

    num_steps: int = 0
    num_stood: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, drafts: DraftCounts, num_tokens: int) -> _Fate:
        """Of drafts, in answers of so many tokens after each one's first: a step gives one token and what stood."""
        positions = drafts.accepted_per_position
        stood = [positions.get(place, 0) for place in range(max(positions, default=0) + 1)]
        return cls(max(drafts.num_drafts, num_tokens - drafts.num_accepted_tokens), stood)

    def add(self, other: _Fate) -> None:
        self.num_steps += other.num_steps
        length = max(len(self.num_stood), len(other.num_stood))
        padded = [counts + [0] * (length - len(counts)) for counts in (self.num_stood, other.num_stood)]
        self.num_stood = [one + two for one, two in zip(*padded, strict=True)]

    def profile(self, num_places: int | None = None) -> AcceptanceProfile:
        """The rates, of so many places: what was never reached does not stand; None: of all that were reached."""
        found = AcceptanceProfile.of_counts(CONFIG, self.num_steps, self.num_stood or [0])
        beyond = 0 if num_places is None else num_places - found.num_places
        return replace(
            found,
            conditional=(*found.conditional, *[0.0] * beyond),
            num_reached=(*found.num_reached, *[0] * beyond),
        )


def mean_step(answers: Sequence[Answer]) -> float | None:
    """Mean seconds between the chunks of streams while all of them had some; None where that was too short.

    Chunks that a client reads together would be gaps of zero; over the whole span they even out.
    """
    streams = [[answer.started + chunk.seconds for chunk in answer.chunks if chunk.has_text] for answer in answers]
    if not all(streams):
        return None
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    means = []
    for times in streams:
        inside = [at for at in times if start <= at <= end]
        if len(inside) > LEAST_STEPS:
            means.append((inside[-1] - inside[0]) / (len(inside) - 1))
    positive = [mean for mean in means if mean > 0.0]
    return statistics.median(positive) if positive else None


def _step(sweep: str, number: int, cell: Cell, sample: StepSample) -> MeasuredStep:
    return MeasuredStep(
        sweep=sweep,
        round=number,
        gigabytes_per_second=None,
        num_sequences=cell.num_sequences,
        context=cell.context,
        sample=sample,
    )
