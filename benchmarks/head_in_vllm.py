"""Lets vLLM's CPU build draft with a trained head, and compares its acceptance length with forerun's on the same prompts.

    forerun train smollm2-135m --output HEAD ...
    python -m benchmarks.peers install vllm
    python -m benchmarks.head_in_vllm HEAD --chat-prompts FILE --output FILE.json

Both write the same number of tokens greedily, in bf16. Their texts may part at near-ties, so the lengths agree only in
the mean over many prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.engines import PEERS, Contender
from benchmarks.peers.install import DEFAULT_FOLDER, python_of
from benchmarks.peers.prompts import chat_prompts
from benchmarks.peers.run import Setup, start_worker
from forerun.bench.machine import describe_machine
from forerun.errors import ForerunError
from forerun.models.store import resolve_model
from forerun.models.tokenizer import load_tokenizer

NUM_DRAFTED = 3
BATCH = 8
MAX_MODEL_LEN = 1024


def acceptance(name: str, prompts: list[list[int]], *, setup: Setup, head: Path, max_tokens: int) -> dict[str, Any]:
    """Tokens drafted and accepted by an engine, and tokens of a step: one more than are accepted of a draft."""
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFTED}
    contender = Contender(name=f"{name} eagle3", peer=name, speculation=speculation)
    worker = start_worker(contender, python_of(PEERS[name], setup.environments), setup=setup)
    try:
        loaded = worker.ask(
            "load",
            model=str(setup.model),
            max_model_len=MAX_MODEL_LEN,
            num_threads=setup.num_threads,
            speculation=speculation,
        )
        drafted = accepted = 0
        for first in range(0, len(prompts), BATCH):
            answer = worker.ask("generate", prompts=prompts[first : first + BATCH], max_tokens=max_tokens)
            drafted, accepted = drafted + answer["drafted"], accepted + answer["accepted"]
    finally:
        worker.close()
    length = 1 + NUM_DRAFTED * accepted / drafted
    return {"version": loaded["version"], "drafted": drafted, "accepted": accepted, "length": length}


def main() -> None:
    """Measure both engines and say by how much they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="the --output of forerun train, in the layout of speculators")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--chat-prompts", type=Path, required=True, help='a .jsonl file of {"turns": [...]}')
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--venvs", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    try:
        model = resolve_model(given.model)
        setup = Setup(
            model=model,
            num_threads=torch.get_num_threads(),
            environments=given.venvs,
            logs=given.venvs / "logs",
        )
        prompts = list(chat_prompts(load_tokenizer(model), given.chat_prompts))[: given.num_prompts]
        found = {
            name: acceptance(name, prompts, setup=setup, head=given.head.resolve(), max_tokens=given.max_tokens)
            for name in ("forerun", "vllm")
        }
    except ForerunError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    found["difference"] = found["vllm"]["length"] / found["forerun"]["length"] - 1
    record = {
        "machine": describe_machine(torch.device("cpu")),
        "num_prompts": len(prompts),
        "max_tokens": given.max_tokens,
        **found,
    }
    given.output.write_text(json.dumps(record, indent=2) + "\n")
    print(
        f"acceptance length: forerun {found['forerun']['length']:.3f}, vLLM {found['vllm']['length']:.3f} "
        f"({found['difference']:+.1%}), {len(prompts)} prompts of {given.max_tokens} tokens"
    )


if __name__ == "__main__":
    main()
