"""Runs in an environment with their schemas: those of Kubernetes and of compose files read what is emitted for them.

Of custom resources Kubernetes knows the pods only.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import distribution
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml


def check(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def pods(part):
    """The pod templates anywhere in a resource."""
    if isinstance(part, list):
        for one in part:
            yield from pods(one)
    elif isinstance(part, dict):
        yield from (part[key] for key in ("template", "podTemplate") if key in part)
        for one in part.values():
            yield from pods(one)


if __name__ == "__main__":
    kubernetes, compose, *custom = map(Path, sys.argv[1:])
    for document in yaml.safe_load_all(kubernetes.read_text()):
        check(document)
    for path in custom:
        found = [pod for document in yaml.safe_load_all(path.read_text()) for pod in pods(document)]
        assert found, path
        for pod in found:
            check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}} | pod)
    schema = Path(distribution("docker-compose").locate_file("compose/config/compose_spec.json"))
    jsonschema.validate(yaml.safe_load(compose.read_text()), json.loads(schema.read_text()))
