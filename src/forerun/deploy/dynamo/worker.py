"""The engine as Dynamo's worker drives it; imports ai-dynamo, so import this only where it is used."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import uvloop
from dynamo._core import Context, get_reasoning_parser_names, get_tool_parser_names
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from forerun.deploy.dynamo.options import WorkerOptions
from forerun.deploy.dynamo.prompt_lengths import PromptLengths
from forerun.deploy.dynamo.service import TokenService
from forerun.deploy.dynamo.streams import Chunk
from forerun.deploy.dynamo.worker_group import WorkerGroup, text_configuration
from forerun.errors import ConfigError, ErrorKind, ForerunError
from forerun.llm import LLM
from forerun.server.engine_thread import EngineEndedError, EngineError

METRICS = ["vllm:", "forerun:"]
"""Beginnings of the names that are ours; Dynamo has its own of the process."""
RANK = 0  # a worker is one data-parallel rank
PROBE_TOKEN_ID = 0
SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait long for Python's lock after each kernel call

logger = logging.getLogger(__name__)


class ForerunWorker(LLMEngine):  # type: ignore[misc]
    """An `LLMEngine` of `dynamo.common.backend` over one forerun engine.

    `failure` is what ended the worker against its will.

    Args:
        load: gives the model; called once, in a thread.
        path: the model's folder, from which the frontend takes tokenizer and chat template.
        name: what requests call the model.
        options: see `WorkerOptions`.
    """

    def __init__(self, load: Callable[[], LLM], *, path: Path, name: str, options: WorkerOptions) -> None:
        self.failure: BaseException | None = None
        self._load = load
        self._path = path
        self._name = name
        self._options = options
        self._group: WorkerGroup | None = None
        self._service: TokenService | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:  # noqa: ARG003
        """Not for this worker, whose options `forerun dynamo-worker` reads.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("dynamo-worker: Dynamo cannot read its options; start it by forerun dynamo-worker MODEL")

    async def start(self, worker_id: int) -> EngineConfig:  # noqa: ARG002
        """Load the model; what the frontend and its router are told of it."""
        try:
            llm = await asyncio.to_thread(self._load)
            lengths = self._join_others(llm)
        except BaseException as error:
            self.failure = error
            raise
        gc.collect()
        gc.freeze()  # a collection that walks all that was loaded holds every stream for a quarter of a second
        self._service = TokenService(llm, name=self._name, prompt_lengths=lengths)
        self._service.start()
        parts, settings = llm.engine.parts, llm.settings
        num_drafted = llm.speculative.num_speculative_tokens
        return EngineConfig(
            model=str(self._path),
            served_model_name=self._name,
            runtime_data={"spec_decode": {"nextn": num_drafted}} if num_drafted else None,
            llm=LlmRegistration(
                context_length=llm.max_model_len,
                kv_cache_block_size=parts.block_size,
                total_kv_blocks=parts.pool.num_blocks,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
            ),
        )

    def _join_others(self, llm: LLM) -> PromptLengths | None:
        """Refuse to run beside workers that write other texts; where requests are noted."""
        folder = self._options.shared_folder
        if folder is None:
            return None
        self._group = WorkerGroup(folder / "workers", self._options.address)
        self._group.join(text_configuration(llm))
        return PromptLengths(folder / "requests")

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request."""
        service = self._service
        if service is None:
            raise EngineShutdown("the worker is not ready, or has ended")
        try:
            async for chunk in service.generate(request, context.id()):
                yield chunk
        except ForerunError as error:
            raise (InvalidArgument if error.kind is ErrorKind.REQUEST else Unknown)(str(error)) from error
        except EngineEndedError as error:  # the frontend sends the request, and what it has got, to another worker
            self._end(error)
            raise EngineShutdown(str(error)) from error
        except EngineError as error:
            raise Unknown(str(error)) from error

    async def abort(self, context: Context) -> None:
        """End a request that nobody waits for any more."""
        if self._service is not None:
            self._service.abort(context.id())

    async def cleanup(self) -> None:
        """End the engine; doing so again changes nothing."""
        if self._group is not None:
            self._group.leave()
        service, self._service = self._service, None
        if service is not None:
            await asyncio.to_thread(service.close)  # the step that runs may be long

    async def kv_event_sources(self) -> list[PushSource]:
        """The prefix cache, as the router's source of events."""
        assert self._service is not None, "Dynamo asks after the start"
        return [PushSource(on_ready=self._service.events.attach, dp_rank=RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """One rank reports how full its KV memory is."""
        return [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Report it there."""
        assert self._service is not None, "Dynamo asks after the start"

        def report(num_used: int, num_blocks: int, hit_rate: float | None) -> None:
            snapshot = ComponentSnapshot(
                kv_used_blocks=num_used,
                kv_total_blocks=num_blocks,
                gpu_cache_usage=num_used / num_blocks,
                dp_rank=RANK,
                kv_cache_hit_rate=hit_rate,
            )
            publisher.publish(RANK, snapshot)

        self._service.report_load_to(report)

    async def register_prometheus(self, metrics: Any) -> None:
        """The metrics of `forerun serve`, in vLLM's names, which Dynamo's planner reads."""
        assert self._service is not None, "Dynamo asks after the start"
        register_engine_registry(metrics, self._service.registry, prefix_filters=METRICS)

    async def health_check_payload(self) -> dict[str, Any]:
        """One token, which Dynamo asks for when nothing else shows that the worker is alive."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=PROBE_TOKEN_ID)
        return payload

    def _end(self, error: EngineEndedError) -> None:
        """End the process in order, once: an engine that has ended serves nobody."""
        if self.failure is None and self._service is not None:
            self.failure = error
            logger.error("the worker ends: %s", error)
            os.kill(os.getpid(), signal.SIGTERM)


def run_worker(load: Callable[[], LLM], *, path: Path, name: str, options: WorkerOptions) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: Dynamo has no such parser, or the model has no tokenizer for the frontend.
        ForerunError: the model cannot be loaded.
        SystemExit: the engine ended after an error.
    """
    _check_parser("--tool-call-parser", options.tool_call_parser, get_tool_parser_names())
    _check_parser("--reasoning-parser", options.reasoning_parser, get_reasoning_parser_names())
    if not (path / "tokenizer.json").exists():
        raise ConfigError(
            f"MODEL: Dynamo's frontend reads tokenizer.json of the model's folder, and {path} has none; give a folder with one"
        )
    options.set_environment()
    engine = ForerunWorker(load, path=path, name=name, options=options)
    config = WorkerConfig(
        namespace=options.namespace,
        component=options.component,
        endpoint=options.endpoint_name,
        model_name=str(path),
        served_model_name=name,
        discovery_backend=options.discovery_backend,
        request_plane=options.request_plane,
        event_plane=options.event_plane,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        enable_kv_routing=options.kv_events,
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        uvloop.run(Worker(engine, config).run())
    except Exception:
        if engine.failure is None:
            raise
    if isinstance(engine.failure, EngineEndedError):
        sys.exit(1)  # the log says why
    if engine.failure is not None:
        raise engine.failure


def _check_parser(option: str, name: str | None, known: list[str]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"{option}: got {name!r}; may be {', '.join(sorted(known))}")
