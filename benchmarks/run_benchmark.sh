#!/usr/bin/env bash
# Measures one engine, or all with --compare, by these variables; a value that the caller has set wins.
# What each means: docs/experiment.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
set -a # the variables below go to Python, and to the engines it starts
PYTHONPATH="$root:$root/src${PYTHONPATH:+:$PYTHONPATH}"

# Engine and models
: "${INFERENCE_ENGINE:=forerun}"
: "${INFERENCE_METHOD:=speculative}"
: "${ENABLE_SPECULATIVE:=true}"
: "${ENABLE_TARGET:=false}"
: "${TARGET_MODEL:=smollm2-135m}"
: "${DRAFTER_MODEL:=}"
: "${GAMMA_VALUE:=5}"
: "${DTYPE:=bfloat16}"
: "${MAX_MODEL_LEN:=2048}"

# Load
: "${NUM_PROMPTS:=0}"
: "${AUTO_RATE:=1.0}"
: "${AUTO_DURATION:=60}"
: "${ENABLE_BATCH:=true}"
: "${BATCH_SIZE:=4}"
: "${MAX_BATCH_LENGTH:=512}"
: "${GENERATION_LENGTH:=100}"
: "${SEED:=0}"

# Prompts
: "${SHAREGPT_DIR:=}"
: "${SHAREGPT_FILES:=sharegpt_gpt4.jsonl,sharegpt_V3_format.jsonl,sharegpt_zh_38K_format.jsonl}"
: "${PROMPT_MIN_LENGTH:=10}"
: "${PROMPT_MAX_LENGTH:=1000}"
: "${MAX_LOAD_LINES:=10000}"

# GPUs
: "${GPU_STRATEGY:=auto}"
: "${TARGET_GPU:=}"
: "${DRAFTER_GPU:=}"
: "${TARGET_GPU_RATIO:=}"
: "${DRAFTER_GPU_RATIO:=}"
: "${ENABLE_GPU_MONITOR:=true}"
: "${GPU_MONITOR_INTERVAL:=1.0}"

# Output
: "${OUTPUT_FILE:=benchmark_results.json}"
: "${ENABLE_DEBUG:=false}"

# One engine's own
: "${FORERUN_SPECULATIVE_CONFIG:=}"
: "${VLLM_ENABLE_SPECULATIVE:=false}"
: "${VLLM_NUM_SPECULATIVE_TOKENS:=$GAMMA_VALUE}"
: "${VLLM_USE_V2_BLOCK_MANAGER:=}"
: "${VLLM_TENSOR_PARALLEL_SIZE:=1}"
: "${VLLM_PIPELINE_PARALLEL_SIZE:=1}"
: "${VLLM_GPU_MEMORY_UTILIZATION:=0.9}"
: "${VLLM_MAX_MODEL_LEN:=}"
: "${VLLM_MAX_NUM_SEQS:=128}"
: "${VLLM_MAX_NUM_BATCHED_TOKENS:=}"
: "${VLLM_DTYPE:=}"
: "${VLLM_QUANTIZATION:=}"
: "${VLLM_DISABLE_LOG_STATS:=true}"

exec "${PYTHON:-python3}" -m benchmarks.experiment "$@"
