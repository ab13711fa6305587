"""How many replicas there are, and what decides it: options of `forerun serve --replicas` and `forerun deploy ray`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from forerun.errors import ConfigError

Routing = Literal["prefix", "least-requests", "least-tokens", "round-robin"]
Predictor = Literal["constant", "ar", "kalman", "harmonic"]


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Engines behind one address, on Ray Serve (extra "ray").

    Raises:
        ConfigError: a value is out of range, the options for scaling are not complete, or one is given where it says nothing.
    """

    replicas: int | None = None
    """Engines to serve with, each in a process of its own; by default one, within this process."""
    max_replicas: int | None = None
    """Let the planner choose between --replicas and this many, by the load; needs --scaling-profile and --sla."""
    scaling_profile: Path | None = None
    """The folder of "forerun profile" that the planner chooses by."""
    sla: str | None = None
    """What requests are promised, e.g. ttft=500ms,itl=50ms, as for "forerun plan"."""
    scaling_interval: float = 60.0
    """Seconds from one decision of the planner to the next."""
    scaling_predictor: Predictor = "kalman"
    """What predicts the next interval's load: constant, ar, kalman or harmonic."""
    routing: Routing = "prefix"
    """Which replica gets a request: prefix (has read most of it, has least to do), least-requests, least-tokens, round-robin."""
    replica_start_timeout: int = 600
    """Seconds that all replicas get to load the model; a service that is not healthy by then is given up."""

    def __post_init__(self) -> None:
        if self.replicas is None:
            others = [field.name for field in fields(self) if field.name != "replicas"]
            self._refuse(*others, says="is for replicas, and there are none; give --replicas 1 or more")
            return
        if self.replicas < 1:
            raise ConfigError(f"replicas: got {self.replicas}; must be 1 or more")
        if not 0.0 < self.scaling_interval < math.inf:
            raise ConfigError(f"scaling_interval: got {self.scaling_interval:g}; must be above 0 seconds")
        if self.replica_start_timeout < 1:
            raise ConfigError(f"replica_start_timeout: got {self.replica_start_timeout}; must be 1 second or more")
        scales = [self.max_replicas is not None, self.scaling_profile is not None, self.sla is not None]
        if any(scales) and not all(scales):
            raise ConfigError(
                "max_replicas, scaling_profile, sla: the planner needs all three to choose how many replicas there are; "
                "give them all, or none"
            )
        if self.max_replicas is None:
            self._refuse(
                "scaling_interval", "scaling_predictor", says="is for replicas that scale; give --max-replicas"
            )
        elif self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas: got {self.max_replicas}; must be at least --replicas, {self.replicas}")

    def _refuse(self, *names: str, says: str) -> None:
        """Refuse options that are not as by default where they would be ignored."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise ConfigError(f"{field.name}: got {getattr(self, field.name)}, which {says}, or leave it out")

    @property
    def most(self) -> int:
        """Replicas that there may be."""
        return self.max_replicas or self.replicas or 1


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(ReplicaOptions):
    """The same of a service on a cluster, which has one replica where nothing else is said."""

    replicas: int | None = 1
    """Engines to serve with, each in a process of its own."""


def num_processors() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_replica(options: ReplicaOptions, num_cores: int) -> int:
    """Threads of each replica on a machine, so that all replicas that there may be have cores of their own.

    Raises:
        ConfigError: there are more replicas than cores.
    """
    if options.most > num_cores:
        raise ConfigError(
            f"replicas: got {options.most}, and this machine has {num_cores} cores; may be 1 to {num_cores}, as each "
            "replica computes on cores of its own"
        )
    return num_cores // options.most
