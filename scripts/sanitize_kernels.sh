#!/bin/sh
# Builds the best kernels for this machine and the portable ones with address and undefined-behaviour sanitizers, in a folder
# beside the package, and runs with them the tests that compute on kernels. Warnings are errors.
set -eu
folder=build/sanitized
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
best=$("$BIN/python" -c 'from forerun.ops.native.library import load_kernels; print(load_kernels().level)')
[ "$best" = portable ] && levels=portable || levels=$best,portable

rm -rf "$folder"
FORERUN_BUILD_LEVELS=$levels CFLAGS="-O1 -g1 -fno-omit-frame-pointer -Werror $sanitizers" LDFLAGS=$sanitizers \
    "$BIN/python" setup.py -q build_ext --build-lib "$folder" --build-temp "$folder/temp"

# The sanitizer must be there before Python, and the C++ library with it, or the exceptions of other libraries go astray.
compiler=${CXX:-g++}
preload="$($compiler -print-file-name=libasan.so) $($compiler -print-file-name=libstdc++.so)"
# Python frees little when it ends; torch's own memory is not looked into.
FORERUN_TEST_KERNELS=$folder/forerun/ops/native LD_PRELOAD=$preload \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "$BIN/python" -m pytest tests/ops/native tests/drafters/lookup tests/drafters/neural/test_chains.py \
    tests/models/test_packing.py tests/models/test_block_decoder.py tests/models/gguf/test_merges.py \
    tests/models/test_batch_invariance.py "$@"
