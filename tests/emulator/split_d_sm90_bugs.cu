// The sm_90a split-D test kernel with each of its bugs, for the emulator only: ptxas has its own opinion of some.
#include "split_d_sm90_launch.cuh"

namespace ffpa::testing {
namespace {

template <Sm90Bug kBug>
Kernel broken() {
  constexpr int kCluster = kBug == Sm90Bug::kOnlyLocalRelease ? 2 : 1;
  return {"split_d_sm90/bug_" + std::to_string(static_cast<int>(kBug)), run_split_d_sm90<128, 2, kCluster, kBug>};
}

template <int... kBugs>
std::vector<Kernel> all_broken(std::integer_sequence<int, kBugs...>) {
  return {broken<static_cast<Sm90Bug>(kBugs)>()...};
}

}  // namespace

std::vector<Kernel> split_d_sm90_bugs() {
  constexpr int kBugCount = static_cast<int>(Sm90Bug::kMisalignedDestination) + 1;
  return all_broken(std::make_integer_sequence<int, kBugCount>());
}

}  // namespace ffpa::testing
