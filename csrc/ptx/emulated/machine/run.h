// What a program around the emulator needs: the options of its launches, and what they found.
#pragma once

#include "ptx/emulated/machine/global_memory.h"
#include "ptx/emulated/machine/options.h"
#include "ptx/emulated/machine/report.h"

namespace ffpa::emu {

// The options of all launches from now on.
void set_current_options(const Options& options);

// Returns the sum of the reports of all launches since the last call.
Report take_session_report();

}  // namespace ffpa::emu
