/* The guesses of a chain and the laws that they are verified against: rows of V probabilities in float32, on a CPU.

   The same functions as `Sampling.probs`, `draw`, `NeighbourAcceptance.output_law` and `verify_block`. PyTorch
   takes some 20 operations a guess and 120 a verification for them, and starting those costs more than computing them.
   A row's result depends on that row alone and not on how many rows or threads there are. */

#include "decoder.c"

#define GROUP 4  /* blocks of weights that one row is multiplied with at once */
#define BLOCK 64 /* codes whose probabilities are summed at once; a row of scratch memory is as many times that as it needs */

typedef double doubles __attribute__((vector_size(64)));
typedef int32_t bits32 __attribute__((may_alias)); /* of a float */

/* `Sampling` of engine/sampling.py. */
typedef struct {
    double temperature, top_p;
    int64_t top_k;
} Sampling;

/* `up` of `ParallelDrafter.combine`, and the target's head; their blocks are padded to a multiple of GROUP. */
typedef struct {
    Linear up, head;
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
    float *survival;        /* [batch, levels], how likely a guess and all before it are kept; written where cut > 0 */
    double bias_of_confidence, cut; /* drawing ends at a level where survival is below the cut in every row; 0: never */
} Chain;

typedef struct {
    int64_t rows, codes, near, whole;
    const float *p, *q, *limit; /* [rows, codes] */
    const int32_t *table;       /* [codes / LANES, near, LANES], the last block padded: neighbours, nearest first */
    float *law;                 /* [rows, codes]; where not `whole`, the accepted mass alone */
} Laws;

typedef struct {
    int64_t batch, nodes, codes, ranks, near;
    Sampling sampling;
    const float *logits, *q; /* [batch, nodes, codes] */
    const int64_t *drawn;    /* [batch, nodes] */
    const int64_t *children; /* [batch, nodes, ranks]; the first is negative where a chain has ended */
    const double *u, *last;  /* [batch] uniform: of the end, and of the code that is drawn there */
    const double *limit;     /* [nodes - 1, 2]: neighbours lend at most limit[0] + limit[1] p(y) */
    const int32_t *table;    /* as in `Laws` */
    double *scratch;         /* [2, batch, nodes] */
    double *behind;          /* [batch, nodes - 1] */
    float *law;              /* [batch, nodes, codes] */
    int64_t *path;           /* [batch, nodes] */
    int64_t *following;      /* [batch, nodes] */
    int64_t *kept, *bonus;   /* [batch] */
} Ends;

/* The sum of x [BLOCK]. */
static inline double block_sum(const float *x) {
    doubles sum = {0};
    for (int i = 0; i < BLOCK; i += 8) sum += __builtin_convertvector(*(const eight *)(x + i), doubles);
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
        for (int j = 0; j < BLOCK; j += LANES) {
            floats each = *(const floats *)(x + i + j);
            *(floats *)(kept + j) = (floats)((ints)each & ((ints)each > bits));
        }
        sum += block_sum(kept);
    }
    return sum;
}

/* How many of x [size] are above a float >= 0 given by its bits. */
static int64_t count_above(const bits32 *x, int64_t size, int32_t bits) {
    int64_t count = 0;
#pragma omp simd reduction(+ : count)
    for (int64_t i = 0; i < size; i++) count += x[i] > bits;
    return count;
}

/* The bits of the smallest number with less than `limit` of x [size] >= 0 above it. */
static int32_t least_of(const float *x, int64_t size, int64_t limit) {
    const bits32 *from = (const bits32 *)x;
    bits32 some[size];
    int32_t least = INT32_MAX;
    int64_t above = 0; /* what is counted already */
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
        if (bit == 1 << 21) { /* from here on of those alone that may be above it or not */
            const int32_t low = least & ~(2 * bit - 1);
            int64_t count = 0;
            above = count_above(from, size, least);
#ifdef __AVX512F__
            for (int64_t i = 0; i < size; i += LANES) {
                const __m512i each = _mm512_loadu_si512(from + i), bottom = _mm512_set1_epi32(low), top = _mm512_set1_epi32(least);
                const __mmask16 kept = _mm512_cmpgt_epi32_mask(each, bottom) & _mm512_cmple_epi32_mask(each, top);
                _mm512_mask_compressstoreu_epi32(some + count, kept, each);
                count += __builtin_popcount(kept);
            }
#else
            for (int64_t i = 0; i < size; i++) {
                some[count] = from[i];
                count += from[i] > low && from[i] <= least;
            }
#endif
            from = some;
            size = count;
        }
        if (above + count_above(from, size, least & ~bit) < limit) least &= ~bit;
    }
    return least;
}

/* Keep the largest of x [size] >= 0, of equal ones the first, until their sum, or their number, is at least `limit`; 0 elsewhere. */
static void keep_largest(float *x, int64_t size, double limit, int counted) {
    int32_t least = counted ? least_of(x, size, (int64_t)limit) : INT32_MAX; /* the smallest number with less than `limit` above it */
    if (!counted)
        for (int32_t bit = 1 << 30; bit; bit >>= 1)
            if (sum_above(x, size, least & ~bit) < limit) least &= ~bit;
    double sum = counted ? (double)count_above((const bits32 *)x, size, least) : sum_above(x, size, least);
    for (int64_t i = 0; i < size; i += LANES) {
        const floats some = *(const floats *)(x + i);
        const ints equal = (ints)some == least;
        int any = 0;
        for (int j = 0; j < LANES; j++) any |= equal[j];
        *(floats *)(x + i) = (floats)((ints)some & ((ints)some >= least));
        for (int j = 0; any && j < LANES; j++)
            if (equal[j]) {
                if (sum < limit) sum += counted ? 1 : some[j];
                else x[i + j] = 0;
            }
    }
}

/* Logits [codes] in x, of `size` floats, a multiple of BLOCK -> the distribution that codes are drawn from, 0 behind it. */
static void probabilities(const Sampling *sampling, float *x, int64_t codes, int64_t size) {
    const int greedy = sampling->temperature == 0;
    const float scale = greedy ? 1 : (float)(1 / sampling->temperature);
    for (int64_t i = codes; i < size; i++) x[i] = -INFINITY;
    const float highest = highest_of(x, size);
    for (int64_t i = 0; i < size; i += LANES) {
        floats *each = (floats *)(x + i);
        *each = exponential((*each - highest) * scale);
    }
    if (!greedy && sampling->top_k > 0 && sampling->top_k < codes) keep_largest(x, size, (double)sampling->top_k, 1);
    if (!greedy && sampling->top_p < 1) keep_largest(x, size, sampling->top_p * sum_all(x, size), 0);
    const float total = (float)sum_all(x, size);
    for (int64_t i = 0; i < size; i += LANES) *(floats *)(x + i) /= total;
}

/* Logits [codes] -> probabilities in x, with room for `codes` up to a multiple of BLOCK. */
static void probabilities_of(const Sampling *sampling, const float *logits, int64_t codes, float *x) {
    Sampling plain = *sampling;
    if (plain.temperature == 0) plain = (Sampling){.temperature = 1, .top_p = 1}; /* `Sampling.probs` of greedy choices */
    memcpy(x, logits, 4 * codes);
    probabilities(&plain, x, codes, up_to(BLOCK, codes));
}

/* The first of x [size] at which their running sum exceeds the share u in (0, 1) of the whole. */
static int64_t draw(const float *x, int64_t size, double u) {
    const double most = u * sum_all(x, size);
    double sum = 0;
    int64_t first = 0, code = 0;
    for (double next; first < size - BLOCK && (next = sum + block_sum(x + first)) <= most; first += BLOCK) sum = next;
    for (int64_t i = first; i < first + BLOCK; i++)
        if (x[i] > 0) {
            code = i;
            if ((sum += x[i]) > most) break;
        }
    return code;
}

/* The first of the largest of x [size]. */
static int64_t largest(const float *x, int64_t size) {
    int64_t code = 0;
    for (int64_t i = 1; i < size; i++) code = x[i] > x[code] ? i : code;
    return code;
}

/* out [GROUP, COLUMNS] = x [inputs] times a group of weights; every sum is in the order of `few_rows`. */
static void one_row(const half *x, int64_t inputs, const half *weight, float (*out)[COLUMNS]) {
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
        const int64_t together = layer->scale ? ROWS : FEW;
        float out[ROWS][COLUMNS];
        if (rows == 1 && !layer->scale) one_row(x, layer->inputs, weight, (float (*)[COLUMNS])(y + g * GROUP * COLUMNS));
        else
            for (int64_t k = 0; k < GROUP; k++)
                for (int64_t r = 0; r < rows; r += together) {
                    const int64_t some = rows - r < together ? rows - r : together;
                    if (layer->scale) whole_product(layer, g * GROUP + k, whole, r, (int)some, out);
                    else few_rows((int)some, x + r * layer->inputs, layer->inputs, weight + k * COLUMNS * layer->inputs, out);
                    for (int64_t i = 0; i < some; i++) memcpy(y + (r + i) * width + (g * GROUP + k) * COLUMNS, out[i], sizeof out[i]);
                }
        if (layer->bias)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = g * GROUP * COLUMNS; i < (g + 1) * GROUP * COLUMNS; i++) y[r * width + i] += layer->bias[i];
    }
}

/* Outputs of a layer, up to whole groups. */
static int64_t width_of(const Linear *layer) { return up_to(GROUP * COLUMNS, layer->outputs); }

/* The most inputs of the two layers, up to a multiple of DEPTH. */
static int64_t wider_of(const Heads *heads) {
    return up_to(DEPTH, heads->up.inputs > heads->head.inputs ? heads->up.inputs : heads->head.inputs);
}

static int64_t bytes_of_inputs(const Heads *heads, int64_t rows) {
    return padded(2 * rows * heads->up.inputs) + padded(2 * rows * heads->head.inputs) + padded(4 * rows * width_of(&heads->up)) +
           padded(4 * rows) + padded(2 * up_to(ROWS, rows) * wider_of(heads)) + padded(4 * rows);
}

int64_t chain_bytes(const Heads *heads, int64_t batch, int64_t threads) {
    return padded(4 * batch * width_of(&heads->head)) + threads * bytes_of_inputs(heads, batch) + 64;
}

/* How likely the guesses of a level will be kept, of features x [batch, dim]; survival [batch] is of the level before, then of this
   one. Returns whether any is at least the cut. */
static int surviving(const Chain *c, const half *x, int64_t dim, float *survival) {
    int any = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        float logit = (float)c->bias_of_confidence;
#pragma omp simd reduction(+ : logit)
        for (int64_t i = 0; i < dim; i++) logit += widen(x[b * dim + i]) * widen(c->confidence[i]);
        survival[b] /= 1 + expf(-logit);
        any |= survival[b] >= (float)c->cut;
    }
    return any;
}

/* A guess for every level, each drawn from the distribution of its level behind the guess before. */
void draw_chain(const Heads *heads, const Chain *chain, int64_t threads) {
    const Chain c = *chain;
    const Linear up = heads->up, head = heads->head;
    const int64_t size = width_of(&head), width = width_of(&up);
    char *at = (char *)padded((int64_t)c.scratch);
    float *logits = take(&at, 4 * c.batch * size);
#pragma omp parallel num_threads(threads)
    {
#ifdef _OPENMP
        int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
#else
        int64_t me = 0, team = 1;
#endif
        char *own = at + me * bytes_of_inputs(heads, c.batch);
        half *active = take(&own, 2 * c.batch * up.inputs), *x = take(&own, 2 * c.batch * head.inputs);
        float *more = take(&own, 4 * c.batch * width), *survival = take(&own, 4 * c.batch);
        Whole whole = {take(&own, 2 * up_to(ROWS, c.batch) * wider_of(heads)), take(&own, 4 * c.batch)};
#ifdef __AMX_BF16__
        const int tiled = tiles && (up.scale || head.scale);
        if (tiled) configure(2 * c.batch < ROWS ? 2 * (int)c.batch : ROWS);
#endif
        for (int64_t b = 0; b < c.batch; b++) survival[b] = 1;
        for (int64_t level = 0; level < c.levels; level++) {
            if (level) { /* every thread for itself, which takes less time than waiting for another */
                for (int64_t b = 0; b < c.batch; b++) {
                    const half *query = c.query + (b * c.levels + level) * up.inputs;
                    const half *prev = c.prev + c.drawn[b * (c.levels + 1) + level] * up.inputs;
                    for (int64_t i = 0; i < up.inputs; i += LANES) {
                        floats sum = silu(widen_all(query + i) + widen_all(prev + i));
                        for (int64_t j = 0; j < LANES; j++) active[b * up.inputs + i + j] = narrow(sum[j]);
                    }
                }
                dense(&up, 0, width / (GROUP * COLUMNS), active, c.batch, &whole, more, width);
            }
            for (int64_t b = 0; b < c.batch; b++)
                for (int64_t i = 0; i < head.inputs; i++) {
                    half feature = c.features[(b * c.levels + level) * head.inputs + i];
                    x[b * head.inputs + i] = level ? narrow(widen(feature) + more[b * width + i]) : feature;
                }
            if (c.cut > 0) { /* every thread for itself, so that all end at the same level */
                if (!surviving(&c, x, head.inputs, survival) && level) break;
                for (int64_t b = 0; b < c.batch && !me; b++) c.survival[b * c.levels + level] = survival[b];
            }
            const int64_t groups = size / (GROUP * COLUMNS);
            dense(&head, groups * me / team, groups * (me + 1) / team, x, c.batch, &whole, logits, size);
#pragma omp barrier
            for (int64_t b = me; b < c.batch; b += team) {
                float *row = logits + b * size;
                if (c.bias)
                    for (int64_t i = 0; i < c.codes; i++) row[i] += c.bias[(b * c.levels + level) * c.codes + i];
                probabilities(&c.sampling, row, c.codes, size);
                memcpy(c.probs + (b * (c.levels + 1) + level) * c.codes, row, 4 * c.codes);
                c.drawn[b * (c.levels + 1) + level + 1] =
                    c.sampling.temperature == 0 ? largest(row, size) : draw(row, size, c.u[b * c.levels + level]);
            }
#pragma omp barrier
        }
#ifdef __AMX_BF16__
        if (tiled) _tile_release();
#endif
    }
}

/* x at LANES places. */
static inline floats gather(const float *x, const int32_t *place) {
#ifdef __AVX512F__
    return (floats)_mm512_i32gather_ps(_mm512_loadu_si512(place), x, 4);
#else
    floats found;
    for (int i = 0; i < LANES; i++) found[i] = x[place[i]];
    return found;
#endif
}

/* Whether any lane of a mask is set. */
static inline int any_of(ints mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any;
#endif
}

/* The mass that each of LANES codes y is accepted with, min(q(y), p(y) + what its neighbours lend); all is p of all codes.

   The longest prefix of its neighbours lends whose mass is at most the limit; a code of probability 1 never lends. */
static inline floats accepted(const float *all, floats p, floats q, floats limit, const int32_t *table, int64_t near) {
    floats total = {0}, lent = {0};
    ints open = p < q; /* beyond q(y) the value does not matter */
    for (int64_t n = 0; n < near && any_of(open); n++, table += LANES) {
        const floats mass = gather(all, table);
        total += mass;
        const ints lends = open & (mass < 1) & (total <= limit);
        lent = (floats)(((ints)total & lends) | ((ints)lent & ~lends));
        open = lends & (p + lent < q);
    }
    const floats mass = p + lent;
    const ints less = mass < q;
    return (floats)(((ints)mass & less) | ((ints)q & ~less));
}

/* A row of codes, with numbers >= 0 behind the last up to a multiple of LANES, and the rule that it is verified under. */
typedef struct {
    const float *p, *q;
    const float *limit;  /* of what neighbours lend; null: fixed + share p */
    const float *logits; /* -infinity: forbidden, never relaxed; or null */
    float fixed, share;
    const int32_t *table;
    int64_t near;
} Row;

/* The law of verifying one child drawn from q with the optimal residual; where not `whole`, the accepted mass alone. */
static inline __attribute__((always_inline)) void law_of_row(const Row *row, int64_t codes, int whole, float *law) {
    const Row r = *row;
    const int32_t *table = r.table;
    doubles kept = {0}, rest = {0};
    for (int64_t y = 0; y < codes; y += LANES, table += LANES * r.near) {
        const floats p = *(const floats *)(r.p + y), limit = r.limit ? *(const floats *)(r.limit + y) : r.fixed + r.share * p;
        floats q = *(const floats *)(r.q + y);
        if (r.logits) q = (floats)((ints)q & (*(const floats *)(r.logits + y) > -INFINITY));
        const floats mass = accepted(r.p, p, q, limit, table, r.near);
        *(floats *)(law + y) = mass;
        const floats more = (floats)((ints)(p - mass) & (p > mass));
        const eight *kept_by_halves = (const eight *)&mass, *rest_by_halves = (const eight *)&more;
        for (int i = 0; i < 2; i++) {
            kept += __builtin_convertvector(kept_by_halves[i], doubles);
            rest += __builtin_convertvector(rest_by_halves[i], doubles);
        }
    }
    if (!whole) return;
    double all_kept = 0, all_rest = 0;
    for (int i = 0; i < 8; i++) all_kept += kept[i], all_rest += rest[i];
    const float share = all_rest > 0 && all_kept < 1 ? (float)((1 - all_kept) / all_rest) : 0;
    for (int64_t y = 0; y < codes; y += LANES) {
        const floats p = *(const floats *)(r.p + y), mass = *(floats *)(law + y);
        *(floats *)(law + y) = mass + share * (floats)((ints)(p - mass) & (p > mass));
    }
}

/* `law_of_row` in every row. */
void output_laws(const Laws *laws, int64_t threads) {
    const Laws w = *laws;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t r = 0; r < w.rows; r++) {
        const int64_t size = up_to(LANES, w.codes), at = r * w.codes;
        float all[4][size] __attribute__((aligned(64))); /* p, q, limit and the law */
        memset(all, 0, sizeof all);
        memcpy(all[0], w.p + at, 4 * w.codes);
        memcpy(all[1], w.q + at, 4 * w.codes);
        memcpy(all[2], w.limit + at, 4 * w.codes);
        const Row row = {.p = all[0], .q = all[1], .limit = all[2], .table = w.table, .near = w.near};
        law_of_row(&row, w.codes, (int)w.whole, all[3]);
        memcpy(w.law + at, all[3], 4 * w.codes);
    }
}

/* The law of the code behind node i of all chains, by its logits; q is 0 where `child` is not set. */
static void law_of_node(const Ends *ends, int64_t i, int child) {
    const Ends e = *ends;
    const float *logits = e.logits + i * e.codes, *q = e.q + i * e.codes;
    const int64_t size = up_to(BLOCK, e.codes);
    float p[size] __attribute__((aligned(64))), *law = e.law + i * e.codes;
    probabilities_of(&e.sampling, logits, e.codes, p);
    if (!e.near || !child) {
        memcpy(law, p, 4 * e.codes);
        return;
    }
    const double *limit = e.limit + 2 * (i % e.nodes);
    Row row = {.p = p, .q = q, .logits = logits, .fixed = (float)limit[0], .share = (float)limit[1], .table = e.table, .near = e.near};
    if (e.codes % LANES == 0) {
        law_of_row(&row, e.codes, 1, law);
        return;
    }
    float more[3][size] __attribute__((aligned(64))); /* q, logits and the law, with room behind them */
    memset(more, 0, sizeof more);
    row.q = memcpy(more[0], q, 4 * e.codes);
    row.logits = memcpy(more[1], logits, 4 * e.codes);
    law_of_row(&row, e.codes, 1, more[2]);
    memcpy(law, more[2], 4 * e.codes);
}

/* [weight p - q]+ of rows of `codes`, q null: 0, and its sum; left may be null. */
static double left_of(const float *p, const float *q, float weight, int64_t codes, float *left) {
    double mass = 0;
#pragma omp simd reduction(+ : mass)
    for (int64_t y = 0; y < codes; y++) {
        const float more = p[y] * weight - (q ? q[y] : 0);
        mass += more > 0 ? more : 0;
    }
    for (int64_t y = 0; left && y < codes; y++) {
        const float more = p[y] * weight - (q ? q[y] : 0);
        left[y] = more > 0 ? more : 0;
    }
    return mass;
}

/* Block verification: where chains end, and the codes that are drawn there. */
void chain_ends(const Ends *ends, int64_t threads) {
    const Ends e = *ends;
    double *masses = e.scratch, *weights = e.scratch + e.batch * e.nodes;
#define CHILD(i) (e.ranks && e.children[(i) * e.ranks] >= 0)
#define Q(i) (CHILD(i) ? e.q + (i) * e.codes : NULL)
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < e.batch * e.nodes; i++) law_of_node(ends, i, CHILD(i));
#pragma omp for
        for (int64_t b = 0; b < e.batch; b++) {
            double weight = 1;
            for (int64_t i = b * e.nodes, n = 1; n <= e.nodes; i++, n++) {
                weights[i] = weight;
                if (n == e.nodes) break;
                const int64_t code = e.drawn[i + 1];
                const float chance = CHILD(i) ? e.q[i * e.codes + code] : 0;
                weight = chance > 0 ? weight * e.law[i * e.codes + code] / chance : 0;
                if (weight > 1) weight = 1;
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < e.batch * e.nodes; i++)
            masses[i] = weights[i] > 0 ? left_of(e.law + i * e.codes, Q(i), (float)weights[i], e.codes, NULL) : 0;
#pragma omp for
        for (int64_t b = 0; b < e.batch; b++) {
            const int64_t first = b * e.nodes, size = up_to(BLOCK, e.codes);
            int64_t last = 0;
            double none = 1; /* of the events behind a node */
            for (int64_t n = e.nodes - 1; n > 0; n--) {
                const double mass = masses[first + n], either = mass + 1 - weights[first + n];
                none *= 1 - (either > 0 ? mass / either : 1);
                e.behind[first - b + n - 1] = none;
                last += e.u[b] >= none;
            }
            const int64_t i = first + last;
            float left[size];
            memset(left, 0, sizeof left);
            if (!(left_of(e.law + i * e.codes, Q(i), (float)weights[i], e.codes, left) > 0)) memcpy(left, e.law + i * e.codes, 4 * e.codes);
            e.bonus[b] = draw(left, size, e.last[b]);
            e.kept[b] = last + 1;
            for (int64_t n = 0; n < e.nodes; n++) {
                e.path[first + n] = n < last ? n : last;
                e.following[first + n] = n < last ? e.drawn[first + n + 1] : n == last ? e.bonus[b] : e.drawn[i];
            }
        }
    }
#undef CHILD
#undef Q
}
