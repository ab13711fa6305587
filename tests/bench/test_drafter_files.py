"""Which models drafters compute with, by their files."""

from __future__ import annotations

from forerun.bench.drafter_files import drafter_fingerprints
from forerun.models.fingerprint import fingerprint_of_files
from tests.tiny_gguf import save_tiny_gguf


def test_models_that_are_here_are_named_by_their_files_and_others_are_left_out(tmp_path):
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(path, kinds=["Q4_0"])
    model = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}
    configs = {
        "suffix": {"method": "suffix"},
        "gone": model | {"model": "./nowhere"},
        "model": model,
        "both": {"method": "hybrid", "drafters": [{"method": "suffix"}, model]},
    }
    own = {str(path): fingerprint_of_files(path)[:16]}
    assert drafter_fingerprints(configs) == {"model": own, "both": own}
    path.write_bytes(path.read_bytes() + b"more")
    assert drafter_fingerprints(configs)["model"] != own
