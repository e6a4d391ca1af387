// Sums of squares of gradients.

#include "sum.cuh"

// The sum of each block. Launched with a block of threads for each.
KERNEL squares(const float *values, u64 n, double *sums) {
    SHARED double lanes[THREADS];
    EACH_THREAD(t) {
        double lane = 0.0;
        UNROLL for (u64 i = sum_start() + t; i < sum_end(n); i += THREADS) {
            lane = lane + square(values[i]);
        }
        lanes[t] = lane;
    }
    add_lanes(lanes, sums);
}
