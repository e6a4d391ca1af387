// Running averages of the parameters: ../../loops/running_average.rs.

#include "common.cuh"

KERNEL running_average(double weight, u64 n, const float *values, Array high, Array low) {
    EACH(i, n) {
        double before = (double)high.from[i] + (double)low.from[i];
        double value = values[i];
        // The first values replace whatever was there.
        double after = weight == 1.0 ? value : before + weight * (value - before);
        u32 bits = bits_of((float)after);
        bool is_finite = (bits & EXPONENT) != EXPONENT;
        bool is_nan = (bits & 0x7fffffffu) > EXPONENT;
        float rounded = float_of(is_nan ? 0x7fc00000u : bits);
        high.to[i] = rounded;
        low.to[i] = is_finite ? (float)(after - (double)rounded) : 0.0f;
    }
}
