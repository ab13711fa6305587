"""What a server says of itself: models, version, metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from forerun.bench.load.scrape import DraftCounts, count_drafts
from forerun.errors import ConfigError

TIMEOUT = aiohttp.ClientTimeout(total=10)  # seconds; pages beside the load are short
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's name in requests, and where it, so its tokenizer, lies."""

    name: str
    root: str


@dataclass(frozen=True, slots=True)
class Server:
    """The parts of a server beside the endpoint under load."""

    session: aiohttp.ClientSession
    base_url: str
    headers: Mapping[str, str]

    async def wait(self, seconds: float = 0) -> None:
        """Wait until the server is there and `/health` does not say that it is loading.

        Raises:
            ConfigError: it takes longer than `seconds`.
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
                    "or give --host and --port, or --base-url"
                )
            if time.monotonic() >= deadline:
                raise ConfigError(problem)
            await asyncio.sleep(RETRY_SECONDS)

    async def first_model(self) -> ServedModel:
        """The first model of `/v1/models`; its root is its name where the server does not say.

        Raises:
            ConfigError: it lists none.
        """
        text = await self._page("/v1/models")
        try:
            model = json.loads(text or "")["data"][0]
            return ServedModel(str(model["id"]), str(model.get("root") or model["id"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"model: {self.base_url}/v1/models names none; give --model, and the key, where one is asked for, by "
                "OPENAI_API_KEY or --header"
            ) from None

    async def version(self) -> str | None:
        """What `/version` says; None where there is no such page."""
        text = await self._page("/version")
        return None if text is None else text[:200]

    async def draft_counts(self) -> DraftCounts | None:
        """Counts of drafts from `/metrics`; None where there are none."""
        text = await self._page("/metrics")
        return None if text is None else count_drafts(text)

    async def _page(self, path: str) -> str | None:
        """A page's text; None where there is no such page."""
        try:
            async with self._get(path) as response:
                return await response.text() if response.status == HTTPStatus.OK else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    def _get(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.session.get(f"{self.base_url}{path}", headers=self.headers, timeout=TIMEOUT)
