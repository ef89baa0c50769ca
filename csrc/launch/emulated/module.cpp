// Python's view of the kernels in the emulator: the calls of csrc/torch_ops, on CPU memory. The module is built with
// the generated instances and the machine (ffpa_attn/testing); without a torch header it compiles in seconds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention/attention_params.h"
#include "attention/backward_params.h"
#include "attention/fp8_params.h"
#include "launch/emulated/instance.h"
#include "ptx/emulated/machine/run.h"

namespace py = pybind11;

namespace ffpa {
namespace {

using Integers = std::vector<int64_t>;
using TensorTuple = std::tuple<uintptr_t, Integers, Integers>;             // address, sizes, strides
using MaskTuple = std::tuple<std::string, uintptr_t, Integers, Integers>;  // name of the type, address, sizes, strides

HostTensor host_tensor(uintptr_t address, const Integers& sizes, const Integers& strides) {
  return {reinterpret_cast<void*>(address), int(sizes.size()), sizes.data(), strides.data()};
}

size_t extent_bytes(const HostTensor& x, size_t element_bytes = sizeof(uint16_t)) {
  int64_t last = 0;
  for (int dim = 0; dim < 4; ++dim) {
    if (x.sizes[dim] == 0) return 0;
    last += (x.sizes[dim] - 1) * x.strides[dim];
  }
  return size_t(last + 1) * element_bytes;
}

struct MaskType {
  MaskKind kind;
  size_t bytes;
};
const std::map<std::string, MaskType> kMaskTypes = {{"torch.bool", {MaskKind::kBool, 1}},
                                                    {"torch.float16", {MaskKind::kHalf, 2}},
                                                    {"torch.bfloat16", {MaskKind::kBFloat16, 2}},
                                                    {"torch.float32", {MaskKind::kFloat, 4}}};

emu::Accumulation accumulation_of(int arch, bool exact) {
  if (!exact) return emu::Accumulation::kPlain;
  return arch >= emu::kSm90 ? emu::Accumulation::kHopper : emu::Accumulation::kAmpere;
}

void configure(int arch, uint64_t seed, bool exact, int os_threads) {
  emu::Options options;
  options.arch = arch;
  options.seed = seed;
  options.accumulation = accumulation_of(arch, exact);
  options.os_threads = os_threads;
  emu::set_current_options(options);
}

struct EmulatedMask {
  MaskView view{};
  std::optional<emu::RegisteredRange> range;

  explicit EmulatedMask(const std::optional<MaskTuple>& mask) {
    if (!mask) return;
    const auto& [type, address, sizes, strides] = *mask;
    const HostTensor tensor = host_tensor(address, sizes, strides);
    view = tensor.mask(kMaskTypes.at(type).kind);
    range.emplace(tensor.data, extent_bytes(tensor, kMaskTypes.at(type).bytes), emu::Access::kReadOnly);
  }
};

// Returns the message of a failed run, or an empty one after a good run.
std::string attention_forward(const std::string& kernel, const TensorTuple& q, const TensorTuple& k,
                              const TensorTuple& v, const TensorTuple& out, uintptr_t lse,
                              const std::optional<MaskTuple>& mask, uintptr_t offsets_q, uintptr_t offsets_k,
                              int64_t sequences, int64_t longest_q, int64_t longest_k, double scale, double softcap,
                              int64_t left, int64_t right, bool top_left, int64_t stages, int64_t value_stages,
                              bool q_resident, bool grid_of_heads, int64_t chunk_keys, uintptr_t scratch,
                              int64_t scratch_floats, int64_t resident_blocks, int64_t splits, uintptr_t partial,
                              int64_t partial_floats) {
  const EmulatedInstance& instance = emulated_instances().at(kernel);
  const HostTensor tensors[] = {std::apply(host_tensor, q), std::apply(host_tensor, k), std::apply(host_tensor, v),
                                std::apply(host_tensor, out)};
  const HostTensor& result = tensors[3];
  const size_t offsets_bytes = offsets_q ? size_t(sequences + 1) * sizeof(int32_t) : 0;
  const emu::RegisteredRange ranges[] = {
      {tensors[0].data, extent_bytes(tensors[0]), emu::Access::kReadOnly},
      {tensors[1].data, extent_bytes(tensors[1]), emu::Access::kReadOnly},
      {tensors[2].data, extent_bytes(tensors[2]), emu::Access::kReadOnly},
      {result.data, extent_bytes(result), emu::Access::kReadWrite},
      {reinterpret_cast<void*>(lse),
       lse ? size_t(result.sizes[0] * result.sizes[1] * result.sizes[2]) * sizeof(float) : 0, emu::Access::kReadWrite},
      {reinterpret_cast<void*>(scratch), size_t(scratch_floats) * sizeof(float), emu::Access::kReadWrite},
      {reinterpret_cast<void*>(offsets_q), offsets_bytes, emu::Access::kReadOnly},
      {reinterpret_cast<void*>(offsets_k), offsets_bytes, emu::Access::kReadOnly},
      {reinterpret_cast<void*>(partial), size_t(partial_floats) * sizeof(float), emu::Access::kReadWrite},
  };
  const EmulatedMask of_mask(mask);
  const AttentionParams params = forward_params(
      tensors[0], tensors[1], tensors[2], result, reinterpret_cast<float*>(lse), of_mask.view,
      {reinterpret_cast<const int32_t*>(offsets_q), reinterpret_cast<const int32_t*>(offsets_k), sequences, longest_q,
       longest_k},
      {scale, softcap, left, right, top_left, stages, value_stages, q_resident, grid_of_heads, int(chunk_keys),
       reinterpret_cast<float*>(scratch), int(resident_blocks), int(splits), reinterpret_cast<float*>(partial)});
  const py::gil_scoped_release release;
  return instance.launch(&params).message;
}

// Takes what torch_ops/fp8_forward.cpp describes. `tensors`: q, k, v, out; `scales`: those of q, k and v.
std::string fp8_forward(const std::string& kernel, const std::vector<TensorTuple>& tensors,
                        const std::vector<std::optional<TensorTuple>>& scales, uintptr_t lse, double scale,
                        double softcap, int64_t left, int64_t right, bool top_left, uintptr_t scratch,
                        int64_t scratch_floats, int64_t resident_blocks, int output) {
  const auto tensor = [&](size_t i) { return std::apply(host_tensor, tensors.at(i)); };
  const HostTensor x[] = {tensor(0), tensor(1), tensor(2), tensor(3)};
  const bool floats = Fp8Output(output) == Fp8Output::kFloat;
  std::deque<emu::RegisteredRange> ranges;
  for (const HostTensor& input : {x[0], x[1], x[2]}) {
    ranges.emplace_back(input.data, extent_bytes(input), emu::Access::kReadOnly);
  }
  ranges.emplace_back(x[3].data, extent_bytes(x[3], floats ? 4 : 2), emu::Access::kReadWrite);
  ranges.emplace_back(reinterpret_cast<void*>(lse),
                      lse ? size_t(x[3].sizes[0] * x[3].sizes[1] * x[3].sizes[2]) * sizeof(float) : 0,
                      emu::Access::kReadWrite);
  ranges.emplace_back(reinterpret_cast<void*>(scratch), size_t(scratch_floats) * sizeof(float),
                      emu::Access::kReadWrite);
  const auto view = [&](size_t i) -> ScaleView {
    if (!scales.at(i)) return {};
    const HostTensor of = std::apply(host_tensor, *scales[i]);
    ranges.emplace_back(of.data, extent_bytes(of, sizeof(float)), emu::Access::kReadOnly);
    return scale_view(of);
  };
  const ScaleView views[] = {view(0), view(1), view(2)};
  const Fp8Params params = fp8_params(
      x[0], x[1], x[2], x[3], reinterpret_cast<float*>(lse), views[0], views[1], views[2], Fp8Output(output),
      fp8_options(scale, softcap, left, right, top_left, reinterpret_cast<float*>(scratch), resident_blocks));
  const py::gil_scoped_release release;
  return emulated_instances().at(kernel).launch(&params).message;
}

std::string arrange_values(const std::string& kernel, const TensorTuple& v, const TensorTuple& arranged) {
  const HostTensor tensors[] = {std::apply(host_tensor, v), std::apply(host_tensor, arranged)};
  const emu::RegisteredRange ranges[] = {{tensors[0].data, extent_bytes(tensors[0], 1), emu::Access::kReadOnly},
                                         {tensors[1].data, extent_bytes(tensors[1], 1), emu::Access::kReadWrite}};
  const ArrangeParams params = arrange_params(tensors[0], tensors[1]);
  const py::gil_scoped_release release;
  return emulated_instances().at(kernel).launch(&params).message;
}

using MemoryTuple = std::tuple<uintptr_t, size_t>;  // address, bytes

// Takes what torch_ops/attention_backward.cpp describes. `tensors`: q, k, v, out, grad_out, dq, dk, dv; `memory`: lse,
// grad_lse, offsets of q and k, statistics, live rows, p, ds, partial.
std::string attention_backward(const std::string& kernel, const std::vector<TensorTuple>& tensors,
                               const std::vector<MemoryTuple>& memory, const std::optional<MaskTuple>& mask,
                               int64_t sequences, int64_t longest_q, int64_t longest_k, double scale, double softcap,
                               int64_t left, int64_t right, bool top_left, int64_t resident_blocks,
                               bool float_gradients, int64_t first_entry, int64_t entries, int64_t first_tile,
                               int64_t end_tile, int64_t first_key, int64_t end_key, int64_t turn) {
  const auto tensor = [&](size_t i) { return std::apply(host_tensor, tensors.at(i)); };
  const BackwardTensors x = {tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), tensor(5), tensor(6), tensor(7)};
  const auto address = [&](size_t i) { return reinterpret_cast<void*>(std::get<0>(memory.at(i))); };
  std::deque<emu::RegisteredRange> ranges;
  constexpr size_t kInputs = 5, kInputMemory = 4;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const HostTensor of = tensor(i);
    ranges.emplace_back(of.data, extent_bytes(of, i >= kInputs && float_gradients ? 4 : 2),
                        i < kInputs ? emu::Access::kReadOnly : emu::Access::kReadWrite);
  }
  for (size_t i = 0; i < memory.size(); ++i) {
    ranges.emplace_back(address(i), std::get<1>(memory[i]),
                        i < kInputMemory ? emu::Access::kReadOnly : emu::Access::kReadWrite);
  }
  const EmulatedMask of_mask(mask);
  const ForwardOptions options = backward_options(scale, softcap, left, right, top_left, resident_blocks);
  const BackwardParams params = backward_params(
      x, static_cast<float*>(address(0)), static_cast<const float*>(address(1)), of_mask.view,
      {static_cast<const int32_t*>(address(2)), static_cast<const int32_t*>(address(3)), sequences, longest_q,
       longest_k},
      options, float_gradients, static_cast<float*>(address(4)), static_cast<uint64_t*>(address(5)),
      {first_entry, entries, first_tile, end_tile, first_key, end_key, turn, static_cast<uint16_t*>(address(6)),
       static_cast<uint16_t*>(address(7)), static_cast<float*>(address(8))});
  const py::gil_scoped_release release;
  return emulated_instances().at(kernel).launch(&params).message;
}

// Returns (bytes of shared memory, grid) of a call with one row block for each of these heads.
std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> launch_shape(const std::string& kernel, int d_qk, int stages,
                                                                int value_stages, bool q_resident, bool grid_of_heads,
                                                                int heads, int batch) {
  AttentionParams params{};
  params.d_qk = d_qk;
  params.d_v = params.n_q = params.splits = 1;
  params.heads_q = heads;
  params.batch = batch;
  params.stages = stages;
  params.value_stages = value_stages;
  params.q_resident = q_resident;
  params.grid_of_heads = grid_of_heads;
  params.resident_blocks = kLargestInt;
  const LaunchShape shape = emulated_instances().at(kernel).shape(&params);
  return {shape.smem_bytes, shape.grid.x, shape.grid.y, shape.grid.z};
}

py::dict take_report() {
  const emu::Report report = emu::take_session_report();
  int64_t wavefronts = 0, ideal = 0;
  for (const emu::BankConflicts& entry : report.bank_conflicts) {
    wavefronts += entry.wavefronts;
    ideal += entry.ideal_wavefronts;
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
  module.def("attention_forward", &ffpa::attention_forward);
  module.def("attention_backward", &ffpa::attention_backward);
  module.def("fp8_forward", &ffpa::fp8_forward);
  module.def("arrange_values", &ffpa::arrange_values);
  module.def("launch_shape", &ffpa::launch_shape);
  module.def("take_report", &ffpa::take_report);
}
