"""Lets the target observe the texts that come next while the head trains on those before: each has its own cores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from forerun.ops.native.library import Kernels
from forerun.ops.native.threads import num_threads_to_use
from forerun.train.batches import Part
from forerun.train.observer import ObservedTexts, Observer


def observe_ahead(observer: Observer, parts: Iterator[Part]) -> Iterator[ObservedTexts]:
    """Yield what is observed of each part in turn; the next one is begun in another thread before one is yielded."""
    with ThreadPoolExecutor(max_workers=1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
        coming: Future[ObservedTexts] = thread.submit(observer.observe, next(parts))
        while True:
            found = coming.result()
            coming = thread.submit(observer.observe, next(parts))
            yield found


@contextmanager
def divided_cores(kernels: Kernels | None) -> Iterator[None]:
    """Inside the block the kernels compute on half of the cores and torch on the others, so that neither waits for the other's."""
    before = torch.get_num_threads()
    num_threads = num_threads_to_use()
    of_kernels = max(1, num_threads // 2)
    try:
        torch.set_num_threads(max(1, num_threads - of_kernels))
        if kernels is not None:
            kernels.use_threads(of_kernels)
        yield
    finally:
        torch.set_num_threads(before)
        if kernels is not None:
            kernels.use_threads(num_threads)
