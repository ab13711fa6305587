"""A request's fields as `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.core.sampling_params import SamplingParams
from forerun.server.errors import ApiError
from forerun.server.protocol import ForerunFields, GenerationBody

SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("bad_words", "allowed_token_ids", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)
"""Fields that mean the same in both; null is the default."""


def sampling_params(
    body: GenerationBody, *, structure: Mapping[str, Any] | None, speculates: bool, **more: Any
) -> SamplingParams:
    """How a request is sampled; `more` are the fields that the two endpoints name differently.

    `structure` is what its text must match.

    Raises:
        ApiError: 400, a value does not fit the others.
        RequestError: a value is out of range.
    """
    if body.best_of not in (None, 1, body.num_completions):
        raise ApiError(
            400, f"best_of: got {body.best_of}; must be n ({body.num_completions}); leave it out", param="best_of"
        )
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    return SamplingParams(
        n=body.num_completions,
        logit_bias=_bias(body.logit_bias),
        structured_outputs=structure,
        speculation=_speculation(body.own, speculates=speculates),
        extra_args={"kv_transfer_params": body.kv_transfer_params} if body.kv_transfer_params else None,
        **given,
        **more,
    )


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings."""
    if not given:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(400, f"logit_bias: got the key {key!r:.80}; must be a token id", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def _speculation(own: ForerunFields, *, speculates: bool) -> Any:
    """What `SamplingParams.speculation` takes."""
    most = own.num_speculative_tokens
    if own.speculation == "off":
        if most:
            raise ApiError(
                400,
                f"forerun.num_speculative_tokens: got {most} with speculation 'off'; leave one of them out",
                param="forerun",
            )
        return "off"
    if own.speculation == "on" and not speculates:
        raise ApiError(
            400,
            "forerun.speculation: got 'on', but this server drafts nothing; start it with --speculative-config",
            param="forerun",
        )
    return None if most is None else {"num_speculative_tokens": most}
