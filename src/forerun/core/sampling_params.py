"""How one request is sampled, in vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.core.structured_outputs import StructuredOutputs, resolve_structured_outputs
from forerun.errors import RequestError, refuse_unknown_keys, strict_keywords

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor: TypeAlias = "Callable[..., Tensor]"
"""`f(output_ids, logits)` or `f(prompt_ids, output_ids, logits)` -> logits, over one row [vocab_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpeculation:
    """What one request asks of speculation.

    `num_speculative_tokens` caps the drafts of this request below the engine's K; 0 turns them off.
    """

    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferParams:
    """What one request asks of the file of its hidden states: vLLM's `extra_args["kv_transfer_params"]`.

    `include_output_tokens`: not the prompt's tokens alone but all except the last, which the target never
    reads. `hidden_states_path`: the file, where the engine lets requests choose it.
    """

    include_output_tokens: bool = False
    hidden_states_path: str | None = None


SCALARS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs"),
)
SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
MOST_COMPLETIONS = 16384  # per prompt, as in vLLM
GREEDY_BELOW = 1e-5  # a lower temperature is greedy, as in vLLM
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
LARGEST_BIAS = 1e30  # a logit and this stay finite under any penalties

SPECULATION_OFF = RequestSpeculation(num_speculative_tokens=0)


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names, meanings and defaults.

    Every setting works under speculation: at a draft node each rule sees the text up to that node.
    NumPy's numbers become Python's own.

    Raises:
        RequestError: a value is of a wrong type or out of range.
        UnknownKeyError: a keyword does not exist.
    """

    n: int = 1  # completions per prompt
    temperature: float = 1.0  # below 1e-5 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None  # -1: none, as in vLLM
    logprobs: int | None = None  # -1: the whole vocabulary
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: list[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    speculation: Literal["off"] | Mapping[str, Any] | RequestSpeculation | None = None
    prediction: str | list[int] | None = None  # the text that is expected: drafted, never imposed
    extra_args: Mapping[str, Any] | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False)  # `stop`, always a tuple
    request_speculation: RequestSpeculation = field(init=False, repr=False)  # `speculation`, resolved
    kv_transfer: KVTransferParams | None = field(init=False, repr=False)  # `extra_args`, resolved
    constraint: StructuredOutputs | None = field(init=False, repr=False)  # `structured_outputs`, resolved

    def __post_init__(self) -> None:
        for name in SCALARS:
            object.__setattr__(self, name, _plain_number(getattr(self, name)))
        _check_types(self)
        _check_ranges(self)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if (ids := getattr(self, name)) is not None:
                object.__setattr__(self, name, list(map(_plain_number, ids)))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(not isinstance(s, str) or not s for s in stop):
            raise RequestError(f"stop: got {self.stop!r}; each must be a non-empty string; drop the empty one")
        if stop and not self.detokenize:
            raise RequestError(
                "stop: stop strings need text, but detokenize=False; set detokenize=True or use stop_token_ids"
            )
        object.__setattr__(self, "stop_strings", stop)
        object.__setattr__(self, "request_speculation", _resolve_speculation(self.speculation))
        object.__setattr__(self, "kv_transfer", _resolve_extra_args(self.extra_args))
        object.__setattr__(self, "constraint", resolve_structured_outputs(self.structured_outputs))
        if self.constraint is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos: got True with structured_outputs, where nothing can follow the end; leave one of them out"
            )

    @cached_property
    def allowed_ascending(self) -> npt.NDArray[np.int32] | None:
        """`allowed_token_ids`, each once; made once for all texts of a request, as there may be a vocabulary of them."""
        ids = self.allowed_token_ids
        return None if ids is None else np.array(sorted(set(ids)), dtype=np.int32)

    def clone(self) -> SamplingParams:
        """A copy, as vLLM has it; nothing here changes, so `dataclasses.replace` makes one with other values."""
        return replace(self)


def _resolve_speculation(given: Literal["off"] | Mapping[str, Any] | RequestSpeculation | None) -> RequestSpeculation:
    match given:
        case None:
            return RequestSpeculation()
        case "off":
            return SPECULATION_OFF
        case RequestSpeculation():
            wanted = given
        case Mapping():
            allowed = [f.name for f in fields(RequestSpeculation)]
            refuse_unknown_keys(given, allowed, where="SamplingParams.speculation")
            wanted = RequestSpeculation(**given)
        case _:
            raise RequestError(
                f"speculation: got {given!r}; may be 'off' or a dict with 'num_speculative_tokens'; leave it out for the engine's own"
            )
    limit = _plain_number(wanted.num_speculative_tokens)
    if limit is not None and not (_is_integer(limit) and limit >= 0):
        raise RequestError(
            f"speculation.num_speculative_tokens: got {limit!r}; must be an integer of 0 or more; 0 turns drafts off"
        )
    return RequestSpeculation(num_speculative_tokens=limit)


def _resolve_extra_args(given: Mapping[str, Any] | None) -> KVTransferParams | None:
    """The one argument there is."""
    if given is None:
        return None
    _refuse_other_than_dict("extra_args", given)
    refuse_unknown_keys(given, ("kv_transfer_params",), where="SamplingParams.extra_args")
    wanted = given.get("kv_transfer_params")
    if wanted is None:
        return None
    _refuse_other_than_dict("kv_transfer_params", wanted)
    refuse_unknown_keys(wanted, [f.name for f in fields(KVTransferParams)], where="kv_transfer_params")
    params = KVTransferParams(**wanted)
    if not isinstance(params.include_output_tokens, bool):
        raise RequestError(f"include_output_tokens: got {params.include_output_tokens!r:.80}; must be True or False")
    path = params.hidden_states_path
    if path is not None and not (isinstance(path, (str, PathLike)) and str(path)):
        raise RequestError(f"hidden_states_path: got {path!r:.80}; must be the path of a file, or None")
    return replace(params, hidden_states_path=None if path is None else str(path))


def _refuse_other_than_dict(name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise RequestError(f"{name}: got {given!r:.80}; must be a dict or None")


def _plain_number(value: Any) -> Any:
    """NumPy's numbers as Python's own; anything else as it is."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _is_integer(value: Any) -> bool:
    """Whether `value` is an integer; True and False are none here, whatever Python says."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_int32(value: Any) -> bool:
    """Whether `value` is an integer that arrays of token ids can hold."""
    return _is_integer(value) and -(2**31) <= value < 2**31


def _is_bias(value: Any) -> bool:
    """Whether `value` is a number that can be added to a logit, -inf included."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and (value == -math.inf or -LARGEST_FLOAT32 <= value <= LARGEST_BIAS)


def _check_types(params: SamplingParams) -> None:
    """Raise `RequestError` for the first switch that is not True or False, or collection that holds something else."""
    for name in SWITCHES:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name}: got {getattr(params, name)!r:.80}; must be True or False")

    def need(name: str, kinds: Any, fits: Callable[[Any], bool], may_be: str) -> None:
        value = getattr(params, name)
        if value is not None and not (isinstance(value, kinds) and all(map(fits, value))):
            raise RequestError(f"{name}: got {value!r:.80}; must be {may_be} or None")

    def is_text(value: Any) -> bool:
        return isinstance(value, str)

    need("stop", (str, list, tuple), is_text, "a string, a list of strings")
    need("bad_words", (list, tuple), is_text, "a list of strings")
    need("stop_token_ids", (list, tuple), _is_integer, "a list of token ids")
    need("allowed_token_ids", (list, tuple), _is_int32, "a list of token ids below 2**31")
    need("logit_bias", (Mapping,), _is_integer, "a dict from token id to number")
    need("logits_processors", (list, tuple), callable, "a list of functions")
    if not isinstance(params.prediction, str):
        need("prediction", (list, tuple), _is_integer, "a string, a list of token ids")


def _check_ranges(params: SamplingParams) -> None:
    """Raise `RequestError` for the first value out of range."""

    def need(ok: bool, name: str, may_be: str) -> None:
        if not ok:
            raise RequestError(f"{name}: got {getattr(params, name)!r:.80}; must be {may_be}")

    def number(name: str, low: float, high: float, may_be: str, *, above: bool = False) -> None:
        value = getattr(params, name)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        need(fits and (low < value if above else low <= value) and value <= high, name, may_be)

    def integer(name: str, low: int, may_be: str, *, optional: bool = False) -> None:
        value = getattr(params, name)
        if optional and value is None:
            return
        need(_is_integer(value) and value >= low, name, may_be)

    integer("n", 1, f"an integer from 1 to {MOST_COMPLETIONS}")
    need(params.n <= MOST_COMPLETIONS, "n", f"at most {MOST_COMPLETIONS}")
    number("temperature", 0.0, 1e6, "from 0 (greedy) to 1e6")
    number("top_p", 0.0, 1.0, "above 0 and at most 1 (1 turns it off)", above=True)
    integer("top_k", -1, "0 or -1 (off) or a positive integer")
    number("min_p", 0.0, 1.0, "from 0 (off) to 1")
    number("presence_penalty", -2.0, 2.0, "from -2 to 2")
    number("frequency_penalty", -2.0, 2.0, "from -2 to 2")
    number("repetition_penalty", 1e-6, 1e6, "from 1e-6 to 1e6 (1 turns it off)")
    integer("max_tokens", 1, "an integer of 1 or more, or None for as many as fit", optional=True)
    integer("min_tokens", 0, "an integer of 0 or more")
    need(
        params.max_tokens is None or params.min_tokens <= params.max_tokens,
        "min_tokens",
        f"at most max_tokens ({params.max_tokens})",
    )
    integer("logprobs", -1, "an integer of 0 or more, -1 for all, or None for none", optional=True)
    integer("prompt_logprobs", -1, "an integer of 0 or more, -1 for all, or None for none", optional=True)
    integer("seed", -(2**63), "an integer of -2**63 or more, or None", optional=True)
    need(
        params.allowed_token_ids is None or len(params.allowed_token_ids) > 0,
        "allowed_token_ids",
        "None or a non-empty list of token ids",
    )
    need(all(params.bad_words or ()), "bad_words", "a list of non-empty strings")
    for token_id, bias in (params.logit_bias or {}).items():
        if not _is_bias(bias):
            raise RequestError(
                f"logit_bias: got {bias!r:.80} for token {token_id}; must be a number up to {LARGEST_BIAS:g}, or -inf to forbid the token"
            )
