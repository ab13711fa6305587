"""The options of the benchmarks' workloads, with vLLM's names and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from forerun.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LatencyWorkload:
    """One batch of requests of equal length, run again and again."""

    input_len: int = 32
    """Tokens of each prompt."""
    output_len: int = 128
    """Tokens to write for each prompt."""
    batch_size: int = 8
    """Prompts given at once."""
    n: int = 1
    """Texts to write for each prompt."""
    num_iters_warmup: int = 10
    """Rounds before the clock counts; may be 0."""
    num_iters: int = 30
    """Rounds that count."""
    temperature: float = 1.0
    """0 always takes the most likely token; 1 samples from the model's own distribution."""
    disable_detokenize: bool = False
    """Make token ids only, no text."""

    def __post_init__(self) -> None:
        _check_counts(self, at_least_zero=("num_iters_warmup",))
        check_temperature("temperature", self.temperature)


@dataclass(frozen=True, kw_only=True)
class ThroughputWorkload:
    """Many requests, all given at once."""

    dataset_name: Literal["random", "sharegpt"] = "random"
    """Where prompts come from: random token ids, or conversations of a file in ShareGPT's format."""
    dataset_path: Path | None = None
    """The file of conversations."""
    num_prompts: int = 1000
    """Prompts to run."""
    input_len: int | None = None
    """Tokens of each random prompt; 1024 if it is left out."""
    output_len: int | None = None
    """Tokens to write for each prompt; if left out 128, with ShareGPT as many as the answer in the file has."""
    n: int = 1
    """Texts to write for each prompt."""
    temperature: float = 1.0
    """0 always takes the most likely token; 1 samples from the model's own distribution."""
    disable_detokenize: bool = False
    """Make token ids only, no text."""

    def __post_init__(self) -> None:
        _check_counts(self)
        check_temperature("temperature", self.temperature)
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise ConfigError(
                f"dataset_path: got {self.dataset_path} with dataset_name 'random', which reads none; "
                "give dataset_name 'sharegpt' or leave the path out"
            )
        if self.dataset_name == "sharegpt" and self.dataset_path is None:
            raise ConfigError("dataset_path: missing with dataset_name 'sharegpt'; give a JSON file of conversations")
        if self.dataset_name == "sharegpt" and self.input_len is not None:
            raise ConfigError(
                f"input_len: got {self.input_len} with dataset_name 'sharegpt', whose prompts have their own; leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class ComparisonWorkload:
    """Prompts answered by each of several configurations in turn."""

    num_prompts: int | None = None
    """Prompts of each kind, the first ones; all if it is left out."""
    max_tokens: int = 128
    """Tokens to write for each prompt, at most."""
    repeats: int = 3
    """Rounds; each answers every prompt with every configuration, and medians are shown."""
    batch_size: int = 1
    """Prompts given at once."""
    temperature: float = 0.0
    """0 always takes the most likely token; 1 samples from the model's own distribution."""

    def __post_init__(self) -> None:
        _check_counts(self)
        check_temperature("temperature", self.temperature)


def check_temperature(name: str, value: float) -> None:
    """Refuse what no text is sampled at, before anything is loaded.

    Raises:
        ConfigError: it is below 0, or no finite number.
    """
    if not 0.0 <= value < math.inf:
        raise ConfigError(f"{name}: got {value}; must be 0 or more, and finite")


def _check_counts(
    workload: LatencyWorkload | ThroughputWorkload | ComparisonWorkload, at_least_zero: tuple[str, ...] = ()
) -> None:
    """Refuse counts that are too small."""
    for field in fields(workload):
        value, least = vars(workload)[field.name], 0 if field.name in at_least_zero else 1
        if type(value) is int and value < least:
            raise ConfigError(f"{field.name}: got {value}; must be {least} or more")
