"""Replicas on this machine, as Ray is asked to start them; Ray itself is in slow tests."""

from __future__ import annotations

import threading

import pytest

from forerun.deploy.ray import service
from forerun.deploy.ray.options import ReplicaOptions
from forerun.deploy.ray.replica import ReplicaSpec
from forerun.server.options import ServerOptions


@pytest.fixture
def deployed(monkeypatch):
    """What is given to a service whose Ray does nothing."""
    specs = []

    class Service(service.RayService):
        def __init__(self, name, *, report):
            self.name = name

        def start_ray(self, *, num_cpus):
            pass

        def start_serve(self, *, host, port):
            pass

        def deploy(self, spec, settings, *, timeout, stopped):
            specs.append(spec)
            stopped.set()

        def close(self):
            pass

    monkeypatch.setattr(service, "RayService", Service)
    monkeypatch.setattr(service, "_when_stopped", threading.Event)
    return specs


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_replicas_on_this_machine_are_told_where_they_are_reached(deployed, host):
    spec = ReplicaSpec(settings={"model": "m"}, options=ServerOptions(host=host, port=0), version="1")
    service.serve_here(spec, ReplicaOptions(replicas=1), report=lambda _: None)
    assert [one.host for one in deployed] == [host]
