#!/usr/bin/env bash
# Sets up, then runs the whole test suite on all cores; arguments go to one pytest instead:
# `bash .dev/test.sh tests/operators/test_ops.py -k compile`. Without network and nvcc the tests that compile fail, and the others run.
set -eu -o pipefail
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc || true
setup_hf || true
cd "$root"
export FFPA_CUDA_ARCHS=${FFPA_CUDA_ARCHS:-$(this_arch)}
[ $# -eq 0 ] || exec "$PY" -m pytest "$@"

# A core for each part, and 3 GB of what is free of a GPU, beside what the first one takes for a large test.
read -r parts gpus < <("$PY" - <<'END'
import os
import torch
most, gpus, large = 0, torch.cuda.device_count(), 30
for gpu in range(gpus):
    free = torch.cuda.mem_get_info(gpu)[0] >> 30
    most += min(16, max(1, 1 + (free - large) // 3 if free > large else free // 3))
print(min(len(os.sched_getaffinity(0)), most or 16), os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus))))
END
)
logs=$root/build/suite
queue=$logs/queue
rm -rf "$logs"
mkdir -p "$queue"
runs=()
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
part() { # of several GPUs, each part takes another one first
  local all first
  if [ -n "$gpus" ]; then
    IFS=, read -ra all <<<"$gpus"
    first=$((($1 - 1) % ${#all[@]}))
    all=("${all[@]:first}" "${all[@]:0:first}")
    export CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${all[*]}")
  fi
  "$PY" -m pytest -p no:cacheprovider tests --queue "$queue" 2>&1 | tee "$logs/part$1.log"
}
part 1 & # one is there to watch
runs+=($!)
for ((i = 2; i <= parts; i++)); do
  part "$i" >/dev/null &
  runs+=($!)
done
failed=0
for ((i = 1; i <= parts; i++)); do
  wait "${runs[i - 1]}" && continue
  failed=1
  [ "$i" = 1 ] || cat "$logs/part$i.log"
done
counts=$(for log in "$logs"/*.log; do grep -E ' in [0-9.]+s' "$log" | tail -n 1; done |
  grep -oE '[0-9]+ (passed|failed|skipped|error)' | awk '{ n[$2] += $1 } END { for (what in n) printf " %d %s", n[what], what }' || true)
echo "in all:$counts"
[[ $counts == *" passed"* ]] || failed=1
exit $failed
