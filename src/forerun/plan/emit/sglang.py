"""SGLang: a script that runs `python -m sglang.launch_server`."""

from __future__ import annotations

from typing import Any

from forerun.errors import ConfigError
from forerun.plan.deployment_plan import Layout
from forerun.plan.emit.emission import Emission, EmitRequest, script
from forerun.plan.emit.speculation import ngram_notes, sglang_options
from forerun.plan.emit.vllm import check_quantization, several_engines


def sglang(request: EmitRequest) -> Emission:
    """A script for one engine; each of several takes a port of its own."""
    plan, engine = request.plan, request.plan.engine
    if plan.layout is not Layout.AGGREGATED:
        raise ConfigError(
            "layout: prefill and decode apart need a router between SGLang's engines; plan with --layout aggregated"
        )
    check_quantization(request, "SGLang")
    chunk = chunk_size(engine.max_num_batched_tokens, engine.block_size)
    options: dict[str, Any] = {
        "model-path": request.model,
        "port": '"${PORT:-30000}"',
        "dtype": engine.dtype,
        "context-length": engine.max_model_len,
        "max-running-requests": engine.max_num_seqs,
        "chunked-prefill-size": chunk,
        "page-size": engine.block_size,
        "tp-size": engine.tensor_parallel_size,
    }
    if plan.speculative_config is not None:
        options |= sglang_options(plan.speculative_config)
    words = ["python", "-m", "sglang.launch_server"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    notes = [*several_engines(request), *ngram_notes(plan.speculative_config, "SGLang")]
    if chunk != engine.max_num_batched_tokens:
        notes.append(
            f"SGLang computes prompts in whole blocks: {chunk} tokens in a step, the plan {engine.max_num_batched_tokens}"
        )
    return Emission(files={"serve.sh": script(words)}, notes=tuple(notes))


def chunk_size(num_tokens: int, block_size: int) -> int:
    """A number of prompt tokens in a step that SGLang takes: whole blocks, at least one."""
    return max(num_tokens // block_size, 1) * block_size
