/* Rows of V codes in float32, on a CPU: temperature, top-k, top-p, softmax, draws.

   The same functions as `Sampling.probs` and `draw`. PyTorch takes some 20 operations for them, and starting those costs more than
   computing them. A row's result depends on that row alone and not on how many rows or threads there are. */

#include "linear.c"

#define SPARE 5  /* rows of scratch memory that a thread has */
#define BLOCK 64 /* codes whose probabilities are summed at once; a row of scratch memory is as many times that as it needs */

typedef double doubles __attribute__((vector_size(64)));
typedef int32_t bits32 __attribute__((may_alias)); /* of floats */

/* `Sampling` of engine/sampling.py. */
typedef struct {
    double temperature;
    int64_t top_k;
    double top_p;
} Sampling;

typedef struct {
    int64_t rows, codes;
    Sampling sampling;
    const float *logits; /* [rows, codes] */
    float *probs;        /* [rows, codes] */
} Rows;

typedef struct {
    int64_t rows, codes, each, count;
    const float *q;  /* [rows, codes], not necessarily normalised */
    const double *u; /* [rows, each] uniform, or null: the likeliest codes are taken */
    int64_t *drawn;  /* [rows, count] */
} Children;

/* Bytes of a row of `codes` floats, up to a multiple of BLOCK. */
static int64_t bytes_of_row(int64_t codes) { return align64(4 * up_to(BLOCK, codes)); }

/* The scratch memory of a thread that handles one row of `codes` at a time: SPARE such rows, and `draws` codes. */
static int64_t bytes_of_rows(int64_t codes, int64_t draws) { return SPARE * bytes_of_row(codes) + align64(8 * draws); }

/* The sum of x [BLOCK]. */
static inline double block_sum(const float *x) {
    doubles sum = {0};
    for (int i = 0; i < BLOCK; i += 8) sum += __builtin_convertvector(*(const f32x8 *)(x + i), doubles);
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

/* The sum of x [size], size a multiple of BLOCK. */
static double sum_all(const float *x, int64_t size) {
    double sum = 0;
    for (int64_t i = 0; i < size; i += BLOCK) sum += block_sum(x + i);
    return sum;
}

/* Of x [size] >= 0 the sum of those above a float given by its bits; floats >= 0 are in the order of theirs. */
static double sum_above(const float *x, int64_t size, int32_t bits) {
    double sum = 0;
    for (int64_t i = 0; i < size; i += BLOCK) {
        float kept[BLOCK] __attribute__((aligned(64)));
        for (int j = 0; j < BLOCK; j += WIDTH) {
            f32v chunk = *(const f32v *)(x + i + j);
            *(f32v *)(kept + j) = (f32v)((i32v)chunk & ((i32v)chunk > bits));
        }
        sum += block_sum(kept);
    }
    return sum;
}

/* How many of x [size] are below `bits`, both floats >= 0 given by their bits. */
static int64_t count_below(const bits32 *x, int64_t size, int32_t bits) {
    int64_t count = 0;
#pragma omp simd reduction(+ : count)
    for (int64_t i = 0; i < size; i++) count += x[i] < bits;
    return count;
}

/* The bits of the `rank`-th smallest of x [size], floats >= 0 given by their bits; x is scratch afterwards. */
static int32_t smallest_of(bits32 *x, int64_t size, int64_t rank) {
    int32_t found = 0;
    int64_t below = 0; /* numbers below all candidates */
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
        if (bit == 1 << 19) { /* continue with the candidates whose upper bits match */
            const int32_t high = found | (2 * bit - 1);
            int64_t count = 0;
            below = count_below(x, size, found);
            for (int64_t i = 0; i < size; i++) {
                x[count] = x[i];
                count += x[count] >= found && x[count] <= high;
            }
            size = count;
        }
        if (below + count_below(x, size, found | bit) < rank) found |= bit;
    }
    return found;
}

/* Keep the largest of x [size] >= 0 whose sum is at least `limit`, of equal ones the first. */
static void keep_largest(float *x, int64_t size, double limit) {
    int32_t least = INT32_MAX; /* the smallest number with less than `limit` above it */
    for (int32_t bit = 1 << 30; bit; bit >>= 1)
        if (sum_above(x, size, least & ~bit) < limit) least &= ~bit;
    double sum = sum_above(x, size, least);
    for (int64_t i = 0; i < size; i += WIDTH) {
        const f32v chunk = *(const f32v *)(x + i);
        *(f32v *)(x + i) = (f32v)((i32v)chunk & ((i32v)chunk >= least));
        for (unsigned equal = bits_of((i32v)chunk == least); equal; equal &= equal - 1) {
            const int j = __builtin_ctz(equal);
            if (sum < limit) sum += chunk[j];
            else x[i + j] = 0;
        }
    }
}

/* Logits [codes] in x, of `size` floats, a multiple of BLOCK -> the distribution that codes are drawn from, 0 after it.

   `spare` [size] is scratch. */
static void probabilities(const Sampling *sampling, float *x, int64_t codes, int64_t size, void *spare) {
    const int greedy = sampling->temperature == 0;
    const float scale = greedy ? 1 : (float)(1 / sampling->temperature);
    for (int64_t i = codes; i < size; i++) x[i] = -INFINITY;
    const float highest = max_of(x, size);
    int32_t furthest = INT32_MAX; /* the bits of the greatest distance from the highest logit that top-k keeps */
    if (!greedy && sampling->top_k > 0 && sampling->top_k < codes) {
        for (int64_t i = 0; i < size; i += WIDTH) *(f32v *)((float *)spare + i) = highest - *(const f32v *)(x + i);
        furthest = smallest_of(spare, size, sampling->top_k);
    }
    for (int64_t i = 0; i < size; i += WIDTH) {
        const f32v distance = highest - *(const f32v *)(x + i);
        *(f32v *)(x + i) = (f32v)((i32v)exp_all(distance * -scale) & ((i32v)distance <= furthest));
    }
    if (!greedy && sampling->top_p < 1) keep_largest(x, size, sampling->top_p * sum_all(x, size));
    const float total = (float)sum_all(x, size);
    for (int64_t i = 0; i < size; i += WIDTH) *(f32v *)(x + i) /= total;
}

/* Logits [codes] -> probabilities in x, which like `spare` has room for `codes` up to a multiple of BLOCK. */
static void probabilities_of(const Sampling *sampling, const float *logits, int64_t codes, float *x, void *spare) {
    Sampling plain = *sampling;
    if (plain.temperature == 0) plain = (Sampling){.temperature = 1, .top_p = 1}; /* `Sampling.probs` of greedy choices */
    memcpy(x, logits, 4 * codes);
    probabilities(&plain, x, codes, up_to(BLOCK, codes), spare);
}

/* The first of x [from, to) at which `sum` and what they add up to exceeds `threshold`; else the last that is above 0, or `from`. */
static int64_t first_above(const float *x, int64_t from, int64_t to, double sum, double threshold) {
    int64_t code = from;
    for (int64_t i = from; i < to; i++)
        if (x[i] > 0) {
            code = i;
            if ((sum += x[i]) > threshold) break;
        }
    return code;
}

/* The first of the largest of x [size]. */
static int64_t largest(const float *x, int64_t size) {
    int64_t code = 0;
    for (int64_t i = 1; i < size; i++) code = x[i] > x[code] ? i : code;
    return code;
}

static void probs_of_row(const void *work, int64_t r, char *scratch) {
    const Rows *w = work;
    float *x = arena_alloc(&scratch, bytes_of_row(w->codes));
    probabilities_of(&w->sampling, w->logits + r * w->codes, w->codes, x, scratch);
    memcpy(w->probs + r * w->codes, x, 4 * w->codes);
}

/* `Sampling.probs`. */
int64_t row_probs(const Rows *rows, const Scratch *scratch, int64_t threads) {
    return run_rows(threads, rows->rows, probs_of_row, rows, scratch, bytes_of_rows(rows->codes, 0));
}

/* The sum of x [size], for any size. */
static double sum_of_row(const float *x, int64_t size) {
    const int64_t full_size = size / BLOCK * BLOCK;
    double sum = sum_all(x, full_size);
    for (int64_t i = full_size; i < size; i++) sum += x[i];
    return sum;
}

/* The first codes at which the running sum of x [codes] exceeds shares u [each] in (0, 1) of the sum; `running_sums` [blocks] is scratch. */
static void draw_all(const float *x, int64_t codes, const double *u, int64_t each, int64_t *drawn, double *running_sums) {
    const int64_t blocks = up_to(BLOCK, codes) / BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t size = codes - b * BLOCK < BLOCK ? codes - b * BLOCK : BLOCK;
        running_sums[b] = (b ? running_sums[b - 1] : 0) + sum_of_row(x + b * BLOCK, size);
    }
    for (int64_t n = 0; n < each; n++) {
        const double threshold = u[n] * running_sums[blocks - 1];
        int64_t low = 0, high = blocks - 1; /* the first block at which the sum exceeds it, or the last */
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (running_sums[middle] > threshold) high = middle;
            else low = middle + 1;
        }
        const int64_t end = (low + 1) * BLOCK;
        drawn[n] = first_above(x, low * BLOCK, end < codes ? end : codes, low ? running_sums[low - 1] : 0, threshold);
    }
}

/* The first `count` different ones of drawn [each], in order; where there are fewer, repetitions follow in order. */
static void first_different(const int64_t *drawn, int64_t each, int64_t count, int64_t *out) {
    int64_t num_out = 0;
    for (int repeated = 0; repeated < 2; repeated++)
        for (int64_t i = 0; i < each && num_out < count; i++) {
            int is_repeated = 0;
            for (int64_t j = 0; j < i && !is_repeated; j++) is_repeated = drawn[j] == drawn[i];
            if (is_repeated == repeated) out[num_out++] = drawn[i];
        }
}

/* The `count` largest of x [codes] in descending order, of equal ones the first; once all are taken they are repeated.

   Of a block, `best` [blocks] is the largest that is not taken yet, or -1. */
static void likeliest(const float *x, int64_t codes, int64_t count, int64_t *out, int64_t *best) {
    const int64_t blocks = up_to(BLOCK, codes) / BLOCK;
    int64_t changed = -1;
    for (int64_t n = 0; n < count && n < codes; n++) {
        for (int64_t b = n ? changed : 0; b < (n ? changed + 1 : blocks); b++) {
            best[b] = -1;
            for (int64_t i = b * BLOCK; i < codes && i < (b + 1) * BLOCK; i++) {
                if (best[b] >= 0 && !(x[i] > x[best[b]])) continue;
                int taken = 0;
                for (int64_t j = 0; j < n && !taken; j++) taken = out[j] == i;
                if (!taken) best[b] = i;
            }
        }
        int64_t best_code = -1;
        for (int64_t b = 0; b < blocks; b++)
            if (best[b] >= 0 && (best_code < 0 || x[best[b]] > x[best_code])) best_code = best[b];
        out[n] = best_code;
        changed = best_code / BLOCK;
    }
    for (int64_t n = codes; n < count; n++) out[n] = out[n - codes];
}

static void children_of_row(const void *work, int64_t r, char *scratch) {
    const Children *w = work;
    const float *q = w->q + r * w->codes;
    int64_t *drawn = arena_alloc(&scratch, 8 * w->each);
    if (w->u) {
        draw_all(q, w->codes, w->u + r * w->each, w->each, drawn, (double *)scratch);
        first_different(drawn, w->each, w->count, w->drawn + r * w->count);
    } else likeliest(q, w->codes, w->count, w->drawn + r * w->count, (int64_t *)scratch);
}

/* `Sampling.children`, and `Sampling.likeliest` where there is no u. */
int64_t draw_children(const Children *w, const Scratch *scratch, int64_t threads) {
    return run_rows(threads, w->rows, children_of_row, w, scratch, bytes_of_rows(w->codes, w->each));
}
