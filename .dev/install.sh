#!/usr/bin/env bash
# Builds the wheel and installs it into the environment that setup_env.sh chooses. Where there is no nvcc, fetches one
# from PyPI first. Run it again after any change: what did not change is not compiled again.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc
cd "$root"
"$PY" -m pip install --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall "$root"
cd / # so that the installed package is found, not the sources
"$PY" -m ffpa_attn.doctor
