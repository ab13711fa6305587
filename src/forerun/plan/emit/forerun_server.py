"""forerun itself: its server's options, alone, in Docker's compose, and on Kubernetes."""

from __future__ import annotations

from typing import Any

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import Layout
from forerun.plan.emit.emission import Emission, EmitRequest, script, yaml_text

IMAGE = "forerun"  # docker build -f deploy/Dockerfile -t forerun .
PORT = 8000
CONFIG_FILE = "serve.yaml"
CONFIG_FOLDER = "/config"
DRAIN_SECONDS = 120  # that a request in flight may take to its end


def forerun(request: EmitRequest) -> Emission:
    """The file of `forerun serve --config`, and a script that starts one server."""
    files = {
        CONFIG_FILE: yaml_text(server_options(request)),
        "serve.sh": script(["forerun", "serve", "--config", CONFIG_FILE, "--port", f'"${{PORT:-{PORT}}}"']),
    }
    return Emission(files=files, notes=_several(request))


def compose(request: EmitRequest) -> Emission:
    """A compose file: the replicas, each with its health check."""
    is_one = request.plan.replicas == 1
    service: dict[str, Any] = {
        "image": request.image or IMAGE,
        "command": ["serve", "--config", f"{CONFIG_FOLDER}/{CONFIG_FILE}"],
        "environment": ["FORERUN_API_KEY"],  # passed on where it is set
        "ports": [f"127.0.0.1:{PORT}:{PORT}" if is_one else f"127.0.0.1::{PORT}"],
        "volumes": [f"./{CONFIG_FILE}:{CONFIG_FOLDER}/{CONFIG_FILE}:ro", "models:/models"],
        "deploy": {"replicas": request.plan.replicas},
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "stop_grace_period": f"{DRAIN_SECONDS}s",
        "restart": "unless-stopped",
    }
    files = {
        "compose.yaml": yaml_text({"services": {"forerun": service}, "volumes": {"models": {}}}),
        CONFIG_FILE: yaml_text(server_options(request)),
    }
    return Emission(files=files, notes=(_image_note(request), *_several(request)))


def kubernetes(request: EmitRequest) -> Emission:
    """A ConfigMap, a Deployment and a Service."""
    name, labels = (
        f"forerun-{request.name}",
        {"app.kubernetes.io/name": "forerun", "app.kubernetes.io/instance": request.name},
    )
    probe = {"httpGet": {"path": "/health", "port": "http"}}
    container = {
        "name": "server",
        "image": request.image or IMAGE,
        "args": ["serve", "--config", f"{CONFIG_FOLDER}/{CONFIG_FILE}"],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": probe | {"periodSeconds": 5, "timeoutSeconds": 4},
        "livenessProbe": probe | {"periodSeconds": 10, "timeoutSeconds": 4, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "models", "mountPath": "/models"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "terminationGracePeriodSeconds": DRAIN_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "models", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "securityContext": {"runAsNonRoot": True, "fsGroup": 10001},
    }
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/path": "/metrics", "prometheus.io/port": str(PORT)}
    documents = (
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": labels},
            "data": {CONFIG_FILE: yaml_text(server_options(request))},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "replicas": request.plan.replicas,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels, "annotations": scraped}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
        },
    )
    notes = (
        _image_note(request),
        "models are read anew by each pod: mount a volume that they share in place of the emptyDir to read them once",
        "cores and memory are those of the node: set resources as on the machine that was profiled",
    )
    return Emission(files={"forerun.yaml": yaml_text(*documents)}, notes=notes)


def server_options(request: EmitRequest) -> dict[str, Any]:
    """The options of `forerun serve`, in the names of its configuration file.

    Raises:
        ConfigError: prefill and decode are apart, which forerun's servers are not.
    """
    plan = request.plan
    if plan.layout is not Layout.AGGREGATED:
        raise ConfigError(
            "layout: forerun's servers compute prompts and answers; plan with --layout aggregated, or emit to dynamo or trtllm"
        )
    options: dict[str, Any] = {
        "model": request.model,
        "max-num-seqs": plan.engine.max_num_seqs,
        "max-num-batched-tokens": plan.engine.max_num_batched_tokens,
        "max-model-len": plan.engine.max_model_len,
        "dtype": plan.engine.dtype,
    }
    if plan.engine.quantization is not None:
        options["quantization"] = plan.engine.quantization
    if plan.speculative_config is None:
        return options | {"no-speculation": True}
    return options | {"speculative-config": plan.speculative_config}


def _image_note(request: EmitRequest) -> str:
    if request.image is not None:
        return f"the image {request.image} must hold forerun with its extra `serve`"
    return f"the image `{IMAGE}` is that of the repository: docker build -f deploy/Dockerfile -t {IMAGE} ."


def _several(request: EmitRequest) -> tuple[str, ...]:
    count = request.plan.replicas
    if count == 1:
        return ()
    return (
        f"{count} servers are planned: put a balancer in front of them that sends each request to the least loaded one",
    )
