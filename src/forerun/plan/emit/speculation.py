"""A plan's `speculative_config` in the words of other systems; what a system lacks is refused, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

from forerun.engine.speculation import FixedLength, Schedule
from forerun.errors import ConfigError
from forerun.plan.emit.emission import FORERUN_FORMATS
from forerun.plan.profile import SCHEDULE
from forerun.plan.record_types import check_count, check_schedule

ADAPTIVE = "enable_adaptive_verification"
SAMPLING = "rejection_sample_method"

WITH_KV = frozenset({"draft_model", "pard", "eagle", "eagle3", "peagle", "mtp", "dflash", "dspark"})
"""Methods whose drafter has a KV cache of its own."""

VLLM_NAMES = {"pard": "draft_model", "peagle": "eagle3"}
"""Methods that vLLM calls by another name, with `parallel_drafting`."""

VLLM_METHODS = (
    *("ngram", "ngram_gpu", "suffix", "draft_model", "pard", "eagle", "eagle3", "peagle", "medusa", "mtp"),
    *("dflash", "dspark"),
)
"""Those that its engine runs: of `mlp_speculator` it reads the configuration alone, and does not start.

forerun has not all of them: a profiled server of vLLM's may have run the others.
"""

VLLM_KEYS = frozenset(
    {
        *("method", "model", "num_speculative_tokens", SCHEDULE, "draft_tensor_parallel_size", "quantization"),
        *("max_model_len", "revision", "code_revision", "prompt_lookup_min", "prompt_lookup_max", "parallel_drafting"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
        *("suffix_decoding_min_token_prob", "rejection_sample_method", "draft_sample_method"),
        *("synthetic_acceptance_rates", "synthetic_acceptance_length", ADAPTIVE, "enforce_eager", "moe_backend"),
        *("kv_cache_dtype", "draft_load_config", "attention_backend", "index_share_for_mtp_iteration"),
        *("disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction"),
        *("use_heterogeneous_vocab", "dspark_draft_topk"),
    }
)
"""Of vLLM 0.32's `SpeculativeConfig`, which refuses others."""

SGLANG_ALGORITHMS = {
    "ngram": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "dflash": "DFLASH",
}
"""Of SGLang 0.5.23's --speculative-algorithm."""

TRTLLM_TYPES = {
    "ngram": "NGram",
    "draft_model": "Draft_Target",
    "pard": "PARD",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "dflash": "DFlash",
}
"""`decoding_type` of TensorRT-LLM's PyTorch backend, tensorrt_llm/llmapi/llm_args.py of 2026-11."""

VLLM_VALUES = {SAMPLING: ("standard", "block", "synthetic"), "draft_sample_method": ("greedy", "probabilistic")}
"""What keys may be that forerun has more values for, vLLM's own default first."""

VLLM_ON_V1 = ("suffix", "medusa", "pard", "peagle")
"""Methods for which vLLM falls back to its older model runner."""

GIVE_ANOTHER = "give another with --speculative-config"

Config = Mapping[str, Any]


class _Drafts(NamedTuple):
    """What all systems must be told."""

    method: str
    model: str | None
    length: int  # K
    schedule: Schedule


def check_schedule_of(config: Config) -> None:
    """Refuse a schedule of draft lengths that is none, or whose ranges no system takes.

    Raises:
        ConfigError: an entry is of another type, or batch sizes do not begin at 1 and rise.
    """
    what, end = "speculative_config", 0
    check_schedule(what, SCHEDULE, config[SCHEDULE], do=GIVE_ANOTHER)
    for first, last, length in config[SCHEDULE]:
        if not end < first <= last or (end == 0 and first != 1) or length < 0:
            raise ConfigError(
                f"{what}: got {SCHEDULE} with {[first, last, length]}; batch sizes must begin at 1 and rise from range to range, "
                f"and lengths be 0 or more: {GIVE_ANOTHER}"
            )
        end = last
    if end == 0:
        raise ConfigError(
            f"{what}: got {SCHEDULE}=[]; must have a range of batch sizes: {GIVE_ANOTHER}, or leave it out"
        )


def vllm_config(config: Config, *, max_model_len: int | None = None) -> dict[str, Any]:
    """vLLM's --speculative-config.

    `matching`, forerun's own verifier, becomes vLLM's `standard`, which keeps the target's distribution too.

    Args:
        config: the plan's.
        max_model_len: of the target; a drafter with less would silently draft nothing that stands after it.

    Raises:
        ConfigError: vLLM has no such method, key or value.
    """
    method = config.get("method")
    if method not in VLLM_METHODS:
        _refuse_method(config, "vLLM", VLLM_METHODS)
    if config.get(ADAPTIVE) and method != "dspark":
        raise ConfigError(
            f"{ADAPTIVE}: vLLM chooses lengths by itself for method 'dspark' only; give a fixed length or a schedule "
            "by batch size with --speculative-config"
        )
    for key in config:
        if key not in VLLM_KEYS:
            _refuse_key(key, "vLLM", VLLM_KEYS)
    _length(config, "vLLM")
    _check_drafter_length(config, max_model_len)
    found = {key: [list(one) for one in value] if key == SCHEDULE else value for key, value in config.items()}
    if found.get(SAMPLING) == "matching":
        del found[SAMPLING]
    _check_values(found)
    if method in VLLM_NAMES:
        found |= {"method": VLLM_NAMES[method], "parallel_drafting": True}
    return found


def _check_values(config: Config) -> None:
    """Refuse what forerun has for a key of vLLM's, and vLLM has not."""
    if config.get("quantization") in FORERUN_FORMATS:
        raise ConfigError(
            f"quantization: got {config['quantization']!r} for the drafter, which forerun's kernels compute; vLLM has its own formats: "
            "leave it out with --speculative-config"
        )
    for key, known in VLLM_VALUES.items():
        if config.get(key, known[0]) not in known:
            raise ConfigError(
                f"{key}: got {config[key]!r}; vLLM has {', '.join(known)}: give one with --speculative-config"
            )


def vllm_notes(config: Config | None) -> list[str]:
    """What vLLM wants beside a configuration, and does otherwise than forerun."""
    notes = []
    config = config or {}
    if config.get("method") == "suffix":
        notes.append("vLLM's method suffix needs a package: pip install arctic-inference==0.1.1")
    if config and config.get(SAMPLING, "matching") == "matching":
        notes.append(
            "vLLM verifies by rejection sampling, forerun by matching: both keep the target's distribution, but a "
            "seed gives another text there"
        )
    if config.get(SAMPLING) == "block":
        notes.append(
            "vLLM verifies blocks in its newer model runner alone: where it falls back to the older one, as for the methods "
            f"{', '.join(VLLM_ON_V1)}, it does as with standard, without a word"
        )
    if config.get(SCHEDULE):
        notes.append(f"vLLM ignores {SCHEDULE} with --data-parallel-size above 1: run engines apart instead")
    return notes


def sglang_options(config: Config) -> dict[str, Any]:
    """SGLang's options, by name without hyphens in front: a chain of K drafted tokens.

    Raises:
        ConfigError: SGLang has no such method, or no schedule of draft lengths.
    """
    drafts = _read(config, "SGLang", SGLANG_ALGORITHMS)
    if drafts.schedule:
        raise ConfigError(
            f"{SCHEDULE}: SGLang has no schedule by batch size; give one number of tokens with --speculative-config"
        )
    options: dict[str, Any] = {"speculative-algorithm": SGLANG_ALGORITHMS[drafts.method]}
    if drafts.model is not None:
        options["speculative-draft-model-path"] = drafts.model
    if drafts.method == "ngram":
        options["speculative-ngram-max-bfs-breadth"] = 1  # by default a tree
    if drafts.method in ("ngram", "dflash"):
        return options | {"speculative-num-draft-tokens": drafts.length + 1}
    # the tokens that are verified count the last committed one
    return options | {
        "speculative-num-steps": drafts.length,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": drafts.length + 1,
    }


def trtllm_config(config: Config, *, max_num_seqs: int) -> dict[str, Any]:
    """`speculative_config` of TensorRT-LLM's LLM options.

    Args:
        config: the plan's.
        max_num_seqs: the largest batch.

    Raises:
        ConfigError: TensorRT-LLM has no such method.
    """
    drafts = _read(config, "TensorRT-LLM", TRTLLM_TYPES, own_keys=("prompt_lookup_min", "prompt_lookup_max"))
    options: dict[str, Any] = {"decoding_type": TRTLLM_TYPES[drafts.method], "max_draft_len": drafts.length}
    if drafts.model is not None:
        options["speculative_model"] = drafts.model
    if drafts.method == "ngram":
        for key in ("prompt_lookup_min", "prompt_lookup_max"):
            check_count("speculative_config", key, config.get(key), least=1, or_none=True, do=GIVE_ANOTHER)
        options["max_matching_ngram_size"] = config.get("prompt_lookup_max") or config.get("prompt_lookup_min") or 5
    if drafts.method == "mtp":
        options["num_nextn_predict_layers"] = drafts.length  # what releases before 1.3 read instead of max_draft_len
    if drafts.schedule:
        options["draft_len_schedule"] = trtllm_schedule(drafts.schedule, drafts.length, max_num_seqs)
    return options


def drafter_kv_notes(config: Config | None) -> list[str]:
    """What is to be known of drafters with a KV cache where prefill and decode are apart."""
    if (config or {}).get("method") not in WITH_KV:
        return []
    return [
        "prefill and decode engines must have the same speculative configuration, since the drafter's KV moves, too; "
        "KV connectors that leave it out lower acceptance to nothing: check it before you rely on the plan"
    ]


def ngram_notes(config: Config | None, system: str) -> list[str]:
    """How look-ups of other systems differ."""
    if (config or {}).get("method") != "ngram":
        return []
    how = {
        "SGLang": "in a trie of all requests' texts",
        "TensorRT-LLM": "from one token up, whatever prompt_lookup_min is",
    }
    return [f"{system} matches n-grams {how[system]}: its acceptance is another than the profiled one"]


def trtllm_schedule(schedule: Schedule, length: int, max_num_seqs: int) -> dict[int, int]:
    """Last batch size -> K, up to the largest batch: one larger than the last of them drafts nothing, so K = 0 goes.

    Raises:
        ConfigError: the first range does not draft `length` tokens, or K rises, which TensorRT-LLM refuses.
    """
    planned = FixedLength(num_speculative_tokens=length, schedule=schedule)
    ranges = [(k, max(sizes)) for k, sizes in groupby(range(1, max_num_seqs + 1), planned.draft_limit)]
    lengths = [k for k, _ in ranges]
    if lengths[0] != length or lengths != sorted(lengths, reverse=True):
        raise ConfigError(
            f"{SCHEDULE}: got K = {', '.join(map(str, lengths))}; TensorRT-LLM's draft_len_schedule must begin "
            f"with num_speculative_tokens, {length}, and never rise: give such a one with --speculative-config"
        )
    return {last: k for k, last in ranges if k > 0}


def _read(config: Config, system: str, methods: Mapping[str, str], *, own_keys: tuple[str, ...] = ()) -> _Drafts:
    method = config.get("method")
    if method not in methods:
        _refuse_method(config, system, methods)
    known = {"method", "model", "num_speculative_tokens", SCHEDULE, *own_keys}
    for key, value in config.items():
        if key not in known and (key, value) not in ((SAMPLING, "matching"), (ADAPTIVE, False)):
            _refuse_key(key, system, known)
    model = config.get("model")
    if model is None and method in WITH_KV - {"mtp"}:
        raise ConfigError(f"model: {system} needs the drafter of method {method!r}; give its folder or hub id")
    return _Drafts(str(method), model, _length(config, system), tuple(tuple(one) for one in config.get(SCHEDULE, ())))


def _length(config: Config, system: str) -> int:
    """K."""
    length = config.get("num_speculative_tokens")
    if type(length) is not int or length < 1:
        raise ConfigError(f"num_speculative_tokens: got {length!r}; {system} wants a number from 1: give it")
    return length


def _check_drafter_length(config: Config, max_model_len: int | None) -> None:
    longest = config.get("max_model_len")
    check_count("speculative_config", "max_model_len", longest, least=1, or_none=True, do=GIVE_ANOTHER)
    if longest is None or max_model_len is None or longest == max_model_len:
        return
    why = (
        "of longer texts nothing that is drafted would stand"
        if longest < max_model_len
        else "vLLM refuses a longer one"
    )
    raise ConfigError(
        f"speculative_config: max_model_len: got {longest}, the target has {max_model_len}; {why}: leave it out with "
        "--speculative-config, or plan for texts of that length"
    )


def _refuse_method(config: Config, system: str, methods: Any) -> NoReturn:
    raise ConfigError(
        f"speculative_config: {system} has no method {config.get('method')!r}; may be {', '.join(methods)}: "
        "give one with --speculative-config, or --no-speculation"
    )


def _refuse_key(key: str, system: str, known: Any) -> NoReturn:
    raise ConfigError(
        f"speculative_config: {system} has no {key!r} here; may be {', '.join(sorted(known))}: "
        "give a configuration without it with --speculative-config"
    )
