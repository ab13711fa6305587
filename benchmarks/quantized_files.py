"""Has llama.cpp quantize a Llama model, to measure what its files lose beside forerun's own rounding.

Run: python -m benchmarks.quantized_files --output-folder FOLDER [--model smollm2-135m] [--types Q4_K_M Q8_0]

The model's checkpoint is written as GGUF in bf16, in which nothing is lost if it is in bf16 itself, and each type is made of that,
without an importance matrix. llama.cpp is the one that `python -m benchmarks.peers install llama_cpp_files` brings, in a wheel of cyllama.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import gguf

from benchmarks.peers.gguf_files import write_gguf
from benchmarks.peers.install import DEFAULT_FOLDER, python_in
from forerun.models.store import resolve_model

QUANTIZE = """
import sys
from cyllama.llama.llama_cpp import LlamaModelQuantizeParams, model_quantize
source, target, kind = sys.argv[1:]
settings = LlamaModelQuantizeParams()
settings.ftype = int(kind)
model_quantize(source, target, settings)
"""


def main() -> None:
    """Write a file of each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--types", nargs="+", default=["Q4_K_M", "Q8_0"])
    parser.add_argument("--output-folder", type=Path, required=True)
    arguments = parser.parse_args()
    python = python_in("llama_cpp_files", DEFAULT_FOLDER)
    folder = resolve_model(arguments.model)
    arguments.output_folder.mkdir(parents=True, exist_ok=True)
    source = arguments.output_folder / f"{folder.name}-bf16.gguf"
    write_gguf(folder, source, "bf16")
    for kind in arguments.types:
        target = arguments.output_folder / f"{folder.name}-{kind}.gguf"
        number = gguf.LlamaFileType[f"MOSTLY_{kind}"].value
        subprocess.run([python, "-c", QUANTIZE, source, target, str(number)], check=True)
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
