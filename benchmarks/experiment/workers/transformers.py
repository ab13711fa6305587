"""Hugging Face transformers: plain decoding in padded batches; assisted generation or prompt lookup one by one."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.experiment.workers.protocol import Answer, Load, Prompts, Worker, serve


class Watch(BaseStreamer):  # type: ignore[misc, unused-ignore]
    """Notes when the tokens of each row come. `generate` hands over the prompts first, then verified tokens."""

    def __init__(self, num_rows: int, eos_token_ids: frozenset[int], began: float) -> None:
        self._eos_token_ids = eos_token_ids
        self._began = began
        self._has_prompt = False
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.times: list[list[float]] = [[] for _ in range(num_rows)]  # of each row's `put`s until it ended
        self.num_tokens = 0  # of the longest row, prompt included

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter() - self._began
        if not self._has_prompt:
            self._has_prompt = True
            self.num_tokens = value.shape[-1]
            return
        tokens = value.reshape(len(self.rows), -1).tolist()
        self.num_tokens += len(tokens[0])
        for row, times, new in zip(self.rows, self.times, tokens, strict=True):
            if row and row[-1] in self._eos_token_ids:
                continue
            times.append(now)
            for token_id in new:
                row.append(token_id)
                if token_id in self._eos_token_ids:
                    break

    def end(self) -> None:
        """`generate` calls it after the last token."""


class Transformers:
    """`generate` of a model in a folder."""

    def __init__(self, load: Load) -> None:
        settings, self._speculation = load.settings, dict(load.speculation or {})
        torch.set_num_threads(settings["num_threads"])
        self._model = _load(load.model, settings["dtype"], settings["target_gpus"])
        if path := self._speculation.pop("assistant_model", None):
            assistant = _load(path, settings["dtype"], settings["drafter_gpus"])
            # The same number of tokens each time, however sure the assistant is, as the other engines draft.
            drafting = assistant.generation_config
            drafting.num_assistant_tokens = self._speculation.pop("num_assistant_tokens")
            drafting.num_assistant_tokens_schedule = "constant"
            drafting.assistant_confidence_threshold = 0.0
            self._speculation["assistant_model"] = assistant
        eos: int | list[int] | None = self._model.generation_config.eos_token_id
        self._eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self._watch: Watch | None = None
        self._drafted = 0
        if self._speculation:
            self._model.register_forward_pre_hook(self._count_drafted, with_kwargs=True)

    def _count_drafted(self, _: object, __: object, inputs: dict[str, Any]) -> None:
        """Whatever a pass reads beyond the tokens that are known is drafted."""
        assert self._watch, "passes are run for a batch"
        cache = inputs["past_key_values"]
        num_read = cache.get_seq_length() + inputs["input_ids"].shape[1]
        self._drafted += num_read - self._watch.num_tokens

    def generate(self, prompts: Prompts, max_tokens: int) -> list[Answer]:
        began = time.perf_counter()
        if not self._speculation:
            return self._together(prompts, max_tokens, began)
        # Assisted generation takes one sequence at a time.
        return [self._together([prompt], max_tokens, began)[0] for prompt in prompts]

    def _together(self, prompts: Prompts, max_tokens: int, began: float) -> list[Answer]:
        length = max(map(len, prompts))
        token_ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        watch = self._watch = Watch(len(prompts), self._eos_token_ids, began)
        self._drafted = 0
        self._model.generate(
            token_ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=watch,
            **self._speculation,
        )
        return [
            Answer(
                row,
                first_token_seconds=times[0],
                seconds=times[-1],
                drafted=self._drafted,
                accepted=len(row) - len(times),
            )
            for row, times in zip(watch.rows, watch.times, strict=True)
        ]


def _load(folder: str, dtype: str, gpus: list[int]) -> Any:
    """A model on one device, or its layers spread over several GPUs."""
    placement: dict[str, Any] = {"device_map": f"cuda:{gpus[0]}" if gpus else "cpu"}
    if len(gpus) > 1:
        room = {gpu: torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus}
        placement = {"device_map": "auto", "max_memory": room}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **placement)


def start(load: Load) -> Worker:
    model = Transformers(load)
    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    return Worker(version=versions, generate=model.generate)


if __name__ == "__main__":
    serve(start)
