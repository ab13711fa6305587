#!/bin/sh
# Builds the kernels' level amx, with the matrix registers emulated, in a folder beside the package, for a machine that has
# AVX-512 BF16 but no AMX, and runs with it the tests that compute on kernels, or those that are given.
set -eu
folder=build/emulated-amx
tests=${*:-tests/ops/native tests/drafters/neural/test_chains.py tests/models/test_packing.py tests/models/test_block_decoder.py tests/models/test_batch_invariance.py}

rm -rf "$folder"
FORERUN_BUILD_LEVELS=amx CFLAGS="-Werror -DFORERUN_EMULATED_AMX -include $PWD/src/forerun/ops/native/csrc/emulated_amx.h" \
    "$BIN/python" setup.py -q build_ext --build-lib "$folder" --build-temp "$folder/temp"
# shellcheck disable=SC2086 - several files
FORERUN_TEST_KERNELS=$folder/forerun/ops/native "$BIN/python" -m pytest $tests
