"""The systems that a plan is emitted for, by name."""

from __future__ import annotations

from collections.abc import Callable

from forerun.errors import ConfigError, did_you_mean
from forerun.plan.emit.dynamo import dynamo
from forerun.plan.emit.emission import Emission, EmitRequest
from forerun.plan.emit.forerun_server import compose, forerun, kubernetes
from forerun.plan.emit.ray import ray
from forerun.plan.emit.sglang import sglang
from forerun.plan.emit.speculation import SCHEDULE
from forerun.plan.emit.trtllm import trtllm
from forerun.plan.emit.vllm import vllm
from forerun.plan.record_types import check_schedule

SYSTEMS: dict[str, Callable[[EmitRequest], Emission]] = {
    "forerun": forerun,
    "compose": compose,
    "kubernetes": kubernetes,
    "vllm": vllm,
    "sglang": sglang,
    "trtllm": trtllm,
    "dynamo": dynamo,
    "ray": ray,
}

OWN = ("forerun", "compose", "kubernetes")
"""Systems in which forerun computes: they know its names of models."""

WITH_IMAGE = ("compose", "kubernetes", "dynamo", "ray")
"""Systems whose files name a container image."""


def emit(system: str, request: EmitRequest) -> Emission:
    """Launch files of a plan for a system.

    Raises:
        ConfigError: there is no such system, or it cannot run what is planned.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"--to: got {system!r}{did_you_mean(system, SYSTEMS)}")
    if system not in OWN and "/" not in request.model:
        raise ConfigError(
            f"model: {request.model!r} is a name of forerun's; give the one that {system} knows with --model, a folder or a hub id org/name"
        )
    if request.image is not None and system not in WITH_IMAGE:
        raise ConfigError(
            f"--image: got {request.image!r}, and the files for {system} name no container image; those for "
            f"{', '.join(WITH_IMAGE)} do: leave it out"
        )
    config = request.plan.speculative_config
    if config is not None and not isinstance(config.get("method"), str):
        raise ConfigError(
            f"speculative_config: got method {config.get('method')!r}; the plan must name one: give it with --speculative-config"
        )
    if config is not None and SCHEDULE in config:
        do = "give another with --speculative-config"
        check_schedule("speculative_config", SCHEDULE, config[SCHEDULE], do=do)
    return SYSTEMS[system](request)
