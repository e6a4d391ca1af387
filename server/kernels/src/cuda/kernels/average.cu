// The mean of the gradients, for plain data parallelism: ../../kernels/average.rs.

#include "common.cuh"

typedef struct {
    float coefficient;
} AverageScalars;

KERNEL average(
    AverageScalars s, u64 n, const float *gradient, Published published, Array parameter
) {
    EACH(i, n) {
        float p = gradient[i] * s.coefficient;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}
