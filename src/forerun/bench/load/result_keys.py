"""The keys of a result, so that metadata does not take one."""

from __future__ import annotations

HEAD = ("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "schema_version")
LIMITS = ("request_rate", "burstiness", "max_concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
COUNTS = ("duration", "completed", "failed", "unsent", "total_input_tokens", "total_output_tokens")
RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
PEAKS = ("max_output_tokens_per_s", "max_concurrent_requests", "peak_output_token_throughput")
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times")
MORE_DETAILS = ("generated_texts", "errors", "chunk_tokens")
OURS = ("chunk_tokens_from", "target_duration", "rps_change_events", "energy", "environment")
KEYS = frozenset((*HEAD, *LIMITS, *COUNTS, *RATES, *PEAKS, *DETAILS, *MORE_DETAILS, *OURS))


def is_taken(key: str) -> bool:
    """Whether a result has, or may have, a key of this name, so that metadata may not."""
    return key in KEYS or key.endswith("_ms") or key.startswith("spec_decode_")
