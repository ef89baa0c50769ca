#!/usr/bin/env bash
# Runs ffpa's plugins inside the classes of real servers: bash .dev/serving_check.sh [vllm] [sglang]; by default of all.
# tests/integrations/serving/check_<server>.py says in its head which releases, and what these import. Of each release's
# wheel the Python files alone are kept, though hundreds of MB are fetched for them; the check stubs what is compiled.
# It needs no GPU, and installs nothing into the environment that runs it. RELEASES="0.24.0" runs these instead, and
# FFPA_SCRATCH=folder keeps what was fetched for the next time.
set -eu -o pipefail
. "$(cd "$(dirname "$0")" && pwd)/setup_env.sh"
cd "$root"
scratch=${FFPA_SCRATCH:-$(mktemp -d)}
[ -n "${FFPA_SCRATCH:-}" ] || trap 'rm -rf "$scratch"' EXIT

said() { # what the head of a check says under a word
  sed -n "s/^$2: //p" "$1" | tr '\n' ' '
}

fetch() { # a release's Python files and metadata
  local to=$scratch/$1-$2
  [ -d "$to" ] && return
  "$PY" -m pip download --quiet --no-deps --disable-pip-version-check --dest "$scratch/wheels" "$1==$2"
  "$PY" - "$scratch/wheels" "$1" "$2" "$to.part" <<'END'
import glob, sys, zipfile
folder, name, version, to = sys.argv[1:]
(wheel,) = glob.glob(f"{folder}/{name}-{version}-*.whl")
with zipfile.ZipFile(wheel) as files:
    kept = [x for x in files.namelist() if x.endswith((".py", ".json")) or ".dist-info/" in x]
    files.extractall(to, kept)
END
  mv "$to.part" "$to"
  rm -rf "$scratch/wheels"
}

if [ $# -eq 0 ]; then
  for check in tests/integrations/serving/check_*.py; do
    name=${check##*/check_}
    set -- "$@" "${name%.py}"
  done
fi
failed=()
for server in "$@"; do
  check=tests/integrations/serving/check_$server.py
  [ -f "$check" ] || { echo "serving_check.sh: there is no $check" >&2; exit 2; }
  needed=$scratch/$server-needs
  if [ ! -d "$needed" ]; then
    # shellcheck disable=SC2046  # a word for each package
    "$PY" -m pip install --quiet --disable-pip-version-check --target "$needed.part" $(said "$check" needs)
    # shellcheck disable=SC2046
    "$PY" -m pip install --quiet --disable-pip-version-check --target "$needed.part" --no-deps $(said "$check" alone)
    mv "$needed.part" "$needed"
  fi
  for release in ${RELEASES:-$(said "$check" releases)}; do
    fetch "$server" "$release"
    echo "== $server $release"
    PYTHONPATH=ffpa:tests:tests/integrations:$scratch/$server-$release:$needed \
      "$PY" -m pytest -q -p no:cacheprovider "$check" || failed+=("$server $release")
  done
done
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
echo "serving: all releases pass"
