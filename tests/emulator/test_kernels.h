// Kernels that tests start by name.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cases/case.h"
#include "launch/launch.cuh"

namespace ffpa::testing {

struct Arguments {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<int64_t> integers;
  std::vector<double> numbers;

  template <class T>
  const T* input(size_t i) const {
    return static_cast<const T*>(inputs.at(i));
  }
  template <class T>
  T* output(size_t i) const {
    return static_cast<T*>(outputs.at(i));
  }
};

struct Kernel {
  std::string name;
  std::function<LaunchStatus(const Arguments& arguments)> run;
};

// The cases of tests/emulator/cases, for every architecture; each can also be run as a kernel of the same name.
const std::vector<cases::Case>& case_table();

std::vector<Kernel> misuse_kernels();
std::vector<Kernel> misuse_flag_kernels();
std::vector<Kernel> misuse_sm90_kernels();
std::vector<Kernel> misuse_bulk_store_kernels();
std::vector<Kernel> split_d_kernels();
std::vector<Kernel> split_d_sm90_kernels();
std::vector<Kernel> split_d_sm90_bugs();

// Returns nullptr if there is none of this name.
const Kernel* find_kernel(const std::string& name);

}  // namespace ffpa::testing
