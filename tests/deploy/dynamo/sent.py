"""Requests as Dynamo's frontend 1.6.1 sends them to a worker."""

from __future__ import annotations

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NOTHING = {
    "stop_conditions": (
        *("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"),
        *("min_tokens", "ignore_eos", "max_thinking_tokens"),
    ),
    "sampling_options": (
        *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
        *("top_k", "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output"),
        "guided_decoding",
    ),
    "output_options": (
        *("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"),
    ),
}


def sent(token_ids=PROMPT, *, stop=None, sampling=None, output=None, routing=None, **others):
    """A request with all fields that a frontend writes; those that nobody asked for are null."""
    given = {"stop_conditions": stop, "sampling_options": sampling, "output_options": output}
    sections = {name: dict.fromkeys(names) | (given[name] or {}) for name, names in NOTHING.items()}
    return {
        "model": "tiny",
        "token_ids": list(token_ids),
        **sections,
        "eos_token_ids": [2, 0],
        "mdc_sum": "0e0e",
        "annotations": [],
        "routing": {"dp_rank": 0} | (routing or {}),
        "router_config_override": None,
    } | others
