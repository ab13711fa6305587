"""NVIDIA Dynamo with vLLM's engines: a graph deployment with its SLA planner, a local script, and its mocker.

Names and keys are those of ai-dynamo 1.4.2 and 1.6.1: `DynamoGraphDeployment` in the versions v1beta1 (`spec.components`) and
v1alpha1 (`spec.services`), `python -m dynamo.planner --config`, and the ConfigMap `planner-profile-data` with the
arrays of the profiler's two npz files as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import Layout
from forerun.plan.drafter_memory import num_blocks
from forerun.plan.dynamo_files import DECODE_FILE, DECODE_KEYS, PREFILL_FILE, PREFILL_KEYS, read_arrays
from forerun.plan.emit.emission import SCRIPT_HEAD, Emission, EmitRequest, script, yaml_text
from forerun.plan.emit.speculation import drafter_kv_notes, vllm_config, vllm_notes
from forerun.plan.emit.vllm import engine_options
from forerun.plan.profile import PROFILE_FILE

VERSION = "1.6.1"
REGISTRY = "nvcr.io/nvidia/ai-dynamo"
PROFILE_DATA = "planner-profile-data"
PROFILE_FOLDER = "/workspace/profiling_results"
PROFILE_VOLUME = {"name": PROFILE_DATA, "configMap": {"name": PROFILE_DATA}}
KV_TRANSFER = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
SECRET = "hf-token-secret"
PLANNER_INTERVAL = 60  # seconds from one decision to the next
WITHOUT_SERVICES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
"""Options with which processes of one machine find each other without etcd and NATS."""

NIXL_PORTS = {"prefill": 20097, "decode": 5600}
"""Ports at which engines of one machine tell where their KV lies: of Dynamo's own example, and vLLM's default."""

MOST_MOCKED_TOKENS = 5  # drafted ones of a step, of Dynamo's mocker
MOST_NAME = 45  # characters of a graph's name and of a component's, which the operator refuses beyond: pods are named after both


class _Worker(NamedTuple):
    """One kind of engine."""

    name: str
    kind: str  # prefill or decode; those that do both are scaled as decode
    replicas: int
    mode: str | None  # of --disaggregation-mode


def dynamo(request: EmitRequest) -> Emission:
    """The graph in both versions, the ConfigMap of the planner, a script for one machine, the mocker's options."""
    if request.profile_folder is None:
        raise ConfigError("--profile: Dynamo's planner reads measured latencies; give the folder of forerun profile")
    measured = measured_length(request.profile_folder, _num_drafted(request))
    profile_data = read_profile_data(request.profile_folder, measured, most_kv_tokens=_planned_kv_tokens(request))
    workers = _workers(request)
    files = {
        "dynamo.yaml": yaml_text(profile_config_map(profile_data), graph_v1beta1(request, workers)),
        "dynamo-v1alpha1.yaml": yaml_text(profile_config_map(profile_data), graph_v1alpha1(request, workers)),
        "launch.sh": _launch_script(request, workers),
        "mocker.sh": mocker_script(request, measured),
    }
    notes = [
        f"the secret {SECRET} must hold HF_TOKEN where the model needs one",
        f"the planner has a budget of {request.plan.replicas} engines, the plan's: raise max_gpu_budget for more",
        *_sla_notes(request),
        *vllm_notes(request.plan.speculative_config),
        *_traps(request, measured),
    ]
    return Emission(files=files, notes=tuple(notes))


def read_profile_data(
    folder: Path, measured: int | None, *, most_kv_tokens: int | None = None
) -> dict[str, dict[str, Any]]:
    """The arrays of a profile's two sweeps, as lists; `max_kv_tokens` is one number, as Dynamo's profiler writes it.

    `z_itl` is the time of a whole step: the planner itself divides it by the acceptance length that it observes, as
    the profile has done in its own `z_itl`, so that speculation would count twice.

    Args:
        folder: of `forerun profile`, or of Dynamo's profiler.
        measured: the draft length whose sweep is taken; None: the sweep of the folder's chosen configuration.
        most_kv_tokens: that an engine holds, where its drafter leaves fewer than the profiled one had; None: as profiled.

    Raises:
        ConfigError: a file cannot be read or lacks an array.
    """
    prefill = read_arrays(folder / PREFILL_FILE, PREFILL_KEYS)
    path = folder / (DECODE_FILE if measured is None else f"decode_k{measured}/raw_data.npz")
    decode = read_arrays(path, DECODE_KEYS, others=("z_step_ms",))
    decode["z_itl"] = decode.pop("z_step_ms", decode["z_itl"])
    kv_tokens = int(np.ravel(decode["max_kv_tokens"])[0])
    if most_kv_tokens is not None and most_kv_tokens < kv_tokens:
        decode["x_kv_usage"] = decode["x_kv_usage"] * (kv_tokens / most_kv_tokens)
        kv_tokens = most_kv_tokens
    lists: dict[str, dict[str, Any]] = {
        "prefill": {key: prefill[key].tolist() for key in PREFILL_KEYS},
        "decode": {key: decode[key].tolist() for key in DECODE_KEYS},
    }
    lists["decode"]["max_kv_tokens"] = kv_tokens
    return lists


def measured_length(folder: Path, num_drafted: int) -> int | None:
    """The draft length of the profile that is nearest to the plan's, better longer than shorter; None: it has none."""
    found = sorted(int(one.name.removeprefix("decode_k")) for one in folder.glob("decode_k*") if one.name[8:].isdigit())
    return next((length for length in found if length >= num_drafted), found[-1] if found else None)


def profile_config_map(profile_data: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ConfigMap that the planner mounts."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": PROFILE_DATA},
        "data": {f"{phase}_raw_data.json": json.dumps(arrays) for phase, arrays in profile_data.items()},
    }


def planner_config(request: EmitRequest) -> dict[str, Any]:
    """The planner's settings: the plan's SLA in milliseconds, and the engines that it may have.

    Raises:
        ConfigError: the SLA limits neither.
    """
    plan, sla = request.plan, request.plan.sla
    itl = sla.tpot if sla.tpot is not None else sla.icl
    if sla.ttft is None or itl is None:
        raise ConfigError("sla: Dynamo's planner wants limits of both; plan with --sla ttft=...,tpot=...")
    gpus = plan.engine.tensor_parallel_size
    return {
        "environment": "kubernetes",
        "backend": "vllm",
        "mode": "agg" if plan.layout is Layout.AGGREGATED else "disagg",
        "optimization_target": "sla",
        "ttft_ms": round(1e3 * sla.ttft, 3),
        "itl_ms": round(1e3 * itl, 3),
        "profile_results_dir": PROFILE_FOLDER,
        "throughput_adjustment_interval_seconds": PLANNER_INTERVAL,
        "max_gpu_budget": gpus * plan.replicas,
        "pre_deployment_sweeping_mode": "thorough",  # latencies were measured, not looked up
        "prefill_engine_num_gpu": gpus,
        "decode_engine_num_gpu": gpus,
        "speculative_nextn": _num_drafted(request),
    }


def graph_v1beta1(request: EmitRequest, workers: list[_Worker]) -> dict[str, Any]:
    """The graph as a list of components with pod templates."""
    components = [
        _component("Frontend", "frontend", 1, _container(request, "dynamo-frontend", ["dynamo.frontend"])),
        _component("Planner", "planner", 1, _planner_container(request), volumes=[PROFILE_VOLUME]),
    ]
    for worker in workers:
        container = _container(request, "vllm-runtime", _worker_words(request, worker)) | {
            "envFrom": [{"secretRef": {"name": SECRET, "optional": True}}],
            "resources": {"limits": {"nvidia.com/gpu": str(request.plan.engine.tensor_parallel_size)}},
        }
        component = _component(worker.name, worker.kind, worker.replicas, container)
        components.append(component | {"scalingAdapter": {}})  # there it is on, and has no keys
    return _graph(request, "v1beta1", {"components": components})


def graph_v1alpha1(request: EmitRequest, workers: list[_Worker]) -> dict[str, Any]:
    """The graph as services by name."""
    services: dict[str, Any] = {
        "Frontend": _service("frontend", 1, _container(request, "dynamo-frontend", ["dynamo.frontend"])),
        "Planner": _service("planner", 1, _planner_container(request)),
    }
    services["Planner"]["extraPodSpec"]["volumes"] = [PROFILE_VOLUME]
    for worker in workers:
        container = _container(request, "vllm-runtime", _worker_words(request, worker))
        service = _service("worker", worker.replicas, container)
        service["subComponentType"] = worker.kind
        service["scalingAdapter"] = {"enabled": True}
        service["envFromSecret"] = SECRET
        service["resources"] = {"limits": {"gpu": str(request.plan.engine.tensor_parallel_size)}}
        services[worker.name] = service
    return _graph(request, "v1alpha1", {"services": services})


def mocker_script(request: EmitRequest, measured: int | None) -> str:
    """Dynamo's mocker with the profile's times: the plan's engines without a GPU, prefill and decode apart as planned.

    It takes the times of whole steps, since it draws by itself how many drafted tokens each yields.
    """
    commands = [_mocker_words(request, measured, worker) for worker in _workers(request)]
    return script(commands[0]) if len(commands) == 1 else _all_at_once(commands)


def _mocker_words(request: EmitRequest, measured: int | None, worker: _Worker) -> list[str]:
    engine = request.plan.engine
    words = ["python", "-m", "dynamo.mocker", "--model-path", request.model, *WITHOUT_SERVICES]
    folder = None if request.profile_folder is None else request.profile_folder.absolute()
    times = folder if folder is None or measured is None else folder / f"mocker_k{measured}.npz"
    words += ["--planner-profile-data", str(times), "--num-workers", str(worker.replicas)]
    words += [] if worker.mode is None else ["--disaggregation-mode", worker.mode]
    words += ["--max-num-seqs", str(engine.max_num_seqs), "--max-model-len", str(engine.max_model_len)]
    words += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens), "--block-size", str(engine.block_size)]
    rates = _mocked_rates(request)
    if rates and worker.mode != "prefill":
        shown = ",".join(f"{rate:g}" for rate in rates)
        words += ["--aic-nextn", str(len(rates)), "--aic-nextn-accept-rates", shown]
    return words


def _mocked_rates(request: EmitRequest) -> list[float]:
    """The chance of each token that the mocker drafts, which has no more than five."""
    rates: list[float] = (request.plan.acceptance or {}).get("conditional_accept_rates", [])
    return rates[: min(_num_drafted(request), MOST_MOCKED_TOKENS)]


def _sla_notes(request: EmitRequest) -> list[str]:
    """What of the SLA Dynamo's planner does not hold."""
    sla = request.plan.sla
    notes = [
        f"Dynamo's planner holds mean latencies against the limits: it has no share of requests, as the plan's {100 * sla.attainment:g}%"
    ]
    if sla.e2el is not None:
        notes.append(f"Dynamo's planner has no limit of e2el, as the plan's {1e3 * sla.e2el:g} ms: it is left out")
    if sla.icl is not None:
        limit = f"{1e3 * sla.icl:g} ms between two messages (icl)"
        if sla.tpot is not None:
            notes.append(f"Dynamo's planner has no limit of {limit}, beside that of the time per token: it is left out")
        else:
            notes.append(
                f"the planner's itl_ms is the plan's limit of {limit}; Dynamo means the time per token, which is less"
            )
    return notes


def _traps(request: EmitRequest, measured: int | None) -> list[str]:
    notes = []
    length, mocked = _num_drafted(request), len(_mocked_rates(request))
    if length and not mocked:
        notes.append("mocker.sh drafts nothing: the plan has no acceptance rates; profile the method's acceptance")
    elif mocked < length:
        why = "Dynamo's mocker has no more" if mocked == MOST_MOCKED_TOKENS else "the plan has no more acceptance rates"
        notes.append(f"mocker.sh drafts {mocked} tokens, the plan {length}: {why} (--aic-nextn)")
    if measured not in (None, length):
        notes.append(
            f"the planner's and the mocker's latencies are those of {measured} drafted tokens: {length}, as planned, were "
            "not profiled"
        )
    if request.plan.layout is Layout.DISAGGREGATED:
        gpus = 2 * request.plan.engine.tensor_parallel_size
        notes.append(f"launch.sh starts an engine of each kind, on GPUs 0 to {gpus - 1} of the machine")
        notes += drafter_kv_notes(request.plan.speculative_config)
    elif request.plan.replicas > 1:
        notes.append(
            f"launch.sh starts one engine of the {request.plan.replicas} that are planned; the deployment has them all"
        )
    return notes


def _num_drafted(request: EmitRequest) -> int:
    """K, which vLLM must be told; 0 where nothing is drafted."""
    config = request.plan.speculative_config
    return 0 if config is None else int(vllm_config(config)["num_speculative_tokens"])


def _planned_kv_tokens(request: EmitRequest) -> int | None:
    """Tokens of KV that each engine holds beside the planned drafter; None: the folder is not of `forerun profile`.

    Raises:
        ConfigError: the profile is another one than the plan was made from, or the drafter leaves no KV memory.
    """
    folder = request.profile_folder
    profile = None if folder is None or not (folder / PROFILE_FILE).is_file() else request.profile()
    return None if profile is None else num_blocks(profile, request.plan.speculative_config) * profile.block_size


def _workers(request: EmitRequest) -> list[_Worker]:
    plan = request.plan
    if plan.layout is Layout.AGGREGATED:
        return [_Worker("VllmWorker", "decode", plan.replicas, None)]  # the role that the planner scales
    return [
        _Worker("VllmPrefillWorker", "prefill", plan.prefill_replicas, "prefill"),
        _Worker("VllmDecodeWorker", "decode", plan.decode_replicas, "decode"),
    ]


def _worker_words(request: EmitRequest, worker: _Worker) -> list[str]:
    words = ["dynamo.vllm", "--model", request.model, *engine_options(request)]
    if worker.mode is None:
        return words
    return [*words, "--disaggregation-mode", worker.mode, "--kv-transfer-config", KV_TRANSFER]


def _container(request: EmitRequest, image: str, words: list[str]) -> dict[str, Any]:
    return {
        "image": request.image or f"{REGISTRY}/{image}:{VERSION}",
        "command": ["python3", "-m", words[0]],
        "args": words[1:],
    }


def _planner_container(request: EmitRequest) -> dict[str, Any]:
    words = ["dynamo.planner", "--config", json.dumps(planner_config(request))]
    mount = {"name": PROFILE_DATA, "mountPath": PROFILE_FOLDER, "readOnly": True}
    return _container(request, "dynamo-planner", words) | {"volumeMounts": [mount]}


def _component(
    name: str, kind: str, replicas: int, container: dict[str, Any], *, volumes: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    pod: dict[str, Any] = {"containers": [{"name": "main"} | container]}
    if volumes:
        pod["volumes"] = volumes
    return {"name": name, "type": kind, "replicas": replicas, "podTemplate": {"spec": pod}}


def _service(kind: str, replicas: int, container: dict[str, Any]) -> dict[str, Any]:
    return {"componentType": kind, "replicas": replicas, "extraPodSpec": {"mainContainer": container}}


def _graph(request: EmitRequest, version: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": f"nvidia.com/{version}",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": _graph_name(request)},
        "spec": spec,
    }


def _graph_name(request: EmitRequest) -> str:
    """The deployment's name: with the name of a component it has 45 characters at most, and begins with a letter."""
    name = request.name if request.name[0].isalpha() else f"model-{request.name}"
    longest = max(len(worker.name) for worker in _workers(request))
    return name[: MOST_NAME - longest].rstrip("-")


def _launch_script(request: EmitRequest, workers: list[_Worker]) -> str:
    """A frontend and one engine of each kind on this machine, in the background; they end with the script."""
    commands = [["python", "-m", "dynamo.frontend", "--http-port", '"${PORT:-8000}"', *WITHOUT_SERVICES]]
    for place, worker in enumerate(workers):
        words = ["python", "-m", *_worker_words(request, worker), *WITHOUT_SERVICES]
        commands.append(words if worker.mode is None else [*_own_devices(request, worker.mode, place), *words])
    return _all_at_once(commands)


def _own_devices(request: EmitRequest, mode: str, place: int) -> list[str]:
    """The environment of one of several engines on a machine: GPUs and a port that no other has."""
    count = request.plan.engine.tensor_parallel_size
    gpus = ",".join(map(str, range(place * count, (place + 1) * count)))
    return [f"CUDA_VISIBLE_DEVICES={gpus}", f"VLLM_NIXL_SIDE_CHANNEL_PORT={NIXL_PORTS[mode]}"]


def _all_at_once(commands: list[list[str]]) -> str:
    """A script of commands in the background, which end with it."""
    lines = [script(words).removeprefix(SCRIPT_HEAD + "exec ").rstrip() + " &" for words in commands]
    return SCRIPT_HEAD + "trap 'kill 0' EXIT\n" + "\n".join(lines) + "\nwait\n"
