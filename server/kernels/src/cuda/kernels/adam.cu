// Adam and AdamW, with and without AMSGrad: ../../kernels/adam.rs.

#include "code.cuh"

typedef struct {
    float gradient, weight_decay, kept;
    Lerp first_moment;
    float beta2, one_minus_beta2, correction2_sqrt, eps, minus_step_size;
} AdamScalars;

typedef struct {
    float m, v;
} Moments;

DEVICE Moments adam_moments(const AdamScalars *s, float gradient, float p, float m, float v) {
    float g = decayed(gradient * s->gradient, p, s->weight_decay);
    Moments moments = {lerp(s->first_moment, m, g), v * s->beta2 + s->one_minus_beta2 * g * g};
    return moments;
}

DEVICE float adam_parameter(const AdamScalars *s, float p, float m, float v) {
    float denominator = sqrtf(v) / s->correction2_sqrt + s->eps;
    return p * s->kept + s->minus_step_size * m / denominator;
}

KERNEL adam(
    AdamScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array exp_avg, Array exp_avg_sq
) {
    EACH(i, n) {
        float p = parameter.from[i];
        Moments next = adam_moments(&s, gradient[i], p, exp_avg.from[i], exp_avg_sq.from[i]);
        exp_avg.to[i] = next.m;
        exp_avg_sq.to[i] = next.v;
        p = adam_parameter(&s, p, next.m, next.v);
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL adam_amsgrad(
    AdamScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array exp_avg, Array exp_avg_sq, Array max_exp_avg_sq
) {
    EACH(i, n) {
        float p = parameter.from[i], largest = max_exp_avg_sq.from[i];
        Moments next = adam_moments(&s, gradient[i], p, exp_avg.from[i], exp_avg_sq.from[i]);
        exp_avg.to[i] = next.m;
        exp_avg_sq.to[i] = next.v;
        float max = next.v > largest ? next.v : largest;
        max_exp_avg_sq.to[i] = max;
        p = adam_parameter(&s, p, next.m, max);
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL adam_int8(
    AdamScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Codes exp_avg, Codes exp_avg_sq, Rounding rounding
) {
    SHARED float m[THREADS];
    SHARED float v[THREADS];
    SHARED u32 magnitudes[THREADS];
    EACH_TILE(tile, n) {
        EACH_THREAD(t) {
            u64 i = tile * TILE + t;
            if (i < n) {
                float p = parameter.from[i];
                Moments next = adam_moments(
                    &s, gradient[i], p, decoded_state(exp_avg, n, SIGNED, tile, i),
                    decoded_state(exp_avg_sq, n, POSITIVE, tile, i)
                );
                p = p * s.kept + s.minus_step_size * next.m / (sqrtf(next.v) + s.eps);
                parameter.to[i] = p;
                publish(published, i, p);
                m[t] = next.m;
                v[t] = next.v;
            }
        }
        encode_state(exp_avg, n, SIGNED, tile, m, magnitudes, rounding);
        encode_state(exp_avg_sq, n, POSITIVE, tile, v, magnitudes, rounding);
    }
}
