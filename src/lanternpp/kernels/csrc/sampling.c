/* The guesses of a tree: rows of V probabilities in float32, on a CPU.

   The same functions as the head of guided features, `Sampling.probs`, `Sampling.children` and `likeliest`. A row's result
   depends on that row alone and not on how many rows or threads there are. */

#include "chain.c"

/* Logits of guided features. */
typedef struct {
    int64_t rows, branches;
    double scale;         /* of guidance, where there are two branches */
    int64_t pitch;        /* numbers from one row of features to the next */
    const bf16 *features; /* [branches, rows, pitch], conditional ones first, of which the first `inputs` are read */
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

/* x and its unconditional counterpart -> what guidance of a scale makes of both, as `Guidance.merge`. */
static inline f32x16 guided(f32x16 x, f32x16 unconditional, float scale) { return x + (scale - 1) * (x - unconditional); }

typedef struct {
    Inputs in;
    const Linear *head;
    const Logits *logits;
    int past; /* of many rows few are read again soon: they go past the caches, in which reading them first would take time */
} HeadWork;

int64_t head_bytes(const Linear *head, int64_t rows) { return inputs_bytes(rows, head->inputs); }

static void store_logits(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const HeadWork *w = work;
    const int64_t outputs = w->head->outputs, left = outputs - block * BLOCK_N, columns = left < BLOCK_N ? left : BLOCK_N;
    for (int64_t r = 0; r < rows; r++) {
        float *y = w->logits->logits + (first + r) * outputs + block * BLOCK_N;
#ifdef __AVX512F__
        if (w->past && columns == BLOCK_N) {
            _mm512_stream_ps(y, _mm512_loadu_ps(out[r]));
            _mm512_stream_ps(y + LANES, _mm512_loadu_ps(out[r] + LANES));
        } else
#endif
            memcpy(y, out[r], 4 * columns);
    }
}

/* A row of guided features, rounded to bf16. */
static void load_guided(const HeadWork *w, int64_t row) {
    Inputs in = w->in;
    const float scale = (float)w->logits->scale;
    const bf16 *x = w->logits->features + row * w->logits->pitch, *other = x + in.rows * w->logits->pitch;
    bf16 both[in.inputs];
    for (int64_t k = 0; k < in.inputs && w->logits->branches > 1; k++)
        both[k] = narrow(widen(x[k]) + (scale - 1) * (widen(x[k]) - widen(other[k])));
    load_row(&in, row, w->logits->branches > 1 ? both : x);
}

static void head_team(const Team *team, void *work) {
    HeadWork *w = work;
    const int64_t blocks = blocks_of(w->head);
    configure_tiles(w->in.tile_rows);
    for (int64_t i = share_begin(team, w->in.rows); i < share_end(team, w->in.rows); i++) load_guided(w, i);
    wait_for_team(team);
    gemm(w->head, &w->in, share_begin(team, blocks), share_end(team, blocks), store_logits, w);
#ifdef __AVX512F__
    _mm_sfence();
#endif
    release_tiles();
}

void head_logits(const Linear *head, const Logits *work, int64_t threads) {
    char *at = work->scratch;
    HeadWork w = {new_inputs(&at, work->rows, head), head, work, 0};
    w.past = work->rows > 2 * TILE_M && head->outputs % LANES == 0 && (intptr_t)work->logits % 64 == 0;
    run_team(threads, head_team, &w);
}

static void probs_of_row(void *work, int64_t r, int64_t rank) {
    const Rows *w = work;
    char *own = w->scratch + rank * bytes_of_rows(w->codes, 0);
    float *x = arena_alloc(&own, bytes_of_row(w->codes));
    probabilities_of(&w->sampling, w->logits + r * w->codes, w->codes, x, own);
    memcpy(w->probs + r * w->codes, x, 4 * w->codes);
}

/* `Sampling.probs`. */
void row_probs(Rows *rows, int64_t threads) { run_rows(threads, rows->rows, probs_of_row, rows); }

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

static void children_of_row(void *work, int64_t r, int64_t rank) {
    const Children *w = work;
    const float *q = w->q + r * w->codes;
    char *own = w->scratch + rank * bytes_of_rows(w->codes, w->each);
    int64_t *drawn = arena_alloc(&own, 8 * w->each);
    if (w->u) {
        draw_all(q, w->codes, w->u + r * w->each, w->each, drawn, (double *)own);
        first_different(drawn, w->each, w->count, w->drawn + r * w->count);
    } else likeliest(q, w->codes, w->count, w->drawn + r * w->count, (int64_t *)own);
}

/* `Sampling.children`, and `Sampling.likeliest` where there is no u. */
void draw_children(Children *children, int64_t threads) { run_rows(threads, children->rows, children_of_row, children); }
