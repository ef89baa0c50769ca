// Emulated side of ptx/native/call_site.cuh.
#pragma once

#include "ptx/emulated/machine/call_site.h"

namespace ffpa::ptx {

using CallSite = emu::CallSite;

}  // namespace ffpa::ptx
