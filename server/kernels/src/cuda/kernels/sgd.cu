// Stochastic gradient descent: ../../kernels/sgd.rs.

#include "code.cuh"

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

// The new parameter. `buffer` becomes the new momentum buffer.
DEVICE float sgd_parameter(const SgdScalars *s, float gradient, float p, float *buffer) {
    float g = decayed(gradient * s->gradient, p, s->weight_decay);
    float b = s->first ? g : *buffer * s->momentum + g * s->undampened;
    *buffer = b;
    float direction = s->nesterov ? g + b * s->momentum : b;
    return p + direction * s->minus_lr;
}

KERNEL sgd_momentum(
    SgdScalars s, u64 n, const float *gradient, Published published, Array parameter, Array buffer
) {
    EACH(i, n) {
        float b = buffer.from[i];
        float p = sgd_parameter(&s, gradient[i], parameter.from[i], &b);
        buffer.to[i] = b;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

KERNEL sgd_momentum_int8(
    SgdScalars s, u64 n, const float *gradient, Published published, Array parameter,
    Codes buffer, Rounding rounding
) {
    SHARED float b[THREADS];
    SHARED u32 magnitudes[THREADS];
    EACH_TILE(tile, n) {
        EACH_THREAD(t) {
            u64 i = tile * TILE + t;
            if (i < n) {
                b[t] = decoded_state(buffer, n, SIGNED, tile, i);
                float p = sgd_parameter(&s, gradient[i], parameter.from[i], &b[t]);
                parameter.to[i] = p;
                publish(published, i, p);
            }
        }
        encode_state(buffer, n, SIGNED, tile, b, magnitudes, rounding);
    }
}
