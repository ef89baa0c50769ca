// CompiledKernel is a kernel that Triton compiled, as Python describes it once for all calls of a kind. A call brings
// the addresses of its tensors, in an order that Python knows.
#pragma once

#include <cstdint>

namespace ffpa {

// This parameter is the address of the call's tensor of this number, plus so many bytes.
struct AddressParameter {
  int place;  // where the parameter lies in the image, in bytes
  int tensor;
  int64_t offset;
};

// This parameter is a TMA descriptor of such a tensor. Dimensions are innermost first.
struct MapParameter {
  AddressParameter base;
  int type, swizzle;  // as the driver counts them
  int rank;
  const uint64_t* size;          // elements
  const uint64_t* stride_bytes;  // strides of dimensions 1 …
  const uint32_t* box;           // elements that a copy moves
};

struct CompiledKernel {
  const char* name;
  void* function;  // a CUfunction
  int programs, threads, smem_bytes;
  int parameters, image_bytes;
  const int* place;      // where each parameter lies in the image
  const int* bytes;      // how many it has
  const uint8_t* image;  // all parameters; those below are filled in
  int addresses, maps;
  const AddressParameter* address;
  const MapParameter* map;
};

}  // namespace ffpa
