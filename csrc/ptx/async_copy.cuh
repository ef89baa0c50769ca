// cp.async: copies from global to shared memory that run beside the thread and end at a wait.
//
// The bytes are visible to the issuing thread after cp_async_wait_group, and to other threads only after a barrier that
// follows it. Instead, cp_async_mbarrier_arrive can make a barrier of ptx/mbarrier.cuh wait for them: it arrives when
// all copies that this thread has issued so far, in committed groups or not, have landed. A thread that has waited for
// that phase, the issuing one or another, sees the copies. It sees nothing else that the issuing thread did: ordinary
// stores and loads need an mbarrier_arrive of their own. Either way, a thread exits only when its copies have landed.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/async_copy.cuh"
#else
#include "ptx/emulated/async_copy.cuh"
#endif
