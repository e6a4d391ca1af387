// Adamax: ../../kernels/adamax.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay;
    Lerp first_moment;
    float beta2, eps, norm_eps, minus_step_size;
} AdamaxScalars;

KERNEL adamax(
    AdamaxScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array exp_avg, Array exp_inf
) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = decayed(gradient[i] * s.gradient, p, s.weight_decay);
        float m = lerp(s.first_moment, exp_avg.from[i], g);
        float before = exp_inf.from[i] * s.beta2 + s.norm_eps, now = fabsf(g) + s.eps;
        float norm = now > before ? now : before;
        exp_avg.to[i] = m;
        exp_inf.to[i] = norm;
        p = p + s.minus_step_size * m / norm;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
