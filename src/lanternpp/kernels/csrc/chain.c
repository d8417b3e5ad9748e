/* The guesses of a chain, on a CPU: the head's logits of every level behind the guess before, and draws from them.

   A row's result depends on that row alone and not on how many rows or threads there are. */

#include "rows.c"

#define GROUP 4  /* blocks of weights that one row is multiplied with at once */

/* The logits of a level are head (features + up act), act = silu(query + prev) of the code before. `turn` is head up, so that
   the products of all levels with the head are one GEMM, and a guess waits for a GEMV with `turn` alone.

   Blocks of `turn` are padded to a multiple of GROUP; its bias is head times that of `up`. */
typedef struct {
    Linear turn, head;
} Heads;

typedef struct {
    int64_t batch, levels, codes;
    Sampling sampling;
    const half *features; /* [batch, levels, dim] */
    const half *query;    /* [batch, levels, hidden] */
    const half *prev;     /* [codes, hidden] */
    const float *bias;    /* [batch, levels, codes], added to the logits, or null */
    const double *u;      /* [batch, levels] uniform */
    float *probs;         /* [batch, levels + 1, codes]; the last is left as it is */
    int64_t *drawn;       /* [batch, levels + 1], of which the first is left as it is */
    char *scratch;        /* as many bytes as `chain_bytes` says */
    const half *confidence; /* [dim], of the logit of how likely a guess is kept, given those before; read where cut > 0 */
    const float *confidence_turn; /* [hidden + 1]: confidence times `up`, and times its bias */
    float *survival;        /* [batch, levels], how likely a guess and all before it are kept; written where cut > 0 */
    double confidence_bias, cut; /* drawing ends at a level where survival is below the cut in every row; 0: never */
} Chain;

/* out [GROUP, COLUMNS] = x [inputs] times a group of weights; every sum is in the order of `few_rows`. */
static void gemv(const half *x, int64_t inputs, const half *weight, float (*out)[COLUMNS]) {
#ifdef __AVX512BF16__
    __m512 left[GROUP], right[GROUP];
#pragma GCC unroll 4
    for (int k = 0; k < GROUP; k++) left[k] = right[k] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2, weight += 2 * COLUMNS) {
        int32_t pair;
        memcpy(&pair, x + i, 4);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k++) {
            const half *w = weight + k * inputs * COLUMNS;
            left[k] = _mm512_dpbf16_ps(left[k], both, (__m512bh)_mm512_loadu_si512(w));
            right[k] = _mm512_dpbf16_ps(right[k], both, (__m512bh)_mm512_loadu_si512(w + COLUMNS));
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < GROUP; k++) {
        _mm512_storeu_ps(out[k], left[k]);
        _mm512_storeu_ps(out[k] + COLUMNS / 2, right[k]);
    }
#else
    for (int k = 0; k < GROUP; k++) few_rows(1, x, inputs, weight + k * inputs * COLUMNS, out + k);
#endif
}

/* y [rows, width] = x [rows, inputs] times groups `first` to `last` of a layer, plus its bias; y has room for whole groups.

   `whole` has room for x, up to a multiple of ROWS rows; with weights in 8 bits tiles are configured for it. */
static void dense(const Linear *layer, int64_t first, int64_t last, const half *x, int64_t rows, Whole *whole, float *y, int64_t width) {
    if (layer->scale) quantise(x, rows, layer->inputs, whole);
    for (int64_t g = first; g < last; g++) {
        const half *weight = (const half *)layer->weight + g * GROUP * COLUMNS * layer->inputs;
        float out[ROWS][COLUMNS];
        if (rows == 1 && !layer->scale) gemv(x, layer->inputs, weight, (float (*)[COLUMNS])(y + g * GROUP * COLUMNS));
        else
            for (int64_t k = 0; k < GROUP; k++)
                for (int64_t r = 0; r < rows; r += ROWS) {
                    const int64_t some = rows - r < ROWS ? rows - r : ROWS;
                    if (layer->scale) whole_product(layer, g * GROUP + k, whole, r, (int)some, out);
                    else few_rows((int)some, x + r * layer->inputs, layer->inputs, weight + k * COLUMNS * layer->inputs, out);
                    for (int64_t i = 0; i < some; i++) memcpy(y + (r + i) * width + (g * GROUP + k) * COLUMNS, out[i], sizeof out[i]);
                }
        if (layer->bias)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = g * GROUP * COLUMNS; i < (g + 1) * GROUP * COLUMNS; i++) y[r * width + i] += layer->bias[i];
    }
}

/* y [rows, COLUMNS], with room for a multiple of ROWS rows, = x [rows, inputs] times one block of a layer, plus its bias.

   x is readable up to a multiple of ROWS rows; with weights in 8 bits `whole` is x by `quantise`. Tiles are configured for ROWS rows. */
static void linear_block(const Linear *layer, int64_t block, const half *x, const Whole *whole, int64_t rows, float (*y)[COLUMNS]) {
    for (int64_t first = 0; first < rows; first += MOST_ROWS)
        product(layer, block, x, 0, whole, first, (int)(rows - first < MOST_ROWS ? rows - first : MOST_ROWS), y + first);
}

/* Outputs of a layer, up to whole groups. */
static int64_t width_of(const Linear *layer) { return up_to(GROUP * COLUMNS, layer->outputs); }

/* What the threads of `draw_chain` share, and what each has for itself. Levels alternate between two buffers, so that a thread may
   begin with the next one while another still reads. */
typedef struct {
    float *logits[2];  /* [batch, size], of which each thread writes its own columns */
    float *highest[2]; /* [batch, threads], of a thread's columns */
    double *sums[2];   /* [batch, size / BLOCK] of what is exponentiated */
    int64_t size;      /* codes, up to whole groups */
    int64_t from, to;  /* this thread's columns */
    half *active;      /* [batch, hidden] */
    Whole whole;
    float *survival;   /* [batch] */
    void *spare;       /* [size] floats */
    float (*block)[COLUMNS]; /* [batch levels, COLUMNS] */
} ChainMemory;

static int64_t bytes_of_chain(const Heads *heads, int64_t batch, int64_t levels) {
    const int64_t most = up_to(ROWS, batch * levels), inputs = heads->head.inputs > heads->turn.inputs ? heads->head.inputs : heads->turn.inputs;
    return padded(2 * up_to(4, batch) * heads->turn.inputs) + padded(2 * most * up_to(DEPTH, inputs)) + padded(4 * most) + padded(4 * batch) +
           padded(4 * width_of(&heads->turn)) + padded(4 * most * COLUMNS);
}

int64_t chain_bytes(const Heads *heads, int64_t batch, int64_t levels, int64_t threads) {
    const int64_t size = width_of(&heads->turn), shared = padded(4 * batch * size) + padded(4 * batch * threads) + padded(8 * batch * size / BLOCK);
    return 2 * shared + threads * bytes_of_chain(heads, batch, levels) + 64;
}

static ChainMemory chain_memory(const Heads *heads, const Chain *c, int64_t me, int64_t team) {
    const int64_t size = width_of(&heads->turn), groups = size / (GROUP * COLUMNS), most = up_to(ROWS, c->batch * c->levels);
    const int64_t inputs = heads->head.inputs > heads->turn.inputs ? heads->head.inputs : heads->turn.inputs;
    char *at = (char *)padded((int64_t)c->scratch);
    ChainMemory m = {.size = size, .from = groups * me / team * GROUP * COLUMNS, .to = groups * (me + 1) / team * GROUP * COLUMNS};
    for (int parity = 0; parity < 2; parity++) {
        m.logits[parity] = take(&at, 4 * c->batch * size);
        m.highest[parity] = take(&at, 4 * c->batch * team);
        m.sums[parity] = take(&at, 8 * c->batch * size / BLOCK);
    }
    at += me * bytes_of_chain(heads, c->batch, c->levels);
    m.active = take(&at, 2 * up_to(4, c->batch) * heads->turn.inputs);
    m.whole = (Whole){take(&at, 2 * most * up_to(DEPTH, inputs)), take(&at, 4 * most)};
    m.survival = take(&at, 4 * c->batch);
    m.spare = take(&at, 4 * size);
    m.block = take(&at, 4 * most * COLUMNS);
    return m;
}

/* The products of all levels' features with this thread's columns of the head, to where their probabilities will be. */
static void head_of_levels(const Chain *c, const Linear *head, ChainMemory *m) {
    const int64_t rows = c->batch * c->levels;
    if (head->scale) quantise(c->features, rows, head->inputs, &m->whole);
    for (int64_t column = m->from; column < m->to && column < c->codes; column += COLUMNS) {
        const int64_t columns = c->codes - column < COLUMNS ? c->codes - column : COLUMNS;
        linear_block(head, column / COLUMNS, c->features, &m->whole, rows, m->block);
        for (int64_t r = 0; r < rows; r++) memcpy(c->probs + (r + r / c->levels) * c->codes + column, m->block[r], 4 * columns);
    }
}

/* act [batch, hidden] of a level: silu(query + prev) of the codes before. Every thread computes all, which takes less time than
   waiting for another. */
static void activate(const Chain *c, int64_t level, int64_t hidden, half *act) {
    for (int64_t b = 0; b < c->batch; b++) {
        const half *query = c->query + (b * c->levels + level) * hidden;
        const half *prev = c->prev + c->drawn[b * (c->levels + 1) + level] * hidden;
        for (int64_t i = 0; i < hidden; i += LANES)
            *(halves *)(act + b * hidden + i) = narrow_all(silu(widen_all(query + i) + widen_all(prev + i)));
    }
}

/* How likely the guesses of a level will be kept; survival [batch] is of the level before, then of this one. Returns whether any is at
   least the cut. */
static int surviving(const Chain *c, int64_t level, int64_t dim, int64_t hidden, const half *act, float *survival) {
    int any = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        const half *x = c->features + (b * c->levels + level) * dim;
        float logit = (float)c->confidence_bias;
#pragma omp simd reduction(+ : logit)
        for (int64_t i = 0; i < dim; i++) logit += widen(x[i]) * widen(c->confidence[i]);
        if (level) {
            logit += c->confidence_turn[hidden];
#pragma omp simd reduction(+ : logit)
            for (int64_t i = 0; i < hidden; i++) logit += widen(act[b * hidden + i]) * c->confidence_turn[i];
        }
        survival[b] = (level ? survival[b] : 1) / (1 + expf(-logit));
        any |= survival[b] >= (float)c->cut;
    }
    return any;
}

/* This thread's columns of the logits of a level, and the highest of them. */
static void logits_of_level(const Heads *heads, const Chain *c, int64_t level, ChainMemory *m, int64_t me, int64_t team) {
    float *logits = m->logits[level % 2];
    const int64_t group = GROUP * COLUMNS;
    if (level) dense(&heads->turn, m->from / group, m->to / group, m->active, c->batch, &m->whole, logits, m->size);
    for (int64_t b = 0; b < c->batch; b++) {
        const float *head = c->probs + (b * (c->levels + 1) + level) * c->codes, *bias = c->bias ? c->bias + (b * c->levels + level) * c->codes : NULL;
        float *row = logits + b * m->size;
        const int64_t to = m->to < c->codes ? m->to : c->codes;
        for (int64_t i = m->from; i < to; i++) row[i] = level ? row[i] + head[i] : head[i];
        for (int64_t i = m->from; bias && i < to; i++) row[i] += bias[i];
        for (int64_t i = to > m->from ? to : m->from; i < m->to; i++) row[i] = -INFINITY;
        m->highest[level % 2][b * team + me] = m->from < m->to ? highest_of(row + m->from, m->to - m->from) : -INFINITY;
    }
}

/* Every thread draws the same codes of a level; each writes the probabilities of its own columns. Two barriers. */
static void draw_level(const Chain *c, int64_t level, ChainMemory *m, int64_t team) {
    const int parity = (int)(level % 2);
    const int64_t blocks = m->size / BLOCK;
    const float scale = (float)(1 / c->sampling.temperature);
#pragma omp barrier
    for (int64_t b = 0; b < c->batch; b++) {
        float *row = m->logits[parity] + b * m->size, highest = -INFINITY;
        for (int64_t t = 0; t < team; t++) highest = m->highest[parity][b * team + t] > highest ? m->highest[parity][b * team + t] : highest;
        for (int64_t i = m->from; i < m->to; i += BLOCK) {
            for (int64_t j = i; j < i + BLOCK; j += LANES) {
                floats *each = (floats *)(row + j);
                *each = exponential((*each - highest) * scale);
            }
            m->sums[parity][b * blocks + i / BLOCK] = block_sum(row + i);
        }
    }
#pragma omp barrier
    for (int64_t b = 0; b < c->batch; b++) {
        const float *row = m->logits[parity] + b * m->size;
        const double *sums = m->sums[parity] + b * blocks;
        double total = 0, sum = 0;
        for (int64_t i = 0; i < blocks; i++) total += sums[i];
        const double most = c->u[b * c->levels + level] * total;
        int64_t block = 0;
        for (; block < blocks - 1 && sum + sums[block] <= most; block++) sum += sums[block];
        int64_t code = block * BLOCK;
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++)
            if (row[i] > 0) {
                code = i;
                if ((sum += row[i]) > most) break;
            }
        c->drawn[b * (c->levels + 1) + level + 1] = code; /* all threads write the same */
        float *probs = c->probs + (b * (c->levels + 1) + level) * c->codes;
        const float over = (float)total;
        for (int64_t i = m->from; i < m->to && i < c->codes; i++) probs[i] = row[i] / over;
    }
}

/* As `draw_level` with top-k, top-p or the greedy choice: whole rows by one thread each. */
static void draw_level_by_rows(const Chain *c, int64_t level, ChainMemory *m, int64_t me, int64_t team) {
#pragma omp barrier
    for (int64_t b = me; b < c->batch; b += team) {
        float *row = m->logits[level % 2] + b * m->size;
        probabilities(&c->sampling, row, c->codes, m->size, m->spare);
        memcpy(c->probs + (b * (c->levels + 1) + level) * c->codes, row, 4 * c->codes);
        c->drawn[b * (c->levels + 1) + level + 1] =
            c->sampling.temperature == 0 ? largest(row, m->size) : draw(row, m->size, c->u[b * c->levels + level]);
    }
#pragma omp barrier
}

/* A guess for every level, each drawn from the distribution of its level behind the guess before. */
void draw_chain(const Heads *heads, const Chain *chain, int64_t threads) {
    const Chain c = *chain;
    const int64_t hidden = heads->turn.inputs, dim = heads->head.inputs;
    const int by_rows = c.sampling.temperature == 0 || c.sampling.top_k > 0 || c.sampling.top_p < 1;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = thread_number(), team = team_size();
        ChainMemory memory = chain_memory(heads, &c, me, team);
#ifdef __AMX_BF16__
        if (tiles) configure(ROWS);
#endif
        head_of_levels(&c, &heads->head, &memory);
        int64_t level = 0;
        for (; level < c.levels; level++) {
            if (level) activate(&c, level, hidden, memory.active);
            if (c.cut > 0) {
                if (!surviving(&c, level, dim, hidden, memory.active, memory.survival) && level) break;
                for (int64_t b = 0; b < c.batch && !me; b++) c.survival[b * c.levels + level] = memory.survival[b];
            }
            logits_of_level(heads, &c, level, &memory, me, team);
            if (by_rows) draw_level_by_rows(&c, level, &memory, me, team);
            else draw_level(&c, level, &memory, team);
        }
        const int64_t to = memory.to < c.codes ? memory.to : c.codes;
        for (; level < c.levels; level++) /* after the end of a chain */
            for (int64_t b = 0; b < c.batch && memory.from < to; b++)
                memset(c.probs + (b * (c.levels + 1) + level) * c.codes + memory.from, 0, 4 * (to - memory.from));
#ifdef __AMX_BF16__
        if (tiles) _tile_release();
#endif
    }
}
