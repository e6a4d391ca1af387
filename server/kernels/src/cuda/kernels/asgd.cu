// Averaged stochastic gradient descent: ../../kernels/asgd.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay, kept, minus_eta, mu;
} AsgdScalars;

KERNEL asgd(
    AsgdScalars s, u64 n, const float *gradient, Published published, Array parameter, Array ax
) {
    EACH(i, n) {
        float p = parameter.from[i], average = ax.from[i];
        float g = decayed(gradient[i] * s.gradient, p, s.weight_decay);
        p = p * s.kept + s.minus_eta * g;
        ax.to[i] = s.mu == 1.0f ? p : average + (p - average) * s.mu;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
