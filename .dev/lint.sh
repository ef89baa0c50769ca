#!/usr/bin/env bash
# Formats every file; with --check changes nothing and fails where something would change.
set -eu
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
cd "$root"
# The versions are part of the style: another release formats differently.
tools=$("$PY" -c 'import re; print(*re.search(r"lint = \[(.*)\]", open("pyproject.toml").read())[1].replace(",", "").replace("\"", "").split())')
# shellcheck disable=SC2086  # one word for each package
"$PY" -m pip install --quiet --disable-pip-version-check $tools
mapfile -t sources < <(find csrc tests -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')
if [ "${1:-}" = --check ]; then
  "$PY" -m ruff format --check --quiet .
  "$PY" -m ruff check --quiet .
  clang-format --dry-run --Werror "${sources[@]}"
  echo "lint: clean"
else
  "$PY" -m ruff format .
  "$PY" -m ruff check --fix .
  clang-format -i "${sources[@]}"
fi
