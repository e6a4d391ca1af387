// RMSprop, with and without momentum, centered or not: ../../kernels/rmsprop.rs.

#include "common.cuh"

typedef struct {
    float gradient, weight_decay, alpha, one_minus_alpha;
    Lerp mean;
    float inner_eps, eps, momentum, minus_lr, buffer_lr, minus_descent;
} RmsPropScalars;

DEVICE float rmsprop_gradient(const RmsPropScalars *s, float gradient, float p) {
    return decayed(gradient * s->gradient, p, s->weight_decay);
}

DEVICE float rmsprop_square(const RmsPropScalars *s, float average, float g) {
    return average * s->alpha + s->one_minus_alpha * g * g;
}

DEVICE float rmsprop_deviation(const RmsPropScalars *s, float variance) {
    return sqrtf(variance + s->inner_eps) + s->eps;
}

DEVICE float rmsprop_plain(const RmsPropScalars *s, float p, float g, float variance) {
    return p + s->minus_lr * g / rmsprop_deviation(s, variance);
}

DEVICE float rmsprop_buffer(const RmsPropScalars *s, float buffer, float g, float variance) {
    return buffer * s->momentum + s->buffer_lr * g / rmsprop_deviation(s, variance);
}

KERNEL rmsprop(
    RmsPropScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array square_avg
) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = rmsprop_gradient(&s, gradient[i], p);
        float square = rmsprop_square(&s, square_avg.from[i], g);
        square_avg.to[i] = square;
        p = rmsprop_plain(&s, p, g, square);
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL rmsprop_momentum(
    RmsPropScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array square_avg, Array momentum_buffer
) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = rmsprop_gradient(&s, gradient[i], p);
        float square = rmsprop_square(&s, square_avg.from[i], g);
        square_avg.to[i] = square;
        float buffer = rmsprop_buffer(&s, momentum_buffer.from[i], g, square);
        momentum_buffer.to[i] = buffer;
        p = p + buffer * s.minus_descent;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL rmsprop_centered(
    RmsPropScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array square_avg, Array grad_avg
) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = rmsprop_gradient(&s, gradient[i], p);
        float square = rmsprop_square(&s, square_avg.from[i], g);
        float mean = lerp(s.mean, grad_avg.from[i], g);
        square_avg.to[i] = square;
        grad_avg.to[i] = mean;
        p = rmsprop_plain(&s, p, g, square - mean * mean);
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL rmsprop_centered_momentum(
    RmsPropScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Array square_avg, Array momentum_buffer, Array grad_avg
) {
    EACH(i, n) {
        float p = parameter.from[i];
        float g = rmsprop_gradient(&s, gradient[i], p);
        float square = rmsprop_square(&s, square_avg.from[i], g);
        float mean = lerp(s.mean, grad_avg.from[i], g);
        square_avg.to[i] = square;
        grad_avg.to[i] = mean;
        float buffer = rmsprop_buffer(&s, momentum_buffer.from[i], g, square - mean * mean);
        momentum_buffer.to[i] = buffer;
        p = p + buffer * s.minus_descent;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
