// Elements of the dtypes of the wire.

#pragma once

#include "common.cuh"

// An element of dtype 0: f32, 1: bf16 or 2: f16.
DEVICE float decoded(const void *from, u64 i, u32 dtype) {
    return dtype == 1   ? from_bf16(((const u16 *)from)[i])
           : dtype == 2 ? from_f16(((const u16 *)from)[i])
                        : ((const float *)from)[i];
}

DEVICE void encode(void *to, u64 i, u32 dtype, float value) {
    switch (dtype) {
    case 1: ((u16 *)to)[i] = to_bf16(value); break;
    case 2: ((u16 *)to)[i] = to_f16(value); break;
    default: ((float *)to)[i] = value;
    }
}
