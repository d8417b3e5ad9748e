/* The draft codes of a chain, on a CPU: the head's logits of every level after the draft code before, and draws from them.

   A row's result depends on that row alone and not on how many rows or threads there are. */

#include "sampling.c"

#define GROUP 4 /* blocks of columns that a thread has at least */

/* Layers of a parallel drafter before and after its decoder, and the target's head.

   The logits of a level are head (features + up act), act = silu(query + prev) of the code before. `head_up` is head up, so that
   the products of all levels with the head are one GEMM, and a draft code waits for a GEMV with `head_up` alone.

   The bias of `head_up` is head times that of `up`. */
typedef struct {
    Linear fc, hint, down, head_up, head;
    const bf16 *queries; /* [query_count, dim]; deeper levels repeat the last */
    int64_t query_count, dim, aux; /* aux: layers of the target that are read beside its features */
    float eps;
} DraftLayers;

typedef struct {
    const DraftLayers *layers;
    int64_t batch, levels, codes;
    Sampling sampling;
    const bf16 *features; /* [batch, levels, dim] */
    const bf16 *query;    /* [batch, levels, hidden] */
    const bf16 *prev;     /* [codes, hidden] */
    const float *bias;    /* [batch, levels, codes], added to the logits, or null */
    const double *u;      /* [batch, levels] uniform */
    float *probs;         /* [batch, levels + 1, codes]; the last is left as it is */
    int64_t *drawn;       /* [batch, levels + 1], of which the first is left as it is */
} Chain;

/* Memory of `sample_chain`, shared and per thread. Levels alternate between two buffers, so that a thread may begin the next level while
   another still reads this one. */
typedef struct {
    float *logits[2];  /* [batch, size], of which each thread writes its own columns */
    float *highest[2]; /* [batch, threads], of a thread's columns */
    double *sums[2];   /* [batch, size / BLOCK] of what is exponentiated */
    int64_t size;      /* codes, up to whole groups */
    int64_t from, to;  /* this thread's columns */
    Inputs features, active; /* of the head [batch levels, dim], of `head_up` [batch, hidden] */
    bf16 *act;         /* [batch, hidden] */
    void *spare;       /* [size] floats */
} ChainMemory;

/* A thread's part of the memory: after the shared buffers and the parts of lower ranks. */
static ChainMemory chain_memory(const DraftLayers *layers, int64_t batch, int64_t levels, const Team *team, char **at) {
    const int64_t size = up_to(GROUP * BLOCK_N, layers->head_up.outputs), groups = size / (GROUP * BLOCK_N);
    ChainMemory m = {.size = size, .from = share_begin(team, groups) * GROUP * BLOCK_N, .to = share_end(team, groups) * GROUP * BLOCK_N};
    for (int parity = 0; parity < 2; parity++) {
        m.logits[parity] = arena_alloc(at, 4 * batch * size);
        m.highest[parity] = arena_alloc(at, 4 * batch * team->size);
        m.sums[parity] = arena_alloc(at, 8 * batch * size / BLOCK);
    }
    for (int64_t rank = 0; rank <= team->rank; rank++) {
        m.features = new_inputs(at, batch * levels, &layers->head);
        m.active = new_inputs(at, batch, &layers->head_up);
        m.act = arena_alloc(at, 2 * batch * layers->head_up.inputs);
        m.spare = arena_alloc(at, 4 * size);
    }
    return m;
}

static int64_t chain_bytes(const DraftLayers *layers, int64_t batch, int64_t levels, int64_t threads) {
    const Team last = {.rank = threads - 1, .size = threads};
    char *at = (char *)64;
    chain_memory(layers, batch, levels, &last, &at);
    return (intptr_t)at;
}

/* Blocks of columns [from, to) of a layer that has them. */
static int64_t last_block(const Linear *layer, int64_t to) { return to / BLOCK_N < blocks_of(layer) ? to / BLOCK_N : blocks_of(layer); }

static void store_probs(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const Chain *c = work;
    const int64_t column = block * BLOCK_N, columns = c->codes - column < BLOCK_N ? c->codes - column : BLOCK_N;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = first + i;
        memcpy(c->probs + (r + r / c->levels) * c->codes + column, out[i], 4 * columns);
    }
}

/* The products of all levels' features with this thread's columns of the head, to where their probabilities will be. */
static void head_of_levels(const Chain *c, const Linear *head, ChainMemory *m) {
    const int64_t rows = c->batch * c->levels;
    configure_tiles(m->features.tile_rows);
    for (int64_t r = 0; r < rows; r++) load_row(&m->features, r, c->features + r * head->inputs);
    quantize_rows(&m->features, 0, rows);
    gemm(head, &m->features, m->from / BLOCK_N, last_block(head, m->to), store_probs, (void *)c);
    configure_tiles(m->active.tile_rows);
}

/* act [batch, hidden] of a level: silu(query + prev) of the code before. Every thread computes all rows, which is faster than waiting
   for other threads. */
static void activate(const Chain *c, int64_t level, int64_t hidden, bf16 *act) {
    for (int64_t b = 0; b < c->batch; b++) {
        const bf16 *query = c->query + (b * c->levels + level) * hidden;
        const bf16 *prev = c->prev + __atomic_load_n(&c->drawn[b * (c->levels + 1) + level], __ATOMIC_RELAXED) * hidden;
        for (int64_t i = 0; i < hidden; i += WIDTH)
            *(bf16v *)(act + b * hidden + i) = narrow_all(silu(widen_all(query + i) + widen_all(prev + i)));
    }
}

/* This thread's columns of the logits of a level, and the highest of them. */
static void logits_of_level(const DraftLayers *layers, const Chain *c, int64_t level, ChainMemory *m, const Team *team) {
    float *logits = m->logits[level % 2];
    FloatRows rows = {logits, m->size};
    for (int64_t b = 0; level && b < c->batch; b++) load_row(&m->active, b, m->act + b * layers->head_up.inputs);
    if (level) quantize_rows(&m->active, 0, c->batch);
    if (level) gemm(&layers->head_up, &m->active, m->from / BLOCK_N, last_block(&layers->head_up, m->to), store_floats, &rows);
    for (int64_t b = 0; b < c->batch; b++) {
        const float *head = c->probs + (b * (c->levels + 1) + level) * c->codes, *bias = c->bias ? c->bias + (b * c->levels + level) * c->codes : NULL;
        float *row = logits + b * m->size;
        const int64_t last_column = m->to < c->codes ? m->to : c->codes;
        for (int64_t i = m->from; i < last_column; i++) row[i] = level ? row[i] + head[i] : head[i];
        for (int64_t i = m->from; bias && i < last_column; i++) row[i] += bias[i];
        for (int64_t i = last_column > m->from ? last_column : m->from; i < m->to; i++) row[i] = -INFINITY;
        m->highest[level % 2][b * team->size + team->rank] = m->from < m->to ? max_of(row + m->from, m->to - m->from) : -INFINITY;
    }
}

/* Every thread draws the same codes of a level; each writes the probabilities of its own columns. Two barriers.
   A code is below c->codes, whatever the logits are. */
static void draw_level(const Chain *c, int64_t level, ChainMemory *m, const Team *team) {
    const int parity = (int)(level % 2);
    const int64_t blocks = m->size / BLOCK;
    const float scale = (float)(1 / c->sampling.temperature);
    wait_for_team(team);
    for (int64_t b = 0; b < c->batch; b++) {
        float *row = m->logits[parity] + b * m->size, highest = -INFINITY;
        for (int64_t t = 0; t < team->size; t++) {
            const float thread_highest = m->highest[parity][b * team->size + t];
            highest = thread_highest > highest ? thread_highest : highest;
        }
        for (int64_t i = m->from; i < m->to; i += BLOCK) {
            for (int64_t j = i; j < i + BLOCK; j += WIDTH) {
                f32v *chunk = (f32v *)(row + j);
                *chunk = exp_all((*chunk - highest) * scale);
            }
            m->sums[parity][b * blocks + i / BLOCK] = block_sum(row + i);
        }
    }
    wait_for_team(team);
    for (int64_t b = 0; b < c->batch; b++) {
        const float *row = m->logits[parity] + b * m->size;
        const double *sums = m->sums[parity] + b * blocks;
        double total = 0, sum = 0;
        for (int64_t i = 0; i < blocks; i++) total += sums[i];
        const double threshold = c->u[b * c->levels + level] * total;
        int64_t block = 0;
        for (; (block + 1) * BLOCK < c->codes && sum + sums[block] <= threshold; block++) sum += sums[block];
        const int64_t code = first_above(row, block * BLOCK, (block + 1) * BLOCK, sum, threshold);
        __atomic_store_n(&c->drawn[b * (c->levels + 1) + level + 1], code, __ATOMIC_RELAXED); /* all threads write the same */
        float *probs = c->probs + (b * (c->levels + 1) + level) * c->codes;
        const float divisor = (float)total;
        for (int64_t i = m->from; i < m->to && i < c->codes; i++) probs[i] = row[i] / divisor;
    }
}

/* As `draw_level` with top-k, top-p or the greedy choice: whole rows by one thread each. */
static void draw_level_by_rows(const Chain *c, int64_t level, ChainMemory *m, const Team *team) {
    wait_for_team(team);
    for (int64_t b = team->rank; b < c->batch; b += team->size) {
        float *row = m->logits[level % 2] + b * m->size;
        probabilities(&c->sampling, row, c->codes, m->size, m->spare);
        memcpy(c->probs + (b * (c->levels + 1) + level) * c->codes, row, 4 * c->codes);
        int64_t *code = c->drawn + b * (c->levels + 1) + level + 1;
        if (c->sampling.temperature == 0) *code = largest(row, c->codes);
        else draw_all(row, c->codes, c->u + b * c->levels + level, 1, code, m->spare);
    }
    wait_for_team(team);
}

static void chain_team(const Team *team, void *work) {
    const Chain c = *(const Chain *)work;
    const DraftLayers *layers = c.layers;
    const int64_t hidden = layers->head_up.inputs;
    const int by_rows = c.sampling.temperature == 0 || c.sampling.top_k > 0 || c.sampling.top_p < 1;
    char *at = (char *)align64((int64_t)team->memory);
    ChainMemory memory = chain_memory(layers, c.batch, c.levels, team, &at);
    head_of_levels(&c, &layers->head, &memory);
    for (int64_t level = 0; level < c.levels; level++) {
        if (level) activate(&c, level, hidden, memory.act);
        logits_of_level(layers, &c, level, &memory, team);
        if (by_rows) draw_level_by_rows(&c, level, &memory, team);
        else draw_level(&c, level, &memory, team);
    }
    release_tiles();
}

/* A draft code for every level, each drawn from the distribution of its level after the draft code before. */
int64_t sample_chain(const Chain *chain, const Scratch *scratch, int64_t threads) {
    ENSURE(scratch, chain_bytes(chain->layers, chain->batch, chain->levels, threads));
    return run_team(threads, chain_team, (void *)chain, scratch->memory);
}
