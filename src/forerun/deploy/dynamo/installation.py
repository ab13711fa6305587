"""Whether Dynamo is installed, in the version that this worker is made for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from forerun.errors import ConfigError

VERSION = "1.6.1"
PACKAGES = ("ai-dynamo", "ai-dynamo-runtime")


def check_installed() -> None:
    """Refuse another version than the one whose interfaces are known.

    Raises:
        ConfigError: a package is missing or of another version.
    """
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        if found != VERSION:
            raise ConfigError(
                f"dynamo-worker: needs {package} {VERSION}, got {found}; pip install 'forerun[dynamo]', or see "
                "docs/dynamo.md to install it without NVIDIA's own package index"
            )
