"""How long a plan takes, on one core, from a profile as large as a real one: by layout, for loads and SLAs of each kind.

Run: python -m benchmarks.plan_speed [--profile FOLDER] [--json FILE]

Without a profile it plans from one that is made up: 40 texts of 256 tokens, and five configurations with a trace each, chains
and trees of up to 16 nodes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forerun
from forerun.core.cpu_name import describe_processor
from forerun.engine.costs import PRIOR
from forerun.plan.deployment_plan import Layout
from forerun.plan.deployment_planner import PlanningOptions, plan_deployment
from forerun.plan.draft_trace import NOTHING, DraftTrace, TracedDraft, TracedText
from forerun.plan.load import Load
from forerun.plan.profile import TRACES_FOLDER, Profile
from forerun.plan.sla import Sla
from forerun.plan.step_times import DraftingCost, MeasuredRange, StepTimeModel

NUM_TEXTS, NUM_TOKENS, LONGEST = 40, 256, 16
CHAIN = tuple(range(-1, LONGEST - 1))
TREE = tuple(node // 2 - 1 for node in range(LONGEST))  # two roots, and two children of each node
CONFIGS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": LONGEST},
    "ngram": {"method": "ngram", "num_speculative_tokens": LONGEST},
    "recycle": {"method": "recycle", "num_speculative_tokens": LONGEST},
    "hybrid": {
        "method": "hybrid",
        "num_speculative_tokens": LONGEST,
        "drafters": [{"method": "suffix"}, {"method": "recycle", "num_speculative_tokens": 15}],
    },
    "auto": {"method": "auto"},
}
LAYOUTS = {
    "aggregated": (Layout.AGGREGATED,),
    "disaggregated": (Layout.DISAGGREGATED,),
    "any": tuple(Layout),
}
CASES = {  # load, SLA, budget
    "few engines": (Load(rate=20, isl=300, osl=100), Sla(ttft=1.0, tpot=0.05), None),
    "hundreds of engines": (Load(rate=2000, isl=300, osl=100), Sla(ttft=1.0, tpot=0.05), None),
    "a budget that is too small": (Load(rate=20, isl=300, osl=100), Sla(ttft=1.0, tpot=0.05), 4),
    "a limit that no engine keeps": (Load(rate=20, isl=300, osl=100), Sla(ttft=0.001, tpot=0.05), None),
    "the same, within a budget": (Load(rate=20, isl=300, osl=100), Sla(ttft=0.001, tpot=0.05), 32),
    "a load that no fleet takes": (Load(rate=1e7, isl=300, osl=100), Sla(ttft=1.0, tpot=0.05), None),
}


def made_up(folder: Path) -> Profile:
    """A profile of the size of a real one, with its traces in a folder."""
    source = random.Random(0)
    (folder / TRACES_FOLDER).mkdir()
    traces, acceptance = {}, {}
    for name in CONFIGS:
        parents = CHAIN if name in ("suffix", "ngram") else TREE
        texts = [_text(parents, source) for _ in range(NUM_TEXTS)]
        trace = DraftTrace.of_texts(name, CONFIGS[name]["method"], LONGEST, texts)
        traces[name] = folder / TRACES_FOLDER / f"{name}.npz"
        trace.save(traces[name])
        acceptance[name] = trace.acceptance()
    measured = MeasuredRange(rows=2048, sequences=32, context_tokens=32_768, prompt_rows=2048)
    return Profile(
        model="made up",
        machine="none",
        kernels="none",
        dtype="bfloat16",
        version=forerun.__version__,
        gigabytes_per_second=20.0,
        weight_bytes=270_000_000,
        kv_bytes_per_token=23_040,
        vocab_size=49_152,
        num_blocks=4096,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        step_times=StepTimeModel([0.008 * weight for weight in (*PRIOR, 0.0, 1e-5)], measured=measured),
        configs=CONFIGS,
        drafting=dict.fromkeys(CONFIGS, DraftingCost(seconds_per_step=1e-4)),
        acceptance=acceptance,
        traces=traces,
    )


def _text(parents: tuple[int, ...], source: random.Random) -> TracedText:
    def draft() -> TracedDraft:
        size = source.randint(1, LONGEST)
        right: list[int] = []
        for node in range(size):
            above = right[-1] if right else -1
            if parents[node] == above and source.random() < 0.5:
                right.append(node)
        return TracedDraft(size, parents[:size], None, None, tuple(right))

    return TracedText(kind="x", num_prompt_tokens=200, drafts=[NOTHING, *(draft() for _ in range(NUM_TOKENS - 1))])


def measure(profile: Profile, case: str, layouts: tuple[Layout, ...], repeats: int) -> dict[str, float]:
    """The least seconds of processor time of some repeats, and the engines that were planned."""
    load, sla, budget = CASES[case]
    options = PlanningOptions(layouts=layouts, most_engines=budget)
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        plan, _ = plan_deployment(profile, load, sla, options)
        seconds.append(time.process_time() - start)
    return {"processor_seconds": min(seconds), "engines": plan.replicas, "feasible": plan.feasible}


def main() -> None:
    """Plan each case in each layout, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = Profile.load(arguments.profile) if arguments.profile else made_up(Path(folder))
        profile = replace(profile, version=forerun.__version__)
        rows = [
            {"case": case, "layout": layout} | measure(profile, case, LAYOUTS[layout], arguments.repeats)
            for case in CASES
            for layout in LAYOUTS
        ]
    assert "torch" not in sys.modules, "planning is meant to do without"
    print(f"{describe_processor()}, Python {sys.version.split()[0]}, {len(profile.configs)} configurations\n")
    print(f"{'case':30} {'layout':14} {'seconds':>8} {'engines':>8}")
    for row in rows:
        said = "" if row["feasible"] else "  infeasible"
        print(f"{row['case']:30} {row['layout']:14} {row['processor_seconds']:8.2f} {row['engines']:8}{said}")
    if arguments.json:
        document = {
            "processor": describe_processor(),
            "profile": profile.model,
            "configurations": list(profile.configs),
            "texts": NUM_TEXTS,
            "tokens": NUM_TOKENS,
            "results": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
