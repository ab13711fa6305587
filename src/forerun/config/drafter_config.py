"""The keys of a `speculative_config` that choose a drafter and set it."""

from __future__ import annotations

import difflib
import importlib
import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from forerun.drafters.base import Drafter, DrafterConfig, DrafterResolver, ResolvesKeys
from forerun.drafters.custom import CustomConfig
from forerun.drafters.registry import DRAFTERS, method_of_checkpoint, renamed_method
from forerun.errors import ConfigError, UnknownKeyError, did_you_mean, one_line

logger = logging.getLogger(__name__)

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

DRAFT_RANKS = "draft_tensor_parallel_size"

NEEDLESS_KEYS = {
    "disable_padded_drafter_batch": "drafts of any lengths share a batch without padding",
    "enforce_eager": "drafters run eagerly",
}
"""vLLM's keys for what is not done here -> why they change nothing."""


def read_keys(given: Any) -> dict[str, Any]:
    """The user's keys, with underscores.

    Raises:
        ConfigError: it is no dict, a key is given in two spellings, or is vLLM's of older days.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"speculative_config: got {type(given).__name__}; must be a dict such as {{'method': 'ngram', ...}}"
        )
    spellings: dict[str, Any] = {}
    for spelling in given:
        first = spellings.setdefault(str(spelling).replace("-", "_"), spelling)
        if first != spelling:
            raise ConfigError(f"a key is given twice in speculative_config, as {first!r} and as {spelling!r}; keep one")
    keys = {key: given[spelling] for key, spelling in spellings.items()}
    for old, new in REMOVED_KEYS.items():
        if old in keys:
            raise UnknownKeyError(f"speculative_config: {old!r} is no longer a key; write {new!r}")
    for key, why in NEEDLESS_KEYS.items():
        if key in keys:
            logger.warning("speculative_config: %s has no effect: %s; leave it out", key, why)
            del keys[key]
    if keys.get(DRAFT_RANKS) in (None, 1):
        keys.pop(DRAFT_RANKS, None)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyResolver:
    """Resolves the settings of drafters inside another drafter's (see `DrafterResolver`)."""

    max_draft_tokens: int
    shared_keys: tuple[str, ...]

    def read_keys(self, given: Any) -> dict[str, Any]:
        """See `DrafterResolver`."""
        return read_keys(given)

    def resolve(self, keys: Mapping[str, Any], *, other_keys: tuple[str, ...]) -> tuple[str, DrafterConfig]:
        """See `DrafterResolver`."""
        return resolve_drafter(keys, other_keys=other_keys, resolver=self)


def resolve_drafter(
    keys: Mapping[str, Any], *, other_keys: tuple[str, ...], resolver: DrafterResolver
) -> tuple[str, DrafterConfig]:
    """The method's name and the settings of its drafter, which may resolve others with `resolver`.

    Raises:
        ConfigError: there is no such method, a value is out of range, or a key is neither the
            drafter's nor one of `other_keys`.
    """
    method, config_class = _method(keys)
    own_keys = () if isinstance(config_class, CustomConfig) else field_names(config_class)
    if DRAFT_RANKS in keys and DRAFT_RANKS not in own_keys:
        raise ConfigError(
            f"{DRAFT_RANKS}: got {keys[DRAFT_RANKS]!r}; must be 1 with method {method!r}, which has no layers of its own to "
            "share out; leave it out"
        )
    allowed = ("method", "model", *other_keys, *own_keys)
    for key in keys:
        if key not in allowed:
            raise UnknownKeyError(
                f"speculative_config: unknown key {key!r} for method {method!r}{did_you_mean(key, allowed)}"
            )
    if isinstance(config_class, CustomConfig):
        return method, config_class
    own = pick(keys, own_keys)
    if issubclass(config_class, ResolvesKeys):
        return method, config_class.from_keys(own, resolver)
    return method, config_class(**own)


def field_names(config_class: Any) -> tuple[str, ...]:
    """The keys that a config class takes."""
    return tuple(f.name for f in fields(config_class))


def pick(keys: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of `keys` that are among `names`."""
    return {name: keys[name] for name in names if name in keys}


def _method(keys: Mapping[str, Any]) -> tuple[str, type[DrafterConfig] | CustomConfig]:
    """The method's name, and its config class (or, for a user's own class, its finished config)."""
    method, model = keys.get("method"), keys.get("model")
    if isinstance(method, type):
        return method.__name__, CustomConfig(drafter_class=method)
    if method is None and isinstance(model, (str, PathLike)):
        method = _inferred_method(str(model))
    if isinstance(method, str) and (today := renamed_method(method)) is not None:
        warnings.warn(
            f"speculative_config: method {method!r} is deprecated; write {today!r}", FutureWarning, stacklevel=5
        )
        method = today
    if method == "custom_class":
        return "custom_class", CustomConfig(drafter_class=_import_class(model))
    if isinstance(method, str) and method in DRAFTERS:
        config_class = DRAFTERS[method].config_class
        _check_model(method, model, takes_one="model" in field_names(config_class))
        return method, config_class
    choices = (*DRAFTERS, "custom_class")
    if method is None:
        others = [str(key) for key in keys if key != "method"]
        for key in difflib.get_close_matches("method", others, n=1):
            raise ConfigError(f"speculative_config: unknown key {key!r}; did you mean 'method'?")
        raise ConfigError(f"speculative_config: 'method' is missing; may be {', '.join(choices)} or a drafter class")
    raise ConfigError(
        f"speculative_config: unknown method {method!r}{did_you_mean(str(method), (*DRAFTERS, 'custom_class'))} (or pass a drafter class)"
    )


def _inferred_method(model: str) -> str:
    """Infer the method from `model` alone: a method's name, a class, or a checkpoint (vLLM's rule)."""
    if model.strip("[]") in DRAFTERS:
        return model.strip("[]")
    if _is_dotted_path(model):
        return "custom_class"
    return method_of_checkpoint(Path(model).name)


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
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"speculative_config: cannot import {module_name!r} ({error}); put it on PYTHONPATH or install it"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"speculative_config: cannot import {module_name!r} ({type(error).__name__}: {one_line(error)}); mend it"
        ) from error
    found = vars(module).get(class_name)
    if found is None:
        raise ConfigError(f"speculative_config: module {module_name!r} has no {class_name!r}; check the name")
    if not isinstance(found, type):
        raise ConfigError(f"speculative_config: {path!r} is not a class; name the drafter class itself")
    return found
