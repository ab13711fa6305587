#!/bin/sh
# Builds the kernels' level amx, with its registers emulated, in a folder beside the package, for a machine that has AVX-512
# BF16 but no AMX, and runs with it the tests that compute on kernels, or those that are given.
set -eu
folder=build/emulated-amx

rm -rf "$folder"
FORERUN_BUILD_LEVELS=amx CFLAGS="-Werror -DFORERUN_EMULATED_AMX" \
    "$BIN/python" setup.py -q build_ext --build-lib "$folder" --build-temp "$folder/temp"

[ $# -gt 0 ] || set -- tests/ops/native tests/drafters/neural/test_chains.py tests/models/test_packing.py \
    tests/models/test_block_decoder.py tests/models/test_batch_invariance.py
export FORERUN_TEST_KERNELS=$folder/forerun/ops/native
"$BIN/python" - <<END
import ctypes, sys
processor = ctypes.CDLL("$FORERUN_TEST_KERNELS/libforerun_processor.so")
if not processor.forerun_runs_here(b"amx"):
    sys.exit("this processor has no AVX-512 BF16, which the emulation needs")
END
"$BIN/python" -m pytest "$@"
