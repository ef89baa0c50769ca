// One program, two compilers: nvcc builds it for a GPU, a host compiler for the emulator. It runs every case of
// tests/emulator/cases on the same inputs and writes the outputs; compare_results.py compares two such files bit for
// bit.
//
//   conform OUTPUT ARCH       ARCH: 80 or 90, what the GPU is or the emulator shall be. Built with FFPA_CONFORM_SM90=0
//                             there are no cases beyond sm_80.
//
// File: for each case a header {char name[64]; double ulp_bound; uint64_t words;} and the words.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cases/arithmetic.cuh"
#include "cases/flags.cuh"
#include "cases/matrix.cuh"
#include "cases/mbarrier.cuh"
#include "cases/memory.cuh"
#include "cases/special_registers.cuh"
#include "cases/tile.cuh"
#include "cases/warp.cuh"
#if FFPA_CONFORM_SM90
#include "cases/sm90.cuh"
#endif
#if !FFPA_CUDA
#include "ptx/emulated/machine/run.h"
#endif

namespace {

using namespace ffpa;

// Memory that kernels can access, filled with 0xcd.
const char* case_name = "";  // of the case that runs

class Buffer {
 public:
  explicit Buffer(size_t words) : words_(words) {
#if FFPA_CUDA
    check(cudaMalloc(&data_, bytes()));
    check(cudaMemset(data_, 0xcd, bytes()));
#else
    storage_.assign(words, 0xcdcdcdcd);
    data_ = storage_.data();
    range_ = std::make_unique<emu::RegisteredRange>(data_, bytes(), emu::Access::kReadWrite);
#endif
  }
  ~Buffer() {
#if FFPA_CUDA
    cudaFree(data_);
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint32_t* data() const { return data_; }

  void upload(const std::vector<uint32_t>& words) {
#if FFPA_CUDA
    check(cudaMemcpy(data_, words.data(), bytes(), cudaMemcpyHostToDevice));
#else
    std::memcpy(data_, words.data(), bytes());
#endif
  }

  std::vector<uint32_t> download() const {
    std::vector<uint32_t> words(words_);
#if FFPA_CUDA
    check(cudaDeviceSynchronize());
    check(cudaMemcpy(words.data(), data_, bytes(), cudaMemcpyDeviceToHost));
#else
    std::memcpy(words.data(), data_, bytes());
#endif
    return words;
  }

 private:
  size_t bytes() const { return words_ * sizeof(uint32_t); }

#if FFPA_CUDA
  static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", case_name, cudaGetErrorString(error));
    std::exit(1);
  }
#else
  std::vector<uint32_t> storage_;
  std::unique_ptr<emu::RegisteredRange> range_;
#endif

  size_t words_;
  uint32_t* data_ = nullptr;
};

// The same numbers from both compilers.
class Random {
 public:
  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return uint32_t(state_ >> 16);
  }

  uint32_t half() {  // 0.06 to 4 in magnitude, either sign
    constexpr uint32_t kFirstExponent = 11, kExponents = 6;
    return (bits() & 0x83ff) | (bits() % kExponents + kFirstExponent) << 10;
  }

  uint32_t byte() { return (bits() & 0x87) | (bits() % 12 + 2) << 3; }

  // 2^-20 to 2^20, but not 0.5 to 2: there the manual bounds the absolute error of lg2, and ulps would say nothing.
  uint32_t positive_exponent() {
    const uint32_t exponent = bits() % 38 + 107;
    return exponent < 126 ? exponent : exponent + 2;
  }

  uint32_t word(cases::Input kind) {
    switch (kind) {
      case cases::Input::kBits: {
        // Without infinities and NaN: read as floats, their payload is nobody's business.
        const uint32_t word = bits();
        return (word & 0x7f800000) == 0x7f800000 ? word & ~0x40000000u : word;
      }
      case cases::Input::kHalves:
        return half() | half() << 16;
      case cases::Input::kBytes:
        return byte() | byte() << 8 | byte() << 16 | byte() << 24;
      case cases::Input::kFloats:
        return float_bits(cases::float_from_random(bits()) * 2);
      case cases::Input::kPositiveFloats:
        return (bits() & 0x7fffff) | positive_exponent() << 23;
    }
    return 0;
  }

 private:
  uint64_t state_ = 88172645463325252ull;
};

void write_result(FILE* file, const cases::Case& entry, const std::vector<uint32_t>& words) {
  char name[64] = {};
  std::snprintf(name, sizeof(name), "%s", entry.name);
  const uint64_t count = words.size();
  std::fwrite(name, 1, sizeof(name), file);
  std::fwrite(&entry.ulp_bound, sizeof(entry.ulp_bound), 1, file);
  std::fwrite(&count, sizeof(count), 1, file);
  std::fwrite(words.data(), sizeof(uint32_t), words.size(), file);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s OUTPUT ARCH\n", argv[0]);
    return 2;
  }
  const int arch = std::atoi(argv[2]);
#if !FFPA_CUDA
  emu::Options options;
  options.arch = arch;
  options.accumulation = arch >= 90 ? emu::Accumulation::kHopper : emu::Accumulation::kAmpere;
  emu::set_current_options(options);
#endif
  std::vector<cases::Case> table = cases::sm80_cases();
#if FFPA_CONFORM_SM90
  const std::vector<cases::Case> sm90 = cases::sm90_cases();
  table.insert(table.end(), sm90.begin(), sm90.end());
#endif
  FILE* file = std::fopen(argv[1], "wb");
  if (!file) {
    std::perror(argv[1]);
    return 1;
  }
  Random random;
  int failures = 0;
  for (const cases::Case& entry : table) {
    std::vector<uint32_t> input_words(entry.input_words);
    for (uint32_t& word : input_words) word = random.word(entry.input);
    if (entry.arch > arch) continue;
    case_name = entry.name;
    Buffer input(input_words.size()), output(entry.output_words);
    input.upload(input_words);
    const LaunchStatus status = entry.run(input.data(), output.data());
    if (!status.ok()) {
      std::fprintf(stderr, "%s: %s\n", entry.name, status.message);
      ++failures;
      continue;
    }
    write_result(file, entry, output.download());
  }
  std::fclose(file);
  return failures ? 1 : 0;
}
