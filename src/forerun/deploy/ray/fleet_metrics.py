"""The metrics of all replicas as one text, each sample with its replica's number in vLLM's label `engine`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ENGINE_LABEL = "engine"


class ReplicaMetrics(NamedTuple):
    """What one replica exposes."""

    rank: int
    replica: str  # its id, which tells replicas apart whose ranks are being changed
    text: str


class _Together(Collector):
    """The families of all replicas, each once."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._families


def together(replicas: Sequence[ReplicaMetrics]) -> bytes:
    """One text in Prometheus' format; a replica's number is its rank, or a free one where another has that rank already."""
    families: dict[tuple[str, str], Metric] = {}
    ranks, labelled = {one.rank for one in replicas}, set[int]()
    free = (number for number in count() if number not in ranks)
    for replica in sorted(replicas):
        number = next(free) if replica.rank in labelled else replica.rank
        labelled.add(replica.rank)
        for family in text_string_to_metric_families(replica.text):
            merged = families.setdefault(
                (family.name, family.type), Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = dict(sample.labels) | {ENGINE_LABEL: str(number)}
                merged.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(_Together(list(families.values())))
    return generate_latest(registry)
