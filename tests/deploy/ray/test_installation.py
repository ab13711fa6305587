"""Ray absent, or of another version."""

from __future__ import annotations

from importlib import metadata

import pytest

from forerun.deploy.ray import installation
from forerun.errors import ConfigError


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    def absent(_name):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(installation.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'forerun\[ray\]'"):
        installation.check_ray()


@pytest.mark.parametrize("found", ["2.61.0", "2.6.0", "3.0.0", "2.600.1"])
def test_another_version_of_ray_is_refused(found, monkeypatch):
    monkeypatch.setattr(installation.metadata, "version", lambda _name: found)
    with pytest.raises(ConfigError, match=f"got version {found}; must be 2.60"):
        installation.check_ray()


def test_a_replica_of_another_version_refuses_to_serve():
    with pytest.raises(ConfigError, match=r"what runs was started by 9\.9"):
        installation.check_same_version("9.9")
