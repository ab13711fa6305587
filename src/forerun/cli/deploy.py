"""`forerun deploy ray`: replicas of a model on a Ray cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter
from cyclopts.config import Env

from forerun.cli.command import examples
from forerun.cli.options import ServingEngineOptions
from forerun.cli.serve import ENGINE, SERVER, replica_spec
from forerun.cli.whole_numbers import refuse_fractions
from forerun.deploy.ray.options import ServiceOptions
from forerun.errors import ConfigError
from forerun.server.options import ServerOptions

ROUTE_PREFIX = re.compile(r"/|(/[^/{}\s]+)+")
Proxies = Literal["HeadOnly", "EveryNode"]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Where on the cluster the service runs.

    Raises:
        ConfigError: a value is out of range.
    """

    address: str = "auto"
    """Address of the cluster's head, or auto: the one that runs on this machine, or that RAY_ADDRESS names."""
    name: str = "forerun"
    """Name of the application; one of the same name is replaced, without a request failing."""
    route_prefix: str = "/"
    """Where on the address the service answers: clients add /v1 to it."""
    cpus_per_replica: float = 1.0
    """Processors that a replica takes, its processes of --tensor-parallel-size together; it computes with as many threads."""
    gpus_per_replica: float = 0.0
    """GPUs that a replica takes."""
    proxies: Proxies = "HeadOnly"
    """Machines that listen: HeadOnly, whose router knows all requests; EveryNode, where each knows its own."""

    def __post_init__(self) -> None:
        if not self.cpus_per_replica > 0:
            raise ConfigError(f"cpus_per_replica: got {self.cpus_per_replica:g}; must be above 0")
        if not self.gpus_per_replica >= 0:
            raise ConfigError(f"gpus_per_replica: got {self.gpus_per_replica:g}; must be 0 or more")
        if not ROUTE_PREFIX.fullmatch(self.route_prefix):
            raise ConfigError(
                f"route_prefix: got {self.route_prefix!r}; must be / or begin with one, not end with one, and have no braces"
            )
        if not self.name.strip():
            raise ConfigError("name: got an empty one; give a name, or leave it out for that of forerun's own")


CLUSTER, REPLICAS = ClusterOptions(), ServiceOptions()

deploy = App(
    name="deploy",
    help="Run several engines as one service on a cluster.",
    help_epilogue=examples(
        "  forerun deploy ray smollm2-135m --replicas 4\n"
        "  forerun deploy ray smollm2-135m --replicas 1 --max-replicas 8 --scaling-profile profile --sla ttft=1s,itl=50ms\n"
        "  forerun deploy ray-stop"
    ),
    config=(Env("FORERUN_", command=False, show=False), refuse_fractions),
)


@deploy.command
def ray(
    model: str,
    /,
    *,
    cluster: Annotated[ClusterOptions, Parameter(name="*", negative=(), group=Group("Cluster", sort_key=1))] = CLUSTER,
    replicas: Annotated[
        ServiceOptions, Parameter(name="*", negative=(), group=Group("Replicas", sort_key=2))
    ] = REPLICAS,
    server: Annotated[ServerOptions, Parameter(name="*", negative=(), group=Group("Server", sort_key=3))] = SERVER,
    engine: ServingEngineOptions = ENGINE,
) -> None:
    """Deploy replicas of a model on a Ray cluster, wait until they are healthy, and leave them running.

    Args:
        model: A folder, a .gguf file, a known name or a hub id org/name, as every machine of the cluster finds it.
    """
    from forerun.deploy.ray.installation import check_ray

    check_ray()
    from forerun.deploy.ray.service import Placement, deploy_on_cluster

    if replicas.replicas is None:
        raise ConfigError("replicas: missing; give --replicas, e.g. --replicas 2")
    deploy_on_cluster(
        replica_spec(model, server, engine),
        replicas,
        Placement(num_cpus=cluster.cpus_per_replica, num_gpus=cluster.gpus_per_replica),
        address=cluster.address,
        name=cluster.name,
        route_prefix=cluster.route_prefix,
        proxies=cluster.proxies,
    )


@deploy.command(name="ray-stop")
def ray_stop(*, name: str = CLUSTER.name, address: str = CLUSTER.address) -> None:
    """Take a service away; requests that run may finish.

    Args:
        name: Name of the application.
        address: Address of the cluster's head, or auto.
    """
    from forerun.deploy.ray.installation import check_ray

    check_ray()
    from forerun.deploy.ray.service import remove_from_cluster

    remove_from_cluster(name, address)
