// Casts between f32 and the dtypes of the wire, with addition: ../../kernels/convert.rs. The host
// checks what it uploads.

#include "convert.cuh"

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
