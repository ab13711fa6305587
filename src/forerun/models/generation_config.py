"""Reads how a model's makers would have it sampled, for requests that do not say: generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from forerun.core.sampling_params import SamplingParams
from forerun.errors import ConfigError, RequestError, refuse_unknown_keys
from forerun.models.model_folder import GENERATION_FILE, find_gguf, read_json

logger = logging.getLogger(__name__)

OVERRIDES = "override_generation_config"

SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Keys that are applied, those that vLLM applies -> fields of `SamplingParams`."""

NOTHING: tuple[Any, ...] = (None, False, [], {})  # False is 0, too
UNAPPLIED: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (None, True),
    **dict.fromkeys(("num_beams", "typical_p", "encoder_repetition_penalty", "guidance_scale"), (*NOTHING, 1)),
    **dict.fromkeys(
        (
            *("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "top_h", "dola_layers", "watermarking_config"),
            *("no_repeat_ngram_size", "exponential_decay_length_penalty", "min_length", "min_new_tokens"),
            *("stop_strings", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
            *("forced_bos_token_id", "forced_eos_token_id"),
        ),
        NOTHING,
    ),
}
"""Keys by which transformers writes other texts, and which are not applied -> the values that ask for nothing."""

_warned: set[Path] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Fields of `SamplingParams` that count where a request leaves them out, by where they come from."""

    of_file: Mapping[str, Any]
    of_overrides: Mapping[str, Any]

    @classmethod
    def read(
        cls, generation_config: str | PathLike[str], overrides: Mapping[str, Any] | None, *, model: Path | None
    ) -> SamplingDefaults:
        """Read what the settings of these names ask for.

        Args:
            generation_config: "auto": the model's file, if it has one; "vllm": none; else the folder of one.
            overrides: keys of the file with values that take the place of its own; None as a value is none.
            model: folder or file of the model; None where there is none.

        Raises:
            ModelError: there is no such folder or file, or it is not JSON.
            ConfigError: a value is of a wrong type or out of range.
            UnknownKeyError: an override is none of the keys that are applied.
        """
        overrides = overrides or {}
        refuse_unknown_keys(overrides, SAMPLING, where=OVERRIDES)
        file = _file(generation_config, model)
        content = {} if file is None else read_json(file)
        if file is not None:
            _warn_once(file, content)
        kept = {key: value for key, value in content.items() if key not in overrides}
        return cls(
            of_file=_applied(kept, source=str(file), do=f"mend it, or override it by {OVERRIDES}"),
            of_overrides=_applied(overrides, source=OVERRIDES, do="mend it"),
        )

    @property
    def values(self) -> dict[str, Any]:
        """All of them."""
        return {**self.of_file, **self.of_overrides}

    def describe(self) -> str:
        """Fields, values and sources in one line; empty where there are none."""
        parts = {GENERATION_FILE: self.of_file, OVERRIDES: self.of_overrides}
        return "; ".join(
            f"{', '.join(f'{name} {value}' for name, value in fields.items())} ({source})"
            for source, fields in parts.items()
            if fields
        )


def _file(generation_config: str | PathLike[str], model: Path | None) -> Path | None:
    match generation_config:
        case "vllm":
            return None
        case "auto":
            file = None if model is None or find_gguf(model) is not None else model / GENERATION_FILE
            return file if file is not None and file.is_file() else None
        case folder:
            return Path(folder).expanduser() / GENERATION_FILE


def _applied(content: Mapping[str, Any], *, source: str, do: str) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the content sets.

    Raises:
        ConfigError: a value is of a wrong type or out of range; `do` is what to do about it.
    """
    fields = {}
    for key, name in SAMPLING.items():
        if content.get(key) is None:
            continue
        fields[name] = content[key]
        try:
            SamplingParams(**{name: content[key]})
        except RequestError as error:
            raise ConfigError(f"{source}: {key}{str(error).removeprefix(name)}; {do}") from error
    return fields


def _warn_once(file: Path, content: Mapping[str, Any]) -> None:
    """Log, the first time that a file is read, what it asks for in vain."""
    asked = {key: content[key] for key, nothing in UNAPPLIED.items() if content.get(key) not in nothing}
    if asked and file not in _warned:
        _warned.add(file)
        shown = ", ".join(f"{key}={value!r:.80}" for key, value in asked.items())
        logger.warning(
            "%s: asks for %s, which is not applied; as in vLLM, only %s are", file, shown, ", ".join(SAMPLING)
        )
