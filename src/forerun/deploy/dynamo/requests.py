"""Dynamo's requests as the engine's: each field is served, is none of a worker's business, or is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.core.sampling_params import SamplingParams
from forerun.core.structured_outputs import StructuredOutputs
from forerun.errors import RequestError

REQUEST = ("model", "token_ids", "sampling_options", "stop_conditions", "output_options", "routing", "extra_args")
SAMPLING = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "allowed_token_ids"),
)
"""Of `sampling_options`: the same name and meaning in `SamplingParams`; null is the default."""
GUIDED = ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern")
"""Of `guided_decoding`: the same in `StructuredOutputs`."""
STOP_TOKENS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")

OF_THE_FRONTEND = {
    "request": {
        *("eos_token_ids", "mdc_sum", "annotations", "router_config_override", "router", "agent_context"),
        *("migration_link", "jail_seed", "request_timestamp_ms", "_HEALTH_CHECK"),
    },
    "sampling_options": {"include_stop_str_in_output", "detokenize"},
    "stop_conditions": {"stop"},
    "output_options": {"skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids", "no_stop_trim"},
    "routing": {
        *("backend_instance_id", "prefill_worker_id", "decode_worker_id", "prefill_dp_rank", "routing_constraints"),
        *("expected_output_tokens", "priority_jump", "strict_priority", "allowed_worker_ids"),
    },
    "extra_args": {"nvext"},
}
"""What the frontend does itself, or tells its router: it makes and cuts the text, and chooses the worker."""

NEUTRAL: Mapping[str, object] = {"n": 1, "best_of": 1, "length_penalty": 1.0, "dp_rank": 0, "priority": 0}
"""Values of fields that are not served which ask for what is done anyway; null, false and nothing do in any field."""

ADVICE = {
    "n": "send a request for each answer",
    "best_of": "send a request for each answer",
    "use_beam_search": "sample several answers",
    "bad_words_token_ids": "allowed_token_ids is served",
    "max_thinking_tokens": "limit max_tokens",
    "prompt_logprobs": "forerun serve gives them",
    "lora_name": "serve each adapter as a model of its own",
    "prompt_embeds": "send text or token ids",
    "prefill_result": "start prefill and decode workers of another engine; this one computes prompts itself",
    "bootstrap_info": "start prefill and decode workers of another engine; this one computes prompts itself",
}
GRAMMAR_BACKENDS = (None, "auto", "guidance")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A request as the frontend sends it, in the engine's words.

    `prompt_ids` are all tokens that came: of a stream that broke on another worker also those that it had written,
    and `sampling` then says how many more to write.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    cache_salt: str | None

    @property
    def counts_written_tokens(self) -> bool:
        """Whether the text depends on which tokens are prompt and which were written before."""
        return self.sampling.presence_penalty != 0.0 or self.sampling.frequency_penalty != 0.0

    def resumed(self, num_prompt_tokens: int) -> tuple[WorkerRequest, list[int]]:
        """The request as the client sent it, and the tokens that were written since.

        The frontend takes what was written off `max_tokens` and `min_tokens`; here it is put back.
        """
        prompt_ids, output_ids = self.prompt_ids[:num_prompt_tokens], self.prompt_ids[num_prompt_tokens:]
        most, least = self.sampling.max_tokens, self.sampling.min_tokens
        sampling = replace(
            self.sampling,
            max_tokens=None if most is None else most + len(output_ids),
            min_tokens=least and least + len(output_ids),
        )
        return replace(self, prompt_ids=prompt_ids, sampling=sampling), output_ids


def wants_nothing(request: Mapping[str, Any]) -> bool:
    """Whether all tokens of a stream came through before it broke, but not that they were the last."""
    return _section(request, "stop_conditions").get("max_tokens") == 0


def translate(request: Mapping[str, Any], *, request_id: str, seed: int, defaults: Mapping[str, Any]) -> WorkerRequest:
    """A request of Dynamo's frontend as the engine takes it.

    Args:
        request: `PreprocessedRequest`, as a worker gets it.
        request_id: the frontend's, which stays when a stream moves to another worker; it seeds a request without
            a seed, so that such a text goes on there too.
        seed: of the engine.
        defaults: values of fields of `SamplingParams` that the request leaves out.

    Raises:
        RequestError: a field is unknown, is not served here, or has an impossible value.
    """
    _refuse_others("request", request, REQUEST)
    parts = {name: _section(request, name) for name in REQUEST[2:]}
    asked, stops, wanted = parts["sampling_options"], parts["stop_conditions"], parts["output_options"]
    _refuse_others("sampling_options", asked, (*SAMPLING, "guided_decoding"))
    _refuse_others("stop_conditions", stops, (*STOP_TOKENS, "max_tokens", "min_tokens", "ignore_eos"))
    _refuse_others("output_options", wanted, ("logprobs",))
    _refuse_others("routing", parts["routing"], ("cache_salt",))
    _refuse_others("extra_args", parts["extra_args"], ())
    given = {name: as_written(asked[name]) for name in SAMPLING if asked.get(name) is not None}
    stop_token_ids = sorted({token_id for name in STOP_TOKENS for token_id in stops.get(name) or ()})
    if stops.get("max_tokens") is not None:
        given["max_tokens"] = stops["max_tokens"]
    sampling = SamplingParams(
        **{"seed": seed_of(request_id, seed), "max_tokens": None, **defaults, **given},
        min_tokens=stops.get("min_tokens") or 0,
        ignore_eos=bool(stops.get("ignore_eos")),
        stop_token_ids=stop_token_ids or None,
        logprobs=wanted.get("logprobs"),
        structured_outputs=_structure(asked.get("guided_decoding")),
        detokenize=False,
    )
    return WorkerRequest(
        prompt_ids=list(request.get("token_ids") or ()),
        sampling=sampling,
        cache_salt=parts["routing"].get("cache_salt"),
    )


def as_written(value: Any) -> Any:
    """A number as the client wrote it: the frontend keeps 0.7 in 32 bits, and sends what that is in 64."""
    if isinstance(value, float):
        short = np.float32(value)
        return float(str(short)) if float(short) == value else value
    return value


def seed_of(request_id: str, seed: int) -> int:
    """The seed of a request that has none: the same on each worker that has this engine's seed; below 2**63."""
    digest = hashlib.sha256(f"{seed} {request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _section(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    given = request.get(name)
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"{name}: got {given!r:.80}; must be an object")
    return given or {}


def _refuse_others(where: str, given: Mapping[str, Any], served: Iterable[str]) -> None:
    """Refuse the first field that asks for something that neither this worker nor the frontend does."""
    known = {*served, *OF_THE_FRONTEND.get(where, ())}
    for name, value in given.items():
        if name in known or value is None or value is False or value in ([], {}) or NEUTRAL.get(name) == value:
            continue
        advice = ADVICE.get(name, "leave it out")
        raise RequestError(f"{where}.{name}: got {value!r:.80}; is not served by this worker; {advice}")


def _structure(given: Mapping[str, Any] | None) -> StructuredOutputs | None:
    """What the text must match."""
    if given is None:
        return None
    _refuse_others("guided_decoding", given, (*GUIDED, "backend"))
    backend = given.get("backend")
    if backend not in GRAMMAR_BACKENDS:
        raise RequestError(f"guided_decoding.backend: got {backend!r:.80}; may be auto or guidance; leave it out")
    return StructuredOutputs(**{name: given[name] for name in GUIDED if given.get(name) is not None})
