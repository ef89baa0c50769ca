#!/usr/bin/env bash
# Sets up, then runs the whole test suite, a part of it on each core; arguments go to one pytest instead:
# `bash .dev/test.sh tests/test_ops.py -k compile`. Without network and nvcc the tests that compile fail, and the others run.
set -eu -o pipefail
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc || true
cd "$root"
export FFPA_CUDA_ARCHS=${FFPA_CUDA_ARCHS:-$(this_arch)}
[ $# -eq 0 ] || exec "$PY" -m pytest "$@"

parts=$(nproc)
[ "$parts" -le 16 ] || parts=16
logs=$root/build/suite
rm -rf "$logs"
mkdir -p "$logs"
runs=()
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
"$PY" -m pytest tests --part "1/$parts" 2>&1 | tee "$logs/part1.log" & # one is there to watch
runs+=($!)
for ((i = 2; i <= parts; i++)); do
  "$PY" -m pytest tests --part "$i/$parts" >"$logs/part$i.log" 2>&1 &
  runs+=($!)
done
failed=0
for ((i = 1; i <= parts; i++)); do
  wait "${runs[i - 1]}" && continue
  failed=1
  [ "$i" = 1 ] || cat "$logs/part$i.log"
done
if [ "$parts" -gt 1 ]; then
  printf '%s' "all $parts parts: "
  tail -qn 1 "$logs"/*.log | grep -oE '[0-9]+ [a-z]*(passed|failed|skipped|errors?)' |
    awk '{ n[$2] += $1 } END { for (what in n) printf "%d %s ", n[what], what; print "" }'
fi
exit $failed
