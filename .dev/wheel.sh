#!/usr/bin/env bash
# Builds the wheel with all its kernels into dist/, and says how long that took and how large it is. Only what changed is
# compiled again: after `rm -rf build/native` it is the time of the whole build.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc
cd "$root"
start=$SECONDS
"$PY" setup.py -q bdist_wheel
echo "the wheel took $((SECONDS - start)) s, MAX_JOBS=${MAX_JOBS:-$(nproc)}"
ls -l dist/*-abi3-*.whl
