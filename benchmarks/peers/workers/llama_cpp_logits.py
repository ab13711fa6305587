"""llama.cpp: the logits by which it would go on after each token of a text, one token at a time as it decodes.

    {"load": {"model": ..., "max_model_len": ..., "num_threads": ...}}
    {"logits": {"prompt": [token ids], "answer": [token ids], "file": ...}}

The second writes fp32 [answer, vocabulary] to the file: row i follows the prompt and the first i tokens of the answer.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.peers.workers.llama_cpp import Context, load_model
from benchmarks.peers.workers.protocol import Load, exchange


def logits(context: Context, prompt: list[int], answer: list[int], file: str) -> None:
    """Write the logits of an answer to a file."""
    context.clear()
    context.forward([prompt], start=0)
    rows = [context.logits(1)[0].copy()]
    for place, token_id in enumerate(answer[:-1]):
        context.forward([[token_id]], start=len(prompt) + place)
        rows.append(context.logits(1)[0].copy())
    np.save(file, np.stack(rows))


def main() -> None:
    """Answer requests until standard input ends."""
    context: Context | None = None

    def answer(request: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal context
        if request == "load":
            load = Load(**arguments, speculation=None)
            context = Context(load_model(load), load, 1)
            return {"version": f"llama-cpp-python {version('llama-cpp-python')}"}
        if request == "logits" and context is not None:
            logits(context, **arguments)
            return {"file": arguments["file"]}
        return None

    exchange(answer)


if __name__ == "__main__":
    main()
