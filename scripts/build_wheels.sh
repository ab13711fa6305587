#!/bin/sh
# Builds wheels with the kernels of every level, into dist: for this machine, and on Linux for the other processor too (x86-64 or
# 64-bit Arm), where its cross compiler is installed. Each fits every Python 3 and, as its name says, all Linux systems whose C
# library is not older than what auditwheel finds it needs.
set -eu
folder=build/wheels
rm -rf "$folder"
mkdir -p "$folder" dist

build() { # [VARIABLE=VALUE ...]: of the compiler
    env FORERUN_BUILD_LEVELS=all "$@" "$BIN/python" -m build --wheel --outdir "$folder/new" . >"$folder/build.log" 2>&1 || {
        cat "$folder/build.log"
        exit 1
    }
    rm -rf build/lib build/temp.* build/bdist.*
}

if [ "$(uname -s)" != Linux ]; then
    build
    mv -f "$folder"/new/*.whl dist
else
    for machine in x86_64 aarch64; do
        if [ "$machine" = "$(uname -m)" ]; then
            build
        elif command -v "$machine-linux-gnu-g++" >/dev/null; then
            build _PYTHON_HOST_PLATFORM=linux-$machine CC=$machine-linux-gnu-gcc CXX=$machine-linux-gnu-g++
        else
            echo "no wheel for $machine: there is no $machine-linux-gnu-g++; on Debian: apt install g++-$(echo $machine | tr _ -)-linux-gnu"
        fi
    done
    "$BIN/python" scripts/tag_wheels.py "$folder"/new/*.whl
    mv -f "$folder"/new/*.whl dist
fi
ls -l dist
