"""The console of an experiment: its lines and warnings, and the texts before a run's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.experiment.settings import Settings
from benchmarks.experiment.start import SPECULATIVE, Run

TITLES = {"forerun": "forerun", "transformers": "Transformers", "vllm": "vLLM"}


@dataclass(slots=True)
class ExperimentConsole:
    """Prints lines and tables, and keeps the warnings among them for the results."""

    console: Console
    warnings: list[str] = field(default_factory=list)

    def print(self, line: str | Table) -> None:
        """Print a table, or a line without markup and wrapping."""
        if isinstance(line, Table):
            self.console.print(line)
        else:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Print a warning and keep it."""
        self.warnings.append(line)
        self.print(f"⚠️  Warning: {line}")


def configuration(settings: Settings, runs: Sequence[Run]) -> list[str]:
    """The lines that show the settings."""
    engines = list(dict.fromkeys(run.engine for run in runs))
    lines = [
        f"Inference Engine: {', '.join(engines)}",
        f"Inference Method: {', '.join(dict.fromkeys(run.method for run in runs))}",
        "",
        f"Target Model: {settings.target_model}",
        f"Drafter Model: {settings.drafter_model or 'none, prompt lookup'}",
        *_work(settings),
        f"Generation Length: {settings.generation_length} tokens",
        f"Gamma: {settings.gamma_value}",
        f"GPU Strategy: {settings.gpu_strategy}",
        f"GPU Monitoring: {_monitoring(settings)}",
        f"Output File: {settings.output_file}",
    ]
    return [*lines, *_vllm(settings)] if "vllm" in engines else lines


def _work(settings: Settings) -> list[str]:
    batches = f"Batch Size: {settings.prompts_per_batch}"
    if settings.num_prompts:
        return [f"Prompts: {settings.num_prompts}", batches]
    return [f"Rate: {settings.auto_rate:g} prompts/s for {settings.auto_duration:g} s", batches]


def _monitoring(settings: Settings) -> str:
    return f"every {settings.gpu_monitor_interval:g} s" if settings.enable_gpu_monitor else "off"


def _vllm(settings: Settings) -> list[str]:
    return [
        "",
        "vLLM Configuration:",
        f"  Tensor Parallel: {settings.vllm_tensor_parallel_size}",
        f"  GPU Memory Utilization: {settings.vllm_gpu_memory_utilization:g}",
        f"  Max Model Length: {settings.vllm_max_model_len or settings.max_model_len}",
        f"  Max Num Seqs: {settings.vllm_max_num_seqs}",
        f"  Data Type: {settings.vllm_dtype or settings.dtype}",
        "",
        "vLLM Speculative Decoding:",
        f"  Enabled: {'Yes' if settings.vllm_enable_speculative else 'No'}",
        f"  Num Speculative Tokens: {settings.num_vllm_speculative_tokens}",
        f"  Use V2 Block Manager: {_block_manager(settings)}",
    ]


def _block_manager(settings: Settings) -> str:
    given = settings.vllm_use_v2_block_manager
    return "built in" if given is None else f"built in (asked for: {str(given).lower()})"


def starting(run: Run) -> str:
    """The line before an engine is loaded."""
    mode = "speculative decoding" if run.method == SPECULATIVE else "target only"
    return f"🚀 Starting the {TITLES[run.engine]} engine ({mode}) ..."


def started(run: Run, version: str, speculation: dict[str, Any] | None, seconds: float) -> list[str]:
    """The lines after an engine was loaded."""
    drafting = ", ".join(f"{name} {value}" for name, value in speculation.items()) if speculation else "nothing"
    return [
        f"  Version: {version}",
        f"  Drafts with: {drafting}",
        f"✅ {TITLES[run.engine]} started in {seconds:.1f} s",
    ]


def fallback(reason: str) -> list[str]:
    """The lines that warn of a fallback to plain decoding."""
    return [f"⚠️  Warning: {reason}", "   Falling back to target-only generation"]
