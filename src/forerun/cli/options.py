"""Options that several commands share: those of the engine, of sampling, and of reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

import forerun
from forerun.core.writable import check_writable_file
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun import SamplingParams

SPECULATIVE_OPTIONS = ("speculative_config", "speculative_model", "speculative_method", "num_speculative_tokens")
DEFAULT_SPECULATION = "default"
PICTURE_FORMATS = (".png", ".svg", ".pdf")
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
"""What is done only where the option is given."""

Words = Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())]
"""Any number of texts behind the option."""

Paths = Annotated[list[Path] | None, Parameter(consume_multiple=True, negative=())]
"""Any number of files or folders behind the option."""

JsonFlag = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]
"""Print one line of JSON for machines, and nothing else, on standard output."""


def parse_duration(_hint: type[Any], tokens: Sequence[Token]) -> float:
    """Parse a duration such as 90s, 10m or 1h30m to seconds.

    Raises:
        ValueError: it is none, or 0.
    """
    text = tokens[-1].value
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = sum(float(number) * SECONDS_PER_UNIT[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != text or not seconds:
        raise ValueError(f"got {text!r}; must be a time above 0 with its units, e.g. 90s, 10m or 1h30m")
    return seconds


Duration = Annotated[float | None, Parameter(converter=parse_duration, n_tokens=1, negative=())]
"""A time with its units, in seconds."""


def parse_object(_hint: type[Any], tokens: Sequence[Token] | Mapping[str, Sequence[Token]]) -> dict[str, Any]:
    """Parse an option given as one JSON object, or as dotted keys with a JSON value or plain text each.

    Hyphens in keys become underscores.

    Raises:
        ValueError: the value is not a JSON object, or a key is nested or given twice, in two spellings too.
    """
    if isinstance(tokens, Mapping):
        items = [(key, _only_value(key, given)) for key, given in tokens.items()]
    else:
        items = list(_json_object(tokens[-1].value).items())
    config: dict[str, Any] = {}
    for key, value in items:
        name = key.replace("-", "_")
        if name in config:
            raise ValueError(f"key {name!r} is given twice; keep one")
        config[name] = value
    return config


def parse_speculation(hint: type[Any], tokens: Sequence[Token] | Mapping[str, Sequence[Token]]) -> dict[str, Any] | str:
    """Like `parse_object`, or the word "auto".

    Raises:
        ValueError: as `parse_object`.
    """
    if isinstance(tokens, Mapping):
        return parse_object(hint, tokens)
    value = tokens[-1].value
    if value == "auto":
        return "auto"
    if re.fullmatch(r"[\w-]+", value):
        raise ValueError(
            f'got {value}; may be auto, or a JSON object such as \'{{"method": "suffix"}}\', for which '
            "--speculative-config.method suffix may be written; --no-speculation for no drafts"
        )
    return parse_object(hint, tokens)


def _json_object(text: str) -> dict[str, Any]:
    example = """'{"key": "value"}'"""
    try:
        value = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); write e.g. {example}") from None
    if not isinstance(value, dict):
        raise ValueError(f"got {text}; must be a JSON object, e.g. {example}")
    return value


def _only_value(key: str, given: Sequence[Token] | Mapping[str, Any]) -> Any:
    if isinstance(given, Mapping):
        raise ValueError(f"key {key!r} has keys of its own; give its value as JSON instead")
    return _typed(given[0].value)


def _typed(text: str) -> Any:
    """`text` parsed as JSON (a number, true, a list, ...), or `text` itself if it is not JSON."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError:
        return text


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; of a key that is given twice JSON would silently keep the last value."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} is given twice; keep one")
    return dict(pairs)


@Parameter(name="*", group=Group("Engine", sort_key=3))
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the model is loaded and run: arguments of `LLM`, with its defaults."""

    speculative_config: Annotated[
        dict[str, Any] | str | None,
        Parameter(converter=parse_speculation, accepts_keys=True, json_dict=False, n_tokens=1, show_default=False),
    ] = DEFAULT_SPECULATION
    """How to draft: auto, a JSON object, or one option per key such as --speculative-config.method suffix. By default
    auto where drafts cannot change any text in any bit (forerun's own kernels), elsewhere not at all."""
    no_speculation: Flag = False
    """Draft nothing: decode plainly."""
    kv_transfer_config: Annotated[
        dict[str, Any] | None,
        Parameter(converter=parse_object, accepts_keys=True, json_dict=False, n_tokens=1),
    ] = None
    """Where hidden states are saved, with the method extract_hidden_states: a JSON object, or one option per key."""
    dtype: str = "auto"
    """Number format of the weights: auto, float32, bfloat16 or float16."""
    quantization: str | None = None
    """Round the weights to fewer bits: int8, int4 or int4-symmetric (native CPU kernels only); by default they stay as they are."""
    activation_dtype: str = "auto"
    """What weights in blocks (GGUF, int4, GPTQ, AWQ) are multiplied with: int8, which is faster, bfloat16, int16, which is as good,
    or auto (the faster of these two)."""
    load_format: str = "auto"
    """Where weights come from: auto (the model's files) or dummy (random ones, to measure speed)."""
    device: str = "auto"
    """Where to run: auto (a GPU if there is one), cpu, cuda or cuda:N."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together, in tokens; by default what model and memory allow."""
    max_num_seqs: int = 64
    """Sequences computed at the same time, at most."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one forward pass, at most."""
    block_size: int = 16
    """Tokens of a block of the KV cache."""
    kv_cache_memory_bytes: int | None = None
    """Memory for the KV cache, in bytes; by default a share of what is free."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory that weights, KV and everything else may take together, above 0 and at most 1."""
    tensor_parallel_size: int = 1
    """Processes of this machine that compute the model together, each on a GPU or on cores of its own."""
    device_step: bool | None = None
    """Compute layers, draw, match and commit tokens on the device; no logits come to the host. By default so on a GPU whose
    kernels can compute the model."""
    device_matmul: Literal["kernels", "torch"] = "kernels"
    """What multiplies in such a step: forerun's kernels, or torch (cuBLAS on a GPU), with which drafts may change texts at
    near-ties."""
    enforce_eager: bool = False
    """On a GPU, launch every step kernel by kernel, without CUDA graphs."""
    cudagraph_capture_sizes: Annotated[list[int] | None, Parameter(consume_multiple=True, negative=())] = None
    """Numbers of rows for which a step on the device is recorded as a CUDA graph; by default 1 to 256, or to four for each of max_num_seqs, at most 1024."""
    kernel_table: Path | None = None
    """File of "forerun tune-kernels" for the GPU's kernels; by default the cached one for this GPU, if there is one."""
    pools_folder: Path | None = None
    """Folder where drafters keep what they learnt from past requests, so that the next start begins with it."""
    seed: int = 0
    """Seed of all sampling: the same seed gives the same text, with or without drafts."""
    speculative_model: str | None = None
    """Deprecated: write --speculative-config.model."""
    speculative_method: str | None = None
    """Deprecated: write --speculative-config.method."""
    num_speculative_tokens: int | None = None
    """Deprecated: write --speculative-config.num-speculative-tokens."""

    def __post_init__(self) -> None:
        if self.no_speculation and self.names_drafter:
            raise ConfigError("--no-speculation: drafts are asked for as well (--speculative-config); leave one out")

    @property
    def names_drafter(self) -> bool:
        """Whether an option says how to draft."""
        return any(asdict(self)[name] not in (None, DEFAULT_SPECULATION) for name in SPECULATIVE_OPTIONS)

    def with_default_speculation(self, config: dict[str, Any] | str, *, need: str) -> EngineOptions:
        """The same options, with `config` if they do not say how to draft themselves.

        Raises:
            ConfigError: they say that nothing is drafted; `need` is why that cannot be.
        """
        if self.no_speculation:
            raise ConfigError(f"--no-speculation: {need}; leave it out")
        return self if self.names_drafter else replace(self, speculative_config=config)

    def without_pools(self) -> EngineOptions:
        """The same options for a measurement, whose answers would take the place of users' in the pools."""
        return replace(self, pools_folder=None)

    def settings(self) -> dict[str, Any]:
        """Keyword arguments for `LLM`."""
        return self.plain_settings() | {
            name: None if self.no_speculation else getattr(self, name) for name in SPECULATIVE_OPTIONS
        }

    def plain_settings(self) -> dict[str, Any]:
        """Keyword arguments for `LLM` without those of speculation."""
        others = ("no_speculation", *SPECULATIVE_OPTIONS)
        return {name: value for name, value in asdict(self).items() if name not in others}

    def asked_speculation(self) -> Mapping[str, Any] | str | None:
        """The `speculative_config` asked for, in the older form too; None if there is none."""
        from forerun.config.speculative_config import merge_deprecated  # torch: only when it is needed

        if not self.names_drafter:
            return None
        given = {name: getattr(self, name) for name in SPECULATIVE_OPTIONS}
        return merge_deprecated(given.pop("speculative_config"), **given)


@Parameter(name="*", group=Group("Engine", sort_key=3))
@dataclass(frozen=True, kw_only=True)
class ServingEngineOptions(EngineOptions):
    """The same for a server, with how requests are sampled that do not say."""

    generation_config: str = "auto"
    """Where requests get the sampling parameters that they leave out: auto (the model's generation_config.json), vllm (none
    of it), or a folder with such a file."""
    override_generation_config: Annotated[
        dict[str, Any] | None,
        Parameter(converter=parse_object, accepts_keys=True, json_dict=False, n_tokens=1),
    ] = None
    """Values in place of that file's: a JSON object, or one option per key such as --override-generation-config.top-p 0.9."""


@Parameter(name="*", group=Group("Sampling", sort_key=2))
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen: fields of `SamplingParams`."""

    max_tokens: int | None = 256
    """Tokens to write, at most; None for as many as fit."""
    temperature: float = 0.0
    """0 always takes the most likely token; 1 samples from the model's own distribution."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 means all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Lower the logits of tokens that were written before by this much."""
    frequency_penalty: float = 0.0
    """Lower the logit of a token by this much for each time it was written before."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens that appeared before by this; 1 means off."""
    min_tokens: int = 0
    """Tokens to write before the text may end."""
    stop: Annotated[list[str] | None, Parameter(negative=())] = None
    """End the text where this string appears; may be given several times."""
    ignore_eos: Flag = False
    """Write on after the model's end-of-text token."""

    def params(self) -> SamplingParams:
        """The options as `SamplingParams`."""
        return forerun.SamplingParams(**asdict(self))


WORKLOAD = Parameter(name="*", group=Group("Workload", sort_key=1), negative=())
"""Makes the fields of a benchmark's workload options of the command."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the figures of a benchmark are written."""

    output_json: Path | None = None
    """Write all figures to this file, as JSON."""
    json_output: JsonFlag = False
    """Print one line of JSON for machines, and nothing else, on standard output."""

    def __post_init__(self) -> None:
        check_writable_file("--output-json", self.output_json)

    def write(self, figures: Mapping[str, Any], *, show: Callable[[], object]) -> None:
        """Show the figures, or print them as JSON, and write the file, as far as the options ask for it.

        Neither a file that cannot be written nor a reader of the output that has gone takes what was measured from the other.
        """
        try:
            if self.json_output:
                print(json.dumps(figures))
            else:
                show()
        finally:
            if self.output_json is not None:
                self.output_json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


REPORT = ReportOptions()


def check_picture(option: str, picture: Path | None) -> None:
    """Refuse a picture file that could not be written after the measurement.

    Raises:
        ConfigError: the file's ending is wrong, it cannot be written, or matplotlib is missing.
    """
    if picture is None:
        return
    if picture.suffix not in PICTURE_FORMATS:
        raise ConfigError(
            f"{option}: cannot write {picture}; give a file that ends in {', '.join(PICTURE_FORMATS)}, in a folder that exists"
        )
    check_writable_file(option, picture)
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option}: matplotlib is not installed; pip install 'forerun[bench]', or leave the picture out"
        )
