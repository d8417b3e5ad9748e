/* The guesses of a tree: rows of V probabilities in float32, on a CPU.

   The same functions as the head of guided features, `Sampling.probs`, `Sampling.children` and `likeliest`. A row's result
   depends on that row alone and not on how many rows or threads there are. */

#include "chain.c"

/* Logits of guided features. */
typedef struct {
    int64_t rows, branches;
    double scale;         /* of guidance, where there are two branches */
    int64_t pitch;        /* numbers from one row of features to the next */
    const half *features; /* [branches, rows, pitch], conditional ones first, of which the first `inputs` are read */
    char *scratch;        /* as many bytes as `head_bytes` says */
    float *logits;        /* [rows, outputs] */
} Logits;

typedef struct {
    int64_t rows, codes;
    Sampling sampling;
    const float *logits; /* [rows, codes] */
    float *probs;        /* [rows, codes] */
    char *scratch;       /* as many bytes as `row_bytes` says */
} Rows;

typedef struct {
    int64_t rows, codes, each, count;
    const float *q;  /* [rows, codes], not necessarily normalised */
    const double *u; /* [rows, each] uniform, or null: the likeliest codes are taken */
    int64_t *drawn;  /* [rows, count] */
    char *scratch;   /* as many bytes as `row_bytes` says for `each` draws */
} Children;

static int64_t bytes_of_features(const Linear *head, int64_t rows) {
    const int64_t most = up_to(ROWS, rows);
    return padded(2 * most * head->inputs) + padded(2 * most * up_to(DEPTH, head->inputs)) + padded(4 * most);
}

int64_t head_bytes(const Linear *head, int64_t rows, int64_t threads) { return threads * bytes_of_features(head, rows); }

/* x and its unconditional counterpart -> what guidance of a scale makes of both, as `Guidance.merge`. */
static inline floats guided(floats x, floats unconditional, float scale) { return x + (scale - 1) * (x - unconditional); }

/* The head of guided features, rounded to bfloat16. */
void head_logits(const Linear *head, const Logits *work, int64_t threads) {
    const Logits w = *work;
    const int64_t inputs = head->inputs, most = up_to(ROWS, w.rows), blocks = up_to(COLUMNS, head->outputs) / COLUMNS;
    const int in_tiles = tiles && w.rows > ROWS && !head->scale;
    const int64_t tile_rows = head->scale ? 2 * w.rows : w.rows;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = thread_number(), team = team_size();
        char *own = w.scratch + me * bytes_of_features(head, w.rows);
        half *x = take(&own, 2 * most * inputs);
        Whole whole = {take(&own, 2 * most * up_to(DEPTH, inputs)), take(&own, 4 * most)};
        const float scale = (float)w.scale;
        float out[MOST_ROWS][COLUMNS];
        for (int64_t r = 0; r < w.rows; r++)
            for (int64_t i = 0; i < inputs; i += LANES) {
                const half *from = w.features + r * w.pitch + i;
                floats sum = widen_all(from);
                if (w.branches > 1) sum = guided(sum, widen_all(from + w.rows * w.pitch), scale);
                *(halves *)(x + place(r, i, inputs, in_tiles)) = narrow_all(sum);
            }
        /* Of many rows few are read again soon: they go past the caches, in which reading them first would take time. */
        const int past = w.rows > 2 * ROWS && head->outputs % LANES == 0 && (intptr_t)w.logits % 64 == 0;
#ifdef __AMX_BF16__
        if (tiles) configure(tile_rows < ROWS ? (int)tile_rows : ROWS);
#endif
        if (head->scale) quantise(x, w.rows, inputs, &whole);
        for (int64_t b = blocks * me / team; b < blocks * (me + 1) / team; b++)
            for (int64_t first = 0; first < w.rows; first += MOST_ROWS) {
                const int64_t rows = w.rows - first < MOST_ROWS ? w.rows - first : MOST_ROWS;
                const int64_t columns = head->outputs - b * COLUMNS < COLUMNS ? head->outputs - b * COLUMNS : COLUMNS;
                product(head, b, x, in_tiles, &whole, first, (int)rows, out);
                for (int64_t r = 0; r < rows; r++) {
                    float *y = w.logits + (first + r) * head->outputs + b * COLUMNS;
#ifdef __AVX512F__
                    if (past && columns == COLUMNS) {
                        _mm512_stream_ps(y, _mm512_loadu_ps(out[r]));
                        _mm512_stream_ps(y + LANES, _mm512_loadu_ps(out[r] + LANES));
                    } else
#endif
                        memcpy(y, out[r], 4 * columns);
                }
            }
#ifdef __AVX512F__
        _mm_sfence();
#endif
#ifdef __AMX_BF16__
        if (tiles) _tile_release();
#endif
    }
}

/* `Sampling.probs`. */
void row_probs(const Rows *rows, int64_t threads) {
    const Rows w = *rows;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t r = 0; r < w.rows; r++) {
        char *own = w.scratch + thread_number() * bytes_of_rows(w.codes, 0);
        float *x = take(&own, bytes_of_row(w.codes));
        probabilities_of(&w.sampling, w.logits + r * w.codes, w.codes, x, own);
        memcpy(w.probs + r * w.codes, x, 4 * w.codes);
    }
}

/* The sum of x [size], for any size. */
static double sum_of_row(const float *x, int64_t size) {
    const int64_t whole = size / BLOCK * BLOCK;
    double sum = sum_all(x, whole);
    for (int64_t i = whole; i < size; i++) sum += x[i];
    return sum;
}

/* `draw` for many shares u [each] of x [codes]; running sums are in `until` [blocks]. */
static void draw_all(const float *x, int64_t codes, const double *u, int64_t each, int64_t *drawn, double *until) {
    const int64_t blocks = up_to(BLOCK, codes) / BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t size = codes - b * BLOCK < BLOCK ? codes - b * BLOCK : BLOCK;
        until[b] = (b ? until[b - 1] : 0) + sum_of_row(x + b * BLOCK, size);
    }
    for (int64_t n = 0; n < each; n++) {
        const double most = u[n] * until[blocks - 1];
        int64_t low = 0, high = blocks - 1; /* the first block at which the sum exceeds it, or the last */
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (until[middle] > most) high = middle;
            else low = middle + 1;
        }
        double sum = low ? until[low - 1] : 0;
        int64_t code = low * BLOCK;
        for (int64_t i = low * BLOCK; i < codes && i < (low + 1) * BLOCK; i++)
            if (x[i] > 0) {
                code = i;
                if ((sum += x[i]) > most) break;
            }
        drawn[n] = code;
    }
}

/* The first `count` different ones of drawn [each], in order; where there are fewer, repetitions follow in order. */
static void first_different(const int64_t *drawn, int64_t each, int64_t count, int64_t *out) {
    int64_t found = 0;
    for (int repeated = 0; repeated < 2; repeated++)
        for (int64_t i = 0; i < each && found < count; i++) {
            int seen = 0;
            for (int64_t j = 0; j < i && !seen; j++) seen = drawn[j] == drawn[i];
            if (seen == repeated) out[found++] = drawn[i];
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
        int64_t most = -1;
        for (int64_t b = 0; b < blocks; b++)
            if (best[b] >= 0 && (most < 0 || x[best[b]] > x[most])) most = best[b];
        out[n] = most;
        changed = most / BLOCK;
    }
    for (int64_t n = codes; n < count; n++) out[n] = out[n - codes];
}

/* `Sampling.children`, and `Sampling.likeliest` where there is no u. */
void draw_children(const Children *children, int64_t threads) {
    const Children w = *children;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t r = 0; r < w.rows; r++) {
        const float *q = w.q + r * w.codes;
        char *own = w.scratch + thread_number() * bytes_of_rows(w.codes, w.each);
        int64_t *drawn = take(&own, 8 * w.each);
        if (!w.u) {
            likeliest(q, w.codes, w.count, w.drawn + r * w.count, (int64_t *)own);
            continue;
        }
        draw_all(q, w.codes, w.u + r * w.each, w.each, drawn, (double *)own);
        first_different(drawn, w.each, w.count, w.drawn + r * w.count);
    }
}
