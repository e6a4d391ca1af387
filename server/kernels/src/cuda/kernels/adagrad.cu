// Adagrad: ../../kernels/adagrad.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay, eps, minus_lr;
} AdagradScalars;

KERNEL adagrad(
    AdagradScalars s, u64 n, const float *gradient, Published published, Array parameter, Array sum
) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = decayed(gradient[i] * s.gradient, p, s.weight_decay);
        float squares = sum.from[i] + g * g;
        sum.to[i] = squares;
        p = p + s.minus_lr * g / (sqrtf(squares) + s.eps);
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
