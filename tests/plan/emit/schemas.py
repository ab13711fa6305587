"""What other systems accept, written down as facts: their options and keys, with source and date."""

from __future__ import annotations

VLLM_OPTIONS = {  # vLLM 0.32.0, `vllm serve --help`, 2026-11
    *("--port", "--dtype", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size"),
    *("--tensor-parallel-size", "--speculative-config", "--kv-transfer-config", "--quantization"),
}
DYNAMO_RUNTIME_OPTIONS = {
    "--discovery-backend",
    "--request-plane",
    "--event-plane",
}  # ai-dynamo 1.4.2, dynamo/common, 2026-11
DYNAMO_WORKER_OPTIONS = (
    VLLM_OPTIONS | DYNAMO_RUNTIME_OPTIONS | {"--model", "--disaggregation-mode"}
)  # ai-dynamo 1.4.2, dynamo/vllm, 2026-11
DYNAMO_MOCKER_OPTIONS = DYNAMO_RUNTIME_OPTIONS | {  # ai-dynamo 1.4.2, dynamo/mocker/args.py, 2026-11
    *("--model-path", "--planner-profile-data", "--num-workers", "--max-num-seqs", "--max-model-len"),
    *("--max-num-batched-tokens", "--block-size", "--aic-nextn", "--aic-nextn-accept-rates", "--disaggregation-mode"),
}
SGLANG_OPTIONS = {  # SGLang 0.5.23, sglang/srt/arg_groups/fields, 2026-11
    *("--model-path", "--port", "--dtype", "--context-length", "--max-running-requests", "--chunked-prefill-size"),
    *(
        "--tp-size",
        "--page-size",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
    ),
    *("--speculative-eagle-topk", "--speculative-num-draft-tokens", "--speculative-ngram-max-bfs-breadth"),
}
TRTLLM_KEYS = {  # TensorRT-LLM 1.3, tensorrt_llm/llmapi/llm_args.py (TorchLlmArgs), 2026-11
    *("backend", "dtype", "tensor_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len"),
    *("enable_chunked_prefill", "kv_cache_config", "cuda_graph_config", "speculative_config"),
    *("disable_overlap_scheduler", "cache_transceiver_config"),
}
TRTLLM_SECTIONS = {  # the same file: KvCacheConfig, DecodeCudaGraphConfig, CacheTransceiverConfig, *DecodingConfig; strict models
    "kv_cache_config": {"enable_block_reuse": bool, "tokens_per_block": int},
    "cuda_graph_config": {"enable_padding": bool, "max_batch_size": int},
    "cache_transceiver_config": {"backend": str, "max_tokens_in_buffer": int},
    "speculative_config": {
        "decoding_type": str,
        "max_draft_len": int,
        "draft_len_schedule": dict,  # last batch size -> K
        "speculative_model": str,
        "max_matching_ngram_size": int,
        "num_nextn_predict_layers": int,
    },
}
TRTLLM_BACKENDS = {"DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"}  # of CacheTransceiverConfig
TRTLLM_DECODING_TYPES = {"NGram", "Draft_Target", "PARD", "Eagle3", "MTP", "DFlash"}  # the same file
PLANNER_KEYS = {  # ai-dynamo 1.4.2 and 1.6.1, dynamo/planner/config/planner_config.py, 2026-11
    *("environment", "backend", "mode", "optimization_target", "ttft_ms", "itl_ms", "profile_results_dir"),
    *("throughput_adjustment_interval_seconds", "max_gpu_budget", "prefill_engine_num_gpu"),
    *("decode_engine_num_gpu", "speculative_nextn", "pre_deployment_sweeping_mode"),
}
