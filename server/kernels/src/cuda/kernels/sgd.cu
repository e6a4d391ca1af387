// Stochastic gradient descent: ../../kernels/sgd.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay, momentum, undampened;
    bool nesterov, first;
    float minus_lr;
} SgdScalars;

KERNEL sgd(SgdScalars s, u64 n, const float *gradient, Published published, Array parameter) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = decayed(gradient[i] * s.gradient, p, s.weight_decay);
        p = p + g * s.minus_lr;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL sgd_momentum(
    SgdScalars s, u64 n, const float *gradient, Published published, Array parameter, Array buffer
) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = decayed(gradient[i] * s.gradient, p, s.weight_decay);
        float b = s.first ? g : buffer.from[i] * s.momentum + g * s.undampened;
        buffer.to[i] = b;
        float direction = s.nesterov ? g + b * s.momentum : b;
        p = p + direction * s.minus_lr;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
