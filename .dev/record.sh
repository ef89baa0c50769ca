#!/usr/bin/env bash
# Measures on this GPU what README.md shows, writes the records to bench/results/, and generates README and pictures
# anew. The records name the commit: the tree must be clean, and the package built from it.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
cd "$root"
[ -z "$(git status --porcelain)" ] || { echo "the tree has changes: commit or stash them first" >&2; exit 1; }
out=$(mktemp -d)

measure() { # measure NAME FLAGS…
  "$PY" tests/test_ffpa_attn.py --gen-bench --check --dir "$out/$1" "${@:2}" >"$out/$1.txt" || { cat "$out/$1.txt"; exit 1; }
  cat "$out/$1"/*.md
  mv "$out/$1"/*.json "$out/$1.json"
}

measure h200 --show-all --torch
measure h200_causal --dtype bf16 --H 32 --causal --tags auto --i 9
measure gemma --dtype bf16 --H 32 --heads-kv 4 --causal --D 512 --tags auto --i 9
measure vae --H 1 --N 16384 --D 512 --tags auto --i 9
measure mla --dtype bf16 --H 128 --N 4096 --D 192 --D-v 128 --causal --tags auto --i 9
measure decode --dtype bf16 --B 16 --H 32 --heads-kv 4 --n-q 1 --n-kv 32768 --D 512 --tags auto --i 9
measure packed --dtype bf16 --B 4 --H 32 --heads-kv 4 --varlen --causal --D 512 --tags auto --i 9
mkdir -p bench/results
mv "$out"/*.json bench/results/
"$PY" bench/readme.py
