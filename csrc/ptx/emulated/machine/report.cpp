#include "ptx/emulated/machine/report.h"

#include <algorithm>
#include <cstring>

namespace ffpa::emu {

void Counters::add(const Counters& other) {
  blocks += other.blocks;
  mma += other.mma;
  wgmma += other.wgmma;
  ldmatrix += other.ldmatrix;
  stmatrix += other.stmatrix;
  shuffles += other.shuffles;
  barriers += other.barriers;
  async_copies += other.async_copies;
  tma_loads += other.tma_loads;
  tma_stores += other.tma_stores;
  bytes_global_to_shared += other.bytes_global_to_shared;
  bytes_global_loaded += other.bytes_global_loaded;
  bytes_global_stored += other.bytes_global_stored;
  collectives += other.collectives;
  context_switches += other.context_switches;
}

bool Report::has(const std::string& kind) const {
  return std::any_of(errors.begin(), errors.end(), [&](const Error& error) { return error.kind == kind; });
}

void Report::merge(const Report& other) {
  for (const Error& error : other.errors) {
    auto same = std::find_if(errors.begin(), errors.end(), [&](const Error& mine) {
      return mine.kind == error.kind && mine.message == error.message;
    });
    if (same == errors.end()) {
      errors.push_back(error);
    } else {
      same->count += error.count;
    }
  }
  for (const BankConflicts& conflicts : other.bank_conflicts) {
    auto same = std::find_if(bank_conflicts.begin(), bank_conflicts.end(), [&](const BankConflicts& mine) {
      return mine.site.line == conflicts.site.line && !std::strcmp(mine.site.file, conflicts.site.file) &&
             !std::strcmp(mine.instruction, conflicts.instruction);
    });
    if (same == bank_conflicts.end()) {
      bank_conflicts.push_back(conflicts);
    } else {
      same->executions += conflicts.executions;
      same->wavefronts += conflicts.wavefronts;
      same->ideal_wavefronts += conflicts.ideal_wavefronts;
      same->worst_way = std::max(same->worst_way, conflicts.worst_way);
    }
  }
  counters.add(other.counters);
}

std::string Report::summary() const {
  std::string text;
  for (const Error& error : errors) {
    if (!text.empty()) text += "\n";
    text += error.kind + " (" + std::to_string(error.count) + "x): " + error.message;
  }
  return text;
}

}  // namespace ffpa::emu
