"""The engine's own settings, in vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from forerun.config.device import check_triton, choose_device
from forerun.config.vllm_arguments import without_vllms_own
from forerun.core.finite_numbers import is_number
from forerun.core.integers import check_integer, is_integer
from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.models.generation_config import SamplingDefaults
from forerun.ops.cuda.system import InstalledCuda

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
GRAPH_ROWS_PER_SEQUENCE = 4  # where many run at once: nearly each of their steps reads a prompt beside them
LOAD_FORMATS = ("auto", "dummy")
ACTIVATION_DTYPES = ("auto", "bfloat16", "int16", "int8")
DEVICE_MATMULS = ("kernels", "torch")

KERNEL_SETTINGS = (
    *("activation_dtype", "device_step", "device_matmul", "enforce_eager", "cudagraph_capture_sizes", "kernel_table"),
)
"""Settings of how a step is computed, which change what it takes, and which forerun's engines alone have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What `LLM(model, **settings)` takes, with vLLM's names where vLLM has the setting.

    Attributes:
        dtype: "auto" is the checkpoint's on a GPU. On a CPU it is bfloat16 for a bfloat16 checkpoint on the native kernels,
            else float32, since torch's bfloat16 is neither faster nor exact under speculation there.
        quantization: "int8", "int4" or "int4-symmetric" rounds the weights to so many bits (native CPU kernels only).
        activation_dtype: what weights in blocks (GGUF, int4, GPTQ, AWQ) are multiplied with. "int16" and "int8" are whole
            numbers in blocks of 32 with a scale: the first as good as bfloat16, the second faster, with other texts. "auto" is
            "int16" on processors that multiply such numbers faster, else "bfloat16".
        load_format: "dummy" makes up random weights, to measure speed without a checkpoint. A folder without a tokenizer
            then takes token ids only.
        max_model_len: tokens of the longest sequence; None: what model and memory allow.
        kv_cache_memory_bytes: None: a quarter of the free memory, at most 4 GiB (CPU), or what `gpu_memory_utilization`
            leaves (GPU).
        speculative_config: vLLM's dict, "auto" for a drafter that chooses by itself, or None. "default" is "auto" where no
            draft can change the text in any bit, as on the native CPU kernels, and None elsewhere.
        pools_folder: where drafters keep what they remember of past requests, so that the next process begins with it;
            None: in memory only.
        tensor_parallel_size: processes of this machine that compute the target together, each on a GPU or on CPU cores of
            its own.
        device_step: True: texts, rules and drafts lie in tables on the device, which computes layers, draws and matches
            tokens itself, so that no logits come to the host. Verification is by matching, and rules that only the host can
            follow are refused. None: True on a GPU where its kernels can compute the model, else False.
        device_matmul: "torch" has such a step multiply by torch (cuBLAS on a GPU) in place of forerun's kernels. Then a row's
            bits may depend on the rows beside it, and drafts may change texts at near-ties.
        kernel_table: a file of `forerun tune-kernels` for the GPU's kernels; None: the one in the cache folder that was made
            for this GPU and this version of triton, if there is one.
        enforce_eager: record no step as a CUDA graph; all are launched kernel by kernel.
        cudagraph_capture_sizes: numbers of rows for which such a step is recorded as a CUDA graph. Rows are padded up to the
            next number; a step with more than the last one is launched kernel by kernel. None: 1 to 256, or to four rows for
            each of max_num_seqs, at most 1024, as far as max_num_batched_tokens goes.
        generation_config: where sampling parameters come from that a request leaves out: "auto" is the model's
            generation_config.json, "vllm" none, else the folder of such a file.
        override_generation_config: keys of that file with values that take the place of its own; None takes one away.

    Raises:
        ModelError: the folder of `generation_config` has no such file that could be read.
        ConfigError: a value is out of range or the settings do not fit each other.
    """

    model: str
    tokenizer: str | PathLike[str] | None = None
    dtype: str | torch.dtype = "auto"
    quantization: str | None = None
    activation_dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    seed: int = 0
    speculative_config: Mapping[str, Any] | str | None = "default"
    speculative_model: str | None = None
    speculative_method: str | None = None
    num_speculative_tokens: int | None = None
    kv_transfer_config: Mapping[str, Any] | None = None
    pools_folder: str | PathLike[str] | None = None
    tensor_parallel_size: int = 1
    device_step: bool | None = None
    device_matmul: str = "kernels"
    kernel_table: str | PathLike[str] | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    generation_config: str | PathLike[str] = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    trust_remote_code: bool = False

    @classmethod
    def from_keywords(cls, model: str, settings: Mapping[str, Any]) -> EngineSettings:
        """Check the keywords and make the settings."""
        own = without_vllms_own(settings)
        refuse_unknown_keys(own, [f.name for f in fields(cls)], where="LLM")
        return cls(model=model, **own)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size"):
            check_integer(name, getattr(self, name), least=1)
        for name, least in (("max_model_len", 2), ("kv_cache_memory_bytes", 1), ("num_gpu_blocks_override", 1)):
            if (given := getattr(self, name)) is not None:
                check_integer(name, given, least=least)
        self._check_types()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}; must be at least max_num_seqs ({self.max_num_seqs}), "
                "so that each sequence gets a row; raise it or lower max_num_seqs"
            )
        if self.device_step and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size: got {self.tensor_parallel_size}; with device_step=True it must be 1, as other processes "
                "keep KV where the step cannot move it; leave one of them out"
            )
        if self.device_matmul not in DEVICE_MATMULS:
            raise ConfigError(f"device_matmul: got {self.device_matmul!r:.80}; may be {', '.join(DEVICE_MATMULS)}")
        if not is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization: got {self.gpu_memory_utilization!r:.80}; must be above 0 and at most 1"
            )
        if self.trust_remote_code is not False:
            raise ConfigError(
                f"trust_remote_code: got {self.trust_remote_code!r:.80}; may be False, as forerun runs no code from checkpoints; "
                "leave it out"
            )
        self._need_path("tokenizer", "a folder, a .gguf file or a known name; leave it out to take the model's")
        self._need_path("pools_folder", "a folder; leave it out to keep none")
        self._need_path("kernel_table", "a file; leave it out to take the cached one")
        self._check_generation()
        self._check_graphs()
        self._check_weights()

    @property
    def kernel_settings(self) -> dict[str, Any]:
        """Those of `KERNEL_SETTINGS` that are not as they are by default, as JSON has them."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name in KERNEL_SETTINGS}
        changed = {f.name: given[f.name] for f in fields(self) if f.name in given and given[f.name] != f.default}
        return {name: str(value) if isinstance(value, PathLike) else value for name, value in changed.items()}

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of rows for which steps are recorded as CUDA graphs, rising."""
        if self.cudagraph_capture_sizes is None:
            most = min(self.max_num_batched_tokens, max(256, GRAPH_ROWS_PER_SEQUENCE * self.max_num_seqs))
            return tuple(size for size in GRAPH_SIZES if size <= most)
        return tuple(sorted(set(self.cudagraph_capture_sizes)))

    def sampling_defaults(self, model: Path | None) -> SamplingDefaults:
        """What requests to a model, a folder or a file, are sampled by where they say nothing.

        Raises:
            ModelError, ConfigError: see `SamplingDefaults.read`.
        """
        return SamplingDefaults.read(self.generation_config, self.override_generation_config, model=model)

    def _check_types(self) -> None:
        if not is_integer(self.seed):
            raise ConfigError(f"seed: got {self.seed!r:.80}; must be an integer; leave it out for 0")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching: got {self.enable_prefix_caching!r:.80}; may be True or False")
        if not isinstance(self.device, str):
            raise ConfigError(f"device: got {self.device!r:.80}; may be auto, cpu, cuda or cuda:N")
        if not isinstance(self.device_step, bool | None):
            raise ConfigError(f"device_step: got {self.device_step!r:.80}; may be True, False or None")

    def _check_graphs(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError(f"enforce_eager: got {self.enforce_eager!r:.80}; may be True or False")
        if sizes is None:
            return
        is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) > 0
        if not is_list or not all(type(size) is int and 1 <= size <= self.max_num_batched_tokens for size in sizes):
            raise ConfigError(
                f"cudagraph_capture_sizes: got {sizes!r:.80}; must be numbers of rows from 1 to max_num_batched_tokens "
                f"({self.max_num_batched_tokens}); leave it out, or set enforce_eager=True for no graphs"
            )

    def _check_generation(self) -> None:
        """Refuse what gives no sampling parameters, as far as it shows without the model."""
        source, overrides = self.generation_config, self.override_generation_config
        if not isinstance(source, str | PathLike):
            raise ConfigError(f"generation_config: got {source!r:.80}; may be 'auto', 'vllm' or a folder")
        if not isinstance(overrides, Mapping | None):
            raise ConfigError(
                f"override_generation_config: got {overrides!r:.80}; must be a dict such as {{'temperature': 0.5}}, or None"
            )
        self.sampling_defaults(None)

    def _check_weights(self) -> None:
        """How weights are read and stored."""
        dtype = self.torch_dtype
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format: got {self.load_format!r}; may be {', '.join(LOAD_FORMATS)}")
        if self.activation_dtype not in ACTIVATION_DTYPES:
            raise ConfigError(f"activation_dtype: got {self.activation_dtype!r}; may be {', '.join(ACTIVATION_DTYPES)}")
        if self.quantization is not None:
            # Here, not above: the table of formats loads torch.
            from forerun.ops.native.formats import check_quantization

            check_quantization(self.quantization)
        named = {"quantization": self.quantization, "activation_dtype": self.activation_dtype}
        for name, value in named.items():
            if value not in (None, "auto") and dtype not in (None, torch.bfloat16):
                raise ConfigError(
                    f"dtype: got {self.dtype!r} with {name}={value!r}; may be auto or bfloat16; leave it out"
                )

    def _need_path(self, name: str, what: str) -> None:
        value = getattr(self, name)
        if value is not None and not isinstance(value, (str, PathLike)):
            raise ConfigError(f"{name}: got {value!r:.80}; must be {what}")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype asked for, by its name or as torch's own; None for "auto"."""
        if self.dtype == "auto":
            return None
        name = str(self.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ConfigError(f"dtype: got {self.dtype!r:.80}; may be auto, {', '.join(DTYPES)}")
        return DTYPES[name]

    @property
    def torch_device(self) -> torch.device:
        """The device asked for; "auto" takes CUDA where there is one.

        Raises:
            ConfigError: there is no such device, or it cannot be used.
        """
        installed = InstalledCuda()
        device = choose_device(self.device, installed)
        may_use_kernels = device.type == "cuda" and self.device_step is not False
        if may_use_kernels and (self.device_step or self.kernel_table is not None or installed.triton is not None):
            check_triton(installed, needed_by="device_step" if self.device_step else "kernel_table")
        elif self.kernel_table is not None:
            raise ConfigError(
                f"kernel_table: got {str(self.kernel_table)!r:.200}, but device {device} computes without the kernels that it is "
                "for; set device_step=True on a GPU, or leave it out"
            )
        return device
