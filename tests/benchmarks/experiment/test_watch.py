"""The tokens that transformers streams become rows and times."""

from __future__ import annotations

import time

import torch

from benchmarks.experiment.workers.transformers import Watch


def test_a_batch_s_rows_end_at_their_end_of_text():
    watch = Watch(2, frozenset({9}), time.perf_counter())
    watch.put(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    for tokens in ([6, 7], [9, 8], [0, 8], [0, 9]):
        watch.put(torch.tensor(tokens))
    assert watch.rows == [[6, 9], [7, 8, 8, 9]]
    assert [len(times) for times in watch.times] == [2, 4]
    assert watch.num_tokens == 7


def test_tokens_verified_together_come_at_one_time():
    watch = Watch(1, frozenset({9}), time.perf_counter())
    watch.put(torch.tensor([[0, 1]]))
    watch.put(torch.tensor([[5, 6, 7]]))
    watch.put(torch.tensor([[8, 9]]))
    assert watch.rows == [[5, 6, 7, 8, 9]]
    assert len(watch.times[0]) == 2
