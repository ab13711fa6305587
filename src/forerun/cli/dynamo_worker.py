"""`forerun dynamo-worker`: serves a model behind NVIDIA Dynamo's frontend."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Group, Parameter
from cyclopts.config import Env

from forerun.cli import loading
from forerun.cli.command import examples
from forerun.cli.options import ServingEngineOptions
from forerun.cli.whole_numbers import refuse_fractions
from forerun.deploy.dynamo.installation import check_installed
from forerun.deploy.dynamo.options import WorkerOptions
from forerun.models import store

ENGINE, WORKER = ServingEngineOptions(), WorkerOptions()

dynamo_worker = App(
    name="dynamo-worker",
    help="Serve a model behind NVIDIA Dynamo's frontend.",
    help_epilogue=examples(
        "  forerun dynamo-worker smollm2-135m\n"
        "  forerun dynamo-worker smollm2-135m --speculative-config.method suffix\n"
        "  python -m dynamo.frontend --discovery-backend file --router-mode kv --migration-limit 3"
    ),
    config=(*(Env(prefix, command=False, show=False) for prefix in ("FORERUN_", "DYN_")), refuse_fractions),
)


@dynamo_worker.default
def run(
    model: str,
    /,
    *,
    worker: Annotated[WorkerOptions, Parameter(name="*", group=Group("Worker", sort_key=2))] = WORKER,
    engine: ServingEngineOptions = ENGINE,
) -> None:
    """Serve a model behind NVIDIA Dynamo's frontend.

    Needs ai-dynamo; neither etcd nor NATS. Start as many as you like, and one frontend. Ctrl-C or SIGTERM lets what
    runs finish and stops.

    Args:
        model: A folder, a known name (see "forerun models list") or a hub id org/name.
    """
    check_installed()
    from forerun.deploy.dynamo.worker import run_worker  # ai-dynamo: only where it is used

    loading.pull_if_needed(model)
    path = store.resolve_model(model)
    name = worker.served_model_name or model
    run_worker(lambda: loading.load_llm(model, engine), path=path, name=name, options=worker)
