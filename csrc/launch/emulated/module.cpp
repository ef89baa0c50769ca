// Python's view of the kernels in the emulator: what csrc/torch_ops/launch.cpp does, on CPU memory. The module is built
// with the generated instances and the machine (ffpa_attn/testing); without a torch header it compiles in seconds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "launch/emulated/instance.h"
#include "ptx/emulated/machine/run.h"

namespace py = pybind11;

namespace ffpa {
namespace {

using MemoryTuple = std::tuple<uintptr_t, size_t, bool>;  // address, bytes, whether a kernel may write them

void configure(int arch, uint64_t seed, bool exact, int os_threads) {
  emu::Options options;
  options.arch = arch;
  options.seed = seed;
  if (exact) options.accumulation = arch >= emu::kSm90 ? emu::Accumulation::kHopper : emu::Accumulation::kAmpere;
  options.os_threads = os_threads;
  emu::set_current_options(options);
}

// Returns the kernel of this name, which must take parameters of this size.
const EmulatedInstance& find_instance(const std::string& kernel, const std::string& params) {
  const EmulatedInstance& instance = emulated_instances().at(kernel);
  if (params.size() != instance.params_bytes) throw std::invalid_argument(kernel + ": parameters of another size");
  return instance;
}

// Runs a kernel, which may touch no other memory than this. Returns the message of a failed run, or an empty one.
std::string launch_kernel(const std::string& kernel, const std::string& params,
                          const std::vector<MemoryTuple>& memory) {
  const EmulatedInstance& instance = find_instance(kernel, params);
  std::deque<emu::RegisteredRange> ranges;
  for (const auto& [address, bytes, writes] : memory) {
    ranges.emplace_back(reinterpret_cast<void*>(address), bytes,
                        writes ? emu::Access::kReadWrite : emu::Access::kReadOnly);
  }
  const py::gil_scoped_release release;
  return instance.launch(params).message;
}

// Returns (bytes of shared memory, grid) of a launch.
std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> launch_shape(const std::string& kernel, const std::string& params) {
  const LaunchShape shape = find_instance(kernel, params).shape(params);
  return {shape.smem_bytes, shape.grid.x, shape.grid.y, shape.grid.z};
}

py::dict take_report() {
  const emu::Report report = emu::take_session_report();
  int64_t wavefronts = 0, ideal = 0;
  for (const auto& [instruction, conflicts] : report.bank_conflicts) {
    wavefronts += conflicts.wavefronts;
    ideal += conflicts.ideal_wavefronts;
  }
  return py::dict(py::arg("mma") = report.counters.mma, py::arg("wgmma") = report.counters.wgmma,
                  py::arg("barriers") = report.counters.barriers, py::arg("blocks") = report.counters.blocks,
                  py::arg("bytes_global") = report.counters.bytes_global_to_shared +
                                            report.counters.bytes_global_loaded + report.counters.bytes_global_stored,
                  py::arg("bank_conflict_ratio") = ideal ? double(wavefronts) / double(ideal) : 1.0);
}

}  // namespace
}  // namespace ffpa

PYBIND11_MODULE(ffpa_emulated, module) {
  module.def("configure", &ffpa::configure);
  module.def("launch", &ffpa::launch_kernel);
  module.def("launch_shape", &ffpa::launch_shape);
  module.def("take_report", &ffpa::take_report);
}
