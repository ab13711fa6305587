"""The load to send: which prompts, and when, with the options and defaults of `vllm bench serve`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from forerun.errors import ConfigError

Backend = Literal["openai", "openai-chat"]
"""The API to load: completions or chat completions."""

DatasetName = Literal["random", "sharegpt", "custom", "prefix_repetition", "spec_bench"]

FROM_FILES = ("sharegpt", "custom", "spec_bench")
OWNERS: Mapping[str, tuple[str, ...]] = {
    "input_len": ("random",),
    "disable_shuffle": ("prefix_repetition", *FROM_FILES),
    "no_oversample": FROM_FILES,
    "skip_chat_template": ("custom", "spec_bench"),
}
"""Datasets that have an option, where its name does not say so."""

MOST_REQUESTS = 10**8  # whose times of arrival are drawn at once: 8 bytes each

LENGTH_FROM_FILE = -1  # an output length that each line of the file gives


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The source of prompts and the lengths of answers; an option that begins with a dataset's name is for it alone."""

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
            if (
                type(value) is int
                and value < least
                and not (field.name == "custom_output_len" and value == LENGTH_FROM_FILE)
            ):
                raise ConfigError(f"{field.name}: got {value}; must be {least} or more")
        self._refuse_options_of_other_datasets()
        self._refuse_two_lengths()
        if (self.dataset_path is None) == (self.dataset_name in FROM_FILES):
            wanted = "missing; give a file" if self.dataset_path is None else f"got {self.dataset_path}; leave it out"
            raise ConfigError(f"dataset_path, with dataset_name {self.dataset_name!r}: {wanted}")
        if self.dataset_name == "prefix_repetition" and self.num_prompts < self.prefix_repetition_num_prefixes:
            raise ConfigError(
                f"num_prompts: got {self.num_prompts}; must be {self.prefix_repetition_num_prefixes}, the number of "
                "prefixes, or more"
            )
        _ = self.range_ratios

    def _refuse_options_of_other_datasets(self) -> None:
        """Refuse options that this dataset would ignore."""
        for field in fields(self):
            owners = OWNERS.get(field.name) or [
                name for name in get_args(DatasetName) if field.name.startswith(f"{name}_")
            ]
            if owners and self.dataset_name not in owners and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{field.name}: given with dataset_name {self.dataset_name!r}, which has no such thing; leave it out"
                )

    def _refuse_two_lengths(self) -> None:
        """Refuse a length that is given by both of its names, of which one would be ignored."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("input_len", "output_len"):
            own = f"{self.dataset_name}_{name}"
            if getattr(self, name) is not None and getattr(self, own, None) != defaults.get(own):
                raise ConfigError(
                    f"{name}: got {getattr(self, name)}, and {own} {getattr(self, own)}, which is the same; give one"
                )

    @property
    def answer_len(self) -> int | None:
        """Tokens to generate for each prompt, or None where the file gives them."""
        if self.output_len is not None:
            return self.output_len
        length: int | None = getattr(self, f"{self.dataset_name}_output_len")
        return None if length == LENGTH_FROM_FILE else length

    @property
    def prompt_len(self) -> int:
        """Mean tokens of a random prompt."""
        return self.random_input_len if self.input_len is None else self.input_len

    @property
    def range_ratios(self) -> tuple[float, float]:
        """The shares by which prompts and answers may be longer or shorter than asked for.

        Raises:
            ConfigError: the option is neither a number nor a pair of numbers, or a number is out of range.
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
        """Whether the prompts need the model's tokenizer, given that the endpoint is chat or completions."""
        if self.dataset_name in ("custom", "spec_bench"):
            return not chat and not self.skip_chat_template
        return True


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """When requests are sent: all at once, at a constant or rising rate, or each when an answer ends."""

    request_rate: float = math.inf
    """Requests per second on average; inf sends them all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts, inf is a fixed beat."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Let the rate rise over the requests, from --ramp-up-start-rps to --ramp-up-end-rps."""
    ramp_up_start_rps: float | None = None
    """Requests per second at the start of the rise."""
    ramp_up_end_rps: float | None = None
    """Requests per second at its end."""
    max_concurrency: int | None = None
    """Requests under way at the same time, at most; the others wait on this side."""
    duration: float | None = None
    """Send for this many seconds instead of a number of requests; those under way are waited for."""
    num_warmups: int = 0
    """Requests sent before the clock counts."""

    def __post_init__(self) -> None:
        for name, least in (("max_concurrency", 1), ("num_warmups", 0)):
            value = vars(self)[name]
            if value is not None and value < least:
                raise ConfigError(f"{name}: got {value}; must be {least} or more")
        for name in ("request_rate", "burstiness", "duration", "ramp_up_start_rps", "ramp_up_end_rps"):
            value = vars(self)[name]
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: got {value}; must be more than 0")
        for name in ("duration", "ramp_up_start_rps", "ramp_up_end_rps"):
            if vars(self)[name] == math.inf:
                raise ConfigError(f"{name}: got inf; must be a number")
        self._check_ramp()
        self._check_count()
        if self.burstiness != 1.0 and not self.has_rate:
            raise ConfigError(
                f"burstiness: got {self.burstiness:g}, and there is no rate, of whose gaps it is the shape; give request_rate or a "
                "ramp-up too, or leave it out"
            )
        if self.is_closed_loop and self.max_concurrency is None:
            raise ConfigError(
                "duration: got no limit on what is sent in that time; give request_rate, max_concurrency or a ramp-up too"
            )

    def _check_count(self) -> None:
        """Refuse rates whose gaps are no numbers, and more requests than can be drawn."""
        for name in ("request_rate", "ramp_up_start_rps"):
            lowest = vars(self)[name]
            if lowest is not None and not math.isfinite(1.0 / lowest):
                raise ConfigError(f"{name}: got {lowest:g}, at which no request would ever be sent; give a higher rate")
        highest = self.request_rate if self.ramp_up_end_rps is None else self.ramp_up_end_rps
        if self.duration is not None and math.isfinite(highest) and self.duration * highest > MOST_REQUESTS:
            raise ConfigError(
                f"duration: got {self.duration:g} s at {highest:g} requests per second; may be {MOST_REQUESTS:g} requests at most"
            )

    def _check_ramp(self) -> None:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ConfigError("ramp_up_start_rps, ramp_up_end_rps: given without ramp_up_strategy; give that too")
            return
        if start is None or end is None:
            raise ConfigError(f"ramp_up_strategy: got {self.ramp_up_strategy!r}; give its start and end rps too")
        if start > end:
            raise ConfigError(f"ramp_up_start_rps: got {start:g}; must be at most ramp_up_end_rps, {end:g}")
        if self.request_rate != math.inf:
            raise ConfigError(f"request_rate: got {self.request_rate:g} with a ramp-up, which sets it; leave one out")

    @property
    def is_closed_loop(self) -> bool:
        """Whether the end of an answer triggers the next request, until the time is up."""
        return self.duration is not None and not self.has_rate

    @property
    def has_rate(self) -> bool:
        """Whether requests are spread over time."""
        return self.ramp_up_strategy is not None or self.request_rate != math.inf
