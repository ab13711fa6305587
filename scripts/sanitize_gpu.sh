#!/bin/sh
# Runs the GPU's tests of attention, of a step's commit and of what a row's bits are under NVIDIA's compute-sanitizer: accesses
# out of bounds, races in shared memory, wrong barriers. Tests with CUDA graphs are left out: each tensor is allocated by
# itself here, so that the sanitizer sees its bounds, and a capture allows no such allocation.
set -eu
tools=${SANITIZER_TOOLS:-"memcheck racecheck synccheck"}
chosen="(attention or tree or step or masks) and not graph"

if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize-gpu: compute-sanitizer is not on PATH; it comes with the CUDA toolkit, in /usr/local/cuda/bin, say" >&2
    exit 2
fi
if ! "$BIN/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "sanitize-gpu: torch sees no CUDA device; forerun collect-env says what is there" >&2
    exit 2
fi
for tool in $tools; do
    echo "compute-sanitizer --tool $tool"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
        "$BIN/python" -m pytest -m "gpu and not slow" -n 0 -p no:cacheprovider --timeout 3600 -k "$chosen" \
        tests/gpu/test_bits.py tests/gpu/test_device_step.py "$@"
done
