#!/bin/sh
# Builds the kernels for 64-bit Arm with a cross compiler and runs the tests that compute on them with an emulated processor.
#
# It needs Debian with the packages g++-aarch64-linux-gnu, qemu-user-static and mmdebstrap; nothing is installed on the machine.
# Everything is made in build/arm: root is a Debian with Python for the emulated processor, site its Python packages.
# Arguments go to pytest; without any it runs all those tests, some ten minutes' worth on two cores.
set -eu
folder=build/arm
suite=bookworm python=3.11
# The last version whose wheel for 64-bit Arm computes on the CPU alone; later ones need gigabytes of CUDA.
torch=torch==2.10.0

for command in aarch64-linux-gnu-g++ qemu-aarch64-static mmdebstrap; do
    command -v $command >/dev/null || {
        echo "there is no $command; on Debian: apt install g++-aarch64-linux-gnu qemu-user-static mmdebstrap"
        exit 2
    }
done
mkdir -p "$folder"

if [ ! -e "$folder/root.done" ]; then
    rm -rf "$folder/root"
    mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3,libstdc++6,libgomp1 "$suite" "$folder/root"
    touch "$folder/root.done"
fi

if [ ! -e "$folder/site.done" ] || [ pyproject.toml -nt "$folder/site.done" ] || [ constraints.txt -nt "$folder/site.done" ]; then
    rm -rf "$folder/site"
    grep -v '^torch==' constraints.txt >"$folder/constraints.txt"
    "$BIN/python" - >"$folder/requirements.txt" <<'END'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(line for line in project["dependencies"] if not line.startswith(("torch", "accelerate"))))
END
    into="-qq --disable-pip-version-check --target $folder/site --python-version $python --only-binary :all:"
    into="$into --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 -c $folder/constraints.txt"
    # torch alone, and what it imports: its wheel names packages for CUDA wherever pip itself runs on x86-64.
    "$BIN/pip" install $into --no-deps $torch
    "$BIN/pip" install $into -r "$folder/requirements.txt" sympy networkx pytest pytest-timeout hypothesis
    touch "$folder/site.done"
fi

_PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ FORERUN_BUILD_LEVELS=all \
    CFLAGS=-Werror "$BIN/python" setup.py -q build_ext --build-lib "$folder/lib" --build-temp "$folder/temp"

[ $# -gt 0 ] || set -- tests/ops/native tests/drafters/lookup tests/drafters/neural/test_chains.py \
    tests/models/test_packing.py tests/models/test_block_decoder.py tests/models/gguf/test_merges.py \
    tests/models/test_batch_invariance.py
# The root folder's conftest.py is for the docs and stays outside.
PYTHONPATH=src:$folder/site FORERUN_TEST_KERNELS=$folder/lib/forerun/ops/native QEMU_LD_PREFIX=$folder/root \
    qemu-aarch64-static "$folder/root/usr/bin/python$python" -m pytest -c pyproject.toml --confcutdir=tests -p no:cacheprovider "$@"
