"""Tokens that `forerun train` trains on in a second: whole steps, with the target's features and the optimiser.

    python -m benchmarks.training_throughput FOLDER [--conversations N] [--keep-features] [--output-json FILE]

FOLDER gets conversations that the target writes, once. Then the same steps are timed in turn as the three phases of a run
take them: while induction heads are taught where to look, after that, and with the hybrid loss of the last third. The
bandwidth of memory is measured before each round, and its buffer is not counted as memory of training.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from forerun.train.torch_environment import set_torch_environment

set_torch_environment()  # as `forerun train` does: torch reads it when it is imported

import torch  # noqa: E402

from benchmarks.command_line import without_folder  # noqa: E402
from forerun.bench.instruments import BandwidthProbe, Stopwatch  # noqa: E402
from forerun.bench.machine import describe_machine  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.train.eagle3_trainer import Eagle3Trainer, Eagle3TrainSettings  # noqa: E402
from forerun.train.probing import peak_memory  # noqa: E402
from forerun.train.run import StageReport, TrainingRun  # noqa: E402
from forerun.train.run_settings import RunSettings  # noqa: E402

STEPS_OF_A_RUN = 1000
PROBE_BYTES = 1 << 30  # more than the caches of servers hold


def phases(settings: Eagle3TrainSettings) -> dict[str, tuple[float, Eagle3TrainSettings]]:
    """Return of each phase of a run its share of the steps, and settings with which all steps are as in it."""
    taught = settings.taught_steps / settings.num_steps
    return {
        "taught": (taught, replace(settings, taught_steps=settings.num_steps, hybrid_share=0.0)),
        "after": (1 - taught - settings.hybrid_share, replace(settings, taught_steps=0, hybrid_share=0.0)),
        "hybrid": (settings.hybrid_share, replace(settings, taught_steps=0, hybrid_share=1.0)),
    }


def tokens_per_second(trainer: Eagle3Trainer, settings: Eagle3TrainSettings, *, first: int, num_steps: int) -> float:
    """Take some steps of a run as these settings say, and return the tokens trained in a second."""
    trainer.settings, trainer.step = settings, first
    begin, before = time.perf_counter(), trainer.num_tokens
    for _ in range(num_steps):
        trainer.run_step()
    return (trainer.num_tokens - before) / (time.perf_counter() - begin)


def show(report: StageReport) -> None:
    """Print how far a stage is."""
    say(f"{report.stage} {report.note}")


def say(note: str) -> None:
    """Show one line, in place of the one before, to whoever looks on."""
    if sys.stderr.isatty():
        print(f"\r{note}\x1b[K", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Write texts if there are none, time the phases in turn, and print medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--conversations", type=int, default=240)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each phase in a round")
    parser.add_argument(
        "--keep-features", action="store_true", help="read the target's features from disk, as trained so"
    )
    parser.add_argument("--output-json", type=Path)
    given = parser.parse_args()
    settings = RunSettings(
        model=given.model,
        output=given.folder,
        magpie=given.conversations,
        epochs=1.0,
        keep_features=given.keep_features,
        seed=given.seed,
    )
    try:
        run = TrainingRun(settings, show)
        if not run.folder.is_done("write"):
            run.write()
        selection = run.mask()
    except ForerunError as error:
        sys.exit(str(error))
    trainer = run.trainer(selection, num_steps=STEPS_OF_A_RUN)
    probe = BandwidthProbe(Stopwatch(torch.device("cpu")), num_bytes=PROBE_BYTES)
    shares = phases(trainer.settings)
    rates: dict[str, list[float]] = {name: [] for name in shares}
    bandwidths = []
    trainer.run_step()  # memory is taken
    for index in range(given.rounds):
        bandwidths.append(probe.measure())
        begin = index % len(shares)
        for name in [*list(shares)[begin:], *list(shares)[:begin]]:  # each is the first of a round in turn
            rates[name].append(
                tokens_per_second(trainer, shares[name][1], first=index * given.steps, num_steps=given.steps)
            )
        say(f"{index + 1} of {given.rounds} rounds")
    medians = {name: median(own) for name, own in rates.items()}
    peak = peak_memory()
    figures = {
        "command": " ".join(["python -m benchmarks.training_throughput", *map(without_folder, sys.argv[1:])]),
        "machine": describe_machine(torch.device("cpu")),
        "texts": {"conversations": len(selection.learned), "tokens": selection.num_tokens},
        "steps_per_phase_and_round": given.steps,
        "gigabytes_per_second": [round(rate / 1e9, 1) for rate in bandwidths],
        "tokens_per_second": {name: [round(rate, 1) for rate in own] for name, own in rates.items()},
        "medians": {name: round(rate, 1) for name, rate in medians.items()},
        "whole_run": round(1 / sum(share / medians[name] for name, (share, _) in shares.items()), 1),
        "peak_bytes": None if peak is None else peak - PROBE_BYTES,
    }
    say("")
    print(json.dumps(figures, indent=2))
    if given.output_json is not None:
        given.output_json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
