"""Stands in for ai-dynamo: the interfaces that the worker uses, and a runtime that drives them in Dynamo's order."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MODULES = (
    *("dynamo", "dynamo._core", "dynamo.common", "dynamo.common.backend", "dynamo.common.backend.health_check"),
    *(
        "dynamo.common.backend.metrics",
        "dynamo.common.backend.publisher",
        "dynamo.llm",
        "dynamo.llm.exceptions",
        "uvloop",
    ),
)


class Context:
    def __init__(self, request_id):
        self._id = request_id

    def id(self):
        return self._id


class LLMEngine:
    pass


@dataclass
class Record:
    """Any of Dynamo's records: its fields by name."""

    fields: dict[str, Any]

    def __getattr__(self, name):
        return self.fields[name]


def record(**fields):
    return Record(fields)


class DynamoError(Exception):
    pass


class InvalidArgument(DynamoError):  # noqa: N818 - Dynamo's name
    pass


class EngineShutdown(DynamoError):  # noqa: N818 - Dynamo's name
    pass


class Unknown(DynamoError):  # noqa: N818 - Dynamo's name
    pass


@dataclass
class Runtime:
    """What the fake runtime saw, and what it does while the worker serves."""

    scenario: Any  # async, called with the engine
    config: Any = None
    registration: Any = None
    registry: Any = None
    prefixes: list[str] = field(default_factory=list)
    stored: list[Any] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)
    probe: Any = None

    def publish(self, rank, snapshot):
        self.snapshots.append((rank, snapshot))

    def publish_stored(self, **event):
        self.stored.append(event)

    async def run(self, engine, config):
        self.config = config
        try:
            self.registration = await engine.start(1)
            await engine.register_prometheus(self)
            assert engine.component_metrics_dp_ranks() == [0]
            engine.attach_snapshot_publisher(self)
            for source in await engine.kv_event_sources():
                source.on_ready(self)
            self.probe = await engine.health_check_payload()
            await self.scenario(engine)
        finally:
            await engine.cleanup()
            await engine.cleanup()


def install(monkeypatch, runtime):
    """Make the fake what `import dynamo` finds."""
    modules = {name: ModuleType(name) for name in MODULES}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    core, backend = modules["dynamo._core"], modules["dynamo.common.backend"]
    core.Context = Context
    core.get_tool_parser_names = lambda: ["hermes"]
    core.get_reasoning_parser_names = lambda: ["qwen3"]
    backend.LLMEngine = LLMEngine
    backend.EngineConfig = backend.LlmRegistration = backend.WorkerConfig = record

    class Worker:
        def __init__(self, engine, config):
            self._engine, self._config = engine, config

        async def run(self):
            await runtime.run(self._engine, self._config)

    def register_engine_registry(seen, registry, *, prefix_filters):
        seen.registry, seen.prefixes = registry, prefix_filters

    backend.Worker = Worker
    modules["dynamo.common.backend.health_check"].build_health_check_payload = lambda bos_token_id: {
        "token_ids": [bos_token_id],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "_HEALTH_CHECK": True,
    }
    modules["dynamo.common.backend.metrics"].register_engine_registry = register_engine_registry
    modules["dynamo.common.backend.publisher"].ComponentSnapshot = record
    modules["dynamo.common.backend.publisher"].PushSource = record
    for error in (InvalidArgument, EngineShutdown, Unknown):
        setattr(modules["dynamo.llm.exceptions"], error.__name__, error)
    modules["uvloop"].run = asyncio.run
    monkeypatch.delitem(sys.modules, "forerun.deploy.dynamo.worker", raising=False)
