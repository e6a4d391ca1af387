// Conversions between the dtypes of the wire and tiles of 8-bit optimizer state.

#include "code.cuh"
#include "convert.cuh"

// Encodes values of dtype `from_dtype` as whole tiles, rounded to nearest.
KERNEL encode_tiles(
    u32 code, u8 *codes, u8 *exponents, u64 n, const void *from, u32 from_dtype
) {
    SHARED u32 numbers[THREADS];
    EACH_TILE(tile, n) {
        EACH_THREAD(t) {
            u64 i = tile * TILE + t;
            numbers[t] = i < n ? code_magnitude(code, decoded(from, i, from_dtype)) : 0u;
        }
        u32 exponent = code_exponent(code, largest_of(numbers));
        // What was decoded has a code with this exponent or the next one.
        u32 chosen = exponent;
        for (u32 next = 0; next < 2 && exponent + next <= HIGHEST - LOWEST; ++next) {
            SYNC;
            EACH_THREAD(t) {
                u64 i = tile * TILE + t;
                u32 difference = 0;
                if (i < n) difference = changed(code, decoded(from, i, from_dtype), exponent + next);
                numbers[t] = difference;
            }
            if (largest_of(numbers) == 0) {
                chosen = exponent + next;
                break;
            }
        }
        EACH_THREAD(t) {
            u64 i = tile * TILE + t;
            if (i < n) codes[i] = code_of(code, decoded(from, i, from_dtype), chosen, true, 0u);
            if (t == 0) exponents[tile] = (u8)chosen;
        }
        SYNC;
    }
}

// Decodes the n elements from `start` on to values of dtype `to_dtype`.
KERNEL decode_tiles(
    u32 code, void *to, u32 to_dtype, u64 start, u64 n, const u8 *codes, const u8 *exponents
) {
    EACH(i, n) {
        u64 element = start + i;
        encode(to, i, to_dtype, decode(code, codes[element], exponents[element / TILE]));
    }
}

KERNEL copy_bytes(u8 *to, u64 n, const u8 *from) {
    EACH(i, n) { to[i] = from[i]; }
}
