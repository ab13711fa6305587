"""Runs in Ray's environment: Serve's schema reads the configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

if __name__ == "__main__":
    ServeDeploySchema.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
