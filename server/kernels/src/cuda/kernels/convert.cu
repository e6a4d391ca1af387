// Casts between f32 and the dtypes of the wire, with addition: ../../kernels/convert.rs. The host
// checks what it uploads.

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

// Converts values of dtype `from_dtype` to `to_dtype`.
KERNEL store(void *to, u32 to_dtype, u64 n, const void *from, u32 from_dtype) {
    EACH(i, n) { encode(to, i, to_dtype, decoded(from, i, from_dtype)); }
}

KERNEL accumulate(float *to, u64 n, const void *from, u32 from_dtype) {
    EACH(i, n) { to[i] = to[i] + decoded(from, i, from_dtype); }
}

// Replaces every NaN by the same one.
KERNEL canonicalise(float *values, u64 n) {
    EACH(i, n) {
        u32 bits = bits_of(values[i]);
        bool is_nan = (bits & 0x7fffffffu) > EXPONENT;
        values[i] = float_of(is_nan ? 0x7fc00000u : bits);
    }
}
