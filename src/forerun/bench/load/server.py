"""Reads what a server publishes beside its answers: readiness, models, version, and counters of drafts."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp

from forerun.errors import ConfigError

TIMEOUT = aiohttp.ClientTimeout(total=10)  # seconds; these pages are short
RETRY_SECONDS = 1.0

SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
ESCAPE = re.compile(r"\\(.)")

PREFIX = "vllm:spec_decode_num_"
DRAFTS = f"{PREFIX}drafts_total"
DRAFT_TOKENS = f"{PREFIX}draft_tokens_total"
ACCEPTED_TOKENS = f"{PREFIX}accepted_tokens_total"
ACCEPTED_PER_POSITION = f"{PREFIX}accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's name in requests, and the name or folder that its tokenizer is loaded from."""

    name: str
    root: str


@dataclass(frozen=True, slots=True)
class Server:
    """The pages of a server beside the endpoint under load."""

    session: aiohttp.ClientSession
    base_url: str
    headers: Mapping[str, str]

    async def wait(self, seconds: float = 0) -> None:
        """Wait until the server answers and `/health` no longer reports that it is loading.

        Raises:
            ConfigError: the server is not ready after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                async with self._get("/health") as response:
                    if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        return
                problem = f"{self.base_url}: still loading; give --ready-check-timeout-sec to wait for it"
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = (
                    f"{self.base_url}: no server answers ({error}); start one there (forerun serve MODEL), "
                    "or give the address of another"
                )
            if time.monotonic() >= deadline:
                raise ConfigError(problem)
            await asyncio.sleep(RETRY_SECONDS)

    async def first_model(self) -> ServedModel:
        """The first model of `/v1/models`; its root is its name if the server gives none.

        Raises:
            ConfigError: the server lists no model.
        """
        text = await self.page("/v1/models")
        try:
            model = json.loads(text or "")["data"][0]
            return ServedModel(str(model["id"]), str(model.get("root") or model["id"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"model: {self.base_url}/v1/models names none; give --model, and the key, where one is asked for, by "
                "OPENAI_API_KEY or --header"
            ) from None

    async def version(self) -> str | None:
        """The text of `/version`, or None if there is no such page."""
        text = await self.page("/version")
        return None if text is None else text[:200]

    async def draft_counts(self) -> DraftCounts | None:
        """The counts of drafts in `/metrics`, or None if there are none."""
        text = await self.page("/metrics")
        return None if text is None else count_drafts(text)

    async def page(self, path: str) -> str | None:
        """A page's text, or None if there is no such page."""
        try:
            async with self._get(path) as response:
                return await response.text() if response.status == HTTPStatus.OK else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    def _get(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.session.get(f"{self.base_url}{path}", headers=self.headers, timeout=TIMEOUT)


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """The samples of Prometheus' text exposition format, version 0.0.4; comments and invalid lines are skipped."""
    samples = []
    for line in text.splitlines():
        found = SAMPLE.fullmatch(line.strip())
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        labels = {name: _unescape(quoted) for name, quoted in LABEL.findall(found["labels"] or "")}
        samples.append(Sample(found["name"], labels, value))
    return samples


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """A server's counts of drafts, summed over its engines."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: dict[int, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens / drafts; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts whose token at each position was accepted; empty where a server counts no drafts."""
        if not self.num_drafts:
            return []
        return [count / self.num_drafts for _, count in sorted(self.accepted_per_position.items())]

    def since(self, earlier: DraftCounts) -> DraftCounts | None:
        """The counts since `earlier`, or None if nothing was drafted or the counters were reset in between."""
        counts = DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            {
                position: count - earlier.accepted_per_position.get(position, 0)
                for position, count in self.accepted_per_position.items()
            },
        )
        was_reset = min(counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) < 0
        return None if was_reset or not counts.num_draft_tokens else counts

    def to_json(self) -> dict[str, Any]:
        """vLLM's keys; the acceptance rate is in percent, as in vLLM."""
        return {
            "spec_decode_acceptance_rate": None if self.acceptance_rate is None else 100 * self.acceptance_rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.num_draft_tokens,
            "spec_decode_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_per_position_acceptance_rates": self.acceptance_per_position,
        }


def count_drafts(text: str) -> DraftCounts | None:
    """The counts of drafts in a server's metrics, by vLLM's names, or None if there are none."""
    sums: dict[str, int] = {}
    per_position: dict[int, int] = {}
    for name, labels, value in parse_metrics(text):
        if not math.isfinite(value):
            continue
        if name == ACCEPTED_PER_POSITION and labels.get("position", "").isdecimal():
            position = int(labels["position"])
            per_position[position] = per_position.get(position, 0) + int(value)
        elif name in (DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS):
            sums[name] = sums.get(name, 0) + int(value)
    if not sums:
        return None
    return DraftCounts(sums.get(DRAFTS, 0), sums.get(DRAFT_TOKENS, 0), sums.get(ACCEPTED_TOKENS, 0), per_position)


def _unescape(quoted: str) -> str:
    return ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], quoted)
