"""Hugging Face transformers: eager, bf16, one batch; speculation by prompt lookup."""

from __future__ import annotations

import itertools
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.workers.protocol import Load, Prompts, Worker, Written, seconds_of, serve


class Transformers:
    """`generate` of a model in a folder."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.num_threads)
        self._speculation = load.speculation or {}
        self._model: Any = AutoModelForCausalLM.from_pretrained(load.model, dtype=torch.bfloat16)
        self._model.generation_config.eos_token_id = None
        self._passes = 0
        self._model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self._passes += 1

    def generate(self, prompts: Prompts, max_tokens: int) -> Written:
        token_ids = torch.tensor(prompts)
        self._passes = 0
        written = self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **self._speculation,
        )[:, token_ids.shape[1] :].tolist()
        accepted = max_tokens - self._passes if self._speculation else None
        return Written(written, accepted=accepted)

    @torch.inference_mode()
    def curve(self, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        cache = DynamicCache(config=self._model.config)
        vocab_size = self._model.config.vocab_size
        self._model(torch.randint(vocab_size, (1, context)), past_key_values=cache)
        seconds: dict[int, list[float]] = {count: [] for count in rows}
        for _, count in itertools.product(range(repeats), rows):
            token_ids = torch.randint(vocab_size, (1, count))
            seconds[count].append(seconds_of(partial(self._model, token_ids, past_key_values=cache)))
            cache.crop(-count)
        return seconds


def start(load: Load) -> Worker:
    model = Transformers(load)
    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    return Worker(version=versions, generate=model.generate, curve=model.curve)


if __name__ == "__main__":
    serve(start)
