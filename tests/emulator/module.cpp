// Python's view of the emulator and of the test cases. No other file includes pybind11; kernels live in other files.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ptx/emulated/machine/run.h"
#include "test_kernels.h"

namespace py = pybind11;

namespace ffpa {
namespace {

py::dict to_python(const emu::Report& report) {
  py::list errors;
  for (const emu::Error& error : report.errors) {
    errors.append(py::dict(py::arg("kind") = error.kind, py::arg("message") = error.message,
                           py::arg("file") = error.site.file, py::arg("line") = error.site.line,
                           py::arg("count") = error.count));
  }
  py::list bank_conflicts;
  for (const auto& [instruction, entry] : report.bank_conflicts) {
    bank_conflicts.append(py::dict(py::arg("instruction") = instruction.name, py::arg("file") = instruction.site.file,
                                   py::arg("line") = instruction.site.line, py::arg("executions") = entry.executions,
                                   py::arg("wavefronts") = entry.wavefronts,
                                   py::arg("ideal_wavefronts") = entry.ideal_wavefronts,
                                   py::arg("worst_way") = entry.worst_way));
  }
  const emu::Counters& counters = report.counters;
  py::dict counts(py::arg("blocks") = counters.blocks, py::arg("mma") = counters.mma, py::arg("wgmma") = counters.wgmma,
                  py::arg("barriers") = counters.barriers,
                  py::arg("bytes_global_to_shared") = counters.bytes_global_to_shared,
                  py::arg("bytes_global_loaded") = counters.bytes_global_loaded,
                  py::arg("bytes_global_stored") = counters.bytes_global_stored);
  return py::dict(py::arg("errors") = errors, py::arg("bank_conflicts") = bank_conflicts, py::arg("counters") = counts);
}

emu::Accumulation accumulation_named(const std::string& name) {
  if (name == "plain") return emu::Accumulation::kPlain;
  if (name == "ampere") return emu::Accumulation::kAmpere;
  if (name == "hopper") return emu::Accumulation::kHopper;
  throw py::value_error("accumulation is plain, ampere or hopper, not " + name);
}

void configure(int arch, uint64_t seed, int os_threads, bool check_races, const std::string& accumulation,
               int64_t max_steps) {
  emu::Options options;
  options.arch = arch;
  options.seed = seed;
  options.os_threads = os_threads;
  options.check_races = check_races;
  options.accumulation = accumulation_named(accumulation);
  options.max_steps = max_steps;
  emu::set_current_options(options);
}

// Runs a test kernel on numpy arrays. Returns (status message, report); an empty message is success.
py::tuple run(const std::string& name, const std::vector<py::array>& inputs, const std::vector<py::array>& outputs,
              const std::vector<int64_t>& integers, const std::vector<double>& numbers) {
  const testing::Kernel* kernel = testing::find_kernel(name);
  if (!kernel) throw py::value_error("no test kernel " + name);
  testing::Arguments arguments;
  std::vector<std::unique_ptr<emu::RegisteredRange>> ranges;
  for (const py::array& array : inputs) {
    arguments.inputs.push_back(array.data());
    ranges.push_back(std::make_unique<emu::RegisteredRange>(array.data(), array.nbytes(), emu::Access::kReadOnly));
  }
  for (py::array array : outputs) {
    arguments.outputs.push_back(array.mutable_data());
    ranges.push_back(std::make_unique<emu::RegisteredRange>(array.data(), array.nbytes(), emu::Access::kReadWrite));
  }
  arguments.integers = integers;
  arguments.numbers = numbers;
  LaunchStatus status;
  std::string message;
  {
    py::gil_scoped_release release;
    status = kernel->run(arguments);
    message = status.message;
  }
  return py::make_tuple(status.ok() ? "" : message, to_python(emu::take_session_report()));
}

py::list case_list() {
  py::list list;
  for (const cases::Case& entry : testing::case_table()) {
    const char* const input_names[] = {"bits", "halves", "bytes", "floats", "positive_floats"};
    list.append(py::dict(py::arg("name") = entry.name, py::arg("arch") = entry.arch,
                         py::arg("input") = input_names[static_cast<int>(entry.input)],
                         py::arg("input_words") = entry.input_words, py::arg("output_words") = entry.output_words));
  }
  return list;
}

}  // namespace
}  // namespace ffpa

PYBIND11_MODULE(ffpa_emulator_tests, module) {
  module.doc() = "Test kernels in the CPU emulator";
  module.def("configure", &ffpa::configure, py::kw_only(), py::arg("arch") = 80, py::arg("seed") = 0,
             py::arg("os_threads") = 1, py::arg("check_races") = true, py::arg("accumulation") = "plain",
             py::arg("max_steps") = int64_t(1) << 31);
  module.def("run", &ffpa::run, py::arg("name"), py::arg("inputs"), py::arg("outputs"),
             py::arg("integers") = std::vector<int64_t>(), py::arg("numbers") = std::vector<double>());
  module.def("cases", &ffpa::case_list);
}
