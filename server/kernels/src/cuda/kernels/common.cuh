// What all kernels share. The same source is compiled for GPUs (NVRTC, without contraction to fused
// multiply-adds, with IEEE division and square root) and, by a C compiler, for the tests: there a
// launch runs the threads of a block one after the other, phase by phase.
//
// The arithmetic is that of ../../kernels, operation by operation, and gives the same bits.

#pragma once

#ifdef __CUDACC_RTC__

#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__
#define SHARED __shared__
// The number of this block.
#define BLOCK_INDEX blockIdx.x
// Runs the statement for each thread of the block.
#define EACH_THREAD(t) for (unsigned t = threadIdx.x, once = 1; once; once = 0)
// Separates phases: what the threads have written before is visible after it.
#define SYNC __syncthreads()
// Unrolls a loop, so that it reads several elements ahead. The order of additions stays the same.
#define UNROLL _Pragma("unroll 8")
// Runs the statement for each of n elements, which the threads of all blocks share.
#define EACH(i, n)                                                                                 \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n);                              \
         i += (u64)gridDim.x * blockDim.x)

#else

#include <math.h>
#include <stdbool.h>

// The number of the block that is being run, and the number of blocks.
extern _Thread_local unsigned block_index, block_count;

#define KERNEL void
#define DEVICE static inline
#define SHARED
#define BLOCK_INDEX block_index
#define EACH_THREAD(t) for (unsigned t = 0; t < THREADS; ++t)
#define SYNC
#define UNROLL
#define EACH(i, n)                                                                                 \
    for (u64 first = (u64)block_index * THREADS; first < (n); first += (u64)block_count * THREADS) \
        for (u64 i = first; i < first + THREADS && i < (n); ++i)

#endif

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

// The threads of a block. Sums have as many lanes.
#define THREADS 128
// The elements of a block of a sum: zeroshard_proto::geometry::blocks::BLOCK.
#define SUM_BLOCK 65536

// An array that a step reads and writes. The two addresses are equal unless a reader holds the
// earlier values.
typedef struct {
    const float *from;
    float *to;
} Array;

// Where a step stores the parameters in the dtype of their tensor.
typedef struct {
    void *to;
    // 0: nowhere; 1: bf16; 2: f16.
    u32 dtype;
} Published;

// A running average that moves towards `end`. torch.lerp has two formulas, which keep it exact at
// both ends.
typedef struct {
    float weight;
    bool from_end;
} Lerp;

DEVICE float lerp(Lerp average, float start, float end) {
    float base = average.from_end ? end : start;
    return base + average.weight * (end - start);
}

// The gradient with weight decay; the gradient itself if there is none.
DEVICE float decayed(float gradient, float parameter, float weight_decay) {
    return weight_decay == 0.0f ? gradient : gradient + parameter * weight_decay;
}

DEVICE u32 bits_of(float value) {
    union {
        float value;
        u32 bits;
    } both;
    both.value = value;
    return both.bits;
}

DEVICE float float_of(u32 bits) {
    union {
        u32 bits;
        float value;
    } both;
    both.bits = bits;
    return both.value;
}

// The exponent bits of an f32. All of them are set only in infinities and NaN.
#define EXPONENT 0x7f800000u

DEVICE float from_bf16(u16 half) { return float_of((u32)half << 16); }

// The nearest bf16, ties to even.
DEVICE u16 to_bf16(float value) {
    u32 bits = bits_of(value);
    u32 rounded = (bits + (0x7fffu + ((bits >> 16) & 1))) >> 16;
    u32 quiet_nan = (bits >> 16) | 0x40;
    bool is_nan = (bits & 0x7fffffffu) > EXPONENT;
    return (u16)(is_nan ? quiet_nan : rounded);
}

DEVICE float from_f16(u16 half) {
    const u32 rebias = (127 - 15) << 23;
    u32 magnitude = ((u32)half & 0x7fff) << 13;
    u32 exponent = magnitude & 0x0f800000u;
    u32 normal = magnitude + rebias;
    // A subnormal is a fraction of 2^-14: its leading one is added, and subtracted exactly.
    float leading = float_of(rebias + (1 << 23));
    u32 subnormal = bits_of(float_of(normal + (1 << 23)) - leading);
    u32 bits = exponent == 0x0f800000u ? normal + rebias : exponent == 0 ? subnormal : normal;
    return float_of(bits | ((u32)half & 0x8000) << 16);
}

// The nearest f16, ties to even.
DEVICE u16 to_f16(float value) {
    const u32 too_large = (127 + 16) << 23, smallest_normal = (127 - 14) << 23;
    // 0.5: its last place is 2^-24, as that of subnormal halves, so adding it rounds to that place.
    const u32 half = (127 - 1) << 23;
    u32 bits = bits_of(value);
    u32 magnitude = bits & 0x7fffffffu;
    u32 odd = (magnitude >> 13) & 1;
    u32 normal = (magnitude - ((127 - 15) << 23) + (0xfff + odd)) >> 13;
    u32 subnormal = bits_of(float_of(magnitude) + float_of(half)) - half;
    u32 quiet_nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    u32 found = normal;
    if (magnitude < smallest_normal) found = subnormal;
    if (magnitude >= too_large) found = 0x7c00;
    if (magnitude > EXPONENT) found = quiet_nan;
    return (u16)(found | ((bits >> 16) & 0x8000));
}

DEVICE void publish(Published published, u64 i, float parameter) {
    if (published.dtype == 1) ((u16 *)published.to)[i] = to_bf16(parameter);
    if (published.dtype == 2) ((u16 *)published.to)[i] = to_f16(parameter);
}
