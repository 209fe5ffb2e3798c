#!/usr/bin/env bash
# Install the wheel into an empty environment, as a user would, and train with it in an empty folder.
#   tools/check_wheel.sh FOLDER TORCH [--index-url URL]
set -euo pipefail
folder=$1 torch=$2
shift 2
rm -rf "$folder"
mkdir -p "$folder/work"
"${PYTHON:-python3}" -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir "$folder" .
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install)
"${pip[@]}" "$@" "$torch"
"${pip[@]}" "$folder"/penstock-*.whl
penstock=$(realpath "$folder/venv/bin/penstock")
cd "$folder/work"
"$penstock" train run.steps=2 run.name=wheel observe.view=plain
"$penstock" samples wheel >/dev/null
"$penstock" report wheel
test -s runs/wheel/model/model.safetensors
