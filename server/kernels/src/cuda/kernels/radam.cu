// RAdam: ../../kernels/radam.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay, kept;
    Lerp first_moment;
    float beta2, one_minus_beta2, correction1, lr, eps;
    bool is_rectified;
    float correction2_sqrt, rectification;
} RAdamScalars;

KERNEL radam(
    RAdamScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array exp_avg, Array exp_avg_sq
) {
    EACH(i, n) {
        float kept = parameter.from[i] * s.kept;
        float g = decayed(gradient[i] * s.gradient, kept, s.weight_decay);
        float m = lerp(s.first_moment, exp_avg.from[i], g);
        float v = exp_avg_sq.from[i] * s.beta2 + s.one_minus_beta2 * g * g;
        exp_avg.to[i] = m;
        exp_avg_sq.to[i] = v;
        float update = m / s.correction1 * s.lr;
        if (s.is_rectified) {
            float adaptive = 1.0f / (sqrtf(v) + s.eps) * s.correction2_sqrt;
            update = update * adaptive * s.rectification;
        }
        float p = kept - update;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
