#!/bin/sh
# Builds the sdist and from it the wheel, installs the wheel into an empty environment, and writes a text with it.
# BIN is the bin folder of the development environment; everything else is made in build/package.
set -eu
unset PYTHONPATH
folder=build/package
rm -rf "$folder"
mkdir -p "$folder"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# What is asked is whether everything is in the package and works; without optimising the compiler takes a tenth of the time.
echo "building sdist and wheel"
CFLAGS="${CFLAGS--O0}" "$BIN/python" -m build --outdir "$folder" . >"$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }

echo "installing the wheel into an empty environment"
"$BIN/python" -m venv "$folder/venv"
BIN="$folder/venv/bin" sh scripts/install_torch.sh
"$folder/venv/bin/pip" install --no-compile -q -c constraints.txt "$folder"/*.whl

"$BIN/python" -c 'import sys; from tests.stand_in import save_stand_in; save_stand_in(sys.argv[1])' "$folder/model"
"$folder/venv/bin/python" -I scripts/check_installed.py "$folder/model" || {
    echo "the compiler's output:"
    cat "$folder/build.log"
    exit 1
}
"$folder/venv/bin/forerun" generate "$folder/model" "the package works" --max-tokens 8 --json
