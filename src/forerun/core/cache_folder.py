"""Where forerun keeps what it makes or downloads for one user."""

from __future__ import annotations

import os
from pathlib import Path

from forerun.errors import ConfigError

MODELS_FOLDER = "models"  # in the cache folder, with a folder for each known model


def cache_folder() -> Path:
    """The folder of models and of all that is kept for them: $FORERUN_CACHE, else $XDG_CACHE_HOME/forerun, else ~/.cache/forerun.

    Raises:
        ConfigError: it is in a home folder that is not known.
    """
    own, shared = os.environ.get("FORERUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "forerun"
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"cache folder: got {folder}, but that home folder is not known; set FORERUN_CACHE to a folder that you may write"
        ) from error
