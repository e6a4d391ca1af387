// Adafactor: ../../kernels/adafactor.rs, with its three passes over matrices and two over vectors.

#include "sum.cuh"

// The number of partial sums of a row.
#define ROW_LANES 16

typedef struct {
    float gradient;
    Lerp second_moment;
    float eps1, eps1_squared, decay;
    double eps2, step_size, d;
} AdafactorScalars;

// The matrices of a slice: rows and columns of each, and their number.
typedef struct {
    u64 height, width, count;
} Matrices;

// The maximum; NaN if `value` is NaN, as torch.clamp.
DEVICE float at_least(float value, float minimum) { return value < minimum ? minimum : value; }

DEVICE float adafactor_update(const AdafactorScalars *s, float gradient, float moment) {
    return gradient * s->gradient / sqrtf(at_least(moment, s->eps1_squared));
}

DEVICE float adafactor_moment(const AdafactorScalars *s, float moment, double sum, u64 of) {
    return lerp(s->second_moment, moment, (float)(sum / (double)of));
}

// The rows whose squares a block of threads adds.
#define BLOCK_ROWS (THREADS / ROW_LANES)

// The row of a thread.
DEVICE u64 row_of(unsigned t) { return (u64)BLOCK_INDEX * BLOCK_ROWS + t / ROW_LANES; }

// Adds the lanes of each row as a tree. Lane 0 has the sum.
DEVICE void add_row_lanes(double *lanes) {
    SYNC;
    for (unsigned half = ROW_LANES / 2; half > 0; half /= 2) {
        EACH_THREAD(t) {
            if (t % ROW_LANES < half) lanes[t] = lanes[t] + lanes[t + half];
        }
        SYNC;
    }
}

// The sum of a lane of a row: that of every ROW_LANES-th square, in order.
#define SUM_LANE(sum, t, row, of_column)                                                           \
    double sum = 0.0;                                                                              \
    if (row < of.height * of.count) {                                                              \
        UNROLL for (u64 column = (t) % ROW_LANES; column < of.width; column += ROW_LANES) {        \
            sum = sum + square(of_column);                                                         \
        }                                                                                          \
    }

// The new second moments of the rows. Launched with a block of threads for every BLOCK_ROWS rows.
KERNEL adafactor_rows(AdafactorScalars s, Matrices of, const float *gradient, Array rows) {
    SHARED double lanes[THREADS];
    EACH_THREAD(t) {
        u64 row = row_of(t);
        const float *values = gradient + row * of.width;
        SUM_LANE(sum, t, row, values[column] * s.gradient);
        lanes[t] = sum;
    }
    add_row_lanes(lanes);
    EACH_THREAD(t) {
        u64 row = row_of(t);
        if (t % ROW_LANES == 0 && row < of.height * of.count) {
            rows.to[row] = adafactor_moment(&s, rows.from[row], lanes[t], of.width);
        }
    }
}

// The new second moments of the columns, a column a thread.
KERNEL adafactor_columns(AdafactorScalars s, Matrices of, const float *gradient, Array columns) {
    EACH(index, of.width * of.count) {
        u64 matrix = index / of.width, column = index % of.width;
        const float *values = gradient + matrix * of.height * of.width + column;
        double sum = 0.0;
        UNROLL for (u64 row = 0; row < of.height; ++row) {
            sum = sum + square(values[row * of.width] * s.gradient);
        }
        columns.to[index] = adafactor_moment(&s, columns.from[index], sum, of.height);
    }
}

// The mean second moment of the rows of each matrix, a matrix a thread.
KERNEL adafactor_means(AdafactorScalars s, Matrices of, const float *rows, float *means) {
    EACH(matrix, of.count) {
        double sum = 0.0;
        UNROLL for (u64 row = 0; row < of.height; ++row) {
            sum = sum + (double)rows[matrix * of.height + row];
        }
        means[matrix] = at_least((float)(sum / (double)of.height), s.eps1);
    }
}

// The second moment of an element.
#define MATRIX_MOMENT(row, column)                                                                 \
    (rows[row] * columns[(row) / of.height * of.width + (column)] / means[(row) / of.height])

// The sum of squares of the update of each row. Launched as adafactor_rows.
KERNEL adafactor_update_squares(
    AdafactorScalars s, Matrices of, const float *gradient, const float *rows,
    const float *columns, const float *means, double *sums
) {
    SHARED double lanes[THREADS];
    EACH_THREAD(t) {
        u64 row = row_of(t);
        const float *values = gradient + row * of.width;
        SUM_LANE(sum, t, row, adafactor_update(&s, values[column], MATRIX_MOMENT(row, column)));
        lanes[t] = sum;
    }
    add_row_lanes(lanes);
    EACH_THREAD(t) {
        u64 row = row_of(t);
        if (t % ROW_LANES == 0 && row < of.height * of.count) sums[row] = lanes[t];
    }
}

KERNEL adafactor_descend(
    AdafactorScalars s, Matrices of, const float *gradient, const float *rows,
    const float *columns, const float *means, const float *minus_lr, Published published,
    Array parameter
) {
    EACH(i, of.height * of.width * of.count) {
        u64 row = i / of.width, column = i % of.width;
        float update = adafactor_update(&s, gradient[i], MATRIX_MOMENT(row, column));
        float p = parameter.from[i] * s.decay + update * *minus_lr;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

// The first pass over a vector. Launched with a block of threads for each block of the sums.
KERNEL adafactor_vector(
    AdafactorScalars s, u64 n, const float *gradient, const float *parameter, Array variance,
    double *parameter_squares, double *update_squares
) {
    SHARED double parameters[THREADS];
    SHARED double updates[THREADS];
    EACH_THREAD(t) {
        double parameter_lane = 0.0, update_lane = 0.0;
        for (u64 i = sum_start() + t; i < sum_end(n); i += THREADS) {
            float g = gradient[i] * s.gradient;
            float moment = lerp(s.second_moment, variance.from[i], g * g);
            variance.to[i] = moment;
            parameter_lane = parameter_lane + square(parameter[i]);
            update_lane = update_lane + square(adafactor_update(&s, gradient[i], moment));
        }
        parameters[t] = parameter_lane;
        updates[t] = update_lane;
    }
    add_lanes(parameters, parameter_squares);
    add_lanes(updates, update_squares);
}

KERNEL adafactor_vector_descend(
    AdafactorScalars s, u64 n, const float *gradient, const float *variance,
    const float *minus_lr, Published published, Array parameter
) {
    EACH(i, n) {
        float update = adafactor_update(&s, gradient[i], variance[i]);
        float p = parameter.from[i] * s.decay + update * *minus_lr;
        parameter.to[i] = p;
        publish(published, i, p);
    }
}

// The factor of the updates, by one thread. There are `parameter_sums` sums of blocks, and
// `update_sums` sums of blocks or rows.
KERNEL adafactor_rate(
    AdafactorScalars s, u64 n, const double *parameter_squares, u64 parameter_sums,
    const double *update_squares, u64 update_sums, float *minus_lr
) {
    EACH(i, 1) {
        double parameters = sqrt(sum_of(parameter_squares, parameter_sums) / (double)n);
        double updates = sqrt(sum_of(update_squares, update_sums) / (double)n) / s.d;
        double lr = (parameters > s.eps2 ? parameters : s.eps2) * s.step_size;
        *minus_lr = -(float)(lr / (updates > 1.0 ? updates : 1.0));
    }
}
