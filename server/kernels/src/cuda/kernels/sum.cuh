// Sums of squares in f64, in the order of ../../kernels/sum.rs: element i of a block of SUM_BLOCK
// elements belongs to lane i % THREADS, each lane adds its elements in order, and the lanes are
// added as a tree.

#pragma once

#include "common.cuh"

// Adds the lanes of a block of threads, and stores the sum as that of the block.
DEVICE void add_lanes(double *lanes, double *sums) {
    SYNC;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        EACH_THREAD(t) {
            if (t < half) lanes[t] = lanes[t] + lanes[t + half];
        }
        SYNC;
    }
    EACH_THREAD(t) {
        if (t == 0) sums[BLOCK_INDEX] = lanes[0];
    }
}

// The elements of this block: its first one, and the end.
DEVICE u64 sum_start(void) { return (u64)BLOCK_INDEX * SUM_BLOCK; }

DEVICE u64 sum_end(u64 n) {
    u64 end = sum_start() + SUM_BLOCK;
    return end < n ? end : n;
}

DEVICE double square(float value) { return (double)value * (double)value; }

// The sums of the blocks, in order.
DEVICE double sum_of(const double *sums, u64 blocks) {
    double sum = 0.0;
    UNROLL for (u64 i = 0; i < blocks; ++i) sum = sum + sums[i];
    return sum;
}
