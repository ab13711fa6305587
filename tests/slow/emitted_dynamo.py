"""Runs in an environment of Dynamo: its classes read the graph, the planner's settings, the ConfigMap, the mocker's options."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import types
from pathlib import Path


def without_performance_model() -> None:
    """Let the planner be imported where its performance model, which is not on the package index, is missing."""
    for name in ("aisimulate_core", "aisimulate_core.sdk", "aisimulate_core._native"):
        module = types.ModuleType(name)
        module.__getattr__ = lambda attribute: type(attribute, (), {})  # type: ignore[method-assign]
        sys.modules.setdefault(name, module)


def main(graph_file: Path, mocker_script: Path, folder: Path) -> None:
    import yaml

    config_map, graph = yaml.safe_load_all(graph_file.read_text())
    importlib.import_module("dynamo.profiler.utils.config").Config.model_validate(graph)
    arguments = json.loads((folder / "planner.json").read_text())
    planner = importlib.import_module("dynamo.planner.config.planner_config")
    planner.PlannerConfig.model_validate(json.loads(arguments[arguments.index("--config") + 1]))
    for name, text in config_map["data"].items():
        (folder / name).write_text(text)
    latencies = importlib.import_module("dynamo.planner.monitoring.perf_metrics")
    steps = latencies._convert_decode_profiling(str(folder))
    prompts = latencies._convert_prefill_profiling(str(folder))
    mocker = importlib.import_module("dynamo.mocker.args")
    lines = mocker_script.read_text().replace("\\\n", " ").splitlines()
    commands = [line.split("dynamo.mocker", 1)[1].removesuffix(" &") for line in lines if "dynamo.mocker" in line]
    started = [mocker.parse_args(shlex.split(words)) for words in commands]
    resolved = mocker.resolve_planner_profile_data(started[-1].planner_profile_data)
    found = {
        "step_ms": [1e3 * one.wall_time for one in steps],
        "prompt_tokens": [one.scheduled_requests.sum_prefill_tokens for one in prompts],
        "mocker_times": str(resolved.npz_path),
        "mocked": [[one.disaggregation_mode, one.num_workers] for one in started],
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    without_performance_model()
    main(*map(Path, sys.argv[1:]))
