# Sourced by the scripts beside it. Leaves in $PY the Python of an environment with what build, tests and bench need.
#
# Which environment: $FFPA_VENV, else the active one or the python3 on PATH where it already has PyTorch >= 2.10, else
# .venv of this repository, made on the first run. Installs only what is missing, so a second run needs no network.
# What compiles kernels calls setup_nvcc as well, the tests setup_hf.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_say() { echo "setup: $*" >&2; }

_has_torch() {
  "$1" - 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version
sys.exit(sys.version_info < (3, 10) or tuple(map(int, version("torch").split(".")[:2])) < (2, 10))
PYTHON
}

_new_enough_python() {
  local python
  for python in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  _say "no Python >= 3.10 with venv on PATH; on Debian or Ubuntu: apt-get install python3 python3-venv"
  return 1
}

_choose_python() {
  local python
  if [ -z "${FFPA_VENV:-}" ]; then
    for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python3 python; do
      if [ -n "$python" ] && _has_torch "$python"; then
        PY=$(command -v "$python")
        return
      fi
    done
  fi
  local venv=${FFPA_VENV:-$root/.venv}
  if [ ! -x "$venv/bin/python" ]; then
    python=$(_new_enough_python) || return 1
    _say "making $venv"
    "$python" -m venv "$venv" || return 1
  fi
  PY=$venv/bin/python
}

# "name", "name>=version" or "name<version" of each requirement that is not met.
_missing() {
  "$PY" - "$@" <<'PYTHON'
import re
import sys
from importlib.metadata import PackageNotFoundError, version

def numbers(text):
    return [int(word) for word in re.findall(r"\d+", text)][:2]

for requirement in sys.argv[1:]:
    name, bound, limit = re.fullmatch(r"([\w-]+)(>=|<|)(.*)", requirement).groups()
    try:
        found = numbers(version(name))
        if (bound == ">=" and found < numbers(limit)) or (bound == "<" and found >= numbers(limit)):
            print(requirement)
    except PackageNotFoundError:
        print(requirement)
PYTHON
}

_install() {
  _say "installing $*"
  "$PY" -m pip install --quiet --disable-pip-version-check "$@"
}

setup_env() {
  _choose_python || return 1
  _has_torch "$PY" || _install torch==2.13.0 || return 1
  local missing
  local needed=("setuptools>=77" wheel numpy pytest ninja pybind11 matplotlib)
  # Without a GPU, Triton's kernels run in its interpreter, which does with numpy's scalars what 2.4 no longer allows.
  if [ "$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ]; then
    needed+=(triton "numpy<2.4")
  fi
  missing=$(_missing "${needed[@]}") || return 1
  # shellcheck disable=SC2086  # one word for each package
  [ -z "$missing" ] || _install $missing || return 1
  # A program that a package brought, such as ninja, is then found without activating the environment.
  PATH=$(dirname "$PY"):$PATH
}

# This machine's GPU, or sm_80, as build flags ask for it: every kernel is compiled to the code of one GPU.
this_arch() {
  "$PY" -c 'import torch; print(*(torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)), sep=".")'
}

# nvcc from PyPI (250 MB) where there is none.
setup_nvcc() {
  PYTHONPATH=$root/ffpa${PYTHONPATH:+:$PYTHONPATH} "$PY" -c 'import sys; from ffpa_attn.building import toolchain; sys.exit(not toolchain.find_nvcc())' && return
  # One release throughout: nvcc does not pin the parts it calls, and those of two releases do not fit.
  _install "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-cuda-runtime==13.0.*"
}

# The libraries whose calls we take; where they cannot be had, their tests are skipped.
setup_hf() {
  local missing
  missing=$(_missing "transformers>=5.4" diffusers) || return 1
  # shellcheck disable=SC2086  # one word for each package
  [ -z "$missing" ] || _install $missing
}

if ! command -v g++ >/dev/null; then
  _say "no g++ on PATH; on Debian or Ubuntu: apt-get install g++"
  return 1 2>/dev/null || exit 1
fi
setup_env || { return 1 2>/dev/null || exit 1; }
