/* The guesses of a tree and the walk that verifies it: rows of V probabilities in float32, on a CPU.

   The same functions as the head of guided features, `Sampling.probs`, `Sampling.children` and `likeliest`, `verify` and `stops` of
   traversal verification. A row's result depends on that row alone and not on how many rows or threads there are. */

#include "draws.c"

/* Logits of guided features. */
typedef struct {
    int64_t rows, branches;
    double scale;         /* of guidance, where there are two branches */
    const half *features; /* [branches, rows, inputs], conditional ones first */
    char *scratch;        /* as many bytes as `head_bytes` says */
    float *logits;        /* [rows, outputs] */
} Logits;

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

typedef struct {
    int64_t batch, nodes, codes, ranks, levels, near, optimal;
    Sampling sampling;
    const float *logits;     /* [batch, nodes, codes] */
    const float *q;          /* [batch, nodes, codes], or null: point masses */
    const int64_t *drawn;    /* [batch, nodes] */
    const int64_t *children; /* [batch, nodes, ranks], -1: none */
    const double *u;         /* [batch, levels, ranks] uniform */
    const double *last;      /* [batch] uniform, of the code behind the path */
    const double *limit;     /* [levels, 2]: neighbours lend at most limit[0] + limit[1] p(y) */
    const int32_t *table;    /* [codes, near] */
    int64_t *path, *kept;    /* [batch, levels + 1], [batch] */
    int64_t *bonus;          /* [batch] */
    float *scratch;          /* [batch, 2, codes up to a multiple of BLOCK] */
} Walk;

typedef struct {
    int64_t batch, nodes, codes, ranks;
    const float *p, *q;      /* [batch, nodes, codes] */
    const int64_t *drawn;    /* [batch, nodes] */
    const int64_t *children; /* [batch, nodes, ranks], -1: none */
    const int64_t *order;    /* [nodes] */
    double *weight;          /* [batch, nodes] */
    double *behind;          /* [batch, nodes - 1] */
    float *left;             /* [batch, nodes, codes] */
} Traversal;

static int64_t bytes_of_features(const Linear *head, int64_t rows) {
    const int64_t most = up_to(ROWS, rows);
    return padded(2 * most * head->inputs) + padded(2 * most * up_to(DEPTH, head->inputs)) + padded(4 * most);
}

int64_t head_bytes(const Linear *head, int64_t rows, int64_t threads) { return threads * bytes_of_features(head, rows); }

/* The head of guided features: that of unconditional + scale (conditional - unconditional), rounded to bfloat16. */
void head_logits(const Linear *head, const Logits *work, int64_t threads) {
    const Logits w = *work;
    const int64_t inputs = head->inputs, most = up_to(ROWS, w.rows), blocks = up_to(COLUMNS, head->outputs) / COLUMNS;
    const int in_tiles = tiles && w.rows > ROWS && !head->scale;
    const int64_t tile_rows = head->scale ? 2 * w.rows : w.rows;
#pragma omp parallel num_threads(threads)
    {
#ifdef _OPENMP
        int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
#else
        int64_t me = 0, team = 1;
#endif
        char *own = w.scratch + me * bytes_of_features(head, w.rows);
        half *x = take(&own, 2 * most * inputs);
        Whole whole = {take(&own, 2 * most * up_to(DEPTH, inputs)), take(&own, 4 * most)};
        const float scale = (float)w.scale;
        float out[MOST_ROWS][COLUMNS];
        for (int64_t i = 0; i < w.rows * inputs; i += LANES) {
            floats sum = widen_all(w.features + i);
            if (w.branches > 1) {
                floats other = widen_all(w.features + w.rows * inputs + i);
                sum = other + scale * (sum - other);
            }
            *(halves *)(x + place(i / inputs, i % inputs, inputs, in_tiles)) = narrow_all(sum);
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
        float x[up_to(BLOCK, w.codes)] __attribute__((aligned(64)));
        probabilities_of(&w.sampling, w.logits + r * w.codes, w.codes, x);
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

/* `draw` for many shares u [each] of x [codes]. */
static void draw_all(const float *x, int64_t codes, const double *u, int64_t each, int64_t *drawn) {
    const int64_t blocks = up_to(BLOCK, codes) / BLOCK;
    double until[blocks]; /* running sums */
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

/* The `count` largest of x [codes] in descending order; of equal ones the first. */
static void likeliest(const float *x, int64_t codes, int64_t count, int64_t *out) {
    const int64_t blocks = up_to(BLOCK, codes) / BLOCK;
    int64_t best[blocks]; /* of a block the largest that is not taken yet, or -1 */
    int64_t changed = -1;
    for (int64_t n = 0; n < count; n++) {
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
}

/* `Sampling.children`, and `Sampling.likeliest` where there is no u. */
void draw_children(const Children *children, int64_t threads) {
    const Children w = *children;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t r = 0; r < w.rows; r++) {
        const float *q = w.q + r * w.codes;
        if (!w.u) {
            likeliest(q, w.codes, w.count, w.drawn + r * w.count);
            continue;
        }
        int64_t drawn[w.each];
        draw_all(q, w.codes, w.u + r * w.each, w.each, drawn);
        first_different(drawn, w.each, w.count, w.drawn + r * w.count);
    }
}

/* Of the residual [x - scale q]+ of x [codes] its sum; q null: of the point mass at `code`. write: put it in the place of x. */
static double residual(float *x, const float *q, float scale, int64_t codes, int64_t code, double write) {
    if (!q) {
        double sum = sum_of_row(x, codes) - x[code];
        if (write > 0) {
            x[code] = 0;
            for (int64_t i = 0; i < codes; i++) x[i] /= (float)write;
        }
        return sum;
    }
    double sum = 0;
    const float over = (float)write;
    if (write > 0)
        for (int64_t i = 0; i < codes; i++) {
            float more = x[i] - q[i] * scale;
            x[i] = (more > 0 ? more : 0) / over;
        }
    else
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < codes; i++) {
            float more = x[i] - q[i] * scale;
            sum += more > 0 ? more : 0;
        }
    return sum;
}

/* The walk of one sample; x and q have room for a row each. */
static void walk_one(const Walk *walk, int64_t b, float *x, float *rest) {
    const Walk w = *walk;
    const int64_t *drawn = w.drawn + b * w.nodes, *children = w.children + b * w.nodes * w.ranks;
    int64_t node = 0, level = 0;
    w.path[b * (w.levels + 1)] = 0;
    for (;; level++) {
        const float *logits = w.logits + (b * w.nodes + node) * w.codes;
        const float *q = w.q ? w.q + (b * w.nodes + node) * w.codes : NULL;
        int64_t below = -1;
        float scale = 1; /* of q, without the codes that were refused */
        probabilities_of(&w.sampling, logits, w.codes, x);
        if (level == w.levels) break;
        for (int64_t rank = 0; rank < w.ranks && below < 0; rank++) {
            const int64_t child = children[node * w.ranks + rank];
            if (child < 0) continue;
            const int64_t code = drawn[child];
            const float chance = q ? q[code] * scale : 1;
            if (!(chance > 0)) continue;
            const int32_t *near = w.table + code * w.near;
            const double most = w.near ? w.limit[2 * level] + w.limit[2 * level + 1] * x[code] : 0;
            float lent = 0;
            int64_t lenders = 0;
            if (logits[code] > -INFINITY) /* what the format forbids is never relaxed */
                while (lenders < w.near && x[near[lenders]] < 1 && lent + x[near[lenders]] <= (float)most) lent += x[near[lenders++]];
            const float relaxed = x[code] + lent;
            if (w.u[(b * w.levels + level) * w.ranks + rank] * chance < relaxed) {
                below = child;
                break;
            }
            double mass = w.optimal ? residual(x, q, scale, w.codes, code, 0) : 0;
            if (!(mass > 0)) { /* the relaxed distribution */
                for (int64_t i = 0; i < lenders; i++) x[near[i]] = 0;
                x[code] = relaxed;
                mass = w.optimal ? 0 : residual(x, q, scale, w.codes, code, 0);
            }
            if (mass > 0) residual(x, q, scale, w.codes, code, mass);
            if (q) {
                if (q != rest) q = memcpy(rest, q, 4 * w.codes);
                rest[code] = 0;
                const double sum = sum_of_row(rest, w.codes);
                scale = sum > 1.17549435e-38 ? (float)(1 / sum) : 1 / 1.17549435e-38f;
            }
        }
        if (below < 0) break;
        node = below;
        w.path[b * (w.levels + 1) + level + 1] = node;
    }
    w.kept[b] = level + 1;
    for (; level < w.levels; level++) w.path[b * (w.levels + 1) + level + 1] = node;
    draw_all(x, w.codes, w.last + b, 1, w.bonus + b);
}

/* `verify`. */
void walk_tree(const Walk *walk, int64_t threads) {
    const int64_t size = up_to(BLOCK, walk->codes);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t b = 0; b < walk->batch; b++) walk_one(walk, b, walk->scratch + 2 * b * size, walk->scratch + (2 * b + 1) * size);
}

/* `stops` of traversal verification for one sample: the weights of nodes and of the codes behind them. */
static void traverse_one(const Traversal *tree, int64_t b) {
    const Traversal t = *tree;
    const int64_t *drawn = t.drawn + b * t.nodes;
    double *weight = t.weight + b * t.nodes;
    for (int64_t n = 0; n < t.nodes; n++) weight[n] = n == 0;
    for (int64_t n = 0; n < t.nodes; n++) {
        const int64_t *child = t.children + (b * t.nodes + n) * t.ranks;
        const float *q = t.q + (b * t.nodes + n) * t.codes;
        float *left = t.left + (b * t.nodes + n) * t.codes;
        memcpy(left, t.p + (b * t.nodes + n) * t.codes, 4 * t.codes);
        if (child[0] < 0) continue;
        const float begin = (float)weight[n];
        double rest = sum_of_row(q, t.codes), mass = rest; /* of q, without the siblings before */
        for (int64_t i = 0; i < t.codes; i++) left[i] *= begin;
        for (int64_t rank = 0; rank < t.ranks && child[rank] >= 0; rank++) {
            const int64_t code = drawn[child[rank]];
            float before[rank + 1];
            int again = 0;
            for (int64_t j = 0; j < rank; j++) {
                again |= drawn[child[j]] == code;
                before[j] = left[drawn[child[j]]];
            }
            if (!(q[code] > 0) || again) continue; /* a code that repeats a sibling's: the drafter had no other to offer */
            mass = rest > q[code] ? rest : q[code];
            if (mass < 1.17549435e-38) mass = 1.17549435e-38;
            const double odds = left[code] * (mass / q[code]);
            weight[child[rank]] = odds < 1 ? odds : 1;
            const float scale = (float)(1 / mass);
            double sum = 0;
            for (int64_t i = 0; i < t.codes; i++) {
                const float more = left[i] - q[i] * scale;
                left[i] = more > 0 ? more : 0;
            }
            for (int64_t j = 0; j < rank; j++) left[drawn[child[j]]] = before[j];
            sum = sum_of_row(left, t.codes);
            double either = sum + 1 - weight[n];
            if (!(either > 0)) either = 1;
            weight[n] = sum / either;
            const float over = (float)either;
            for (int64_t i = 0; i < t.codes; i++) left[i] /= over;
            rest -= q[code];
        }
    }
    double none = 1; /* of the events behind a node */
    for (int64_t i = t.nodes - 1; i > 0; i--) {
        none *= 1 - weight[t.order[i]];
        t.behind[b * (t.nodes - 1) + i - 1] = none;
    }
}

/* `stops` of traversal verification. */
void tree_stops(const Traversal *tree, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t b = 0; b < tree->batch; b++) traverse_one(tree, b);
}
