#!/usr/bin/env bash
# Formats every file and checks it; with --check changes nothing and fails where something would change.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
cd "$root"
mapfile -t sources < <(git ls-files '*.cu' '*.cuh' '*.h' '*.cpp')
if [ "${1:-}" = --check ]; then
  "$PY" -m ruff format --check . && "$PY" -m ruff check .
  [ ${#sources[@]} -eq 0 ] || clang-format --dry-run --Werror "${sources[@]}"
else
  "$PY" -m ruff format . && "$PY" -m ruff check --fix .
  [ ${#sources[@]} -eq 0 ] || clang-format -i "${sources[@]}"
fi
