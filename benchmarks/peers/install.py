"""Makes the virtual environments of peers and tools, and the GGUF files that some of them load."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.peers.engines import FORERUN, OTHERS, Peer
from benchmarks.peers.gguf_files import write_gguf
from forerun.errors import ForerunError

REQUIREMENTS = Path(__file__).with_name("requirements")
DEFAULT_FOLDER = Path.home() / ".cache" / "forerun" / "peers"
TOOLS = (
    "dynamo",
    "dynamo_1_6",
    "dynamo_worker",
    "llama_cpp_files",
    "lm_eval",
    "manifests",
    "ray",
    "ray_2_56",
    "sglang",
    "speculators",
)
"""Tools of the slow tests and of benchmarks.quantized_files, which are no engines."""

INSTALLED = "installed.txt"
"""The file in an environment that says what it was made from; where that has changed, it is made again."""


class InstallError(ForerunError):
    """A peer's environment is missing or cannot be made."""


def python_of(peer: Peer, folder: Path) -> Path:
    """The peer's interpreter; that of forerun is the present one.

    Raises:
        InstallError: the environment does not exist, or was made from something else.
    """
    return Path(sys.executable) if peer == FORERUN else python_in(peer.name, folder)


def python_in(name: str, folder: Path) -> Path:
    """The interpreter of a peer's or a tool's environment.

    Raises:
        InstallError: the environment does not exist, or was made from something else.
    """
    if not _is_installed(name, folder):
        raise InstallError(f"{name}: not installed in {folder}; run python -m benchmarks.peers install {name}")
    return folder / name / "bin" / "python"


def install(names: Iterable[str], folder: Path) -> None:
    """Make the environments that do not exist yet, or were made from other requirements.

    The requirements list every package with its version and are installed without dependencies: those
    of vLLM would bring in packages with which its CPU build cannot be loaded.

    Raises:
        InstallError: there is no such peer or tool, or pip failed.
    """
    for name in names:
        if name not in (*OTHERS, *TOOLS):
            raise InstallError(f"peer: got {name!r}; may be {', '.join((*OTHERS, *TOOLS))}")
        if _is_installed(name, folder):
            continue
        requirements = REQUIREMENTS / f"{name}.txt"
        venv.create(folder / name, with_pip=True, symlinks=True, clear=True)
        python = str(folder / name / "bin" / "python")
        command = [python, "-m", "pip", "install", "--no-deps", "-r", str(requirements)]
        build_environment = _build_environment(name)
        if build_environment:
            command.append("--no-cache-dir")  # it has what was compiled with other flags
        if subprocess.run(command, env={**os.environ, **build_environment}, check=False).returncode:
            raise InstallError(
                f"{name}: pip could not install {requirements}; its message is above; mend and run again"
            )
        (folder / name / INSTALLED).write_text(_made_from(name))


def _is_installed(name: str, folder: Path) -> bool:
    found = folder / name / INSTALLED
    return found.exists() and found.read_text() == _made_from(name)


def _made_from(name: str) -> str:
    """What an environment is made from: its packages, and what they are compiled with."""
    flags = "".join(f"# {variable}={value}\n" for variable, value in _build_environment(name).items())
    return (REQUIREMENTS / f"{name}.txt").read_text() + flags


def _build_environment(name: str) -> Mapping[str, str]:
    return OTHERS[name].build_environment if name in OTHERS else {}


def weights_of(peer: Peer, model: Path, folder: Path) -> Path:
    """The file or folder that the peer loads; a GGUF file is written if it is missing or older than the model."""
    if peer.weights == "folder":
        return model
    file = folder / "models" / f"{model.name}-{peer.weights}.gguf"
    newest = max(source.stat().st_mtime for source in model.iterdir())
    if not file.exists() or file.stat().st_mtime < newest:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(model, file, peer.weights)
    return file
