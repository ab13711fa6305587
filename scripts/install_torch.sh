#!/bin/sh
# Installs the pinned torch into $BIN's environment: the CPU build where there is no NVIDIA GPU.
set -eu
version=$(sed -n 's/^torch==//p' constraints.txt)
pip="$BIN/pip install --disable-pip-version-check --no-compile -q -c constraints.txt"
if "$BIN/python" -c 'import torch' 2>/dev/null; then
    exit 0
fi
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    $pip "torch==$version"
elif [ -n "${TORCH_INDEX:-}" ]; then
    $pip --extra-index-url "$TORCH_INDEX" "torch==$version+cpu"
elif ! $pip "torch==$version+cpu" 2>/dev/null; then
    echo "note: this package index has no CPU-only build of torch; installing the default one, which is larger."
    echo "      To avoid that: make clean, then make TORCH_INDEX=URL with the CPU index that pytorch.org names."
    $pip "torch==$version"
fi
