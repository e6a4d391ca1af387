// LAMB: ../../kernels/lamb.rs. The first pass writes the moments and adds the squares of parameters
// and updates; the second computes the updates again, and applies them with the trust ratio.

#include "sum.cuh"

typedef struct {
    float gradient;
    Lerp first_moment;
    float beta2, one_minus_beta2, inverse_correction1, inverse_correction2_sqrt, eps, weight_decay;
    double lr;
} LambScalars;

DEVICE float lamb_update(const LambScalars *s, float p, float m, float v) {
    float denominator = sqrtf(v) * s->inverse_correction2_sqrt + s->eps;
    float ratio = m * s->inverse_correction1 / denominator;
    return ratio + p * s->weight_decay;
}

// Launched with a block of threads for each block of the sums.
KERNEL lamb_moments(
    LambScalars s, u64 n, const float *gradient, const float *parameter, Array exp_avg,
    Array exp_avg_sq, double *parameter_squares, double *update_squares
) {
    SHARED double parameters[THREADS];
    SHARED double updates[THREADS];
    EACH_THREAD(t) {
        double parameter_lane = 0.0, update_lane = 0.0;
        for (u64 i = sum_start() + t; i < sum_end(n); i += THREADS) {
            float g = gradient[i] * s.gradient;
            float m = lerp(s.first_moment, exp_avg.from[i], g);
            float v = exp_avg_sq.from[i] * s.beta2 + s.one_minus_beta2 * g * g;
            exp_avg.to[i] = m;
            exp_avg_sq.to[i] = v;
            parameter_lane = parameter_lane + square(parameter[i]);
            update_lane = update_lane + square(lamb_update(&s, parameter[i], m, v));
        }
        parameters[t] = parameter_lane;
        updates[t] = update_lane;
    }
    add_lanes(parameters, parameter_squares);
    add_lanes(updates, update_squares);
}

// The factor of the updates, by one thread.
KERNEL lamb_rate(
    LambScalars s, u64 blocks, const double *parameter_squares, const double *update_squares,
    float *minus_lr
) {
    EACH(i, 1) {
        double parameters = sum_of(parameter_squares, blocks);
        double updates = sum_of(update_squares, blocks);
        bool is_trusted = parameters > 0.0 && updates > 0.0;
        double trust = is_trusted ? sqrt(parameters) / sqrt(updates) : 1.0;
        *minus_lr = -(float)(s.lr * trust);
    }
}

KERNEL lamb_descend(
    LambScalars s, u64 n, const float *exp_avg, const float *exp_avg_sq, const float *minus_lr,
    Published published, Array parameter
) {
    EACH(i, n) {
        float p = parameter.from[i];
        p = p + lamb_update(&s, p, exp_avg[i], exp_avg_sq[i]) * *minus_lr;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
