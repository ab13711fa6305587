"""Which prompts are sent: the datasets of `vllm bench serve`, under its names and with its defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from forerun.errors import ConfigError

DatasetName = Literal["random", "sharegpt", "custom", "prefix_repetition", "spec_bench"]

FROM_FILES = ("sharegpt", "custom", "spec_bench")
FROM_FILE = -1  # an output length that the file's own lines decide


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where prompts come from and how long answers are; options that begin with a dataset's name are for it alone."""

    dataset_name: DatasetName = "random"
    """random tokens, conversations in ShareGPT's format, JSON lines with a "prompt", random tokens after few prefixes, or JSON lines as Spec-Bench's."""
    dataset_path: Path | None = None
    """The file of sharegpt, custom or spec_bench."""
    num_prompts: int = 1000
    """Prompts to send; with --duration, prompts that are sent in turn."""
    seed: int = 0
    """Of prompts and of arrivals."""
    input_len: int | None = None
    """The same as --random-input-len."""
    output_len: int | None = None
    """Tokens to write for each prompt, whatever the dataset."""
    random_input_len: int = 1024
    """Tokens of each prompt."""
    random_output_len: int = 128
    """Tokens to write for each."""
    random_range_ratio: str = "0.0"
    """Draw lengths within this share of them; a number below 1, or {"input": 0.3, "output": 0.5}."""
    random_prefix_len: int = 0
    """Tokens that all prompts begin with, on top of their length."""
    prefix_repetition_prefix_len: int = 256
    """Tokens of each prefix."""
    prefix_repetition_suffix_len: int = 256
    """Tokens after it, each prompt's own."""
    prefix_repetition_num_prefixes: int = 10
    """Prefixes, used in turn."""
    prefix_repetition_output_len: int = 128
    """Tokens to write for each prompt."""
    sharegpt_output_len: int | None = None
    """Tokens to write for each prompt; by default as many as the file's answer has."""
    custom_output_len: int = 256
    """Tokens to write for each prompt; -1: as many as the line's "output_tokens" says."""
    spec_bench_output_len: int = 256
    """Tokens to write for each prompt."""
    spec_bench_category: str | None = None
    """Take questions of this category only."""
    disable_shuffle: bool = False
    """Take a file's prompts in their order."""
    no_oversample: bool = False
    """Send fewer prompts where a file has fewer, instead of some of them again."""
    skip_chat_template: bool = False
    """Send prompts of custom and spec_bench as they are; by default those to /v1/completions are laid out as a user's message."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("random_prefix_len", "seed") else 1
            if type(value) is int and value < least and not (field.name == "custom_output_len" and value == FROM_FILE):
                raise ConfigError(f"{field.name}: got {value}; must be {least} or more")
        self._refuse_strays()
        if (self.dataset_path is None) == (self.dataset_name in FROM_FILES):
            wanted = "missing; give a file" if self.dataset_path is None else f"got {self.dataset_path}; leave it out"
            raise ConfigError(f"dataset_path, with dataset_name {self.dataset_name!r}: {wanted}")
        if self.dataset_name == "prefix_repetition" and self.num_prompts < self.prefix_repetition_num_prefixes:
            raise ConfigError(
                f"num_prompts: got {self.num_prompts}; must be {self.prefix_repetition_num_prefixes}, the number of "
                "prefixes, or more"
            )
        _ = self.range_ratios

    def _refuse_strays(self) -> None:
        """Options that say something to another dataset would do nothing."""
        for field in fields(self):
            owner = next(
                (n for n in ("random", "prefix_repetition", *FROM_FILES) if field.name.startswith(f"{n}_")), None
            )
            if field.name == "input_len":
                owner = "random"
            if owner not in (None, self.dataset_name) and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{field.name}: given with dataset_name {self.dataset_name!r}, which has no such thing; leave it out"
                )

    @property
    def answer_len(self) -> int | None:
        """Tokens to write for each prompt; None: the file decides."""
        if self.output_len is not None:
            return self.output_len
        length: int | None = getattr(self, f"{self.dataset_name}_output_len")
        return None if length == FROM_FILE else length

    @property
    def prompt_len(self) -> int:
        """Tokens of a random prompt, before its length is varied."""
        return self.random_input_len if self.input_len is None else self.input_len

    @property
    def range_ratios(self) -> tuple[float, float]:
        """By which share prompts, and answers, may be longer or shorter.

        Raises:
            ConfigError: what was given is neither a number nor two of them, or one is out of range.
        """
        try:
            given = json.loads(self.random_range_ratio)
            ratios = (given["input"], given["output"]) if isinstance(given, Mapping) else (given, given)
            shares = float(ratios[0]), float(ratios[1])
        except (ValueError, TypeError, LookupError):
            shares = math.nan, math.nan
        if not all(0 <= share < 1 for share in shares):
            raise ConfigError(
                f"random_range_ratio: got {self.random_range_ratio!r}; must be a number from 0 to below 1, or "
                '{"input": NUMBER, "output": NUMBER}'
            )
        return shares

    def needs_tokenizer(self, *, chat: bool) -> bool:
        """Whether prompts cannot be made without the model's tokenizer, for a chat endpoint or for completions."""
        if self.dataset_name in ("custom", "spec_bench"):
            return not chat and not self.skip_chat_template
        return True
