// A CallSite is the place in a kernel that a report should name. Functions of ptx record the place of their caller; a
// helper above ptx that wants its own caller named takes a `ptx::CallSite site = ptx::CallSite()` as last parameter and
// hands it on. On a GPU it is empty and costs nothing.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/call_site.cuh"
#else
#include "ptx/emulated/call_site.cuh"
#endif
