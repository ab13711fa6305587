"""Plans an experiment: its runs, and warnings of settings without effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.experiment.console import ExperimentConsole
from benchmarks.experiment.engines import find_python
from benchmarks.experiment.settings import ENGINE_NAMES, METHODS, Settings
from benchmarks.experiment.start import PLAIN, SPECULATIVE, Run
from benchmarks.peers.install import InstallError


def plan_single(settings: Settings) -> list[Run]:
    """INFERENCE_ENGINE with INFERENCE_METHOD, and with ENABLE_TARGET its plain decoding too."""
    methods = [settings.inference_method, *([PLAIN] if settings.enable_target else [])]
    return [Run(settings.inference_engine, method) for method in dict.fromkeys(methods)]


def plan_comparison(console: ExperimentConsole) -> list[Run]:
    """All installed engines, plain and speculative; transformers' speculation, the baseline, comes first."""
    engines = []
    for engine in ENGINE_NAMES:
        try:
            find_python(engine)
        except InstallError as error:
            console.warn(f"left out: {error}")
        else:
            engines.append(engine)
    baseline = Run("transformers", SPECULATIVE)
    return list(dict.fromkeys([baseline, *(Run(engine, method) for engine in engines for method in METHODS[::-1])]))


def with_all_speculation(settings: Settings) -> Settings:
    """The settings of a comparison, in which speculation is on for all engines."""
    return replace(settings, enable_speculative=True, vllm_enable_speculative=True)


def without_effect(settings: Settings, engines: Sequence[str]) -> list[str]:
    """Warnings of variables that are accepted but have no effect."""
    warnings = []
    if "vllm" in engines and settings.vllm_use_v2_block_manager is not None:
        warnings.append("VLLM_USE_V2_BLOCK_MANAGER has no effect: today's vLLM has one block manager")
    if settings.forerun_speculative_config is not None and settings.drafter_model is not None and "forerun" in engines:
        warnings.append("DRAFTER_MODEL is not forerun's drafter here: FORERUN_SPECULATIVE_CONFIG is")
    return warnings
