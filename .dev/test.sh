#!/usr/bin/env bash
# Sets up, then runs the whole test suite; arguments go to pytest: `bash .dev/test.sh tests/test_ops.py -k compile`.
# Without network and nvcc the tests that compile fail, and the others run.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc || true
cd "$root"
exec "$PY" -m pytest "${@:-tests}"
