"""vLLM: a script that runs `vllm serve`."""

from __future__ import annotations

import json

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import Layout
from forerun.plan.emit.emission import Emission, EmitRequest, script
from forerun.plan.emit.speculation import SCHEDULE, vllm_config


def vllm(request: EmitRequest) -> Emission:
    """A script for one engine; each of several takes a port of its own."""
    plan = request.plan
    if plan.layout is not Layout.AGGREGATED:
        raise ConfigError(
            "layout: prefill and decode apart need a router between vLLM's engines; emit to dynamo, or plan with --layout aggregated"
        )
    words = ["vllm", "serve", request.model, "--port", '"${PORT:-8000}"', *engine_options(request)]
    return Emission(files={"serve.sh": script(words)}, notes=(*several_engines(request), *schedule_trap(request)))


def engine_options(request: EmitRequest) -> list[str]:
    """The options of one vLLM engine, whoever starts it."""
    engine = request.plan.engine
    check_quantization(request, "vLLM")
    words = ["--dtype", engine.dtype, "--max-model-len", str(engine.max_model_len)]
    words += [
        "--max-num-seqs",
        str(engine.max_num_seqs),
        "--max-num-batched-tokens",
        str(engine.max_num_batched_tokens),
    ]
    words += ["--block-size", str(engine.block_size), "--tensor-parallel-size", str(engine.tensor_parallel_size)]
    if request.plan.speculative_config is not None:
        words += ["--speculative-config", json.dumps(vllm_config(request.plan.speculative_config))]
    return words


def check_quantization(request: EmitRequest, system: str) -> None:
    """Refuse weights that only forerun's kernels compute with."""
    quantization = request.plan.engine.quantization
    if quantization is not None:
        raise ConfigError(
            f"quantization: {quantization!r} is computed by forerun's kernels, {system} has its own formats; "
            "profile and plan without it"
        )


def several_engines(request: EmitRequest) -> tuple[str, ...]:
    """What to do where more than one engine is planned."""
    count = request.plan.replicas
    if count == 1:
        return ()
    return (f"{count} engines are planned: start each with a PORT of its own and put a balancer in front of them",)


def schedule_trap(request: EmitRequest) -> tuple[str, ...]:
    """What vLLM does to a schedule of draft lengths."""
    if SCHEDULE not in (request.plan.speculative_config or {}):
        return ()
    return (f"vLLM ignores {SCHEDULE} with --data-parallel-size above 1: run engines apart instead",)
