// NAdam: ../../kernels/nadam.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay, kept;
    Lerp first_moment;
    float beta2, one_minus_beta2, correction2, eps, gradient_step, moment_step;
} NAdamScalars;

KERNEL nadam(
    NAdamScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array exp_avg, Array exp_avg_sq
) {
    EACH(i, n) {
        float kept = parameter.from[i] * s.kept;
        float g = decayed(gradient[i] * s.gradient, kept, s.weight_decay);
        float m = lerp(s.first_moment, exp_avg.from[i], g);
        float v = exp_avg_sq.from[i] * s.beta2 + s.one_minus_beta2 * g * g;
        exp_avg.to[i] = m;
        exp_avg_sq.to[i] = v;
        float denominator = sqrtf(v / s.correction2) + s.eps;
        float p = kept + s.gradient_step * g / denominator;
        p = p + s.moment_step * m / denominator;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
