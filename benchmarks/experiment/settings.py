"""The settings of an experiment, read from environment variables of the fields' names in capitals."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from benchmarks.command_line import OWN_VARIABLES
from benchmarks.experiment.placement import STRATEGIES
from forerun.errors import ConfigError

ENGINE_NAMES = ("forerun", "transformers", "vllm")
METHODS = ("speculative", "target_ar")
PREFIXES = ("FORERUN_", "VLLM_")
SHAREGPT_FILES = "sharegpt_gpt4.jsonl,sharegpt_V3_format.jsonl,sharegpt_zh_38K_format.jsonl"

Reader = Callable[[str, str], Any]
"""(variable, text) -> value."""


def _refuse(name: str, text: str, may_be: str) -> ConfigError:
    return ConfigError(f"{name}: got {text!r:.80}; may be {may_be}; set it to that or leave it out")


def _text(_: str, text: str) -> str:
    return text


def _one_of(*choices: str) -> Reader:
    def read(name: str, text: str) -> str:
        if text.lower() not in choices:
            raise _refuse(name, text, ", ".join(choices))
        return text.lower()

    return read


def _switch(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise _refuse(name, text, "true or false")
    return text.lower() == "true"


def _whole(least: int) -> Reader:
    def read(name: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise _refuse(name, text, f"a whole number of {least} or more")
        return value

    return read


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _refuse(name, text, "a number above 0")
    return value


def _share(name: str, text: str) -> float:
    value = _number(name, text)
    if value > 1:
        raise _refuse(name, text, "a number above 0 and at most 1")
    return value


def _names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise _refuse(name, text, "file names with commas between them")
    return names


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _refuse(name, text, 'a JSON object like {"method": "suffix"}')
    return value


def _variable(default: str, read: Reader) -> Any:
    """A field with its default as the shell script writes it, "" for None."""
    return field(metadata={"default": default, "read": read})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of all variables, which docs/experiment.md describes; None for an empty one without default."""

    inference_engine: str = _variable("forerun", _one_of(*ENGINE_NAMES))
    inference_method: str = _variable("speculative", _one_of(*METHODS))
    enable_speculative: bool = _variable("true", _switch)
    enable_target: bool = _variable("false", _switch)
    target_model: str = _variable("smollm2-135m", _text)
    drafter_model: str | None = _variable("", _text)
    gamma_value: int = _variable("5", _whole(1))
    dtype: str = _variable("bfloat16", _text)
    max_model_len: int = _variable("2048", _whole(2))

    num_prompts: int = _variable("0", _whole(0))
    auto_rate: float = _variable("1.0", _number)
    auto_duration: float = _variable("60", _number)
    enable_batch: bool = _variable("true", _switch)
    batch_size: int = _variable("4", _whole(1))
    max_batch_length: int = _variable("512", _whole(1))
    generation_length: int = _variable("100", _whole(1))
    seed: int = _variable("0", _whole(0))

    sharegpt_dir: str | None = _variable("", _text)
    sharegpt_files: tuple[str, ...] = _variable(SHAREGPT_FILES, _names)
    prompt_min_length: int = _variable("10", _whole(0))
    prompt_max_length: int = _variable("1000", _whole(1))
    max_load_lines: int = _variable("10000", _whole(1))

    gpu_strategy: str = _variable("auto", _one_of(*STRATEGIES))
    target_gpu: str | None = _variable("", _text)
    drafter_gpu: str | None = _variable("", _text)
    target_gpu_ratio: int | None = _variable("", _whole(1))
    drafter_gpu_ratio: int | None = _variable("", _whole(1))
    enable_gpu_monitor: bool = _variable("true", _switch)
    gpu_monitor_interval: float = _variable("1.0", _number)

    output_file: str = _variable("benchmark_results.json", _text)
    enable_debug: bool = _variable("false", _switch)

    forerun_speculative_config: Mapping[str, Any] | None = _variable("", _object)

    vllm_enable_speculative: bool = _variable("false", _switch)
    vllm_num_speculative_tokens: int | None = _variable("", _whole(1))
    vllm_use_v2_block_manager: bool | None = _variable("", _switch)
    vllm_tensor_parallel_size: int = _variable("1", _whole(1))
    vllm_pipeline_parallel_size: int = _variable("1", _whole(1))
    vllm_gpu_memory_utilization: float = _variable("0.9", _share)
    vllm_max_model_len: int | None = _variable("", _whole(2))
    vllm_max_num_seqs: int = _variable("128", _whole(1))
    vllm_max_num_batched_tokens: int | None = _variable("", _whole(1))
    vllm_dtype: str | None = _variable("", _text)
    vllm_quantization: str | None = _variable("", _text)
    vllm_disable_log_stats: bool = _variable("true", _switch)

    def __post_init__(self) -> None:
        if self.prompt_min_length > self.prompt_max_length:
            raise ConfigError(
                f"PROMPT_MIN_LENGTH: got {self.prompt_min_length}; may be at most PROMPT_MAX_LENGTH "
                f"({self.prompt_max_length}); lower it or raise that"
            )
        if self.generation_length >= self.max_model_len:
            raise ConfigError(
                f"GENERATION_LENGTH: got {self.generation_length}; must leave room for a prompt in MAX_MODEL_LEN "
                f"({self.max_model_len}); lower it or raise that"
            )

    @property
    def prompts_per_batch(self) -> int:
        """Prompts given together; 1 without batches."""
        return self.batch_size if self.enable_batch else 1

    @property
    def num_vllm_speculative_tokens(self) -> int:
        """vLLM's own number, else GAMMA_VALUE."""
        return self.vllm_num_speculative_tokens or self.gamma_value


def variable(one: Field[Any]) -> str:
    """The environment variable of a field."""
    return one.name.upper()


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings from environment variables; an empty one counts as not set.

    Raises:
        ConfigError: a value is wrong, or two do not fit each other.
    """
    values: dict[str, Any] = {}
    for one in fields(Settings):
        text = environment.get(variable(one), "").strip() or one.metadata["default"]
        values[one.name] = one.metadata["read"](variable(one), text) if text else None
    return Settings(**values)


def others(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Variables with an engine's prefix that are no settings of the experiment."""
    known = {variable(one) for one in fields(Settings)}
    return {name: text for name, text in environment.items() if name.startswith(prefix) and name not in known}


def unknown_variables(environment: Mapping[str, str], engines: tuple[str, ...]) -> list[str]:
    """A warning for each of these variables, which have no effect here but are passed on to the engine."""
    known = [variable(one) for one in fields(Settings)]
    warnings = []
    for prefix in PREFIXES:
        engine = prefix.rstrip("_").lower()
        for name in others(environment, prefix):
            if name in OWN_VARIABLES:
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            fate = f"it is handed to {engine} as it is" if engine in engines else f"{engine} is not measured"
            warnings.append(f"{name} is no variable of this experiment; {fate}{hint}")
    return warnings
