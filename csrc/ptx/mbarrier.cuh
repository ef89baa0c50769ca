// mbarrier: barriers in shared memory that count arrivals of threads and asynchronous copies. sm_80 has
// mbarrier_init, _arrive and _wait; bytes (TMA) and blocks of a cluster came with sm_90.
//
// A barrier is 8 bytes, 8-byte aligned. Its phase completes when the expected arrivals have come and all expected bytes
// have landed. A waiter names the parity of the phase it waits for: 0 for the first, and a wait for parity 1 on a fresh
// barrier returns at once. Parities tell only neighbouring phases apart, so nobody may fall a phase behind.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/mbarrier.cuh"
#else
#include "ptx/emulated/mbarrier.cuh"
#endif
