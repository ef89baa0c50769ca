#include "ptx/emulated/machine/report.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace ffpa::emu {

std::string to_string(CallSite site) {
  const char* slash = std::strrchr(site.file, '/');
  return format("%s:%d", slash ? slash + 1 : site.file, site.line);
}

std::string format(const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  const std::string text = format(pattern, values);
  va_end(values);
  return text;
}

std::string format(const char* pattern, va_list values) {
  char* text = nullptr;
  if (vasprintf(&text, pattern, values) < 0) throw std::bad_alloc();
  const std::unique_ptr<char, decltype(&std::free)> owner(text, std::free);
  return text;
}

void BankConflicts::add(const BankConflicts& other) {
  executions += other.executions;
  wavefronts += other.wavefronts;
  ideal_wavefronts += other.ideal_wavefronts;
  worst_way = std::max(worst_way, other.worst_way);
}

void Counters::add(const Counters& other) {
  blocks += other.blocks;
  mma += other.mma;
  wgmma += other.wgmma;
  barriers += other.barriers;
  bytes_global_to_shared += other.bytes_global_to_shared;
  bytes_global_loaded += other.bytes_global_loaded;
  bytes_global_stored += other.bytes_global_stored;
}

void Report::add(const Error& error) {
  const auto same = std::find_if(errors.begin(), errors.end(),
                                 [&](const Error& mine) { return mine.kind == error.kind && mine.key == error.key; });
  if (same == errors.end()) {
    errors.push_back(error);
  } else {
    same->count += error.count;
  }
}

void Report::merge(const Report& other) {
  for (const Error& error : other.errors) add(error);
  for (const auto& [instruction, conflicts] : other.bank_conflicts) bank_conflicts[instruction].add(conflicts);
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
