"""vLLM: a script that runs `vllm serve`."""

from __future__ import annotations

import json
from typing import Any

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import Layout
from forerun.plan.emit.emission import FORERUN_FORMATS, Emission, EmitRequest, script
from forerun.plan.emit.speculation import vllm_config, vllm_notes


def vllm(request: EmitRequest) -> Emission:
    """A script for one engine; each of several takes a port of its own."""
    plan = request.plan
    if plan.layout is not Layout.AGGREGATED:
        raise ConfigError(
            "layout: prefill and decode apart need a router between vLLM's engines; emit to dynamo, or plan with --layout aggregated"
        )
    words = ["vllm", "serve", request.model, "--port", '"${PORT:-8000}"', *engine_options(request)]
    return Emission(
        files={"serve.sh": script(words)}, notes=(*several_engines(request), *vllm_notes(plan.speculative_config))
    )


def engine_options(request: EmitRequest) -> list[str]:
    """The options of one vLLM engine, whoever starts it."""
    words: list[str] = []
    for name, value in engine_arguments(request).items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def engine_arguments(request: EmitRequest) -> dict[str, Any]:
    """The arguments of one engine, in the names of vLLM's `LLM`.

    Raises:
        ConfigError: vLLM has no such speculation or quantization.
    """
    check_quantization(request, "vLLM", has_others=True)
    engine, config = request.plan.engine, request.plan.speculative_config
    arguments: dict[str, Any] = {
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "block_size": engine.block_size,
        "tensor_parallel_size": engine.tensor_parallel_size,
    }
    if engine.quantization is not None:
        arguments["quantization"] = engine.quantization
    if config is not None:
        arguments["speculative_config"] = vllm_config(config, max_model_len=engine.max_model_len)
    return arguments


def check_quantization(request: EmitRequest, system: str, *, has_others: bool = False) -> None:
    """Refuse weights that only forerun's kernels compute with, and settings that only they have.

    Args:
        request: what is emitted.
        system: its name, for errors.
        has_others: it takes other formats, those of servers that were profiled, under the names that these have there.

    Raises:
        ConfigError: the system cannot run the planned engine.
    """
    engine = request.plan.engine
    for name, value in engine.kernel_settings.items():
        raise ConfigError(
            f"{name}: {value!r:.80} is a setting of forerun's kernels, {system} has none of it; profile and plan without it"
        )
    quantization = engine.quantization
    if quantization in FORERUN_FORMATS:
        raise ConfigError(
            f"quantization: {quantization!r} is computed by forerun's kernels, {system} has its own formats; "
            "profile and plan without it"
        )
    if quantization is not None and not has_others:
        raise ConfigError(
            f"quantization: {quantization!r} is a format of the server that was profiled, {system} has names of its own; emit "
            "to vllm, dynamo or ray, or profile a server without it"
        )


def several_engines(request: EmitRequest) -> tuple[str, ...]:
    """What to do where more than one engine is planned."""
    count = request.plan.replicas
    if count == 1:
        return ()
    return (f"{count} engines are planned: start each with a PORT of its own and put a balancer in front of them",)
