"""The engines: interpreter, environment variables, and settings under each engine's own names."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiment.placement import Placement
from benchmarks.experiment.settings import Settings, others
from benchmarks.peers.engines import PEERS
from benchmarks.peers.install import DEFAULT_FOLDER, python_of
from forerun.errors import ConfigError

LOOKUP_MIN, LOOKUP_MAX = 1, 4
"""Tokens that prompt lookup matches, the same for all engines; the minimum of transformers is fixed at 1."""

Keywords = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Engine:
    """Translates the settings to an engine's keywords: for plain decoding, and for drafting with a drafter's folder."""

    name: str
    settings: Callable[[Settings, Placement], Keywords]
    speculation: Callable[[Settings, Path | None], Keywords]


def _forerun_settings(settings: Settings, placement: Placement) -> Keywords:
    keywords = {
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.prompts_per_batch,
        "seed": settings.seed,
    }
    if placement.is_auto:
        return keywords
    if len(placement.target) > 1 or placement.target != placement.drafter:
        raise ConfigError(
            f"TARGET_GPU, DRAFTER_GPU: got GPUs {placement.target} and {placement.drafter}; forerun keeps target and "
            "drafter on one; use GPU_STRATEGY=same or auto"
        )
    return {**keywords, "device": f"cuda:{placement.target[0]}" if placement.target else "cpu"}


def _forerun_speculation(settings: Settings, drafter: Path | None) -> Keywords:
    if settings.forerun_speculative_config is not None:
        return dict(settings.forerun_speculative_config)
    return _like_vllm(settings.gamma_value, drafter)


def _transformers_settings(settings: Settings, placement: Placement) -> Keywords:
    return {
        "dtype": settings.dtype,
        "num_threads": torch.get_num_threads(),
        "target_gpus": placement.target,
        "drafter_gpus": placement.drafter,
    }


def _transformers_speculation(settings: Settings, drafter: Path | None) -> Keywords:
    if drafter is None:
        return {"prompt_lookup_num_tokens": settings.gamma_value, "max_matching_ngram_size": LOOKUP_MAX}
    return {"assistant_model": str(drafter), "num_assistant_tokens": settings.gamma_value}


def _vllm_settings(settings: Settings, placement: Placement) -> Keywords:
    num_gpus = settings.vllm_tensor_parallel_size * settings.vllm_pipeline_parallel_size
    if placement.target and len(placement.target) < num_gpus:
        raise ConfigError(
            f"VLLM_TENSOR_PARALLEL_SIZE x VLLM_PIPELINE_PARALLEL_SIZE: got {num_gpus}; the target has "
            f"{len(placement.target)} GPUs; lower them or give it more"
        )
    optional = {
        "max_num_batched_tokens": settings.vllm_max_num_batched_tokens,
        "quantization": settings.vllm_quantization,
    }
    return {
        "dtype": settings.vllm_dtype or settings.dtype,
        "max_model_len": settings.vllm_max_model_len or settings.max_model_len,
        "max_num_seqs": settings.vllm_max_num_seqs,
        "tensor_parallel_size": settings.vllm_tensor_parallel_size,
        "pipeline_parallel_size": settings.vllm_pipeline_parallel_size,
        "gpu_memory_utilization": settings.vllm_gpu_memory_utilization,
        "disable_log_stats": settings.vllm_disable_log_stats,
        "seed": settings.seed,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _vllm_speculation(settings: Settings, drafter: Path | None) -> Keywords:
    return _like_vllm(settings.num_vllm_speculative_tokens, drafter)


def _like_vllm(num_tokens: int, drafter: Path | None) -> Keywords:
    """A speculative_config of vLLM, which forerun takes too."""
    if drafter is None:
        lookup = {"prompt_lookup_min": LOOKUP_MIN, "prompt_lookup_max": LOOKUP_MAX}
        return {"method": "ngram", "num_speculative_tokens": num_tokens, **lookup}
    return {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": num_tokens}


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("forerun", _forerun_settings, _forerun_speculation),
        Engine("transformers", _transformers_settings, _transformers_speculation),
        Engine("vllm", _vllm_settings, _vllm_speculation),
    )
}


def find_python(engine: str) -> Path:
    """The interpreter that has the engine: this one, or else that of the peers' environment.

    Raises:
        InstallError: neither has the engine.
    """
    if importlib.util.find_spec(engine) is not None:
        return Path(sys.executable)
    return python_of(PEERS[engine], DEFAULT_FOLDER)


def environment_of(engine: str, python: Path, placement: Placement, caller: Mapping[str, str]) -> dict[str, str]:
    """Variables of the engine's process: threads as its documentation recommends, then the caller's own variables."""
    num_threads = torch.get_num_threads()
    values = {"threads": str(num_threads), "cores": f"0-{num_threads - 1}", "venv": str(python.parent.parent)}
    environment = {name: value.format(**values) for name, value in PEERS[engine].environment.items()}
    if not os.path.exists(environment.get("LD_PRELOAD", "")):
        environment.pop("LD_PRELOAD", None)
    if engine == "vllm" and placement.target and not placement.is_auto:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(caller)[index] for index in placement.target)
    return environment | others(caller, f"{engine.upper()}_")


def num_visible_gpus() -> int:
    """The number of GPUs that torch sees."""
    return torch.cuda.device_count()


def _visible(caller: Mapping[str, str]) -> list[str]:
    given = caller.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(num_visible_gpus())]
