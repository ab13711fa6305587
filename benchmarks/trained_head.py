"""What a trained head brings: its acceptance alone, and the speed of plain decoding, of the head and of auto with it.

    python -m benchmarks.trained_head --chat-prompts FILE --output FILE.json [--head FOLDER]

All write the same prompts in turn, back with every other prompt, one sequence at a time, greedily and at temperature 1; tables and
past answers are empty at the start. The texts must be equal, token for token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.prompts import chat_prompts
from benchmarks.peers.schedule import turn
from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.errors import ForerunError
from forerun.models.shipped_heads import FOLDER
from forerun.models.store import resolve_model
from forerun.models.tokenizer import load_tokenizer

TEMPERATURES = (0.0, 1.0)
WARM_UP = {"prompt": "The sea is", "cache_salt": "warm-up"}  # tables and past answers of other salts stay empty
NUM_DRAFTED = 3
MAX_MODEL_LEN = 2048


@dataclass
class Contender:
    """One way to speculate, and the seconds that each prompt took."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def warm_up(self) -> None:
        """Write something that does not count: the first answer takes longer than others."""
        self.llm.generate(WARM_UP, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
        self.llm.reset_stats()

    def write(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Write one answer."""
        started = time.perf_counter()
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        self.seconds.append(time.perf_counter() - started)
        self.num_tokens += len(output.outputs[0].token_ids)
        return output.outputs[0].token_ids

    def summary(self, plain: Contender) -> dict[str, Any]:
        """Speed against plain decoding, over all prompts and of the worst one, and what became of the drafts."""
        found = self.llm.stats.speculation
        ratios = [a / b for a, b in zip(plain.seconds, self.seconds, strict=True)]
        return {
            "tokens_per_second": self.num_tokens / sum(self.seconds),
            "speed_up": sum(plain.seconds) / sum(self.seconds),
            "worst_prompt": min(ratios),
            "length": found.acceptance_length,
            "per_position": found.acceptance_per_position[:NUM_DRAFTED],
        }


def contenders(model: str, head: str | None) -> dict[str, Contender]:
    """Plain decoding, the head alone, and auto with it."""
    folder = FOLDER / model if head is None else Path(head)
    plain = LLM(model, speculative_config=None, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False)
    own = {"method": "eagle3", "model": str(folder), "quantization": "int8", "draft_sample_method": "coupled"}
    alone = plain.with_speculation({**own, "num_speculative_tokens": NUM_DRAFTED})
    auto = plain.with_speculation({"method": "auto", "drafter": own})
    return {"plain": Contender(plain), "head": Contender(alone), "auto": Contender(auto)}


def main() -> None:
    """Measure, and print one line for each way and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", help="the --output of forerun train; by default the head that comes with forerun")
    parser.add_argument("--chat-prompts", type=Path, required=True, help='a .jsonl file of {"turns": [...]}')
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    try:
        tokenizer = load_tokenizer(resolve_model(given.model))
        prompts = list(chat_prompts(tokenizer, given.chat_prompts))[: given.num_prompts]
        record: dict[str, Any] = {
            "machine": describe_machine(torch.device("cpu")),
            "num_prompts": len(prompts),
            "max_tokens": given.max_tokens,
        }
        for temperature in TEMPERATURES:
            ways = contenders(given.model, given.head)
            for way in ways.values():
                way.warm_up()
            num_equal = 0
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=temperature, seed=number, max_tokens=given.max_tokens)
                texts = [way.write(prompt, params) for way in turn([*ways.values()], number)]
                num_equal += all(text == texts[0] for text in texts)
            found = {name: way.summary(ways["plain"]) for name, way in ways.items()}
            record[f"temperature {temperature:g}"] = {"equal_texts": num_equal, **found}
            for name, one in found.items():
                shares = " ".join(f"{share:.0%}" for share in one["per_position"])
                print(
                    f"temperature {temperature:g}, {name}: {one['tokens_per_second']:.1f} tokens/s, "
                    f"{one['speed_up']:.2f} times plain (worst prompt {one['worst_prompt']:.2f}), "
                    f"{one['length'] or 1:.2f} tokens a step, {shares}"
                )
            print(f"temperature {temperature:g}: {num_equal} of {record['num_prompts']} texts are equal", flush=True)
            given.output.write_text(json.dumps(record, indent=2) + "\n")
    except ForerunError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
