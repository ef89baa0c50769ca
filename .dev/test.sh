#!/usr/bin/env bash
# Sets up, then runs the whole test suite; arguments go to pytest: `bash .dev/test.sh tests/test_ops.py -k compile`.
# Without network and nvcc the tests that compile fail, and the others run.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc || true
cd "$root"
# Every kernel is compiled, to the code of one GPU: this machine's, or sm_80.
one_arch='import torch; print(*(torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)), sep=".")'
export FFPA_CUDA_ARCHS=${FFPA_CUDA_ARCHS:-$("$PY" -c "$one_arch")}
exec "$PY" -m pytest "${@:-tests}"
