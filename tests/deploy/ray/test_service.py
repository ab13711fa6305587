"""Replicas on this machine, as Ray is asked to start them; Ray itself is in slow tests."""

from __future__ import annotations

import re
import sys
import threading
from types import SimpleNamespace

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


def test_a_service_that_ends_waits_for_its_requests_however_long_they_take(monkeypatch):
    """Ray itself would wait for a minute."""
    deleted, states = [], ["DELETING"] * 300

    def delete(name, *, _blocking):
        assert not _blocking
        deleted.append(name)

    def status():
        alive = {"mine": SimpleNamespace(message="", deployments={}, status=SimpleNamespace(value=states.pop()))}
        return SimpleNamespace(applications=alive if states else {})

    modules = {
        "ray": SimpleNamespace(serve=SimpleNamespace(delete=delete, status=status)),
        "ray.exceptions": SimpleNamespace(RayError=RuntimeError),
        "ray.serve": SimpleNamespace(),
        "ray.serve.exceptions": SimpleNamespace(RayServeException=RuntimeError),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(service, "check_ray", lambda: None)
    monkeypatch.setattr(service, "POLL_S", 0.0)
    service.RayService("mine").delete()
    assert (deleted, states) == (["mine"], [])


def test_the_line_that_says_where_a_service_is_has_a_url_for_ipv6_too(deployed, monkeypatch):
    monkeypatch.setattr(service.RayService, "watch", lambda *_: None)
    monkeypatch.setattr(service.RayService, "deploy", lambda *_, **__: None)
    lines = []
    spec = ReplicaSpec(settings={"model": "m"}, options=ServerOptions(host="::1", port=0), version="1")
    service.serve_here(spec, ReplicaOptions(replicas=1), report=lines.append)
    assert re.fullmatch(r"ready: http://\[::1\]:\d+ \(Ctrl-C stops\)", lines[-1])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_replicas_on_this_machine_are_told_where_they_are_reached(deployed, host):
    spec = ReplicaSpec(settings={"model": "m"}, options=ServerOptions(host=host, port=0), version="1")
    service.serve_here(spec, ReplicaOptions(replicas=1), report=lambda _: None)
    assert [one.host for one in deployed] == [host]
