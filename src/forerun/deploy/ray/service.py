"""The service on Ray Serve: its settings, its start with a deadline, and its orderly end.

Ray is imported where it is used, so that the rest of forerun neither needs it nor waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import forerun.errors
from forerun.deploy.ray.installation import check_ray
from forerun.deploy.ray.options import ReplicaOptions, num_processors, threads_per_replica
from forerun.deploy.ray.planned_drafts import planned_methods
from forerun.deploy.ray.prefix_header import IMPORT_PATH, IMPORT_VARIABLE
from forerun.deploy.ray.replica import EngineReplica, ReplicaSpec
from forerun.errors import ConfigError, ModelError
from forerun.plan.profile import Profile
from forerun.plan.sla import parse_sla

DEPLOYMENT = "engine"
ROUTER = "forerun.deploy.ray.prefix_router:PrefixRouter"
POLICY = "forerun.deploy.ray.planner_policy:PlannerPolicy"

OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes; requests and chunks are small, and weights are mapped from files, not from there."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
NOT_STARTED = "NOT_STARTED"
POLL_S = 0.25
WATCH_S = 5.0
HEALTH_PERIOD_S = 2.0
CONNECT_S = 5.0
KEEP_ALIVE_S = 60  # as of `forerun serve`
START_ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What one replica takes of a machine."""

    num_cpus: float
    num_gpus: float = 0.0
    num_threads: int | None = None  # None: as many as it has CPUs

    def bundles(self, num_ranks: int) -> list[dict[str, float]]:
        """What each process of a tensor-parallel replica takes; GPUs are the first one's, which is the replica itself.

        Raises:
            ConfigError: there are fewer threads than processes.
        """
        threads = self.num_threads or int(self.num_cpus)
        if threads < num_ranks:
            raise ConfigError(
                f"tensor_parallel_size: got {num_ranks}, but a replica computes with {threads} threads, of which each process "
                f"needs one; lower it to {max(1, threads)} or less, or give replicas more processors (--cpus-per-replica, or "
                "fewer --replicas on one machine)"
            )
        each = {"CPU": self.num_cpus / num_ranks}
        first = each | ({"GPU": self.num_gpus} if self.num_gpus else {})
        return [first, *(dict(each) for _ in range(1, num_ranks))]


def deployment_settings(spec: ReplicaSpec, options: ReplicaOptions, placement: Placement) -> dict[str, Any]:
    """Arguments of `serve.deployment`.

    Raises:
        ConfigError: the profile or the SLA by which replicas scale cannot be read, the profile has not the drafts of the
            replicas, or a tensor-parallel replica has more processes than threads.
    """
    threads = placement.num_threads or max(1, int(placement.num_cpus))
    server = spec.options
    limit = int(spec.settings.get("max_num_seqs", 64)) + server.max_queue
    settings: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        },
        "max_ongoing_requests": limit,
        "max_queued_requests": limit,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": float(server.shutdown_timeout),
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_PERIOD_S,
        "max_constructor_retry_count": START_ATTEMPTS,
        "max_surge_percent": 100,  # of a service that is replaced: the old replicas serve until the new ones do
        "request_router_config": {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"routing": options.routing},
        },
    }
    num_ranks = int(spec.settings.get("tensor_parallel_size", 1))
    if num_ranks > 1:
        # the ranks share memory, so they are on one machine; the actor is the first of them and starts the others
        bundles = placement.bundles(num_ranks)
        settings["ray_actor_options"]["num_cpus"] = bundles[0]["CPU"]
        settings |= {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}
    if options.max_replicas is None:
        settings["num_replicas"] = options.replicas
    else:
        settings["autoscaling_config"] = _autoscaling(spec, options)
    return settings


def _autoscaling(spec: ReplicaSpec, options: ReplicaOptions) -> dict[str, Any]:
    if options.scaling_profile is None or options.sla is None:  # refused by the options themselves
        raise ConfigError("max_replicas: needs scaling_profile and sla")
    parse_sla(options.sla)
    methods = planned_methods(Profile.load(options.scaling_profile), spec.settings)
    return {
        "min_replicas": options.replicas,
        "initial_replicas": options.replicas,
        "max_replicas": options.max_replicas,
        # the policy has its own interval and its own hysteresis
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 5.0,
        "policy": {
            "policy_function": POLICY,
            "policy_kwargs": {
                "profile": str(options.scaling_profile.resolve()),
                "sla": options.sla,
                "interval": options.scaling_interval,
                "predictor": options.scaling_predictor,
                "methods": methods,
            },
        },
    }


class RayService:
    """An application on Ray Serve.

    Args:
        name: of the application.
        report: shows a line to whoever started it.
    """

    def __init__(self, name: str, *, report: Callable[[str], None] = print) -> None:
        check_ray()
        self.name = name
        self._report = report
        self._has_ray = False
        self._is_own = False
        logging.getLogger("ray.serve").setLevel(logging.WARNING)

    def start_ray(self, *, num_cpus: int) -> None:
        """Start Ray on this machine, for this service alone: no dashboard, no telemetry, nothing listens elsewhere."""
        # Ray's processes inherit the environment; the middleware is loaded in its proxy
        os.environ.update(QUIET | {IMPORT_VARIABLE: IMPORT_PATH})
        import ray

        self._has_ray = self._is_own = True
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
        )

    def join_ray(self, address: str) -> None:
        """Use a cluster that runs.

        Raises:
            ConfigError: there is none at the address.
        """
        os.environ.update(QUIET)
        import ray

        _check_answers(address)
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, error) from None
        self._has_ray = True

    def start_serve(self, *, host: str, port: int, proxies: str = "HeadOnly") -> None:
        """Start Ray Serve; where it runs already, its address stays as it is, and Ray says so.

        Raises:
            ConfigError: its HTTP proxy cannot listen there.
        """
        from ray import serve
        from ray.exceptions import RayError

        try:
            serve.start(
                proxy_location=proxies,
                http_options={"host": host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S},
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
        except RayError as error:
            serve.shutdown()  # its proxy would try for ever
            raise ConfigError(
                f"--host {host} --port {port}: Ray's HTTP proxy cannot listen there ({_reason(str(error))}); stop what does, "
                "or give another --port"
            ) from None

    def deploy(
        self,
        spec: ReplicaSpec,
        settings: dict[str, Any],
        *,
        route_prefix: str = "/",
        timeout: float,
        stopped: threading.Event,
    ) -> None:
        """Deploy, and wait until all replicas are healthy, or `stopped` is set.

        Where a service of this name runs, its replicas go on until the new ones are healthy; where only their number
        is another, those that stay are left alone.

        Raises:
            ConfigError: Ray refuses the application's name or prefix.
            ModelError: replicas could not start, or were not healthy in time; a new service is removed then.
        """
        from ray import serve
        from ray.serve.api import RunTarget
        from ray.serve.exceptions import RayServeException

        is_new = self.state()[0] == NOT_STARTED
        deployment = serve.deployment(**settings)(serve.ingress()(EngineReplica))
        deployment = deployment.options(version=_fingerprint(spec, settings), _internal=True)
        target = RunTarget(target=deployment.bind(spec), name=self.name, route_prefix=route_prefix)
        try:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except RayServeException as error:  # another application answers at its prefix, say
            raise ConfigError(
                f"--name {self.name} --route-prefix {route_prefix}: {_reason(str(error))} Give others"
            ) from error
        deadline = time.monotonic() + timeout
        while not stopped.wait(POLL_S):
            state, message = self.state()
            if state == "RUNNING" and self._is_listening():
                return
            if state in ("DEPLOY_FAILED", "UNHEALTHY"):
                if is_new:
                    self.delete()
                raise ModelError(f"replicas: they do not start: {_reason(message)}")
            if time.monotonic() > deadline:
                if is_new:
                    self.delete()
                raise ModelError(
                    f"replicas: not healthy within {timeout:g} s (--replica-start-timeout): {_reason(message) or state}; "
                    "see the logs in /tmp/ray/session_latest/logs/serve"
                )

    def state(self) -> tuple[str, str]:
        """The application's state in Ray's words, and what Ray says of it and of its deployment."""
        from ray import serve

        application = serve.status().applications.get(self.name)
        if application is None:
            return NOT_STARTED, ""
        messages = [application.message, *(one.message for one in application.deployments.values())]
        return application.status.value, max(messages, key=len)

    @staticmethod
    def _is_listening() -> bool:
        """Whether Ray's HTTP proxies answer, which start beside the replicas."""
        from ray import serve

        proxies = serve.status().proxies
        return bool(proxies) and all(one.value == "HEALTHY" for one in proxies.values())

    def watch(self, stopped: threading.Event) -> None:
        """Say when the service is not well, and when it is again, until `stopped` is set."""
        last = "RUNNING"
        while not stopped.wait(WATCH_S):
            state, message = self.state()
            if state != last:
                self._report(f"service: {state.lower()}{f': {_reason(message)}' if message else ''}")
            last = state

    def delete(self) -> None:
        """Take the application away, and wait until it is: requests that run may finish, for as long as its replicas let them."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        with suppress(RayError, RayServeException, ConnectionError):  # Ray is gone
            serve.delete(self.name, _blocking=False)  # it would wait for a minute, however long they have
            while self.state()[0] != NOT_STARTED:
                time.sleep(POLL_S)

    def close(self) -> None:
        """Leave Ray; where this process started it, the service ends orderly, and Ray with it."""
        if not self._has_ray:
            return
        import ray

        if self._is_own:
            self.delete()
        ray.shutdown()


def serve_here(spec: ReplicaSpec, options: ReplicaOptions, *, report: Callable[[str], None] = print) -> None:
    """Serve with replicas on this machine until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: Ray is absent, there are more replicas than cores, or the address cannot be listened on.
        ModelError: the replicas do not start.
    """
    from forerun.server.serve import listen, url_host  # the extra "serve"

    num_cores = num_processors()
    threads = threads_per_replica(options, num_cores)
    settings = deployment_settings(spec, options, Placement(num_cpus=threads, num_threads=threads))
    service = RayService("forerun", report=report)
    with listen(spec.options.host, spec.options.port) as sock:  # taken: said before Ray starts, which would only log it
        port: int = sock.getsockname()[1]
    try:
        service.start_ray(num_cpus=num_cores)
        stopped = _when_stopped()  # after Ray, which puts a handler of its own there
        service.start_serve(host=spec.options.host, port=port)
        report(f"Ray is up; {_replicas(options)} {spec.settings['model']}, {threads} threads each")
        spec = replace(spec, host=spec.options.host)
        service.deploy(spec, settings, timeout=options.replica_start_timeout, stopped=stopped)
        if not stopped.is_set():
            report(f"ready: http://{url_host(spec.options.host)}:{port} (Ctrl-C stops)")
            service.watch(stopped)
    finally:
        service.close()


def deploy_on_cluster(
    spec: ReplicaSpec,
    options: ReplicaOptions,
    placement: Placement,
    *,
    address: str,
    name: str,
    route_prefix: str,
    proxies: str,
    report: Callable[[str], None] = print,
) -> None:
    """Deploy on a cluster that runs, wait until the replicas are healthy, and leave them there.

    Raises:
        ConfigError: Ray is absent, or no cluster answers.
        ModelError: the replicas do not start.
    """
    settings = deployment_settings(spec, options, placement)
    service = RayService(name, report=report)
    try:
        service.join_ray(address)
        service.start_serve(host=spec.options.host, port=spec.options.port, proxies=proxies)
        report(f"{_replicas(options)} {spec.settings['model']}")
        service.deploy(
            spec, settings, route_prefix=route_prefix, timeout=options.replica_start_timeout, stopped=threading.Event()
        )
        report(f"healthy: application {name!r}; forerun deploy ray-stop --name {name} takes it away")
    finally:
        service.close()


def remove_from_cluster(name: str, address: str) -> None:
    """Take an application away; requests that run may finish.

    Raises:
        ConfigError: Ray is absent, no cluster answers, or it has no such application.
    """
    service = RayService(name)
    try:
        service.join_ray(address)
        state, _ = service.state()
        if state == NOT_STARTED:
            raise ConfigError(f"--name {name}: the cluster at {address} has no such application")
        service.delete()
    finally:
        service.close()


def _check_answers(address: str) -> None:
    """Refuse an address where nothing listens, at which Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        return  # "auto", a name or a client's address: Ray finds out itself
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"--address {address}: no Ray cluster answers there ({error}); start one with 'ray start --head', or give "
        "the address of its head; a cluster that asks for tokens, as Ray's do by default, needs RAY_AUTH_MODE=token here too"
    )


def _when_stopped() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set; a second one interrupts."""
    stopped = threading.Event()

    def obey(_signal: int, _frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, obey)
    return stopped


def _fingerprint(spec: ReplicaSpec, settings: Mapping[str, Any]) -> str:
    """What each replica runs, as a version: Ray starts replicas anew where it is another."""
    parts = (spec, settings["ray_actor_options"], settings.get("placement_group_bundles"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _replicas(options: ReplicaOptions) -> str:
    return "1 replica loads" if options.replicas == 1 else f"{options.replicas} replicas load"


def _reason(message: str) -> str:
    """The last line of what Ray says, which is the error; the rest is where it was raised. Of our own errors, and Ray Serve's, the text alone."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return re.sub(rf"^({forerun.errors.__name__}|ray\.serve\.exceptions)\.\w+: ", "", (errors or lines or [""])[-1])
