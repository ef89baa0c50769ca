#!/usr/bin/env bash
# On a machine with a GPU: build with all cores, conform, the whole suite, random problems (SECONDS_OF_PROBLEMS of them, 300), calls
# repeated, short benchmarks; results in $1 (build/gpu_check), a short table last. SEED=N draws other problems. SANITIZE=1 adds a
# compute-sanitizer pass over the kernels; SKIP="conform tests campaign stress bench small pages" leaves steps out.
set -u
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc || exit 1
cd "$root"
export FFPA_CUDA_ARCHS=${FFPA_CUDA_ARCHS:-$(this_arch)}
out=${1:-build/gpu_check}
mkdir -p "$out"
failed=0

step() { # step NAME COMMAND…: runs it into $out/NAME.log and notes time and outcome
  local name=$1 start=$SECONDS status=ok
  shift
  case " ${SKIP:-} " in *" $name "*) return ;; esac
  "$@" >"$out/$name.log" 2>&1 || { status=FAILED failed=1; }
  printf '%-9s %-6s %4d s  %s\n' "$name" "$status" $((SECONDS - start)) "$(grep -v '^$' "$out/$name.log" | tail -1 | cut -c1-150)" |
    tee -a "$out/summary.txt"
}

: >"$out/summary.txt"
step build "$PY" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
step doctor "$PY" -m ffpa_attn.doctor
step conform env PYTHON="$PY" bash .dev/conform.sh "$out/conform"
step tests env PYTEST_ADDOPTS="-q -p no:cacheprovider --deselect tests/building/test_install.py" bash .dev/test.sh
processes=$(nproc)
[ "$processes" -le 16 ] || processes=16
step campaign "$PY" tests/campaign.py --seconds "${SECONDS_OF_PROBLEMS:-300}" --processes "$processes" --seed "${SEED:-0}" --json "$out/campaign.json"
step stress "$PY" tests/campaign_stress.py --json "$out/stress.json"
step bench "$PY" tests/test_ffpa_attn.py --gen-bench --check --H 32 --dtype bf16 --dir "$out"
step small env FFPA_BACKEND=triton "$PY" bench/small_heads.py
step pages "$PY" bench/paged.py --quick
step training "$PY" bench/training_shapes.py --quick
sanitize() { # sanitize NAME TOOL KEYWORDS TESTS…
  step "$1" compute-sanitizer --tool "$2" --error-exitcode 1 "$PY" -m pytest -q -p no:cacheprovider -k "$3" "${@:4}"
}
not_long="not bits_repeat and not long_sequences and not more_than_31"
for tool in ${SANITIZE:+memcheck racecheck initcheck synccheck}; do
  sanitize "$tool" "$tool" "on_a_gpu and $not_long" tests/backends/test_mma.py tests/backends/test_mma_{splits,rows,packed}.py \
    tests/backends/test_toggles.py tests/backends/test_{fused,two_phase}.py
  # Without Triton in the forward: before its kernels are launched from here, the driver is asked for a parameter too many.
  FFPA_BACKEND=mma sanitize "$tool-backward" "$tool" "cuda and $not_long" tests/backends/test_backward.py tests/backends/test_backward_short.py
done
echo
cat "$out"/*.md 2>/dev/null
cat "$out/summary.txt"
exit $failed
