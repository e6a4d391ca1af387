// Lion: ../../kernels/lion.rs.

#include "common.cuh"

typedef struct {
    float gradient, beta1, one_minus_beta1, beta2, one_minus_beta2, kept, lr;
} LionScalars;

KERNEL lion(
    LionScalars s, u64 n, const float *gradient, Published published, Array parameter, Array exp_avg
) {
    EACH(i, n) {
        float average = exp_avg.from[i];
        float g = gradient[i] * s.gradient;
        float c = average * s.beta1 + g * s.one_minus_beta1;
        float change = c == 0.0f ? 0.0f : copysignf(s.lr, c);
        float p = parameter.from[i] * s.kept - change;
        exp_avg.to[i] = average * s.beta2 + g * s.one_minus_beta2;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
