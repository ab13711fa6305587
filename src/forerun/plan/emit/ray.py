"""Ray Serve with vLLM's engines: the configuration that `serve deploy` reads, and KubeRay's RayService around it.

Names and keys are those of Ray 2.60, and of 2.56, whose image pods run: `ServeDeploySchema`, and the arguments of
`ray.serve.llm:build_openai_app`; and of KubeRay 1.7: the CRD of `RayService` in ray.io/v1; read in 2026-11. Ray Serve LLM
runs vLLM; `forerun deploy ray` starts forerun's own replicas.
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
RAY_VERSION = "2.56.0"
IMAGE = f"rayproject/ray-llm:{RAY_VERSION}-py312-cu130"
"""What KubeRay 1.7 gives in its own example of Ray Serve LLM."""

HEAD_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001, "serve": PORT}
HEAD_RESOURCES = {"cpu": "2", "memory": "8Gi"}  # as in the same example


def ray(request: EmitRequest) -> Emission:
    """One application whose replicas are the plan's engines, behind OpenAI's interface, alone and on Kubernetes."""
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
    applications = {"applications": [application]}
    document = {"http_options": {"host": "127.0.0.1", "port": PORT}} | applications
    service = ray_service(request, yaml_text(applications))
    name = service["metadata"]["name"]
    notes = (
        f"pip install 'ray[serve,llm]', then serve deploy serve.yaml; the model is called {request.name} in requests",
        "it listens on 127.0.0.1; Ray's port has no keys: put a proxy before it to serve others",
        f"on Kubernetes, with KubeRay's operator: kubectl apply -f rayservice.yaml; it serves in the cluster as {name}-serve-svc:{PORT}",
        *vllm_notes(plan.speculative_config),
    )
    return Emission(files={"serve.yaml": yaml_text(document), "rayservice.yaml": yaml_text(service)}, notes=notes)


def ray_service(request: EmitRequest, serve_config: str) -> dict[str, Any]:
    """KubeRay's manifest: a head that computes nothing, and a worker with GPUs for each of the plan's engines.

    Args:
        request: what is emitted.
        serve_config: the applications, as YAML; without further options Serve listens on all addresses of its pods.
    """
    engines, gpus = request.plan.replicas, str(request.plan.engine.tensor_parallel_size)
    head = _container(request, "ray-head") | {
        "ports": [{"name": name, "containerPort": port} for name, port in HEAD_PORTS.items()],
        "resources": {"requests": HEAD_RESOURCES, "limits": HEAD_RESOURCES},
    }
    worker = _container(request, "ray-worker") | {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    version = {} if request.image else {"rayVersion": RAY_VERSION}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        # a label of DNS (RFC 1035) begins with a letter; KubeRay takes 47 characters at most
        "metadata": {"name": f"ray-{request.name}"},
        "spec": {
            "serveConfigV2": serve_config,
            "rayClusterConfig": version
            | {
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _pod(head)},
                "workerGroupSpecs": [
                    {
                        "groupName": "engines",
                        "replicas": engines,
                        "minReplicas": engines,
                        "maxReplicas": engines,
                        "rayStartParams": {},
                        "template": _pod(worker),
                    }
                ],
            },
        },
    }


def _container(request: EmitRequest, name: str) -> dict[str, Any]:
    return {"name": name, "image": request.image or IMAGE}


def _pod(container: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"containers": [container]}}
