// This is the only header that looks at which compiler is reading the file and for which GPU.
//
// The same kernel source is read twice: by nvcc, which builds GPU code from csrc/ptx/native, and by a plain host
// compiler, which builds the kernel for the CPU emulator from csrc/ptx/emulated. Everything above csrc/ptx uses the
// macros below and never asks who is compiling.
#pragma once

#if defined(__CUDACC__)
#define FFPA_CUDA 1
#else
#define FFPA_CUDA 0
#endif

// FFPA_SM90 is 1 where nvcc compiles for sm_90 or later: csrc/ptx/native then uses what sm_80 has to do in another way.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FFPA_SM90 1
#else
#define FFPA_SM90 0
#endif

#if FFPA_CUDA

// Device functions are always inlined: register arrays passed by reference must not become memory.
#define FFPA_DEVICE __device__ __forceinline__
#define FFPA_HOST_DEVICE __host__ __device__ __forceinline__

// A kernel is declared as FFPA_KERNEL(threads, min_blocks_per_sm) void name(…): the bounds fix the register budget, and
// ptxas ignores setmaxnreg unless the second one is given.
#define FFPA_KERNEL(threads, min_blocks_per_sm) __global__ __launch_bounds__(threads, min_blocks_per_sm)

// Marks a kernel parameter that stays in constant memory, so that its address can be handed to the TMA unit.
#define FFPA_GRID_CONSTANT __grid_constant__

#define FFPA_UNROLL _Pragma("unroll")
#define FFPA_NO_UNROLL _Pragma("unroll 1")

#else

#define FFPA_DEVICE inline
#define FFPA_HOST_DEVICE inline
#define FFPA_KERNEL(threads, min_blocks_per_sm)
#define FFPA_GRID_CONSTANT
#define FFPA_UNROLL
#define FFPA_NO_UNROLL

#endif
