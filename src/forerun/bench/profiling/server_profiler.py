"""Measures a server through its OpenAI interface and vLLM's metrics: what steps take with what it drafts, seen by a client."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from forerun.bench.instruments import Progress, no_progress
from forerun.bench.load.answer import Answer, LoadRequest
from forerun.bench.load.client import Endpoint, ask
from forerun.bench.load.server import DraftCounts, Server, parse_metrics
from forerun.bench.profiling.grid import Cell, ProfileGrid
from forerun.bench.profiling.output import write_outputs
from forerun.bench.profiling.stages import Stages, digest, open_stages
from forerun.bench.profiling.step_sweep import DECODE, PREFILL, MeasuredPrompt, MeasuredStep, RoundResult
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.profile import SERVERS_KERNELS, Profile
from forerun.plan.step_times import DraftingCost, StepSample, StepTimeModel

TIMEOUT = aiohttp.ClientTimeout(total=30 * 60)  # seconds
CONFIG = "server"
"""The name of the configuration that a server runs: it does not say more of it."""

CACHE_INFO = "vllm:cache_config_info"
LEAST_STEPS = 3  # of all sequences at once, to take a mean of
NUM_TOKENS = 128  # tokens of each sequence once the prompts are read; drafts write several in a step
ASKED_AT_ONCE = 4  # prompts whose drafts are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """A server, what it was started with as far as it does not say so itself, and what is measured.

    `num_kv_tokens`: tokens that its KV memory holds; None: as its metrics say (forerun's and vLLM's do). Prompts of the
    sweeps are random token ids below `vocab_size`, which must be in the model's vocabulary.
    """

    url: str
    model: str
    prompts: Mapping[str, Sequence[str]]  # texts by class
    grid: ProfileGrid
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_tokens: int | None = None
    block_size: int = 16
    vocab_size: int = 1000
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_seconds: float = 0.0  # for the server to be ready

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--server: got {self.url!r}; must be a URL such as http://127.0.0.1:8000")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a server says of itself."""

    version: str
    max_model_len: int
    num_blocks: int
    block_size: int


def profile_server(
    task: ServerTask,
    folder: Path,
    *,
    overwrite: bool = False,
    progress: Progress = no_progress,
    announce: Progress = no_progress,
) -> Profile:
    """Measure a server, which must have nothing else to do, and write its profile.

    A client cannot choose K, nor see drafting apart: steps are those of the server's own configuration, and
    cost what they cost with drafting and with its interface.

    Raises:
        ConfigError: the server is not ready, has no such model, refuses a prompt, or does not say what is needed.
    """
    return asyncio.run(_ServerProfiler(task, folder, overwrite, progress, announce).run())


@dataclass(slots=True)
class _ServerProfiler:
    task: ServerTask
    folder: Path
    overwrite: bool
    progress: Progress
    announce: Progress
    _random: random.Random = field(default_factory=random.Random)  # no seed: a server may know earlier prompts

    async def run(self) -> Profile:
        started = time.monotonic()
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
            server = Server(session, self.task.url, self.task.headers)
            await server.wait(self.task.wait_seconds)
            facts = await self._facts(server, session)
            grid = self.task.grid.within(
                max_model_len=facts.max_model_len,
                max_num_seqs=self.task.max_num_seqs,
                num_slots=facts.num_blocks * facts.block_size,
            )
            stages = open_stages(self.folder, self._identity(facts, grid), overwrite=self.overwrite)
            rounds = [await self._round(number, grid, server, session, stages) for number in range(grid.rounds)]
            acceptance = await self._acceptance(grid, server, session, stages)
        length = acceptance[CONFIG].num_places if acceptance else 0
        profile = Profile(
            model=self.task.model,
            machine=self.task.url,
            kernels=SERVERS_KERNELS,
            dtype="unknown",
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
            step_times=StepTimeModel.fit([step.sample for one in rounds for step in one.steps]),
            configs={CONFIG: {"num_speculative_tokens": length}} if acceptance else {},
            drafting={CONFIG: DraftingCost()} if acceptance else {},
            acceptance=acceptance,
            conditions={
                "grid": grid.to_json(),
                "drafting": "in the step times, as a client cannot tell it apart",
                "energy": "not counted at a server",
                "seconds": round(time.monotonic() - started, 1),
            },
        )
        decoding = [step for one in rounds for step in one.steps if step.sweep == DECODE]
        num_drafted = sum(step.sample.num_draft_tokens for step in decoding)
        mean_length = round(num_drafted / max(1, sum(step.num_sequences for step in decoding)))
        if not write_outputs(profile, rounds, self.folder, draft_length=mean_length):
            self.announce("there is no page of plots, as matplotlib is not installed; pip install 'forerun[bench]'")
        profile.save(self.folder)
        return profile

    def _identity(self, facts: _Facts, grid: ProfileGrid) -> dict[str, Any]:
        task = self.task
        return {
            "model": task.model,
            "server": task.url,
            "version": facts.version,
            "max_num_seqs": task.max_num_seqs,
            "max_num_batched_tokens": task.max_num_batched_tokens,
            "max_model_len": facts.max_model_len,
            "prompts_digest": {kind: digest(list(texts)) for kind, texts in task.prompts.items()},
            "num_kv_tokens": facts.num_blocks * facts.block_size,
            "grid": grid.to_json(),
        }

    async def _facts(self, server: Server, session: aiohttp.ClientSession) -> _Facts:
        """What the server says of itself, and the task where it does not.

        Raises:
            ConfigError: it has no such model, or its limits are not known.
        """
        task = self.task
        listed = await self._text(session, "/v1/models")
        try:
            models = {str(one["id"]): one for one in json.loads(listed or "")["data"]}
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"--server: {task.url}/v1/models names no model; is it an OpenAI-compatible server?"
            ) from None
        if task.model not in models:
            raise ConfigError(f"model: {task.url} has no {task.model!r}; it has {', '.join(models) or 'none'}")
        longest = models[task.model].get("max_model_len")
        info = next(
            (
                one.labels
                for one in parse_metrics(await self._text(session, "/metrics") or "")
                if one.name == CACHE_INFO
            ),
            {},
        )
        blocks, size = info.get("num_gpu_blocks", ""), info.get("block_size", "")
        block_size = int(size) if size.isdecimal() else task.block_size
        num_blocks = int(blocks) if blocks.isdecimal() else (task.num_kv_tokens or 0) // block_size
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

    async def _text(self, session: aiohttp.ClientSession, path: str) -> str | None:
        async with session.get(f"{self.task.url}{path}", headers=self.task.headers) as response:
            return await response.text() if response.status == 200 else None

    async def _round(
        self, number: int, grid: ProfileGrid, server: Server, session: aiohttp.ClientSession, stages: Stages
    ) -> RoundResult:
        """Each prompt length and each batch once, in an order of its own; kept when it ends."""
        kept = stages.get(f"round-{number}")
        if kept is not None:
            return RoundResult.from_json(kept)
        result = RoundResult(gigabytes_per_second=None)
        jobs: list[Cell | int] = [*grid.cells(), *sorted(set(grid.input_lengths))]
        random.Random(number).shuffle(jobs)
        if not number:  # the first request of a server may be slow
            await self._ask_all(session, [self._request(grid.input_lengths[0], 8)])
        for place, job in enumerate(jobs):
            self.progress(f"round {number + 1} of {grid.rounds}: {place} of {len(jobs)} measurements")
            if isinstance(job, int):
                (answer,) = await self._ask_all(session, [self._request(job, 1)])
                result.prompts.append(MeasuredPrompt(isl=job, ttft_seconds=answer.ttft))
                sample = StepSample(
                    num_rows=0, num_sequences=0, num_context_tokens=0, num_prompt_rows=job, seconds=answer.ttft
                )
                result.steps.append(_step(PREFILL, number, Cell(0, job), sample))
            else:
                found = await self._measure_batch(job, server, session)
                if found is not None:
                    result.steps.append(_step(DECODE, number, job, found))
        stages.keep(f"round-{number}", result.to_json())
        return result

    async def _measure_batch(self, cell: Cell, server: Server, session: aiohttp.ClientSession) -> StepSample | None:
        """The mean step while all sequences of a batch decode; None where they did not for long enough."""
        output_len = NUM_TOKENS + cell.num_sequences * cell.context // self.task.max_num_batched_tokens
        before = await server.draft_counts()
        answers = await self._ask_all(
            session, [self._request(cell.context, output_len) for _ in range(cell.num_sequences)]
        )
        after = await server.draft_counts()
        seconds = mean_step(answers)
        if seconds is None:
            return None
        drafts = after.since(before) if before is not None and after is not None else None
        num_steps = sum(len(answer.chunks) for answer in answers) / len(answers)
        num_drafted = round(drafts.num_draft_tokens / num_steps) if drafts is not None else 0
        return StepSample(
            num_rows=cell.num_sequences + num_drafted,
            num_sequences=cell.num_sequences,
            num_context_tokens=cell.num_sequences * (cell.context + output_len // 2),
            num_draft_tokens=num_drafted,
            seconds=seconds,
        )

    async def _acceptance(
        self, grid: ProfileGrid, server: Server, session: aiohttp.ClientSession, stages: Stages
    ) -> dict[str, AcceptanceProfile]:
        """What became of the server's drafts by class of prompts, by its own counters; empty where it drafts nothing."""
        kept = stages.get("drafter")
        if kept is None:
            kept = {}
            total = _Fate()
            for kind, texts in self.task.prompts.items():
                self.progress(f"drafts on {kind}")
                fate = await self._fate(texts[: grid.num_texts], grid.max_tokens, server, session)
                if fate is not None:
                    kept[f"{CONFIG}/{kind}"] = fate.profile().to_json()
                    total.add(fate)
            if kept:
                kept = {CONFIG: total.profile().to_json()} | kept
            stages.keep("drafter", kept)
        return {name: AcceptanceProfile.from_json(record) for name, record in kept.items()}

    async def _fate(
        self, texts: Sequence[str], max_tokens: int, server: Server, session: aiohttp.ClientSession
    ) -> _Fate | None:
        before = await server.draft_counts()
        answers: list[Answer] = []
        for start in range(0, len(texts), ASKED_AT_ONCE):
            requests = [LoadRequest(text, max_tokens) for text in texts[start : start + ASKED_AT_ONCE]]
            answers += await self._ask_all(session, requests, chat=True)
        after = await server.draft_counts()
        drafts = after.since(before) if before is not None and after is not None else None
        if drafts is None:
            return None
        num_tokens = sum(max(0, (answer.num_output_tokens or 0) - 1) for answer in answers)
        return _Fate.of(drafts, num_tokens)

    def _request(self, num_tokens: int, output_len: int) -> LoadRequest:
        return LoadRequest(self._random.choices(range(10, self.task.vocab_size), k=num_tokens), output_len)

    async def _ask_all(
        self, session: aiohttp.ClientSession, requests: Sequence[LoadRequest], *, chat: bool = False
    ) -> list[Answer]:
        """Send requests at once and read their answers.

        Raises:
            ConfigError: one failed.
        """
        endpoint = Endpoint(
            url=f"{self.task.url}/v1/{'chat/' if chat else ''}completions",
            backend="openai-chat" if chat else "openai",
            model=self.task.model,
            body={"temperature": 0} if chat else {"temperature": 0, "ignore_eos": True},
            headers=self.task.headers,
        )
        asked = [ask(session, endpoint, one, f"profile-{number}") for number, one in enumerate(requests)]
        answers = await asyncio.gather(*asked)
        for answer in answers:
            if answer.error is not None:
                raise ConfigError(
                    f"--server: {self.task.url} failed a request ({answer.error}); what was measured is kept"
                )
        return answers


@dataclass(slots=True)
class _Fate:
    """Steps that could verify a draft, and how many stood at each place."""

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

    def profile(self) -> AcceptanceProfile:
        return AcceptanceProfile.of_counts(CONFIG, self.num_steps, self.num_stood)


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
