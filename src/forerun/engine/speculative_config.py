"""`speculative_config`, checked and resolved once into who drafts, who verifies and how many tokens."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from forerun.drafters.base import Drafter, DrafterConfig, TargetInfo
from forerun.drafters.registry import DRAFTERS
from forerun.drafters.silent import SilentConfig
from forerun.engine.speculation import Schedule, SpeculationControl
from forerun.errors import ConfigError, UnknownKeyError, did_you_mean
from forerun.verify.registry import VERIFIERS, MatchingConfig, VerifierConfig

MAX_SPECULATIVE_TOKENS = 128

REMOVED_KEYS = {
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_model": "model",
    "speculative_method": "method",
    "synthetic_acceptance_rate": "synthetic_acceptance_rates",
    "disable_by_batch_size": "num_speculative_tokens_per_batch_size",
    "speculative_disable_by_batch_size": "num_speculative_tokens_per_batch_size",
    "speculative_token_tree": "draft_tree",
    "adaptive_verification": "enable_adaptive_verification",
    "tensor_parallel_size": "draft_tensor_parallel_size",
}
"""Spellings that vLLM once had -> today's, so that an error can say the new one."""

REMOVED_SAMPLE_METHODS = {
    "strict": "standard",
    "probabilistic": "standard",
    "rejection": "standard",
    "rejection_sampler": "standard",
    "typical_acceptance_sampler": "typical",
}

FAMILY_MTP = "_mtp"  # vLLM once had a method for each family: "deepseek_mtp", "glm4_moe_mtp" ...

_COMMON_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig:
    """A drafter class of the user's own, constructed with the `TargetInfo`."""

    drafter_class: type[Drafter]

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The user must say how many."""
        return None

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter."""
        make: Any = self.drafter_class
        drafter: Drafter = make(target)
        return drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A resolved `speculative_config`: who drafts, who verifies, how many tokens."""

    method: str = "none"
    drafter: DrafterConfig = field(default_factory=SilentConfig)
    verifier: VerifierConfig = field(default_factory=MatchingConfig)
    num_speculative_tokens: int = 0
    schedule: Schedule = ()

    @property
    def control(self) -> SpeculationControl:
        """The rule that says how many tokens to draft."""
        return SpeculationControl(num_speculative_tokens=self.num_speculative_tokens, schedule=self.schedule)

    @property
    def is_lossless(self) -> bool:
        """Whether the verifier keeps the target's distribution."""
        return self.verifier.build(self.num_speculative_tokens).is_lossless

    def describe(self) -> str:
        """One phrase for banners and reports."""
        if not self.num_speculative_tokens:
            return "no speculation"
        lossy = "" if self.is_lossless else ", lossy"
        return f"{self.method}, K={self.num_speculative_tokens}{lossy}"


def resolve_speculative(given: Mapping[str, Any] | None) -> SpeculativeConfig:
    """Resolve a vLLM-style dict.

    Raises:
        ConfigError: a key or value that does not exist, is out of range, or does not fit the others.
    """
    if given is None:
        return SpeculativeConfig()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"speculative_config: got {type(given).__name__}; must be a dict such as {{'method': 'ngram', ...}}"
        )
    keys = {str(key).replace("-", "_"): value for key, value in given.items()}
    _refuse_removed(keys)
    method, drafter_class = _method(keys)
    sample_method = _sample_method(keys.get("rejection_sample_method", "matching"))
    verifier_class = VERIFIERS[sample_method]
    own_keys = () if isinstance(drafter_class, CustomConfig) else _field_names(drafter_class)
    verifier_keys = _field_names(verifier_class)
    _refuse_unknown(keys, method, (*_COMMON_KEYS, *own_keys, *verifier_keys))
    drafter = drafter_class if isinstance(drafter_class, CustomConfig) else drafter_class(**_pick(keys, own_keys))
    num_tokens = _num_tokens(keys.get("num_speculative_tokens"), drafter, method)
    return SpeculativeConfig(
        method=method,
        drafter=drafter if num_tokens else SilentConfig(),  # K = 0: nobody reads the prompts for nothing
        verifier=verifier_class(**_pick(keys, verifier_keys)),
        num_speculative_tokens=num_tokens,
        schedule=_schedule(keys.get("num_speculative_tokens_per_batch_size")),
    )


def verifier_part(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `speculative_config` that choose and set the verifier."""
    names = {"rejection_sample_method"}.union(*(_field_names(config_class) for config_class in VERIFIERS.values()))
    return _pick(given, tuple(sorted(names)))


def merge_deprecated(
    given: Mapping[str, Any] | None,
    *,
    speculative_model: str | None,
    speculative_method: str | None,
    num_speculative_tokens: int | None,
) -> Mapping[str, Any] | None:
    """Fold the arguments that older vLLM took into `speculative_config`, with a warning that shows it."""
    old = {"model": speculative_model, "method": speculative_method, "num_speculative_tokens": num_speculative_tokens}
    old = {key: value for key, value in old.items() if value is not None}
    if not old:
        return given
    if given is not None:
        raise ConfigError(
            f"speculative_config and the older argument(s) for {sorted(old)} are both given; keep speculative_config only"
        )
    warnings.warn(
        f"speculative_model, speculative_method and num_speculative_tokens are deprecated; write speculative_config={old!r}",
        FutureWarning,
        stacklevel=4,
    )
    return old


def _refuse_removed(keys: Mapping[str, Any]) -> None:
    for old, new in REMOVED_KEYS.items():
        if old in keys:
            raise UnknownKeyError(f"speculative_config: {old!r} is no longer a key; write {new!r}")


def _refuse_unknown(keys: Mapping[str, Any], method: str, allowed: tuple[str, ...]) -> None:
    for key in keys:
        if key not in allowed:
            raise UnknownKeyError(
                f"speculative_config: unknown key {key!r} for method {method!r}{did_you_mean(key, allowed)}"
            )


def _method(keys: Mapping[str, Any]) -> tuple[str, type[DrafterConfig] | CustomConfig]:
    """The method's name, and its config class (or, for a user's own class, its finished config)."""
    method, model = keys.get("method"), keys.get("model")
    if isinstance(method, type):
        return method.__name__, CustomConfig(drafter_class=method)
    if method is None and isinstance(model, (str, PathLike)):
        method = _inferred_method(str(model))
    if isinstance(method, str) and method.endswith(FAMILY_MTP):
        warnings.warn(f"speculative_config: method {method!r} is deprecated; write 'mtp'", FutureWarning, stacklevel=5)
        method = "mtp"
    if method == "custom_class":
        return "custom_class", CustomConfig(drafter_class=_import_class(model))
    if method in DRAFTERS:
        _check_model(str(method), model, takes_one="model" in _field_names(DRAFTERS[str(method)]))
        return str(method), DRAFTERS[str(method)]
    choices = (*DRAFTERS, "custom_class")
    if method is None:
        raise ConfigError(f"speculative_config: 'method' is missing; may be {', '.join(choices)} or a drafter class")
    raise ConfigError(
        f"speculative_config: unknown method {method!r}{did_you_mean(str(method), (*DRAFTERS, 'custom_class'))} (or pass a drafter class)"
    )


def _inferred_method(model: str) -> str:
    """What a model without a method means: a drafter's own name, a class, or a model that drafts (vLLM's rule)."""
    if model.strip("[]") in DRAFTERS:
        return model.strip("[]")
    return "custom_class" if _is_dotted_path(model) else "draft_model"


def _is_dotted_path(model: str) -> bool:
    """Whether `model` can be a class and is no file."""
    return "." in model and all(part.isidentifier() for part in model.split(".")) and not Path(model).exists()


def _check_model(method: str, model: Any, *, takes_one: bool) -> None:
    if takes_one and not (isinstance(model, (str, PathLike)) and str(model)):
        raise ConfigError(
            f"speculative_config: method {method!r} needs 'model', got {model!r}; give a folder, a .gguf file, a known name or a hub id"
        )
    if not takes_one and model is not None and str(model).strip("[]") != method:
        raise ConfigError(
            f"speculative_config: method {method!r} uses no draft model, got model {model!r}; leave 'model' out"
        )


def _import_class(path: Any) -> type[Drafter]:
    """The class that a dotted path names."""
    module_name, _, class_name = str(path or "").rpartition(".")
    if not module_name:
        raise ConfigError(
            f"speculative_config: 'model' must be the dotted path of your drafter class, got {path!r}; e.g. 'my_module.MyDrafter'"
        )
    try:
        found = vars(importlib.import_module(module_name))[class_name]
    except ImportError as error:
        raise ConfigError(
            f"speculative_config: cannot import {module_name!r} ({error}); put it on PYTHONPATH or install it"
        ) from error
    except KeyError:
        raise ConfigError(f"speculative_config: module {module_name!r} has no {class_name!r}; check the name") from None
    if not isinstance(found, type):
        raise ConfigError(f"speculative_config: {path!r} is not a class; name the drafter class itself")
    return found


def _sample_method(name: Any) -> str:
    if name in REMOVED_SAMPLE_METHODS:
        raise ConfigError(
            f"rejection_sample_method: {name!r} is no longer a value; write {REMOVED_SAMPLE_METHODS[name]!r}"
        )
    if name not in VERIFIERS:
        raise ConfigError(f"rejection_sample_method: got {name!r}{did_you_mean(str(name), VERIFIERS)}")
    return str(name)


def _num_tokens(given: Any, drafter: DrafterConfig, method: str) -> int:
    value = drafter.default_num_speculative_tokens if given is None else given
    if value is None:
        raise ConfigError(
            f"num_speculative_tokens: method {method!r} has no default; give an integer from 0 to {MAX_SPECULATIVE_TOKENS}, e.g. 5"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"num_speculative_tokens: got {value!r}; must be an integer from 0 to {MAX_SPECULATIVE_TOKENS} (0 turns drafting off)"
        )
    return value


def _schedule(given: Any) -> Schedule:
    """Check vLLM's [(first, last, K), ...]: rising, not overlapping, starting at batch size 1."""
    if given is None:
        return ()
    name = "num_speculative_tokens_per_batch_size"
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"{name}: got {given!r}; must be a non-empty list of [first, last, K]")
    entries: list[tuple[int, int, int]] = []
    for entry in given:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not all(isinstance(x, int) for x in entry):
            raise ConfigError(f"{name}: got {entry!r}; each entry must be three integers [first, last, K]")
        first, last, num_tokens = entry
        if first < 1 or last < first or num_tokens < 0:
            raise ConfigError(f"{name}: got {entry!r}; needs 1 <= first <= last and K >= 0")
        entries.append((first, last, num_tokens))
    entries.sort()
    if entries[0][0] != 1:
        raise ConfigError(f"{name}: the first range starts at {entries[0][0]}; must start at batch size 1")
    for before, after in pairwise(entries):
        if after[0] <= before[1]:
            raise ConfigError(
                f"{name}: ranges {before[:2]} and {after[:2]} overlap; each batch size may be in one range only"
            )
    return tuple(entries)


def _field_names(config_class: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(config_class))


def _pick(keys: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: keys[name] for name in names if name in keys}
