#!/usr/bin/env bash
# Builds the wheel and installs it into the environment that setup_env.sh chooses. Where there is no nvcc, fetches one
# from PyPI first. Run it again after any change: what did not change is not compiled again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/setup_env.sh"
cd "$root"

has_nvcc() {
  PYTHONPATH=ffpa "$PY" -c 'import sys; from ffpa_attn import toolchain; sys.exit(not toolchain.find_nvcc())'
}

if ! has_nvcc; then
  # One release throughout: nvcc does not pin the parts it calls, and those of two releases do not fit.
  _install "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-cuda-runtime==13.0.*"
fi
"$PY" -m pip install --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall "$root"
cd / # so that the installed package is found, not the sources
"$PY" -m ffpa_attn.doctor
