"""llama.cpp: plain decoding through its batch API, prompt lookup through llama-cpp-python."""

from __future__ import annotations

import itertools
from functools import partial
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.workers.protocol import Load, Prompts, Worker, Written, seconds_of, serve


class Context:
    """KV memory for `num_sequences` sequences of `max_model_len` tokens each, and a batch to fill."""

    def __init__(self, model: Any, load: Load, num_sequences: int) -> None:
        num_tokens = num_sequences * load.max_model_len
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = num_tokens
        settings.n_seq_max = num_sequences
        settings.n_threads = settings.n_threads_batch = load.num_threads
        self._context = llama_cpp.llama_init_from_model(model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(num_tokens, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def cut(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of the first sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, num_tokens, -1)

    def forward(self, rows: list[list[int]], *, start: int, all_logits: bool = False) -> None:
        """Run one pass: `rows[i]` are the tokens of sequence i from position `start` on."""
        batch = self._batch
        batch.n_tokens = sum(map(len, rows))
        place = itertools.count()
        for sequence, token_ids in enumerate(rows):
            for offset, token_id in enumerate(token_ids):
                i = next(place)
                batch.token[i], batch.pos[i] = token_id, start + offset
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = all_logits or offset + 1 == len(token_ids)
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"llama_decode failed on {batch.n_tokens} tokens")
        llama_cpp.llama_synchronize(self._context)

    def best_tokens(self, num_sequences: int) -> list[int]:
        """The most likely next token of each sequence."""
        return [int(row.argmax()) for row in self.logits(num_sequences)]

    def logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """The logits of the last pass [rows, vocabulary], which the next one overwrites."""
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(num_rows, self._vocab_size))


def load_model(load: Load) -> Any:
    """llama.cpp's model of a file."""
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    return llama_cpp.llama_model_load_from_file(load.model.encode(), settings)


class Plain:
    """Sequences decoded together, one token each per pass."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._model = load_model(load)
        self._contexts: dict[int, Context] = {}

    def _context(self, num_sequences: int) -> Context:
        """An empty context of this size, made at its first use."""
        if num_sequences not in self._contexts:
            self._contexts[num_sequences] = Context(self._model, self._load, num_sequences)
        self._contexts[num_sequences].clear()
        return self._contexts[num_sequences]

    def generate(self, prompts: Prompts, max_tokens: int) -> Written:
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) != 1:
            raise ValueError(f"prompts: got lengths {sorted(lengths)}; this worker decodes equally long ones together")
        context = self._context(len(prompts))
        written: list[list[int]] = [[] for _ in prompts]
        start = 0
        rows = prompts
        for _ in range(max_tokens):
            context.forward(rows, start=start)
            start += len(rows[0])
            rows = [[token_id] for token_id in context.best_tokens(len(prompts))]
            for token_ids, row in zip(written, rows, strict=True):
                token_ids += row
        return Written(written)

    def curve(self, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        cache = self._context(1)
        token_ids = list(range(1000, 1000 + max(context, *rows)))
        cache.forward([token_ids[:context]], start=0)
        seconds: dict[int, list[float]] = {count: [] for count in rows}
        for _, count in itertools.product(range(repeats), rows):
            work = partial(cache.forward, [token_ids[:count]], start=context, all_logits=True)
            seconds[count].append(seconds_of(work))
            cache.cut(context)
        return seconds


class CountedLookup(LlamaPromptLookupDecoding):  # type: ignore[misc, unused-ignore]
    """Prompt lookup that counts its drafts."""

    drafted = 0
    num_drafts = 0

    def __call__(self, input_ids: Any, /, **settings: Any) -> Any:
        draft = super().__call__(input_ids, **settings)
        self.drafted += len(draft)
        self.num_drafts += 1
        return draft


class PromptLookup:
    """`Llama.generate` with a draft model that looks the last tokens up in the text."""

    def __init__(self, load: Load) -> None:
        self._lookup = CountedLookup(**load.speculation or {})
        self._llama = llama_cpp.Llama(
            load.model,
            n_ctx=load.max_model_len,
            n_batch=load.max_model_len,
            n_threads=load.num_threads,
            n_threads_batch=load.num_threads,
            draft_model=self._lookup,
            verbose=False,
        )

    def generate(self, prompts: Prompts, max_tokens: int) -> Written:
        (prompt,) = prompts
        self._llama.reset()
        self._lookup.drafted = self._lookup.num_drafts = 0
        tokens = self._llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        written = list(itertools.islice(tokens, max_tokens))
        passes = 1 + self._lookup.num_drafts
        return Written([written], drafted=self._lookup.drafted, accepted=max_tokens - passes)


def start(load: Load) -> Worker:
    versions = f"llama-cpp-python {version('llama-cpp-python')}"
    if load.speculation is not None:
        return Worker(version=versions, generate=PromptLookup(load).generate)
    plain = Plain(load)
    return Worker(version=versions, generate=plain.generate, curve=plain.curve)


if __name__ == "__main__":
    serve(start)
