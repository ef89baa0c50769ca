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

// Returns the kernel of this name, which must take parameters of this size.
const EmulatedInstance& find_instance(const std::string& kernel, const std::string& params) {
  const EmulatedInstance& instance = emulated_instances().at(kernel);
  if (params.size() != instance.params_bytes) throw std::invalid_argument(kernel + ": parameters of another size");
  return instance;
}

// Returns (bytes of shared memory, grid) of a launch.
std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> launch_shape(const std::string& kernel, const std::string& params) {
  const LaunchShape shape = find_instance(kernel, params).shape(params);
  return {shape.smem_bytes, shape.grid.x, shape.grid.y, shape.grid.z};
}

py::dict to_python(const emu::Report& report) {
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

// Runs a kernel, which may touch no other memory than this. Returns the message of a failed run, or an empty one, and
// the report.
py::tuple run(const std::string& kernel, const std::string& params, const std::vector<MemoryTuple>& memory, int arch,
              uint64_t seed, bool exact, int os_threads) {
  const EmulatedInstance& instance = find_instance(kernel, params);
  emu::Options options;
  options.arch = arch;
  options.seed = seed;
  if (exact) options.accumulation = arch >= emu::kSm90 ? emu::Accumulation::kHopper : emu::Accumulation::kAmpere;
  options.os_threads = os_threads;
  emu::set_current_options(options);
  std::deque<emu::RegisteredRange> ranges;
  for (const auto& [address, bytes, writes] : memory) {
    ranges.emplace_back(reinterpret_cast<void*>(address), bytes,
                        writes ? emu::Access::kReadWrite : emu::Access::kReadOnly);
  }
  LaunchStatus status;
  {
    const py::gil_scoped_release release;
    status = instance.launch(params);
  }
  return py::make_tuple(status.message, to_python(emu::take_session_report()));
}

}  // namespace
}  // namespace ffpa

PYBIND11_MODULE(ffpa_emulated, module) {
  module.def("run", &ffpa::run);
  module.def("launch_shape", &ffpa::launch_shape);
}
