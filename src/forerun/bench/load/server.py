"""What a server says of itself: models, version, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from forerun.bench.load.scrape import DraftCounts, count_drafts
from forerun.errors import ConfigError

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

    async def first_model(self) -> ServedModel:
        """The first model of `/v1/models`; its root is its name where the server does not say.

        Raises:
            ConfigError: no server answers, or it lists no model.
        """
        try:
            async with self.session.get(f"{self.base_url}/v1/models", headers=self.headers) as response:
                listed = await response.json(content_type=None)
            model = listed["data"][0]
            return ServedModel(str(model["id"]), str(model.get("root") or model["id"]))
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise self._absent(error) from error
        except (aiohttp.ClientError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"model: {self.base_url}/v1/models names none (status {response.status}); give --model, and the key, "
                "where one is asked for, by OPENAI_API_KEY or --header"
            ) from error

    async def wait(self, seconds: float = 0) -> None:
        """Wait until the server is there and `/health` does not say that it is loading.

        Raises:
            ConfigError: it takes longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                async with self.session.get(f"{self.base_url}/health", headers=self.headers) as response:
                    if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        return
                    problem = ConfigError(
                        f"{self.base_url}: still loading; give --ready-check-timeout-sec to wait longer"
                    )
            except aiohttp.InvalidURL:
                raise ConfigError(
                    f"base_url: got {self.base_url!r}; must be a URL such as http://127.0.0.1:8000"
                ) from None
            except (aiohttp.ClientConnectionError, TimeoutError) as error:
                problem = self._absent(error)
            if time.monotonic() >= deadline:
                raise problem
            await asyncio.sleep(RETRY_SECONDS)

    async def version(self) -> str | None:
        """What `/version` says; None where there is no such page."""
        text = await self._page("/version")
        return None if text is None else text[:200]

    async def draft_counts(self) -> DraftCounts | None:
        """Counts of drafts from `/metrics`; None where there are none."""
        text = await self._page("/metrics")
        return None if text is None else count_drafts(text)

    async def _page(self, path: str) -> str | None:
        try:
            async with self.session.get(f"{self.base_url}{path}", headers=self.headers) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    def _absent(self, error: BaseException) -> ConfigError:
        return ConfigError(
            f"{self.base_url}: no server answers ({error}); start one there (forerun serve MODEL), "
            "or give --host and --port, or --base-url"
        )
