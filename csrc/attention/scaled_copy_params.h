#pragma once

#include <cstdint>

namespace ffpa {

struct ScaledCopyParams {
  const void* in;  // [size]
  void* out;       // [size]
  int64_t size;
  float scale;
};

}  // namespace ffpa
