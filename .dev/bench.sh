#!/usr/bin/env bash
# Sets up, then runs the benchmark at a size that fits this machine; arguments go to tests/test_ffpa_attn.py. Where there is
# a GPU, the kernels are built first, in place.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
cd "$root"
if "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  setup_nvcc
  "$PY" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
fi
[ $# -gt 0 ] || set -- --gen-bench --show-all --plot --check
start=$(mktemp)
trap 'rm -f "$start"' EXIT
"$PY" tests/test_ffpa_attn.py "$@"
record=$(find tmp -name '*.json' -newer "$start" -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 | cut -d' ' -f2)
[ -z "$record" ] || echo "What was measured is in $record. If docs/speed.md lacks this GPU, attach the file to an issue."
