"""The latencies of an answer, by the names that vLLM has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forerun.bench.load.answer import Answer


class Metric(NamedTuple):
    """A latency: its names, and its values in seconds, one per answer or several."""

    short: str
    title: str
    values: Callable[[Answer], Sequence[float]]


METRICS = {
    "ttft": Metric("TTFT", "Time to First Token", lambda answer: [answer.ttft]),
    "tpot": Metric(
        "TPOT",
        "Time per Output Token (excl. 1st token)",
        lambda answer: [] if answer.tpot is None else [answer.tpot],
    ),
    "itl": Metric("ITL", "Inter-token Latency", lambda answer: answer.itls),
    "icl": Metric("ICL", "Inter-chunk Latency", lambda answer: answer.icls),
    "e2el": Metric("E2EL", "End-to-end Latency", lambda answer: [answer.latency]),
    "client_queue_time": Metric("Client Queue Time", "Client-side Queueing", lambda answer: [answer.queue_time]),
    "e2el_including_client_queue": Metric(
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
        lambda answer: [answer.latency + answer.queue_time],
    ),
}

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
