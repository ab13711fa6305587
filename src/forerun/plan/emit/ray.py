"""Ray Serve with vLLM's engines: the configuration that `serve deploy` and KubeRay's RayService read.

Names and keys are those of Ray 2.60: `ServeDeploySchema`, and the arguments of `ray.serve.llm:build_openai_app`.
Ray Serve LLM runs vLLM; `forerun deploy ray` starts forerun's own replicas.
"""

from __future__ import annotations

from typing import Any

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import Layout
from forerun.plan.emit.emission import Emission, EmitRequest, yaml_text
from forerun.plan.emit.speculation import vllm_notes
from forerun.plan.emit.vllm import engine_arguments

BUILDER = "ray.serve.llm:build_openai_app"
PORT = 8000


def ray(request: EmitRequest) -> Emission:
    """One application whose replicas are the plan's engines, behind OpenAI's interface."""
    plan = request.plan
    if plan.layout is not Layout.AGGREGATED:
        raise ConfigError(
            "layout: prefill and decode apart are emitted for dynamo and trtllm only; plan with --layout aggregated"
        )
    engine: dict[str, Any] = {
        "model_loading_config": {"model_id": request.name, "model_source": request.model},
        "engine_kwargs": engine_arguments(request),
        "deployment_config": {"num_replicas": plan.replicas, "max_ongoing_requests": 2 * plan.engine.max_num_seqs},
    }
    application = {
        "name": request.name,
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": {"llm_configs": [engine]},
    }
    document = {"http_options": {"host": "127.0.0.1", "port": PORT}, "applications": [application]}
    notes = (
        f"pip install 'ray[serve,llm]', then serve deploy serve.yaml; the model is called {request.name} in requests",
        "it listens on 127.0.0.1; Ray's port has no keys: put a proxy before it to serve others",
        *vllm_notes(plan.speculative_config),
    )
    return Emission(files={"serve.yaml": yaml_text(document)}, notes=notes)
