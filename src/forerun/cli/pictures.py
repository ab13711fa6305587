"""Files that pictures may be written to."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from forerun.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def check_picture(option: str, picture: Path | None) -> None:
    """Refuse a picture that could not be written in the end.

    Raises:
        ConfigError: its format or folder is wrong, or matplotlib is missing.
    """
    if picture is None:
        return
    if picture.suffix not in FORMATS or picture.is_dir() or not picture.parent.is_dir():
        raise ConfigError(
            f"{option}: cannot write {picture}; give a file that ends in {', '.join(FORMATS)}, in a folder that exists"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option}: matplotlib is not installed; pip install 'forerun[bench]', or leave the picture out"
        )
