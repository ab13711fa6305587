"""Runs in an environment with their schemas: those of Kubernetes and of compose files read what is emitted for them."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distribution
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

if __name__ == "__main__":
    kubernetes, compose = map(Path, sys.argv[1:])
    for document in yaml.safe_load_all(kubernetes.read_text()):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    schema = Path(distribution("docker-compose").locate_file("compose/config/compose_spec.json"))
    jsonschema.validate(yaml.safe_load(compose.read_text()), json.loads(schema.read_text()))
