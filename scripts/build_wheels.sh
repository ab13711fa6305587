#!/bin/sh
# Builds a wheel with the kernels of every level, into dist: for this machine, and on Linux for the other processor too (x86-64 or
# 64-bit Arm) where its cross compiler is installed. A wheel fits every Python 3. auditwheel names a Linux wheel after the oldest
# C library that it runs with; macOS calls it after the system that Python was built for.
set -eu
folder=build/wheels
rm -rf "$folder"
mkdir -p "$folder"

build() { # [VARIABLE=VALUE ...]: of the compiler
    env FORERUN_BUILD_LEVELS=all "$@" "$BIN/python" -m build --outdir "$folder/new" . >"$folder/build.log" 2>&1 || {
        cat "$folder/build.log"
        exit 1
    }
}

case $(uname -s)-$(uname -m) in
Linux-x86_64 | Linux-aarch64)
    for machine in x86_64 aarch64; do
        compiler=$machine-linux-gnu
        if [ $machine = "$(uname -m)" ]; then
            build
        elif command -v $compiler-g++ >/dev/null; then
            build _PYTHON_HOST_PLATFORM=linux-$machine CC=$compiler-gcc CXX=$compiler-g++
        else
            echo "no wheel for $machine: there is no $compiler-g++; on Debian: apt install g++-$(echo $compiler | tr _ -)"
        fi
    done
    PATH=$BIN:$PATH "$BIN/auditwheel" repair --wheel-dir dist "$folder"/new/*.whl >"$folder/audit.log" 2>&1 || {
        cat "$folder/audit.log"
        exit 1
    }
    ;;
*)
    build
    mkdir -p dist
    cp "$folder"/new/*.whl dist
    ;;
esac
ls -l dist
