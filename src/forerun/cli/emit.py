"""`forerun emit`: launch files of a deployment plan, for forerun and for other systems."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from forerun.cli.command import command
from forerun.cli.options import Flag, parse_speculation
from forerun.core.writable import check_writable_folder
from forerun.errors import ConfigError
from forerun.plan.deployment_plan import DeploymentPlan
from forerun.plan.emit.emission import Emission, EmitRequest
from forerun.plan.emit.systems import SYSTEMS
from forerun.plan.emit.systems import emit as emit_for
from forerun.plan.profile import SERVERS_KERNELS

MARK = "# Written by forerun emit, which writes it anew.\n"

System = Literal["forerun", "compose", "kubernetes", "vllm", "sglang", "trtllm", "dynamo", "ray"]


@command
def emit(
    *,
    plan: Path,
    to: System,
    output: Path | None = None,
    profile: Path | None = None,
    model: str | None = None,
    image: str | None = None,
    speculative_config: Annotated[
        dict[str, Any] | str | None,
        Parameter(converter=parse_speculation, accepts_keys=True, json_dict=False, n_tokens=1),
    ] = None,
    no_speculation: Flag = False,
) -> None:
    """Write the files that start what `forerun plan` has planned, for forerun or for another system.

    What a system lacks is an error that says what it has instead; nothing of a plan is left out silently.

    Args:
        plan: The folder of "forerun plan --output" or of "forerun tune --output", or its plan.json.
        to: Where it runs: forerun itself, alone, in Docker's compose or on Kubernetes; or another system.
        output: The folder for the files, which is made if needed; files there that this command did not write stay, and are
            an error. Without it they are printed.
        profile: The folder of "forerun profile", whose measured latencies Dynamo's planner reads, and whose memory servers get.
        model: The model's name there, where it is not the plan's: a folder or a hub id org/name.
        image: The container image, instead of the usual one, for compose, kubernetes, dynamo and ray.
        speculative_config: Speculation instead of the plan's, JSON or key by key, for a system that lacks its method.
        no_speculation: Plain decoding instead of the plan's speculation.

    Examples:
        forerun emit --plan plan --to forerun --output launch
        forerun emit --plan plan --to kubernetes --image registry.example/forerun:1
        forerun emit --plan plan --to vllm --model HuggingFaceTB/SmolLM2-135M-Instruct
        forerun emit --plan plan --to dynamo --profile profile --model org/name --output launch
    """
    check_writable_folder("--output", output)
    planned = DeploymentPlan.load_file(plan)
    if speculative_config is not None and no_speculation:
        raise ConfigError("--speculative-config: contradicts --no-speculation; give one of them")
    is_another = speculative_config is not None or no_speculation
    if is_another:
        other = {"method": speculative_config} if isinstance(speculative_config, str) else speculative_config
        planned = replace(planned, speculative_config=other, acceptance=None)
    # a server that was profiled may have drafted as none of ours does
    if SYSTEMS[to].is_own and (is_another or planned.profile.get("kernels") == SERVERS_KERNELS):
        _check_known(planned.speculative_config)
    request = EmitRequest(plan=planned, model=model or planned.model, profile_folder=profile, image=image)
    emission = emit_for(to, request)
    notes = list(emission.notes)
    if not planned.feasible:
        notes.insert(0, "the plan does not meet its SLA; these files start the best that it reaches")
    if output is None:
        _print(emission)
    else:
        _write(emission, output)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _check_known(config: dict[str, Any] | None) -> None:
    """Refuse a configuration with which forerun's servers would not start.

    Raises:
        ConfigError: its method, a key or a value is none of forerun's.
    """
    from forerun.config.speculative_config import resolve_speculative  # torch: only when it is needed

    resolve_speculative(config)


def _print(emission: Emission) -> None:
    for name, text in emission.files.items():
        if len(emission.files) > 1:
            print(f"# --- {name}")
        print(text, end="")


def _write(emission: Emission, folder: Path) -> None:
    """Write the files, each with a line that says whose they are: only such files are written anew.

    Raises:
        ConfigError: the folder has a file of one of the names that this command has not written.
    """
    for path in (folder / name for name in emission.files):
        if path.exists() and not (path.is_file() and MARK.encode() in path.read_bytes()):
            raise ConfigError(
                f"--output: {path} is there, and forerun emit has not written it; give another folder, or move it away"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in emission.files.items():
        path = folder / name
        first, rest = text.split("\n", 1) if text.startswith("#!") else ("", text)
        path.write_text((first and f"{first}\n") + MARK + rest, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
        print(path)
