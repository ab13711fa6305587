"""forerun itself: its server's options, alone, in Docker's compose, and on Kubernetes."""

from __future__ import annotations

import math
import os
import re
from typing import Any, NamedTuple

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import Layout
from forerun.plan.drafter_memory import NOTHING, DrafterMemory, drafter_memory, kv_memory, models_of, num_blocks
from forerun.plan.emit.emission import FORERUN_FORMATS, Emission, EmitRequest, beside_script, script, yaml_text

IMAGE = "forerun"  # docker build -f deploy/Dockerfile -t forerun .
PORT = 8000
CONFIG_FILE = "serve.yaml"
CONFIG_FOLDER = "/config"
DRAIN_SECONDS = 120  # that a request in flight may take to its end
GRACE_SECONDS = DRAIN_SECONDS + 10  # until a server is killed, which ends itself by then
HEALTH_CHECK = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{PORT}/health', timeout=4)"
MIB = 2**20
PROCESS_BYTES = 2**30  # of Python, its packages and activations
SPREAD = (
    "the Service sends each connection to any of the servers: plan with --routing random, or put a balancer in front of them that "
    "sends each request to the least loaded one"
)


class _Resources(NamedTuple):
    """What one server of the plan takes; None: not known."""

    cores: int | None
    gpus: int
    kv_bytes: int | None
    memory_mib: int | None
    drafter: DrafterMemory = NOTHING


def forerun(request: EmitRequest) -> Emission:
    """The file of `forerun serve --config`, and a script that starts one server."""
    resources = resources_of(request)
    files = {
        CONFIG_FILE: yaml_text(server_options(request, resources)),
        "serve.sh": script(
            ["forerun", "serve", "--config", beside_script(CONFIG_FILE), "--port", f'"${{PORT:-{PORT}}}"']
        ),
    }
    return Emission(files=files, notes=(*_several(request), *_drafter_notes(resources)))


def compose(request: EmitRequest) -> Emission:
    """A compose file: the replicas, each with its health check."""
    is_one = request.plan.replicas == 1
    resources = resources_of(request)
    limits = {} if resources.memory_mib is None else {"limits": {"memory": f"{resources.memory_mib}M"}}
    gpus = {"driver": "nvidia", "count": resources.gpus, "capabilities": ["gpu"]}
    reserved = {"reservations": {"devices": [gpus]}} if resources.gpus else {}
    needed = {"resources": limits | reserved} if limits or reserved else {}
    service: dict[str, Any] = {
        "image": request.image or IMAGE,
        "command": ["serve", "--config", f"{CONFIG_FOLDER}/{CONFIG_FILE}"],
        "environment": ["FORERUN_API_KEY"],  # passed on where it is set
        "ports": [f"127.0.0.1:{PORT}:{PORT}" if is_one else f"127.0.0.1::{PORT}"],
        "volumes": [f"./{CONFIG_FILE}:{CONFIG_FOLDER}/{CONFIG_FILE}:ro", "models:/models"],
        "deploy": {"replicas": request.plan.replicas} | needed,
        "healthcheck": {
            "test": ["CMD", "python", "-c", HEALTH_CHECK],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": "10m",
        },
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "stop_grace_period": f"{GRACE_SECONDS}s",
        "restart": "unless-stopped",
    }
    files = {
        "compose.yaml": yaml_text({"services": {"forerun": service}, "volumes": {"models": {}}}),
        CONFIG_FILE: yaml_text(container_options(request, resources)),
    }
    together = "give each server cores of its own with cpuset: those that share cores wait for each other"
    if resources.gpus:
        together = "docker gives all of these servers the same GPUs: write a service for each, with device_ids in place of count"
    notes = (
        *_image_notes(request),
        *_path_notes(request),
        *_resource_notes(request, resources),
        *_drafter_notes(resources),
        *_several(request),
        *(() if is_one else (together,)),
    )
    return Emission(files=files, notes=notes)


def kubernetes(request: EmitRequest) -> Emission:
    """A ConfigMap, a Deployment and a Service."""
    resources = resources_of(request)
    labels = {"app.kubernetes.io/name": "forerun", "app.kubernetes.io/instance": request.name}
    name = f"forerun-{request.name}"
    metadata = {"name": name, "labels": labels}
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/path": "/metrics", "prometheus.io/port": str(PORT)}
    pod = _pod(request, resources, config_map=name)
    documents = (
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {CONFIG_FILE: yaml_text(container_options(request, resources))},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": request.plan.replicas,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels, "annotations": scraped}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
        },
    )
    notes = (
        *_image_notes(request),
        *_path_notes(request),
        *(() if request.plan.replicas == 1 else (SPREAD,)),
        "models are read anew by each pod: mount a volume that they share in place of the emptyDir to read them once",
        *_core_notes(request, resources),
        *_resource_notes(request, resources),
        *_drafter_notes(resources),
    )
    return Emission(files={"forerun.yaml": yaml_text(*documents)}, notes=notes)


def _pod(request: EmitRequest, resources: _Resources, *, config_map: str) -> dict[str, Any]:
    """A pod with one server, which may write to its models and temporary files alone."""
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
    } | _pod_resources(resources)
    return {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": config_map}},
            {"name": "models", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "securityContext": {"runAsNonRoot": True, "fsGroup": 10001},
    }


def server_options(request: EmitRequest, resources: _Resources) -> dict[str, Any]:
    """The options of `forerun serve`, in the names of its configuration file.

    Raises:
        ConfigError: prefill and decode are apart, which forerun's servers are not, or weights in a format that they lack.
    """
    plan = request.plan
    if plan.layout is not Layout.AGGREGATED:
        raise ConfigError(
            "layout: forerun's servers compute prompts and answers; plan with --layout aggregated, or emit to dynamo or trtllm"
        )
    engine = plan.engine
    if engine.quantization not in (None, *FORERUN_FORMATS):
        raise ConfigError(
            f"quantization: {engine.quantization!r} is a format of the server that was profiled, forerun has "
            f"{', '.join(FORERUN_FORMATS)}; emit to vllm, dynamo or ray, or profile forerun itself"
        )
    options: dict[str, Any] = {
        "model": request.model,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "max-model-len": engine.max_model_len,
        "block-size": engine.block_size,
        "dtype": engine.dtype,
        "tensor-parallel-size": engine.tensor_parallel_size,
    }
    if engine.device is not None:
        options["device"] = engine.device
    if resources.kv_bytes is not None:
        options["kv-cache-memory-bytes"] = resources.kv_bytes
    if engine.quantization is not None:
        options["quantization"] = engine.quantization
    options |= {name.replace("_", "-"): value for name, value in engine.kernel_settings.items()}
    if plan.speculative_config is None:
        return options | {"no-speculation": True}
    return options | {"speculative-config": plan.speculative_config}


def container_options(request: EmitRequest, resources: _Resources) -> dict[str, Any]:
    """The same for a server in a container, whose requests may come to their end before it is killed."""
    return server_options(request, resources) | {"shutdown-timeout": DRAIN_SECONDS}


def resources_of(request: EmitRequest) -> _Resources:
    """A core for each thread that computed or GPUs, and with the profile's folder the memory of its KV cache and weights.

    The KV cache has as many blocks as were planned, the drafter's part of each included, and the blocks beside them that drafts
    alone are written to: see `kv_memory` and `DrafterMemory`. Of weights, the drafter's too, the largest are there twice while
    they are loaded: as they lie in the file, and packed for the kernels.

    Raises:
        ConfigError: the folder has no profile, or another one than the plan was made from, or the drafter leaves no room for
            the planned engine's longest sequence.
    """
    engine, profile = request.plan.engine, request.profile()
    has_gpu = engine.device == "cuda"
    gpus = engine.tensor_parallel_size if has_gpu else 0
    kernels = request.plan.profile.get("kernels", "") if profile is None else profile.kernels
    threads = None if has_gpu else re.search(r"(\d+) threads", str(kernels))  # of one process
    count = int(threads[1]) * engine.tensor_parallel_size if threads else None
    if profile is None:
        return _Resources(count, gpus, None, None)
    config = request.plan.speculative_config
    drafter, num_tokens = drafter_memory(profile, config), num_blocks(profile, config) * profile.block_size
    if num_tokens < min(engine.max_model_len, profile.num_blocks * profile.block_size):
        raise ConfigError(
            f"speculative_config: beside its drafter an engine has KV memory for {num_tokens} tokens, and max_model_len is "
            f"{engine.max_model_len}; must be at most that: plan with this drafter, or give a smaller one"
        )
    kv_bytes = kv_memory(profile, drafter)
    if kv_bytes is None or profile.weight_bytes is None:
        return _Resources(count, gpus, kv_bytes, None, drafter)
    weights = (profile.weight_bytes, *drafter.models)
    total = sum(weights) + max(weights) + drafter.tables + PROCESS_BYTES * engine.tensor_parallel_size
    if not has_gpu:  # else KV lies in its memory
        total += kv_bytes + drafter.scratch
    return _Resources(count, gpus, kv_bytes, math.ceil(total / MIB), drafter)


def _pod_resources(resources: _Resources) -> dict[str, Any]:
    """Requests equal limits, so that a node with the static CPU manager policy gives the pod cores of its own."""
    found = {
        **({} if resources.cores is None else {"cpu": str(resources.cores)}),
        **({} if resources.memory_mib is None else {"memory": f"{resources.memory_mib}Mi"}),
        **({} if not resources.gpus else {"nvidia.com/gpu": str(resources.gpus)}),
    }
    return {"resources": {"requests": found, "limits": found}} if found else {}


def _core_notes(request: EmitRequest, resources: _Resources) -> tuple[str, ...]:
    if resources.cores is not None:
        return (
            f"each pod takes {resources.cores} cores, one for each thread that was profiled: a node must have more, since the kubelet "
            "keeps some for itself",
        )
    on_gpu = "the profiled machine's are those of all its GPUs: give an engine its share"
    unknown = "the profile does not say how many threads computed: give an engine as many"
    return (f"cores are not limited, as {on_gpu if request.plan.engine.device == 'cuda' else unknown}",)


def _resource_notes(request: EmitRequest, resources: _Resources) -> tuple[str, ...]:
    if resources.memory_mib is None:
        unknown = "the profile does not know what weights and KV take"
        given = "with --profile it is that of the profiled KV cache and the weights"
        return (f"memory is not limited: {given if request.profile_folder is None else unknown}",)
    kv = "" if request.plan.engine.device == "cuda" else "the profiled KV cache, "
    taken = (sum(resources.drafter.models) + resources.drafter.tables) / MIB
    drafter = f", the drafter's {taken:.0f} MiB" if taken else ""
    return (
        f"the limit of memory is an estimate: {kv}the weights{drafter}, the largest once more while they are loaded, and 1 GiB "
        "for each process",
    )


def _drafter_notes(resources: _Resources) -> tuple[str, ...]:
    """What is not known of the drafter, so that it is in no memory that was counted."""
    return tuple(f"not counted in memory: {what}" for what in resources.drafter.unknown)


def _image_notes(request: EmitRequest) -> tuple[str, ...]:
    device = request.plan.engine.device
    cuda = (
        "; the engine that was profiled computed on a GPU: it must hold torch's CUDA build" if device == "cuda" else ""
    )
    unknown = ("the profile, of a server, does not say whether an engine has a GPU: add it where one has",)
    if request.image is not None:
        note = f"the image {request.image} must hold forerun with its extra `serve`{cuda}"
    else:
        note = f"the image `{IMAGE}` is that of the repository: docker build -f deploy/Dockerfile -t {IMAGE} .{cuda}"
    return (note, *(unknown if device is None else ()))


def _path_notes(request: EmitRequest) -> tuple[str, ...]:
    """What the containers do not have: files and folders of this machine."""
    paths = [model for model in (request.model, *models_of(request.plan.speculative_config)) if _is_path(model)]
    table = request.plan.engine.kernel_settings.get("kernel_table")
    paths += [] if table is None else [table]
    return tuple(f"{path} is a path, and nothing is mounted there: mount it into the containers" for path in paths)


def _is_path(model: str) -> bool:
    """Whether a model's name is that of a file or folder, rather than a known name or a hub id."""
    return model.startswith((".", "/", "~")) or model.endswith(".gguf") or os.path.exists(model)


def _several(request: EmitRequest) -> tuple[str, ...]:
    count = request.plan.replicas
    if count == 1:
        return ()
    return (
        f"{count} servers are planned: put a balancer in front of them that sends each request to the least loaded one",
    )
