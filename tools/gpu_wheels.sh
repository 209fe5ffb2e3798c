#!/bin/sh
# Unpack what Penstock needs into a folder, for a GPU machine without internet that has torch and
# transformers already. Run it where there is internet, carry the folder over, and put it on PYTHONPATH:
#
#   tools/gpu_wheels.sh wheels 3.12 && scp -r wheels penstock gpu-machine: && ssh gpu-machine \
#       'PYTHONPATH=wheels:. python3 -c "from penstock.bench.train import run; run()"'
set -eu
folder=${1:?usage: tools/gpu_wheels.sh FOLDER [PYTHON_VERSION]}
version=${2:-3.12}
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
# pydantic-core must be the one that its pydantic names, so pip resolves those two together.
"${PYTHON:-python3}" -m pip download --quiet --python-version "$version" --only-binary :all: \
    -d "$downloads" pydantic msgspec pyyaml
mkdir -p "$folder"
for wheel in "$downloads"/*.whl; do
    "${PYTHON:-python3}" -m zipfile -e "$wheel" "$folder"
done
