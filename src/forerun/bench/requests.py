"""Prompts as token ids, random or laid out, and the checks before and after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forerun.core.outputs import RequestOutput
from forerun.errors import ConfigError, RequestError
from forerun.llm import LLM
from forerun.models.tokenizer import Tokenizer


def random_prompts(llm: LLM, count: int, num_tokens: int) -> list[list[int]]:
    """Prompts of random tokens of the model's vocabulary; the engine's seed is theirs."""
    random = np.random.default_rng(llm.settings.seed)
    vocab_size = llm.executor.model.vocab_size
    prompts: list[list[int]] = random.integers(vocab_size, size=(count, num_tokens)).tolist()
    return prompts


def lay_out(tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a text, taken as a user's message where the model has a chat template, or of a conversation.

    Raises:
        RequestError: it is a conversation and there is no template, or that refuses it.
    """
    if not isinstance(prompt, str):
        return tokenizer.apply_chat_template(prompt)
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])


def check_room(llm: LLM, input_len: int, output_len: int) -> None:
    """Refuse requests that the engine would cut off.

    Raises:
        ConfigError: prompt and output are longer than the engine's sequences.
    """
    if input_len + output_len > llm.max_model_len:
        raise ConfigError(
            f"input_len, output_len: got {input_len} + {output_len} tokens; max_model_len is {llm.max_model_len}; "
            "ask for less or raise max_model_len"
        )


def check_outputs(outputs: Sequence[RequestOutput]) -> None:
    """Refuse a measurement in which a request failed.

    Raises:
        RequestError: one did.
    """
    for output in outputs:
        if output.error is not None:
            raise RequestError(f"request {output.request_id} failed: {output.error}; nothing was measured")
