"""Makes the head that comes with forerun for its default model, from nothing but that model: `make head`.

Each round lets the target write conversations of its own, with a seed of its own, and trains the head of the round before
on them; then, at a third of the rate, the head is trained once more on the last round's texts, and on those of two rounds
more; at last on two larger sets, in larger steps. A round takes some two hours of two cores, the last ones three and sixteen, or
minutes of a GPU; what is interrupted goes on where it was. `--rounds` makes more or fewer of them, and a round that was made
before is not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.models.shipped_heads import FOLDER, TARGET_FILE, HeadTarget
from forerun.models.store import KNOWN_MODELS, resolve_model

MODEL = "smollm2-135m"
NUM_ROUNDS = 4
CONVERSATIONS = 5000
ONCE = ("--epochs", "1", "--keep-features")
LAST_RATE, LAST_CONVERSATIONS, NUM_LAST_SETS = 0.001, 3000, 2
LARGE_SETS = (
    ("--magpie", "12000", "--epochs", "1.65", "--batch-tokens", "8192"),
    ("--magpie", "35000", "--epochs", "4.9", "--batch-tokens", "16384", "--learning-rate", "0.0035"),
)
SHIPPED = ("config.json", "model.safetensors", "README.md")


def train_round(number: int, folder: Path, before: Path | None, exclude: list[str]) -> None:
    """Train one round's head in `folder`, beginning with that of the round before."""
    options = ["--magpie", str(CONVERSATIONS), "--seed", str(number)]
    options += [] if before is None else ["--begin-with", str(before)]
    train(folder, [*options, *ONCE], exclude)


def train_in_small_steps(folder: Path, before: Path, texts: list[str], exclude: list[str]) -> None:
    """Train a head further on the texts that these options name."""
    train(folder, [*texts, "--begin-with", str(before), "--learning-rate", str(LAST_RATE), *ONCE], exclude)


def train_in_large_steps(folder: Path, before: Path, amounts: tuple[str, ...], seed: int, exclude: list[str]) -> None:
    """Train a head further on a larger set of texts, on a GPU where there is one."""
    train(folder, [*amounts, "--seed", str(seed), "--begin-with", str(before), "--device", "auto"], exclude)


def train(folder: Path, options: list[str], exclude: list[str]) -> None:
    """Run `forerun train` with what all heads share."""
    options += ["--layout", "specforge", "--stored-as", "int8"]
    options += [part for file in exclude for part in ("--exclude", file)]
    forerun = Path(sys.executable).with_name("forerun")
    subprocess.run([forerun, "train", MODEL, "--output", str(folder), *options], check=True)


def ship(head: Path) -> None:
    """Put a head where the package has it, and say which target it is for."""
    folder = FOLDER / MODEL
    folder.mkdir(exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(head / name, folder / name)
    licence = f"\nLicence: {KNOWN_MODELS[MODEL].licence}, like that of the target, whose own texts it was trained on.\n"
    with (folder / "README.md").open("a", encoding="utf-8") as card:
        card.write(licence)
    path = resolve_model(MODEL)
    target = load_target(path, EngineSettings(model=MODEL, device="cpu"), torch.device("cpu"))
    made_for = HeadTarget.of(target, title=KNOWN_MODELS[MODEL].title)
    (folder / TARGET_FILE).write_text(json.dumps(made_for.to_json()) + "\n", encoding="utf-8")
    print(folder)


def main() -> None:
    """Make the rounds that are missing, and ship the last one's head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/head"), help="where rounds are kept")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--exclude", action="append", default=[], help="a file of evaluation prompts")
    given = parser.parse_args()
    before = None
    for number in range(given.rounds):
        folder = given.folder / f"round-{number}"
        train_round(number, folder, before, given.exclude)
        before = folder
    if before is not None:
        head = given.folder / "again"
        train_in_small_steps(head, before, ["--texts", str(before)], given.exclude)
        for number in range(NUM_LAST_SETS):
            before, head = head, given.folder / f"last-{number}"
            new_texts = ["--magpie", str(LAST_CONVERSATIONS), "--seed", str(given.rounds + number)]
            train_in_small_steps(head, before, new_texts, given.exclude)
        for number, amounts in enumerate(LARGE_SETS):
            before, head = head, given.folder / f"large-{number}"
            train_in_large_steps(head, before, amounts, given.rounds + NUM_LAST_SETS + number, given.exclude)
        ship(head)


if __name__ == "__main__":
    main()
