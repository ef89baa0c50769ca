#!/usr/bin/env bash
# Sets up, then runs the benchmark at a size that fits this machine; arguments go to tests/test_ffpa_attn.py.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
cd "$root"
[ $# -gt 0 ] || set -- --gen-bench --show-all --plot --check
exec "$PY" tests/test_ffpa_attn.py "$@"
