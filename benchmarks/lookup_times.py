"""Times the look-ups of drafts on recorded texts, and the decision of what is verified; and what a long prompt costs.

Run: python -m benchmarks.lookup_times RECORDING [--sequences 1 8 32 64] [--plain]
RECORDING is a file of `forerun bench replay`. Each sequence commits a token a step, and gets a draft of at most 16
nodes, as far as they may pay on a typical processor; medians over all steps. A decision is what an engine asks of `AdaptiveLength` in a step: how much of each draft is
verified, and how much is drafted for each sequence then. --plain times the definitions in Python instead of the compiled look-ups.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.stats import SpeculationStats
from forerun.drafters.base import DraftContext, DraftRequest, TargetInfo, VerifiedRows
from forerun.drafters.lookup.algorithms import PlainLookup, best_lookup
from forerun.drafters.lookup.drafter import LookupDrafter
from forerun.engine.adaptive import AdaptiveLength

MAX_NODES = 16
LONG_PROMPT = 100_000  # tokens


def drafter(*, is_plain: bool) -> LookupDrafter:
    """A drafter for any small target."""
    target = TargetInfo(vocab_size=1 << 17, max_model_len=1 << 17, num_speculative_tokens=MAX_NODES)
    lookup = PlainLookup() if is_plain else best_lookup()
    return LookupDrafter(target, table_bytes=64 << 20, pool_bytes=16 << 20, lookup=lookup)


def sequence(number: int, prompt_ids: list[int], output_ids: list[int]) -> Sequence:
    """A sequence of its own."""
    return Sequence(seq_id=number, prompt_ids=prompt_ids, output_ids=output_ids, sampling=SamplingParams(), seed=0)


def time_steps(texts: list[dict[str, Any]], num_sequences: int, *, is_plain: bool) -> dict[str, float]:
    """Run batches of texts in lockstep; microseconds per step of `learn`, `propose` and the decision, and nodes per draft."""
    lookup, control = drafter(is_plain=is_plain), AdaptiveLength(MAX_NODES)
    learning: list[float] = []
    drafting: list[float] = []
    deciding: list[float] = []
    stats = [SpeculationStats() for _ in range(num_sequences)]
    num_nodes, limit = 0, MAX_NODES
    for first in range(0, max(len(texts) - num_sequences, 1), num_sequences):
        batch = (texts * num_sequences)[first : first + num_sequences]
        running = [sequence(first + i, text["prompt"], text["answer"][:1]) for i, text in enumerate(batch)]
        for one in running:
            lookup.start(one)
        for place in range(1, min(len(text["answer"]) for text in batch)):
            before = [one.tokens_from(len(one) - 2) for one in running]
            for one, text in zip(running, batch, strict=True):
                one.output_ids.append(text["answer"][place])
            rows = VerifiedRows(
                token_ids=np.array([tokens[-1] for tokens in before]),
                previous_ids=np.array([tokens[0] for tokens in before]),
                candidate_ids=np.array([text["top"][place] for text in batch], dtype=np.int32),
                candidate_logits=np.array([text["logprobs"][place] for text in batch], dtype=np.float32),
                salts=[(row, row + 1, None) for row in range(num_sequences)],
            )
            least = control.min_survival
            requests = [DraftRequest(one, limit, MAX_NODES, min_survival=least) for one in running]
            start = time.perf_counter()
            lookup.learn(rows)
            learnt = time.perf_counter()
            drafts = lookup.propose(DraftContext(requests=requests))
            drafting.append(1e6 * (time.perf_counter() - learnt))
            num_tokens = sum(map(len, running))
            chosen = time.perf_counter()
            lengths = control.choose(
                drafts, num_rows=num_sequences, num_sequences=num_sequences, num_context_tokens=num_tokens
            )
            limit = control.draft_limit(num_sequences)
            taken = time.perf_counter() - chosen
            verified = [draft.first(length) for draft, length in zip(drafts, lengths, strict=True)]
            limiting = time.perf_counter()
            for of_sequence, verifying in zip(stats, verified, strict=True):
                control.limit_of(of_sequence, limit, verifying=verifying)
            deciding.append(1e6 * (taken + time.perf_counter() - limiting))
            learning.append(1e6 * (learnt - start))
            num_nodes += sum(map(len, drafts))
        for one in running:
            lookup.stop(one)
    return {
        "learn": statistics.median(learning),
        "propose": statistics.median(drafting),
        "decide": statistics.median(deciding),
        "nodes": num_nodes / len(drafting) / num_sequences,
    }


def time_long_prompt(*, is_plain: bool) -> float:
    """Milliseconds until a long prompt is indexed, the best of five."""
    source = random.Random(0)
    prompt = [source.randrange(1 << 17) for _ in range(LONG_PROMPT)]
    lookup, seconds = drafter(is_plain=is_plain), []
    for number in range(5):
        start = time.perf_counter()
        lookup.start(sequence(number, prompt, []))
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def main() -> None:
    """Print a line per number of sequences, and one for the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.recording.read_text().splitlines()]
    texts = [line for line in lines if len(line.get("answer", ())) >= 100]
    random.Random(0).shuffle(texts)
    for num_sequences in options.sequences:
        found = time_steps(texts, num_sequences, is_plain=options.plain)
        print(
            f"{num_sequences} sequences: learn {found['learn']:.0f} us, propose {found['propose']:.0f} us, decide {found['decide']:.0f} us a step; "
            f"{found['nodes']:.1f} nodes a draft"
        )
    print(f"prompt of {LONG_PROMPT} tokens: {time_long_prompt(is_plain=options.plain):.1f} ms")


if __name__ == "__main__":
    main()
