"""One replica: an engine with its own HTTP application, inside an actor of Ray Serve.

The class knows no interface of Ray but the names of the methods that Ray Serve calls, so it can be run without it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.deploy.ray.fleet_metrics import ReplicaMetrics, together
from forerun.deploy.ray.installation import check_same_version
from forerun.deploy.ray.load_meter import counts_of
from forerun.llm import LLM
from forerun.server.app import REQUEST_ID, SANE_ID, build_app
from forerun.server.metrics import expose
from forerun.server.options import ServerOptions
from forerun.server.serve import SWITCH_INTERVAL_S, log_stats
from forerun.server.served_model import ServedModel

MOST_WAIT_S = 4.0  # for other replicas' metrics; each waits up to 3 s for its engine


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """What each replica runs: arguments of `LLM`, and of the server; `version` is that of forerun.

    `host` is the address that Ray's proxy listens on; None where it may be another than that of `options`.
    """

    settings: Mapping[str, Any]
    options: ServerOptions
    version: str
    host: str | None = None


class EngineReplica:
    """The deployment: it loads the model, answers HTTP requests, and tells router, autoscaler and health checks of itself.

    Raises:
        ConfigError: this machine has another version of forerun.
        ForerunError: the model cannot be loaded.
    """

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Ray awaits it
        check_same_version(spec.version)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if not spec.options.disable_log_stats:
            log_stats()
        self._options, self._host = spec.options, spec.host
        self.model = await asyncio.to_thread(lambda: ServedModel(LLM(**spec.settings), spec.options))
        gc.collect()
        gc.freeze()  # as in `Server`: a collection over all that was loaded would hold every stream
        self.model.engine.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray Serve once, after the constructor."""
        app = build_app(self._options, host=self._host, lifespan=self._lifespan)
        app.state.model = self.model
        app.state.read_metrics = self.read_all_metrics
        return RequestId(app)

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(self.model.close)

    async def check_health(self) -> None:
        """Called by Ray Serve every few seconds; after three failures it starts another replica instead.

        Raises:
            RuntimeError: the engine has ended, its last steps failed, or a step hangs.
        """
        if self.model.engine.failure is not None:
            raise RuntimeError(self.model.engine.failure)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray Serve for its routers."""
        return {"kv_tokens": self.model.kv_memory[1]}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve for its autoscaling policy: counters that only grow, and what is under way.

        Nothing while the engine does not tell: a counter of 0 would undo what it has counted.
        """
        metrics = await self.model.engine_metrics()
        return counts_of(metrics, self.model.metrics.ended).to_stats() if metrics else {}

    async def own_metrics(self) -> ReplicaMetrics:
        """This replica's metrics, for the one that was asked for those of all."""
        from ray import serve

        context = serve.get_replica_context()
        text = expose(self.model.metrics, await self.model.engine_metrics()).decode()
        return ReplicaMetrics(context.rank.rank, context.replica_tag, text)

    async def read_all_metrics(self) -> bytes:
        """The metrics of all replicas; one that does not answer within seconds is left out."""
        from ray import serve

        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        asked = handle.broadcast("own_metrics")
        own, others = await asyncio.gather(self.own_metrics(), _each_answer(asked), return_exceptions=True)
        # asked for all answers together (`results_async`), Ray gives none where one is late
        answers = [own, *([] if isinstance(others, BaseException) else others)]
        return together(list({one.replica: one for one in answers if isinstance(one, ReplicaMetrics)}.values()))


async def _each_answer(asked: Any) -> list[Any]:
    """What each replica answers to a broadcast within seconds, or the exception that says why not."""
    results = await asyncio.wait_for(asked._fetch_replica_results_async(), MOST_WAIT_S)
    answers = (asyncio.wait_for(one.get_async(), MOST_WAIT_S) for one in results)
    return await asyncio.gather(*answers, return_exceptions=True)


class RequestId:
    """Gives the application the request's id that Ray's proxy has put into its header, and will put into the answer's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name.lower() == REQUEST_ID), b"")
            request_id = given.decode() if SANE_ID.fullmatch(given) else uuid.uuid4().hex
            scope.setdefault("state", {})["request_id"] = request_id
        await self._app(scope, receive, send)
