"""`forerun serve`: serves a model over OpenAI's HTTP interface."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter, Token
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict, Env

import forerun
from forerun.cli import loading
from forerun.cli.input_files import read_yaml
from forerun.cli.options import EngineOptions, ServingEngineOptions
from forerun.cli.whole_numbers import refuse_fractions
from forerun.deploy.disaggregated.options import PrefillOptions
from forerun.deploy.ray.options import ReplicaOptions
from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.server.options import ServerOptions

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.deploy.ray.replica import ReplicaSpec

EXTRA = ("fastapi", "uvicorn", "h11", "pydantic", "prometheus_client", "starlette")
ENGINE, SERVER, REPLICAS, PREFILL = ServingEngineOptions(), ServerOptions(), ReplicaOptions(), PrefillOptions()


def _from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Read options that neither the command line nor the environment gives from the file of --config."""
    given = next((argument.tokens for argument in arguments if argument.name == "--config"), ())
    if not given:
        return
    path = Path(given[-1].value)
    options = read_yaml(path, option="--config", example="port: 8001")
    if not isinstance(options, Mapping):
        raise ConfigError(f"--config: {path} holds no options; write one a line, e.g. port: 8001")
    names = [str(name).replace("_", "-") for name in options]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--config: {path} has {name} twice, with hyphens and with underscores; keep one")
    known = {name[2:] for argument in arguments for name in argument.names if name.startswith("--")}
    known = {"model", *known} - {"config"}
    refuse_unknown_keys([name.partition(".")[0] for name in names], known, where=f"--config: {path}")
    plain = dict(zip(names, map(_flat, options.values()), strict=True))
    model = next(argument for argument in arguments if argument.name == "MODEL")  # positional: `Dict` cannot set it
    if plain.get("model") is not None and not model.tokens:
        model.append(Token(keyword="model", value=str(plain["model"]), source=str(path)))
    plain.pop("model", None)
    Dict(plain, use_commands_as_keys=False, source=str(path))(app, commands, arguments)


def _flat(value: Any) -> Any:
    """A mapping as JSON, the form that its option takes; other values as they are."""
    return json.dumps(value) if isinstance(value, Mapping) else value


serve = App(
    name="serve",
    help="Serve a model over OpenAI's HTTP interface.",
    help_epilogue=(
        "Examples:\n"
        "  forerun serve smollm2-135m\n"
        "  forerun serve smollm2-135m --speculative-config.method suffix --port 8001\n"
        "  forerun serve smollm2-135m --replicas 2\n"
        "  FORERUN_API_KEY=secret forerun serve smollm2-135m --host 0.0.0.0\n"
        "  forerun serve --config server.yaml"
    ),
    config=(Env("FORERUN_", command=False, show=False), _from_file, refuse_fractions),
)


@serve.default
def run(
    model: str,
    /,
    *,
    config: Path | None = None,  # noqa: ARG001 - read by `_from_file`
    server: Annotated[ServerOptions, Parameter(name="*", negative=(), group=Group("Server", sort_key=2))] = SERVER,
    replicas: Annotated[
        ReplicaOptions, Parameter(name="*", negative=(), group=Group("Replicas", sort_key=4))
    ] = REPLICAS,
    prefill: Annotated[
        PrefillOptions, Parameter(name="*", negative=(), group=Group("Prefill process", sort_key=5))
    ] = PREFILL,
    engine: ServingEngineOptions = ENGINE,
) -> None:
    """Serve a model over OpenAI's HTTP interface.

    An option counts where it is found first: on the command line, in the environment (FORERUN_PORT for
    --port), in the file of --config, else its default. Ctrl-C or SIGTERM lets what runs finish and stops.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        config: A YAML file of options, named as here without the hyphens in front.
    """
    try:
        from forerun.server.serve import Server, log_stats
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise ConfigError(
            f"serve: needs the package {error.name}, which is not installed; pip install 'forerun[serve]'"
        ) from None
    if replicas.replicas is not None:
        if prefill.prefill_threads is not None:
            raise ConfigError(
                "prefill_threads: replicas read their own prompts; leave out --prefill-threads or --replicas"
            )
        serve_with_replicas(model, server, engine, replicas)
        return
    if not server.disable_log_stats:
        log_stats()
    it = Server(lambda: _load(model, engine, prefill), server, report=lambda line: print(line, flush=True))
    it.run()
    if it.is_working:
        os._exit(0)  # a thread within native code cannot be ended, and would crash while the interpreter shuts down


def _load(model: str, engine: EngineOptions, prefill: PrefillOptions) -> LLM:
    if prefill.prefill_threads is None:
        return loading.load_llm(model, engine)
    return loading.load_disaggregated(model, engine, prefill)


def serve_with_replicas(model: str, server: ServerOptions, engine: EngineOptions, replicas: ReplicaOptions) -> None:
    """Serve with several engines on this machine, each in a process of its own."""
    from forerun.deploy.ray.installation import check_ray

    check_ray()
    from forerun.deploy.ray.service import serve_here

    serve_here(replica_spec(model, server, engine), replicas, report=lambda line: print(line, flush=True))


def replica_spec(model: str, server: ServerOptions, engine: EngineOptions) -> ReplicaSpec:
    """What each replica runs; a known model that is absent is pulled first."""
    from forerun.deploy.ray.replica import ReplicaSpec

    if server.request_log is not None:
        raise ConfigError(
            "request_log: each replica would name blocks by itself, so that prompts of two replicas never begin alike; serve "
            "with one engine, or leave out --request-log"
        )
    if server.watch_head is not None:
        raise ConfigError("watch_head: replicas keep their heads; serve with one engine, or leave out --watch-head")
    for name in ("max_connections", "client_timeout"):
        if getattr(server, name) != getattr(SERVER, name):
            raise ConfigError(
                f"{name}: got {getattr(server, name)}, and connections are those of Ray's proxy, which has no such limit; leave it "
                "out, or put a reverse proxy before the service"
            )
    loading.pull_if_needed(model)
    if server.served_model_name is None:
        server = replace(server, served_model_name=model)
    return ReplicaSpec(settings={"model": model} | engine.settings(), options=server, version=forerun.__version__)
