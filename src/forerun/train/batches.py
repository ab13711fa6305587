"""Divides the texts of a training run into batches, a function of the seed: whoever goes on gets the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from forerun.train.selection import LearnedText

Part = list[LearnedText]
"""Texts that are computed at once."""


class Batches:
    """The texts in another random order each epoch, `batch_tokens` a step on average, in parts of similar length.

    A batch takes one more text where at least half of it fits, so that some batches are larger and some smaller.
    A part has at most `pass_tokens` tokens, padding included, unless a single text has more.
    """

    def __init__(self, texts: Sequence[LearnedText], *, batch_tokens: int, pass_tokens: int, seed: int) -> None:
        self._texts, self._batch_tokens, self._pass_tokens, self._seed = texts, batch_tokens, pass_tokens, seed
        self._firsts: list[int] = []  # of each epoch that was planned, the step that begins it
        self._planned: list[list[list[int]]] = []  # of each epoch, texts by batch

    @property
    def mean_tokens(self) -> float:
        """Tokens of a batch: more than `batch_tokens` where single texts have more."""
        if not self._planned:
            self._plan_epoch()
        return sum(len(text.token_ids) for text in self._texts) / len(self._planned[0])

    def parts(self, step: int) -> list[Part]:
        """The texts of a step, counted from 0."""
        while not self._planned or step >= self._firsts[-1] + len(self._planned[-1]):
            self._plan_epoch()
        epoch = max(epoch for epoch, first in enumerate(self._firsts) if first <= step)
        batch = self._planned[epoch][step - self._firsts[epoch]]
        return list(self._parts([self._texts[index] for index in batch]))

    def _plan_epoch(self) -> None:
        epoch = len(self._planned)
        source = torch.Generator().manual_seed(self._seed * 1000 + epoch)
        batches: list[list[int]] = [[]]
        room = self._batch_tokens
        for index in torch.randperm(len(self._texts), generator=source).tolist():
            num_tokens = len(self._texts[index].token_ids)
            if batches[-1] and num_tokens > 2 * room:
                batches.append([])
                room = self._batch_tokens
            batches[-1].append(index)
            room -= num_tokens
        self._firsts.append(self._firsts[-1] + len(self._planned[-1]) if self._planned else 0)
        self._planned.append(batches)

    def _parts(self, batch: Sequence[LearnedText]) -> Iterator[Part]:
        part: Part = []
        for text in sorted(batch, key=lambda text: len(text.token_ids)):
            if part and len(text.token_ids) * (len(part) + 1) > self._pass_tokens:
                yield part
                part = []
            part.append(text)
        yield part
