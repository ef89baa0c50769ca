// All cases in one translation unit, and the table of everything that can be run by name.
#include "cases/arithmetic.cuh"
#include "cases/flags.cuh"
#include "cases/matrix.cuh"
#include "cases/mbarrier.cuh"
#include "cases/memory.cuh"
#include "cases/sm90.cuh"
#include "cases/special_registers.cuh"
#include "cases/tile.cuh"
#include "cases/warp.cuh"
#include "test_kernels.h"

namespace ffpa::testing {
namespace {

std::vector<Kernel> all_kernels() {
  std::vector<Kernel> all;
  for (const cases::Case& entry : case_table()) {
    const auto run = entry.run;
    all.push_back({entry.name, [run](const Arguments& arguments) {
                     return run(arguments.input<uint32_t>(0), arguments.output<uint32_t>(0));
                   }});
  }
  for (auto group : {misuse_kernels, misuse_flag_kernels, misuse_sm90_kernels, misuse_bulk_store_kernels,
                     split_d_kernels, split_d_sm90_kernels, split_d_sm90_bugs}) {
    const std::vector<Kernel> kernels = group();
    all.insert(all.end(), kernels.begin(), kernels.end());
  }
  return all;
}

}  // namespace

const std::vector<cases::Case>& case_table() {
  static const std::vector<cases::Case> table = [] {
    std::vector<cases::Case> all = cases::sm80_cases();
    const std::vector<cases::Case> sm90 = cases::sm90_cases();
    all.insert(all.end(), sm90.begin(), sm90.end());
    return all;
  }();
  return table;
}

const Kernel* find_kernel(const std::string& name) {
  static const std::vector<Kernel> all = all_kernels();
  for (const Kernel& kernel : all) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

}  // namespace ffpa::testing
