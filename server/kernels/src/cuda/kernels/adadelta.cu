// Adadelta: ../../kernels/adadelta.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay, rho, one_minus_rho, eps, minus_lr;
} AdadeltaScalars;

KERNEL adadelta(
    AdadeltaScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array square_avg, Array acc_delta
) {
    EACH(i, n) {
        float p = parameter.from[i], deltas = acc_delta.from[i];
        float g = decayed(gradient[i] * s.gradient, p, s.weight_decay);
        float square = square_avg.from[i] * s.rho + s.one_minus_rho * g * g;
        square_avg.to[i] = square;
        float delta = sqrtf(deltas + s.eps) / sqrtf(square + s.eps) * g;
        acc_delta.to[i] = deltas * s.rho + s.one_minus_rho * delta * delta;
        p = p + delta * s.minus_lr;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
