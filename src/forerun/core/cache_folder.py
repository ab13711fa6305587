"""Where forerun keeps what it makes or downloads for one user."""

from __future__ import annotations

import os
from pathlib import Path

MODELS_FOLDER = "models"  # in the cache folder, with a folder for each known model


def cache_folder() -> Path:
    """The folder of models and of all that is kept for them: $FORERUN_CACHE, else $XDG_CACHE_HOME/forerun, else ~/.cache/forerun."""
    if own := os.environ.get("FORERUN_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "forerun"
    return Path.home() / ".cache" / "forerun"
