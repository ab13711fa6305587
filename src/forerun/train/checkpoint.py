"""A head in its published layout, in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.models.checkpoint import SINGLE_FILE, save_tensors
from forerun.models.model_folder import CONFIG_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint:
    """A head's config.json and its tensors, under the names they are published with."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def save(self, folder: Path) -> Path:
        """Write it where `speculative_config["model"]` can point to; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(dict(self.config), indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_tensors(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        return folder
