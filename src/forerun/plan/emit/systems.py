"""The systems that a plan is emitted for, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.errors import ConfigError, did_you_mean
from forerun.plan.emit.dynamo import dynamo
from forerun.plan.emit.emission import Emission, EmitRequest
from forerun.plan.emit.forerun_server import compose, forerun, kubernetes
from forerun.plan.emit.ray import ray
from forerun.plan.emit.sglang import sglang
from forerun.plan.emit.speculation import check_schedule_of
from forerun.plan.emit.trtllm import trtllm
from forerun.plan.emit.vllm import vllm
from forerun.plan.profile import SCHEDULE


@dataclass(frozen=True, slots=True)
class System:
    """A system, by what its files need.

    `write` makes the files. `is_own`: forerun computes in it, so that it knows forerun's names of models. `has_image`: its
    files name a container image. `reads_profile`: something in them comes from the folder of `forerun profile`.
    """

    write: Callable[[EmitRequest], Emission]
    is_own: bool = False
    has_image: bool = False
    reads_profile: bool = False


SYSTEMS = {
    "forerun": System(forerun, is_own=True, reads_profile=True),
    "compose": System(compose, is_own=True, has_image=True, reads_profile=True),
    "kubernetes": System(kubernetes, is_own=True, has_image=True, reads_profile=True),
    "vllm": System(vllm),
    "sglang": System(sglang),
    "trtllm": System(trtllm),
    "dynamo": System(dynamo, has_image=True, reads_profile=True),
    "ray": System(ray, has_image=True),
}


def emit(system: str, request: EmitRequest) -> Emission:
    """Launch files of a plan for a system.

    Raises:
        ConfigError: there is no such system, or it cannot run what is planned.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"--to: got {system!r}{did_you_mean(system, SYSTEMS)}")
    asked = SYSTEMS[system]
    if not asked.is_own and "/" not in request.model:
        raise ConfigError(
            f"model: {request.model!r} is a name of forerun's; give the one that {system} knows with --model, a folder or a hub id org/name"
        )
    if request.image is not None and not asked.has_image:
        others = ", ".join(name for name, one in SYSTEMS.items() if one.has_image)
        raise ConfigError(
            f"--image: got {request.image!r}, and the files for {system} name no container image; those for {others} do: leave it out"
        )
    if request.profile_folder is not None and not asked.reads_profile:
        others = ", ".join(name for name, one in SYSTEMS.items() if one.reads_profile)
        raise ConfigError(
            f"--profile: got {str(request.profile_folder)!r}, and nothing in the files for {system} comes from a profile; those for "
            f"{others} read it: leave it out"
        )
    config = request.plan.speculative_config
    if config is not None and not isinstance(config.get("method"), str):
        raise ConfigError(
            f"speculative_config: got method {config.get('method')!r}; the plan must name one: give it with --speculative-config"
        )
    if config is not None and SCHEDULE in config:
        check_schedule_of(config)
    return asked.write(request)
