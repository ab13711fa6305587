"""Impossible workloads are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench.workloads import ComparisonWorkload, LatencyWorkload, ThroughputWorkload
from forerun.errors import ConfigError


@pytest.mark.parametrize("name", ["input_len", "output_len", "batch_size", "n", "num_iters"])
def test_latency_counts_are_one_or_more(name):
    with pytest.raises(ConfigError, match=f"{name}: got 0; must be 1 or more"):
        LatencyWorkload(**{name: 0})


def test_a_warm_up_of_no_rounds_is_allowed_but_not_of_less():
    LatencyWorkload(num_iters_warmup=0)
    with pytest.raises(ConfigError, match="num_iters_warmup: got -1; must be 0 or more"):
        LatencyWorkload(num_iters_warmup=-1)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"num_prompts": 0}, "num_prompts: got 0"),
        ({"output_len": -3}, "output_len: got -3"),
        ({"dataset_path": Path("file.json")}, "with dataset_name 'random', which reads none"),
        ({"dataset_name": "sharegpt"}, "dataset_path: missing"),
        ({"dataset_name": "sharegpt", "dataset_path": Path("f"), "input_len": 3}, "whose prompts have their own"),
    ],
)
def test_throughput_options_that_contradict_each_other_are_refused(options, hint):
    with pytest.raises(ConfigError, match=hint):
        ThroughputWorkload(**options)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"num_prompts": 0}, "num_prompts: got 0"),
        ({"repeats": 0}, "repeats: got 0"),
        ({"temperature": -0.5}, "temperature: got -0.5; must be 0 or more"),
        ({"temperature": float("nan")}, "temperature: got nan"),
    ],
)
def test_comparisons_of_nothing_are_refused(options, hint):
    with pytest.raises(ConfigError, match=hint):
        ComparisonWorkload(**options)
