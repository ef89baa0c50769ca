#!/usr/bin/env bash
# Proves a change in about three minutes on 2 cores: formats it, then runs some of the tests that notice mistakes where it is.
# `bash .dev/check.sh --since HEAD~1` compares with another commit than the last one; `test.sh` runs all tests.
set -eu -o pipefail
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
setup_nvcc || true
setup_hf || true
cd "$root"
bash .dev/lint.sh
"$PY" tests/check_change.py "$@"
