"""Which models drafters compute with: what a measurement that goes on depends on beside what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.fingerprint import fingerprint_of_files
from forerun.plan.drafter_memory import folder_of, models_of


def drafter_fingerprints(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """For each configuration that names models the short fingerprint of each whose files lie on this machine, by its name."""
    found = {
        name: {
            model: fingerprint_of_files(folder)[:16]
            for model in models_of(config)
            if (folder := folder_of(model)) is not None
        }
        for name, config in configs.items()
    }
    return {name: models for name, models in found.items() if models}
