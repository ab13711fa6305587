"""TensorRT-LLM: the options of `trtllm-serve --config`, or three files where prefill and decode are apart."""

from __future__ import annotations

from typing import Any

from forerun.plan.deployment_plan import Layout
from forerun.plan.emit.emission import Emission, EmitRequest, beside_script, script, yaml_text
from forerun.plan.emit.speculation import drafter_kv_notes, ngram_notes, trtllm_config
from forerun.plan.emit.vllm import check_quantization, several_engines

HOST_DRAFTERS = ("ngram", "draft_model")
"""Methods whose drafts come from the host, so that a step cannot begin before the last one's result is known."""


def trtllm(request: EmitRequest) -> Emission:
    """One configuration and a script; apart: prefill.yaml, decode.yaml and instances.yaml, how many of each.

    The three files are those that Dynamo's scripts for TensorRT-LLM (gen_yaml.py) make of a plan.
    """
    check_quantization(request, "TensorRT-LLM")
    plan = request.plan
    notes = [*_block_notes(plan.engine.block_size), *ngram_notes(plan.speculative_config, "TensorRT-LLM")]
    if plan.layout is Layout.AGGREGATED:
        words = [
            "trtllm-serve",
            request.model,
            "--backend",
            "pytorch",
            "--port",
            '"${PORT:-8000}"',
            "--config",
            beside_script("config.yaml"),
        ]
        files = {"config.yaml": yaml_text(engine_options(request)), "serve.sh": script(words)}
        return Emission(files=files, notes=(*several_engines(request), *notes))
    apart = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": plan.engine.max_model_len}}
    # a prefill engine has no tokens to overlap with, and drafts only so that the decoding one finds the drafter's KV
    prefill = engine_options(request) | {"disable_overlap_scheduler": True} | apart
    instances = {"prefill": plan.prefill_replicas, "decode": plan.decode_replicas}
    files = {
        "prefill.yaml": yaml_text(prefill),
        "decode.yaml": yaml_text(engine_options(request) | apart),
        "instances.yaml": yaml_text(instances),
    }
    return Emission(
        files=files,
        notes=(
            f"start {instances['prefill']} server(s) with prefill.yaml and {instances['decode']} with decode.yaml, "
            "and trtllm-serve disaggregated in front of them",
            *notes,
            *drafter_kv_notes(plan.speculative_config),
        ),
    )


def engine_options(request: EmitRequest) -> dict[str, Any]:
    """The options of one engine, in the names of TensorRT-LLM's LLM."""
    plan, engine = request.plan, request.plan.engine
    options: dict[str, Any] = {
        "backend": "pytorch",
        "dtype": engine.dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "max_batch_size": engine.max_num_seqs,
        "max_num_tokens": engine.max_num_batched_tokens,
        "max_seq_len": engine.max_model_len,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": True, "tokens_per_block": tokens_per_block(engine.block_size)},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": engine.max_num_seqs},
    }
    config = plan.speculative_config
    if config is not None:
        options["speculative_config"] = trtllm_config(config, max_num_seqs=engine.max_num_seqs)
        if config["method"] in HOST_DRAFTERS:
            options["disable_overlap_scheduler"] = True
    return options


def tokens_per_block(block_size: int) -> int:
    """A block size that TensorRT-LLM has: powers of two from 16."""
    size = 16
    while size < block_size:
        size *= 2
    return size


def _block_notes(planned: int) -> list[str]:
    size = tokens_per_block(planned)
    if size == planned:
        return []
    return [f"TensorRT-LLM's blocks hold powers of two from 16: {size} tokens each, the planned ones {planned}"]
