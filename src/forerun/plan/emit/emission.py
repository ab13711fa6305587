"""What is emitted for a system: files by name, and what a reader of them must know."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forerun.plan.deployment_plan import DeploymentPlan
from forerun.plan.profile import NAMES, Profile

FORERUN_FORMATS = ("int8", "int4", "int4-symmetric")
"""What forerun's kernels round weights to; profiles of servers may have other formats."""

SCRIPT_HEAD = "#!/bin/sh\nset -e\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitRequest:
    """What is emitted.

    `plan` says what runs, under `model`, the name by which the system knows it. `profile_folder` is the folder of
    `forerun profile` that the plan was made from, for systems that read one. `image`
    replaces the container image of systems that have one.
    """

    plan: DeploymentPlan
    model: str
    profile_folder: Path | None = None
    image: str | None = None

    @property
    def name(self) -> str:
        """A name for deployments: lower case letters, digits and hyphens, as DNS has them (RFC 1123)."""
        words = re.sub(r"[^a-z0-9]+", "-", self.model.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-")
        return words[:40].strip("-") or "model"

    def profile(self) -> Profile | None:
        """The profile of the folder; None where no folder is given.

        Raises:
            ConfigError: there is none in it, or one of another model, machine, version or way to compute than the plan's.
        """
        if self.profile_folder is None:
            return None
        found = Profile.load(self.profile_folder)
        found.check_fits(model=self.plan.model)
        found.check_fits(**{name: value for name, value in self.plan.profile.items() if name in NAMES})
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Files by their names, and one sentence for each thing to know or to do beside them."""

    files: dict[str, str]
    notes: tuple[str, ...] = ()


class _PlainDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes what occurs twice twice, without anchors, and text of several lines line by line."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_PlainDumper.add_representer(str, _text)


def yaml_text(*documents: Any) -> str:
    """YAML of one document or several, keys in the order given."""
    text: str = yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def script(*commands: Sequence[str]) -> str:
    """A shell script of commands, each word quoted; the last one replaces the shell."""
    lines = [_command(words) for words in commands]
    lines[-1] = f"exec {lines[-1]}"
    return SCRIPT_HEAD + "\n".join(lines) + "\n"


def beside_script(name: str) -> str:
    """A word of a script: a file in its folder, wherever it is started from."""
    return f'"$(dirname "$0")"/{name}'


def _command(words: Sequence[str]) -> str:
    """One option a line."""
    lines: list[str] = []
    for word in words:
        quoted = word if word.startswith('"$') else shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return " \\\n  ".join(lines)
