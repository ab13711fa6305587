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
    options: dict[str, Any] = {
        "model-path": request.model,
        "port": '"${PORT:-30000}"',
        "dtype": engine.dtype,
        "context-length": engine.max_model_len,
        "max-running-requests": engine.max_num_seqs,
        "chunked-prefill-size": engine.max_num_batched_tokens,
        "page-size": engine.block_size,
        "tp-size": engine.tensor_parallel_size,
    }
    if plan.speculative_config is not None:
        options |= sglang_options(plan.speculative_config)
    words = ["python", "-m", "sglang.launch_server"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return Emission(
        files={"serve.sh": script(words)},
        notes=(*several_engines(request), *ngram_notes(plan.speculative_config, "SGLang")),
    )
