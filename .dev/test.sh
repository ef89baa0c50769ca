#!/usr/bin/env bash
# Sets up, then runs the whole test suite; arguments go to pytest: `bash .dev/test.sh tests/test_ops.py -k compile`.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
cd "$root"
exec "$PY" -m pytest "${@:-tests}"
