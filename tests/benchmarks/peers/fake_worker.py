"""A fake worker that repeats the number of its prompt's tokens, and dies of a prompt that begins with 13."""

from __future__ import annotations

import os

from benchmarks.peers.workers.protocol import Load, Prompts, Worker, Written, serve


def generate(prompts: Prompts, max_tokens: int) -> Written:
    if prompts[0][0] == 13:
        os._exit(3)
    if prompts[0][0] == 14:
        return Written([[1]])
    return Written([[len(prompt)] * max_tokens for prompt in prompts], drafted=2, accepted=1)


def start(load: Load) -> Worker:
    print("what a peer prints is no answer")
    return Worker(version=f"fake {load.num_threads}", generate=generate)


if __name__ == "__main__":
    serve(start)
