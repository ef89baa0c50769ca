#!/usr/bin/env bash
# Builds the kernels, measures on this GPU what README.md shows, writes the records to bench/results/, and generates README
# and pictures anew. The records name the commit, and its tree must be clean. `record.sh DIR` measures PyPI's ffpa-attn
# beside the others: `pip install --target DIR ffpa-attn` brings it.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc
cd "$root"
[ -z "$(git status --porcelain)" ] || { echo "the tree has changes: commit or stash them first" >&2; exit 1; }
"$PY" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
gpu=$("$PY" -c 'import re, torch; print(re.search(r"\S*\d\S*", torch.cuda.get_device_name())[0].lower())')  # such as h100
out=$(mktemp -d)

measure() { # measure NAME FLAGS…
  "$PY" tests/test_ffpa_attn.py --gen-bench --check --i 9 --dir "$out/$1" "${@:2}" >"$out/$1.txt" || { cat "$out/$1.txt"; exit 1; }
  cat "$out/$1"/*.md
  mv "$out/$1"/*.json "$out/${gpu}_$1.json"
}

measure levels --show-all --torch
front=(--dtype bf16 --H 32 --D 256,320,512,640,1024 --peers sdpa-flash,sdpa-cudnn,flex --tags auto,sdpa,flex,pypi)
[ $# -eq 0 ] || front+=(--pypi "$1")
measure forward "${front[@]}"
measure forward_causal "${front[@]}" --causal
measure backward "${front[@]}" --backward
measure backward_causal "${front[@]}" --backward --causal
measure causal --dtype bf16 --H 32 --causal --tags auto
measure gemma --dtype bf16 --H 32 --heads-kv 4 --causal --D 512 --tags auto
measure vae --H 1 --N 16384 --D 512 --tags auto
measure mla --dtype bf16 --H 128 --N 4096 --D 192 --D-v 128 --causal --tags auto,sdpa --peers sdpa-flash,sdpa-cudnn
measure decode --dtype bf16 --B 16 --H 32 --heads-kv 4 --n-q 1 --n-kv 32768 --D 512 --tags auto,unfused --torch
measure packed --dtype bf16 --B 4 --H 32 --heads-kv 4 --varlen --causal --D 512 --tags auto
mkdir -p bench/results
mv "$out"/*.json bench/results/
"$PY" bench/readme.py
