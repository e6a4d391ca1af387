// Tiles of 8-bit optimizer state: ../../loops/code.rs and ../../random.rs, which say what they
// are.
// A block of threads encodes a tile, and each thread one element of it.

#pragma once

#include "common.cuh"

typedef unsigned char u8;

// The elements of a tile are those of a block of threads.
#define TILE THREADS

#define SIGNED 0
#define POSITIVE 1

// Of code SIGNED or POSITIVE: the bits of the mantissa, of an f32's mantissa that the code lacks,
// the largest magnitude as bits of the byte, the exponent field of the largest elements after the
// multiplication that makes all tiles alike, and the mantissa of the largest magnitude.
#define CODE_BITS(code) ((code) == SIGNED ? 4u : 3u)
#define CODE_SHIFT(code) (23u - CODE_BITS(code))
#define CODE_LARGEST(code) ((code) == SIGNED ? 127u : 255u)
#define CODE_SCALED(code) ((code) == SIGNED ? 135u : 159u)
#define CODE_MOST(code) ((code) == SIGNED ? 0x770000u : 0x700000u)
// The exponent field of an f32 that stands for the exponent byte 0, and that of the largest numbers.
#define LOWEST 35u
#define HIGHEST 254u
// The number that is added, and its exponent field.
#define BIAS_FIELD 128u
#define BIAS 2.0f
// The exponent byte of a tile whose elements are NaN.
#define NOT_A_NUMBER 255u

// An array of 8-bit state that a step reads and writes: the codes, followed by the exponents.
typedef struct {
    const u8 *from;
    u8 *to;
} Codes;

// The random numbers of a step: its key, and the number of the first tile in the tensor.
typedef struct {
    u64 key, tile;
} Rounding;

// Runs the statement for each tile of n elements, which all blocks share.
#ifdef __CUDACC_RTC__
#define EACH_TILE(tile, n)                                                                         \
    for (u64 tile = blockIdx.x; tile * TILE < (n); tile += gridDim.x)
#else
#define EACH_TILE(tile, n)                                                                         \
    for (u64 tile = block_index; tile * TILE < (n); tile += block_count)
#endif

DEVICE float power_of_two(u32 field) { return float_of(field << 23); }

// The bits of a value without the sign that the code stores apart. The sum is 0 for -0.
DEVICE u32 code_magnitude(u32 code, float value) {
    return code == SIGNED ? bits_of(value) & 0x7fffffffu : bits_of(value + 0.0f);
}

// The exponent byte of a tile whose largest magnitude has these bits.
DEVICE u32 code_exponent(u32 code, u32 largest) {
    if (largest > (HIGHEST << 23 | CODE_MOST(code))) return NOT_A_NUMBER;
    u32 field = (largest >> 23) + ((largest & 0x007fffffu) > CODE_MOST(code) ? 1u : 0u);
    return (field < LOWEST ? LOWEST : field) - LOWEST;
}

// The code of a value. `rounding` is what is added to the bits that are cut off; to_even: rounds to
// nearest instead.
DEVICE u8 code_of(u32 code, float value, u32 exponent, bool to_even, u32 rounding) {
    if (exponent == NOT_A_NUMBER) return 0;
    u32 shift = CODE_SHIFT(code), magnitude = code_magnitude(code, value);
    float scale = power_of_two(127u + CODE_SCALED(code) - LOWEST - exponent);
    u32 bits = bits_of(float_of(magnitude) * scale + BIAS);
    u32 nearest = (1u << (shift - 1)) - 1u + ((bits >> shift) & 1u);
    u32 rounded = (bits + (to_even ? nearest : rounding)) >> shift;
    if (code == SIGNED) return (u8)((rounded & 0x7fu) | ((bits_of(value) >> 24) & 0x80u));
    rounded = rounded & 0xffu;
    return (u8)(rounded == 0u && magnitude != 0u ? 1u : rounded);
}

DEVICE float decode(u32 code, u32 byte, u32 exponent) {
    if (exponent == NOT_A_NUMBER) return float_of(0x7fc00000u);
    u32 bits = ((byte & CODE_LARGEST(code)) << CODE_SHIFT(code)) + (BIAS_FIELD << 23);
    float unscale = power_of_two(exponent + LOWEST + 127u - CODE_SCALED(code));
    float value = (float_of(bits) - BIAS) * unscale;
    return float_of(bits_of(value) | (byte & ~CODE_LARGEST(code)) << 24);
}

// The bits that encoding and decoding change.
DEVICE u32 changed(u32 code, float value, u32 exponent) {
    float found = decode(code, code_of(code, value, exponent, true, 0u), exponent);
    return bits_of(found) ^ (code == SIGNED ? bits_of(value) : bits_of(value + 0.0f));
}

// The largest number of a block of threads, for all of them.
DEVICE u32 largest_of(u32 *numbers) {
    SYNC;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        EACH_THREAD(t) {
            if (t < half && numbers[t + half] > numbers[t]) numbers[t] = numbers[t + half];
        }
        SYNC;
    }
    return numbers[0];
}

DEVICE u64 splitmix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// What stochastic rounding adds to the bits that are cut off of an element of a tile.
DEVICE u32 stochastic(u32 code, Rounding rounding, u64 tile, u32 position) {
    u64 number = splitmix(rounding.key + (rounding.tile + tile) * 0x9e3779b97f4a7c15ull);
    u32 first = code == SIGNED ? (u32)number : (u32)(number >> 32);
    return (first + position * 0x9e3779b9u) >> (32u - CODE_SHIFT(code));
}

// The value of an element before the step.
DEVICE float decoded_state(Codes state, u64 n, u32 code, u64 tile, u64 i) {
    return decode(code, state.from[i], state.from[n + tile]);
}

// Encodes the values of a tile after the step. `magnitudes` has room for a number of each thread,
// which may be overwritten.
DEVICE void encode_state(
    Codes state, u64 n, u32 code, u64 tile, const float *values, u32 *magnitudes, Rounding rounding
) {
    SYNC;
    EACH_THREAD(t) {
        bool is_inside = tile * TILE + t < n;
        magnitudes[t] = is_inside ? code_magnitude(code, values[t]) : 0u;
    }
    u32 exponent = code_exponent(code, largest_of(magnitudes));
    EACH_THREAD(t) {
        u64 i = tile * TILE + t;
        if (i < n) {
            u32 random = stochastic(code, rounding, tile, t);
            state.to[i] = code_of(code, values[t], exponent, false, random);
        }
        if (t == 0) state.to[n + tile] = (u8)exponent;
    }
    SYNC;
}
