"""Checks an installed forerun: its files, its native kernels, and a text that it writes.

Usage: python -I scripts/check_installed.py MODEL_FOLDER
"""

from __future__ import annotations

import platform
import sys
from importlib.resources import files
from pathlib import Path

import forerun
from forerun import LLM, SamplingParams
from forerun.ops.native.library import library_file, load_kernels

LEVELS_OF_MACHINES = {
    **dict.fromkeys(("x86_64", "amd64"), ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")),
    **dict.fromkeys(("aarch64", "arm64"), ("neonbf16", "neon")),
}


def missing_files(machine: str) -> list[str]:
    """Return what the package lacks on a machine (as `platform.machine()` names it), a sentence each."""
    levels = [*LEVELS_OF_MACHINES.get(machine.lower(), ()), "portable"]
    faults = [f"the native kernels for {level} were not built" for level in levels if not library_file(level).exists()]
    if not library_file("processor").exists():
        faults.append("the library that says which kernels the processor runs was not built")
    if not files("forerun.server").joinpath("page.html").is_file():
        faults.append("the server's page.html is not in the package")
    return faults


def main() -> None:
    """Check everything; exit with a sentence where something is wrong."""
    package = Path(forerun.__file__).resolve()
    if not package.is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(f"forerun is imported from {package.parent}, not from the environment {sys.prefix}")
    faults = missing_files(platform.machine())
    if faults:
        sys.exit("; ".join(faults))
    kernels = load_kernels()
    assert kernels is not None, "the portable level runs everywhere"
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    texts = [
        LLM(sys.argv[1], speculative_config=config).generate("a text, a text", sampling, use_tqdm=False)[0].outputs[0]
        for config in (None, {"method": "ngram", "num_speculative_tokens": 4})
    ]
    if texts[0].token_ids != texts[1].token_ids:
        sys.exit("the text with drafts differs from the text without")
    print(f"forerun {package.parent} writes a text on the {kernels.level} kernels")


if __name__ == "__main__":
    main()
