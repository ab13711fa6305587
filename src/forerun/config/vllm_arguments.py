"""vLLM's arguments that forerun has no setting for: what asks for nothing is taken, all else refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import ConfigError

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # the model and its files
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "convert": ("auto", "none"),
    "model_impl": ("auto",),
    "config_format": ("auto", "hf"),
    "hf_config_path": (None,),
    "hf_overrides": (None, {}),
    "rope_scaling": (None, {}),
    "rope_theta": (None,),
    "revision": (None, "main"),
    "code_revision": (None, "main"),
    "tokenizer_revision": (None, "main"),
    "hf_token": (None, True),
    "download_dir": (None,),
    "ignore_patterns": (None, []),
    "model_loader_extra_config": (None, {}),
    "safetensors_load_strategy": (None, "lazy"),
    "use_tqdm_on_load": (bool,),
    "quantization_config": (None, {}),
    "served_model_name": (None,),
    # text
    "tokenizer_mode": ("auto", "hf"),
    "skip_tokenizer_init": (False,),
    "chat_template": (None,),
    "max_logprobs": (int,),  # the most that may be asked for; here all may
    "logprobs_mode": ("raw_logprobs",),
    "logits_processors": (None, []),
    "structured_outputs_config": (None, {}),
    "guided_decoding_backend": (None, "auto", "guidance"),
    "reasoning_parser": (None, ""),
    "spec_method": (None,),
    "spec_model": (None,),
    "spec_tokens": (None,),
    # adapters, images, pooling
    "enable_lora": (False,),
    "max_loras": (1,),
    "max_lora_rank": (16,),
    "max_cpu_loras": (None,),
    "enable_prompt_adapter": (False,),
    "enable_prompt_embeds": (False,),
    "limit_mm_per_prompt": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": (None, []),
    "language_model_only": (bool,),
    "pooler_config": (None,),
    # memory and steps
    "kv_cache_dtype": ("auto",),
    "calculate_kv_scales": (False,),
    "swap_space": (int, float),  # vLLM itself swaps no more: what has to wait is computed anew
    "cpu_offload_gb": (0,),
    "kv_offloading_size": (None, 0),
    "enable_sleep_mode": (False,),
    "disable_sliding_window": (False,),
    "prefix_caching_hash_algo": ("sha256",),
    "enable_chunked_prefill": (None, True),
    "long_prefill_token_threshold": (0,),
    "scheduling_policy": ("fcfs",),
    "num_scheduler_steps": (1,),
    "async_scheduling": (None, False),
    "max_seq_len_to_capture": (8192,),
    "compilation_config": (None, {}),
    "attention_config": (None, {}),
    "attention_backend": (None,),
    "additional_config": (None, {}),
    # processes and machines
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "distributed_executor_backend": (None, "mp"),
    "disable_custom_all_reduce": (bool,),
    "worker_cls": ("auto",),
    "worker_extension_cls": ("",),
    # reports
    "disable_log_stats": (bool,),  # the log is Python's, at level INFO
    "otlp_traces_endpoint": (None,),
    "profiler_config": (None, {}),
    "kv_events_config": (None,),
}
"""Arguments of vLLM's `LLM` and `EngineArgs` -> values, or types of values, that ask for nothing else than what forerun does."""

INSTEAD: Mapping[str, str] = {
    "chat_template": "give it to chat",
    "logits_processors": "put functions into SamplingParams",
    "reasoning_parser": "give it to forerun serve; offline a text is what the model wrote",
    "revision": "download it and give its folder as model",
    "spec_method": "put it into speculative_config",
    "spec_model": "put it into speculative_config",
    "spec_tokens": "put it into speculative_config",
}
"""What to do about some of them, other than to leave them out."""


def without_vllms_own(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that only vLLM has.

    Raises:
        ConfigError: one of these asks for something.
    """
    for name, value in settings.items():
        if name in NEUTRAL and not any(_is(value, one) for one in NEUTRAL[name]):
            may_be = " or ".join(f"any {one.__name__}" if isinstance(one, type) else repr(one) for one in NEUTRAL[name])
            raise ConfigError(
                f"{name}: got {value!r:.80}; may be {may_be}, as forerun has nothing else of this argument of vLLM's; "
                + INSTEAD.get(name, "leave it out")
            )
    return {name: value for name, value in settings.items() if name not in NEUTRAL}


def _is(value: Any, neutral: Any) -> bool:
    """Whether a value is this one, or of this type; True is no number."""
    if isinstance(neutral, type):
        return type(value) is neutral
    if isinstance(value, bool) != isinstance(neutral, bool):
        return False
    return value is neutral or (isinstance(value, (int, float, str, dict, list)) and value == neutral)
