// Lion: ../../kernels/lion.rs.

#include "code.cuh"

typedef struct {
    float gradient, beta1, one_minus_beta1, beta2, one_minus_beta2, kept, lr;
} LionScalars;

// The new parameter. `average` becomes the new momentum.
DEVICE float lion_parameter(const LionScalars *s, float gradient, float p, float *average) {
    float g = gradient * s->gradient;
    float c = *average * s->beta1 + g * s->one_minus_beta1;
    float change = c == 0.0f ? 0.0f : copysignf(s->lr, c);
    *average = *average * s->beta2 + g * s->one_minus_beta2;
    return p * s->kept - change;
}

KERNEL lion(
    LionScalars s, u64 n, const float *gradient, Published published, Array parameter, Array exp_avg
) {
    EACH(i, n) {
        float average = exp_avg.from[i];
        float p = lion_parameter(&s, gradient[i], parameter.from[i], &average);
        exp_avg.to[i] = average;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL lion_int8(
    LionScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Codes exp_avg, Rounding rounding
) {
    SHARED float m[THREADS];
    SHARED u32 magnitudes[THREADS];
    EACH_TILE(tile, n) {
        EACH_THREAD(t) {
            u64 i = tile * TILE + t;
            if (i < n) {
                float average = decoded_state(exp_avg, n, SIGNED, tile, i);
                float p = lion_parameter(&s, gradient[i], parameter.from[i], &average);
                parameter.to[i] = p;
                publish(published, i, p);
                m[t] = average;
            }
        }
        encode_state(exp_avg, n, SIGNED, tile, m, magnitudes, rounding);
    }
}
