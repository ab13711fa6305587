"""Figures of runs for tests, by what matters in them."""

from __future__ import annotations

from forerun.plan.tuning.run_figures import RunFigures, Spread


def spread(seconds):
    return Spread(mean=seconds, p50=seconds, p95=seconds, p99=seconds)


def figures(tokens_per_second, *, latency=1.0, attainment=None, joules=None):
    """A run of 10 requests and 1000 tokens."""
    return RunFigures(
        num_requests=10,
        num_output_tokens=1000,
        seconds=1000 / tokens_per_second,
        ttft=spread(0.1),
        tpot=spread(0.01),
        icl=spread(0.02),
        e2el=spread(latency),
        attainment=attainment,
        joules=joules,
    )
