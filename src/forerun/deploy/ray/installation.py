"""Which Ray there is: it is an extra, and its interfaces for routing and scaling change from version to version."""

from __future__ import annotations

from importlib import metadata

import forerun
from forerun.errors import ConfigError

RAY = "2.60"
INSTALL = "pip install 'forerun[ray]'"


def check_ray() -> None:
    """Refuse an installation without Ray Serve, or with another version of Ray than this was written for.

    Raises:
        ConfigError: Ray is absent, or of another version.
    """
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"ray: is not installed; {INSTALL}") from None
    if not found.startswith(f"{RAY}."):
        raise ConfigError(f"ray: got version {found}; must be {RAY}, whose interfaces for routing are used: {INSTALL}")
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ray: Ray Serve cannot be imported ({error}); {INSTALL}") from None


def check_same_version(expected: str) -> None:
    """Refuse to be part of what another version of forerun started.

    Raises:
        ConfigError: the versions differ.
    """
    if forerun.__version__ != expected:
        raise ConfigError(
            f"version: this machine has forerun {forerun.__version__}, what runs was started by {expected}; "
            "install the same version on every machine of the cluster"
        )
