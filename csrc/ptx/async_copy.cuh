// cp.async: copies from global to shared memory that run beside the thread and end at a wait.
//
// The bytes are visible to the issuing thread after cp_async_wait_group, and to other threads only after a barrier that
// follows it.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/async_copy.cuh"
#else
#include "ptx/emulated/async_copy.cuh"
#endif
