#!/usr/bin/env bash
# Builds tests/conform/conform.cu for the GPU of this machine and for the emulator, runs both, and compares the results.
# Needs a GPU (sm_80 or later), nvcc, g++, and Python with numpy ($PYTHON, or python3).
#   usage: .dev/conform.sh [output directory]
#   FFPA_CONFORM_BUILD_ONLY=1: build both programs and run the emulator's alone, on a machine without a GPU, for sm_90.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m -- "${1:-build/conform}")
mkdir -p "$out"

if [[ ${FFPA_CONFORM_BUILD_ONLY:-0} == 1 ]]; then
  capability=9.0
else
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)
fi
case $capability in
  9.0) arch=90 sm90=1 gencode=arch=compute_90a,code=sm_90a ;;
  *)   arch=80 sm90=0 gencode=arch=compute_80,code=compute_80 ;;  # the sm_80 cases; the accumulation model is sm_80's
esac

includes=(-Icsrc -Itests/emulator -DFFPA_CONFORM_SM90=$sm90)
nvcc -std=c++17 -O3 -gencode "$gencode" "${includes[@]}" tests/conform/conform.cu -o "$out/conform_gpu" &
nvcc_job=$!

# One object for each source of the emulator, on all cores.
host_flags=(-std=c++17 -O2 -pthread -ffp-contract=off -Wno-psabi "${includes[@]}")
{
  printf '%s\n' csrc/ptx/emulated/machine/*.cpp tests/conform/conform.cu
} | OUT=$out xargs -P "$(nproc)" -I{} sh -c 'source=$1; shift; g++ -x c++ "$@" -c "$source" -o "$OUT/${source##*/}.o"' sh {} "${host_flags[@]}"
g++ -pthread "$out"/*.o -o "$out/conform_emulated"
wait "$nvcc_job"

"$out/conform_emulated" "$out/emulated.bin" "$arch"
if [[ ${FFPA_CONFORM_BUILD_ONLY:-0} == 1 ]]; then
  echo "built both programs and ran the emulator's; there is nothing to compare with"
  exit 0
fi
"$out/conform_gpu" "$out/gpu.bin" "$arch"
"${PYTHON:-python3}" tests/conform/compare_results.py "$out/gpu.bin" "$out/emulated.bin" --arch "$arch"
