/* The verification of a draft: distributions of relaxed rules, token by token and jointly; in float32, on a CPU.

   The same functions as `NeighbourAcceptance.output_distribution`, `verify_tokenwise` and `verify_joint`. PyTorch takes some
   120 operations for each, and starting those costs more than computing them. A row's result depends on that row alone and not
   on how many rows or threads there are. */

#include "chain.c"

#define TINY 1.17549435e-38 /* the smallest float that is normal */

/* What is known of a node besides what was drafted. */
typedef struct {
    double begin, end;     /* its weight before any of its children is tried, and once all are rejected */
    double tail;           /* the probability that this node and all after it in the order are rejected */
    int64_t parent, depth; /* -1: no path leads to it */
} Node;

typedef struct {
    int64_t joint; /* whether drafts are verified jointly, else token by token */
    int64_t batch, nodes, codes, ranks, levels, near, optimal;
    Sampling sampling;
    const float *logits;     /* [batch, nodes, codes] */
    const float *q;          /* [batch, nodes, codes], or token by token null: point masses */
    const int64_t *drawn;    /* [batch, nodes] */
    const int64_t *children; /* [batch, nodes, ranks], -1: none; a node's id is above its parent's */
    const int64_t *order;    /* [nodes] of traversal, or null: that of the ids */
    const double *u;         /* [batch, levels, ranks] uniform token by token, [batch] for the others */
    const double *last;      /* [batch] uniform, of the code after the path */
    const double *limit;     /* [levels, 2]: neighbours give at most limit[0] + limit[1] p(y) */
    const int32_t *table;    /* neighbours, nearest first: [codes, near] token by token, [codes / LANES, near, LANES] with the last block padded for the others */
    Node *node;              /* [batch, nodes], not token by token, nor is the next */
    float *distribution;     /* [batch, nodes, codes] */
    int64_t *path;           /* [batch, levels + 1] */
    int64_t *following;      /* [batch, levels + 1] */
    int64_t *kept, *bonus;   /* [batch] */
} Verification;

/* x at LANES places. */
static inline f32x16 gather(const float *x, const int32_t *place) {
#ifdef __AVX512F__
    return (f32x16)_mm512_i32gather_ps(_mm512_loadu_si512(place), x, 4);
#else
    f32x16 found;
    for (int i = 0; i < LANES; i++) found[i] = x[place[i]];
    return found;
#endif
}

/* The mass that each of LANES codes y is accepted with, min(q(y), p(y) + what its neighbours give); all is p of all codes.

   The longest prefix of its neighbours moves whose mass is at most the limit; a code of probability 1 never moves. */
static inline f32x16 accepted(const float *all, f32x16 p, f32x16 q, f32x16 limit, const int32_t *table, int64_t near) {
    f32x16 total = {0}, moved = {0};
    i32x16 open = p < q; /* beyond q(y) the value does not matter */
    int64_t n = 0;
    for (; n < near && __builtin_popcount(bits_of(open)) > 2; n++, table += LANES) {
        const f32x16 mass = gather(all, table);
        total += mass;
        const i32x16 moves = open & (mass < 1) & (total <= limit);
        moved = (f32x16)(((i32x16)total & moves) | ((i32x16)moved & ~moves));
        open = moves & (p + moved < q);
    }
    for (unsigned lanes = bits_of(open); n < near && lanes; lanes &= lanes - 1) { /* one by one, as a gather takes as long for two lanes as for all */
        const int i = __builtin_ctz(lanes);
        float sum = total[i], given;
        for (int64_t m = n; m < near && p[i] + moved[i] < q[i]; m++, moved[i] = sum)
            if ((given = all[table[(m - n) * LANES + i]]) >= 1 || (sum += given) > limit[i]) break;
    }
    const f32x16 mass = p + moved;
    const i32x16 less = mass < q;
    return (f32x16)(((i32x16)mass & less) | ((i32x16)q & ~less));
}

/* The distribution of verifying one child drawn from q with the optimal residual; p, q and distribution [codes up to a multiple of LANES], 0 at the end. */
static void distribution_of_row(const Verification *v, const float *p, const float *q, const double *limit, float *distribution) {
    const float fixed = (float)limit[0], share_of_p = (float)limit[1];
    const int32_t *table = v->table;
    doubles kept = {0}, rest = {0};
    for (int64_t y = 0; y < v->codes; y += LANES, table += LANES * v->near) {
        const f32x16 some = *(const f32x16 *)(p + y), mass = accepted(p, some, *(const f32x16 *)(q + y), fixed + share_of_p * some, table, v->near);
        *(f32x16 *)(distribution + y) = mass;
        const f32x16 more = (f32x16)((i32x16)(some - mass) & (some > mass));
        const f32x8 *kept_by_halves = (const f32x8 *)&mass, *rest_by_halves = (const f32x8 *)&more;
        for (int i = 0; i < 2; i++) {
            kept += __builtin_convertvector(kept_by_halves[i], doubles);
            rest += __builtin_convertvector(rest_by_halves[i], doubles);
        }
    }
    double all_kept = 0, all_rest = 0;
    for (int i = 0; i < 8; i++) all_kept += kept[i], all_rest += rest[i];
    const float share = all_rest > 0 && all_kept < 1 ? (float)((1 - all_kept) / all_rest) : 0;
    for (int64_t y = 0; y < v->codes; y += LANES) {
        const f32x16 some = *(const f32x16 *)(p + y), mass = *(f32x16 *)(distribution + y);
        *(f32x16 *)(distribution + y) = mass + share * (f32x16)((i32x16)(some - mass) & (some > mass));
    }
}

/* A copy of x [codes] in a thread's scratch memory, 0 after it. */
static float *copied(const float *x, int64_t codes, char **own) {
    float *copy = arena_alloc(own, bytes_of_row(codes));
    memset(copy + codes, 0, 4 * (up_to(BLOCK, codes) - codes));
    return memcpy(copy, x, 4 * codes);
}

/* The path of sample b is known: the codes that are decided along it, the last of them the bonus. */
static void conclude(const Verification *v, int64_t b, int64_t kept, int64_t bonus) {
    const int64_t *path = v->path + b * (v->levels + 1), *drawn = v->drawn + b * v->nodes;
    int64_t *following = v->following + b * (v->levels + 1);
    for (int64_t n = 0; n < v->levels; n++) following[n] = drawn[path[n + 1]];
    following[v->levels] = drawn[0];
    following[kept - 1] = v->bonus[b] = bonus;
    v->kept[b] = kept;
}

/* The sum of the residual [x - scale q]+ of x [codes]; q null: of the point mass at `code`. */
static double residual_mass(const float *x, const float *q, float scale, int64_t codes, int64_t code) {
    double sum = 0;
    if (!q) return sum_of_row(x, codes) - x[code];
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < codes; i++) {
        float more = x[i] - q[i] * scale;
        sum += more > 0 ? more : 0;
    }
    return sum;
}

/* x becomes its residual over `mass`. */
static void take_residual(float *x, const float *q, float scale, int64_t codes, int64_t code, float mass) {
    if (!q) x[code] = 0;
    for (int64_t i = 0; i < codes; i++) {
        const float more = q ? x[i] - q[i] * scale : x[i];
        x[i] = (more > 0 ? more : 0) / mass;
    }
}

/* token-wise verification of one sample. */
static void verify_sample(const void *work, int64_t b, char *own) {
    const Verification w = *(const Verification *)work;
    float *x = arena_alloc(&own, bytes_of_row(w.codes)), *rest = arena_alloc(&own, bytes_of_row(w.codes));
    const int64_t *drawn = w.drawn + b * w.nodes, *children = w.children + b * w.nodes * w.ranks;
    int64_t node = 0, level = 0;
    w.path[b * (w.levels + 1)] = 0;
    for (;; level++) {
        const float *logits = w.logits + (b * w.nodes + node) * w.codes;
        const float *q = w.q ? w.q + (b * w.nodes + node) * w.codes : NULL;
        int64_t below = -1;
        float scale = 1; /* of q, without the codes that were rejected */
        probabilities_of(&w.sampling, logits, w.codes, x, own);
        if (level == w.levels) break;
        for (int64_t rank = 0; rank < w.ranks && below < 0; rank++) {
            const int64_t child = children[node * w.ranks + rank];
            if (child < 0) continue;
            const int64_t code = drawn[child];
            const float chance = q ? q[code] * scale : 1;
            if (!(chance > 0)) continue;
            const int32_t *near = w.table + code * w.near;
            const double most = w.near ? w.limit[2 * level] + w.limit[2 * level + 1] * x[code] : 0;
            float moved = 0;
            int64_t movers = 0;
            if (logits[code] > -INFINITY) /* what the format forbids is never relaxed */
                while (movers < w.near && x[near[movers]] < 1 && moved + x[near[movers]] <= (float)most) moved += x[near[movers++]];
            const float relaxed = x[code] + moved;
            if (w.u[(b * w.levels + level) * w.ranks + rank] * chance < relaxed) {
                below = child;
                break;
            }
            double mass = w.optimal ? residual_mass(x, q, scale, w.codes, code) : 0;
            if (!(mass > 0)) { /* the relaxed distribution */
                for (int64_t i = 0; i < movers; i++) x[near[i]] = 0;
                x[code] = relaxed;
                mass = w.optimal ? 0 : residual_mass(x, q, scale, w.codes, code);
            }
            if (mass > 0) take_residual(x, q, scale, w.codes, code, (float)mass);
            if (q) {
                if (q != rest) q = memcpy(rest, q, 4 * w.codes);
                rest[code] = 0;
                const double sum = sum_of_row(rest, w.codes);
                scale = (float)(1 / (sum > TINY ? sum : TINY));
            }
        }
        if (below < 0) break;
        node = below;
        w.path[b * (w.levels + 1) + level + 1] = node;
    }
    const int64_t kept = level + 1;
    for (; level < w.levels; level++) w.path[b * (w.levels + 1) + level + 1] = node;
    int64_t bonus;
    draw_all(x, w.codes, w.last + b, 1, &bonus, (double *)own);
    conclude(&w, b, kept, bonus);
}

/* Parents and depths of the nodes of sample b; nothing is rejected yet. */
static void places_of(const Verification *v, int64_t b) {
    Node *node = v->node + b * v->nodes;
    const int64_t *children = v->children + b * v->nodes * v->ranks;
    for (int64_t n = 0; n < v->nodes; n++) node[n] = (Node){n == 0, n == 0, 1, -1, n ? -1 : 0};
    for (int64_t n = 0; n < v->nodes; n++)
        for (int64_t rank = 0; rank < v->ranks; rank++) {
            const int64_t child = children[n * v->ranks + rank];
            if (child >= 0 && node[n].depth >= 0) node[child] = (Node){0, 0, 1, n, node[n].depth + 1};
        }
}

/* How many children node i of all samples has. */
static int64_t children_of(const Verification *v, int64_t i) {
    int64_t count = 0;
    while (count < v->ranks && v->children[i * v->ranks + count] >= 0) count++;
    return count;
}

/* The distribution of the code after node i of all samples; own: 4 rows of scratch memory. */
static void distribution_of_node(const Verification *v, int64_t i, char *own) {
    const float *logits = v->logits + i * v->codes;
    float *p = arena_alloc(&own, bytes_of_row(v->codes)), *distribution = v->distribution + i * v->codes;
    probabilities_of(&v->sampling, logits, v->codes, p, own);
    if (!v->near || v->node[i].depth < 0 || !children_of(v, i)) {
        memcpy(distribution, p, 4 * v->codes);
        return;
    }
    float *q = copied(v->q + i * v->codes, v->codes, &own);
    for (int64_t y = 0; y < v->codes; y++) q[y] = logits[y] > -INFINITY ? q[y] : 0; /* what the format forbids is never relaxed */
    distribution_of_row(v, p, q, v->limit + 2 * v->node[i].depth, (float *)own);
    memcpy(distribution, own, 4 * v->codes);
}

/* The weight of a child: that of its parent times p / q of its code, and at most 1; mass: what q has left. */
static double weight_of(double weight, float p, float q, double mass) {
    const double found = q > 0 ? weight * p * (mass / q) : 0;
    return found < 1 ? found : 1;
}

/* All children of node i of all samples are rejected, one after another: the weights of several children, that of the node, and in
   left [codes up to a multiple of BLOCK] the distribution of the code after it, not normalised. */
static void reject_children(const Verification *v, int64_t i, float *left) {
    const int64_t first = i - i % v->nodes, count = children_of(v, i);
    const int64_t *child = v->children + i * v->ranks, *drawn = v->drawn + first;
    const float *q = v->q + i * v->codes, *from = v->distribution + i * v->codes;
    double weight = v->node[i].begin, scale = weight;      /* of the node, and of `from` */
    double rest = count > 1 ? sum_of_row(q, v->codes) : 1; /* of q, without the siblings before */
    for (int64_t rank = 0; rank < count; rank++) {
        const int64_t code = drawn[child[rank]];
        double mass = rest > q[code] ? rest : q[code];
        int again = 0;
        for (int64_t j = 0; j < rank; j++) again |= drawn[child[j]] == code;
        if (rank && (again || !(q[code] > 0))) continue; /* the drafter had no other code to offer */
        mass = mass > TINY ? mass : TINY;
        if (count > 1) v->node[first + child[rank]].begin = weight_of(scale, from[code], q[code], mass);
        const float over = (float)scale, share = (float)(1 / mass);
        for (int64_t y = 0; y < v->codes; y++) { /* the codes of rejected siblings have 0 left, so that taking more changes nothing */
            const float more = from[y] * over - q[y] * share;
            left[y] = more > 0 ? more : 0;
        }
        const double sum = sum_of_row(left, v->codes), either = sum + 1 - weight;
        scale = 1 / (either > 0 ? either : 1);
        weight = sum * scale;
        from = left;
        rest -= q[code];
    }
    if (from != left) memcpy(left, from, 4 * v->codes);
    v->node[i].end = weight;
}

/* The weights at which the children of a sample's nodes begin, where they have several or one. */
static void weigh_children(const Verification *v, int64_t b, float *left) {
    for (int64_t i = b * v->nodes; i < (b + 1) * v->nodes; i++) {
        const int64_t child = v->ranks ? v->children[i * v->ranks] : -1, count = children_of(v, i);
        if (count > 1) reject_children(v, i, left);
        if (count != 1) continue; /* the weight of an only child takes one code of the distribution, so what is left can wait */
        const int64_t at = i * v->codes + v->drawn[b * v->nodes + child];
        v->node[b * v->nodes + child].begin = weight_of(v->node[i].begin, v->distribution[at], v->q[at], 1);
    }
}

/* Where the draft of a sample ends, and the code that is drawn there. */
static void end_draft(const Verification *v, int64_t b, float *left) {
    const int64_t first = b * v->nodes;
    int64_t end = 0;
    double none = 1;
    for (int64_t n = v->nodes - 1; n > 0; n--) {
        Node *at = v->node + first + (v->order ? v->order[n] : n);
        end += v->u[b] >= (at->tail = none *= 1 - at->end);
    }
    int64_t node = v->order ? v->order[end] : end;
    reject_children(v, first + node, left);
    if (!(sum_of_row(left, v->codes) > 0)) memcpy(left, v->distribution + (first + node) * v->codes, 4 * v->codes);
    const int64_t bonus = draw(left, up_to(BLOCK, v->codes), v->last[b]), depth = v->node[first + node].depth;
    int64_t *path = v->path + b * (v->levels + 1);
    for (int64_t n = v->levels; n >= 0; n--) {
        path[n] = node;
        if (n <= depth) node = v->node[first + node].parent;
    }
    conclude(v, b, depth + 1, bonus);
}

static void joint_team(const Team *team, void *work) {
    const Verification *v = work;
    char *own = team->memory + team->rank * bytes_of_rows(v->codes, 0);
    float *left = arena_alloc(&own, bytes_of_row(v->codes));
    memset(left, 0, 4 * up_to(BLOCK, v->codes));
    for (int64_t i = team->rank; i < v->batch * v->nodes; i += team->size) distribution_of_node(v, i, own);
    wait_for_team(team);
    for (int64_t b = team->rank; b < v->batch; b += team->size) weigh_children(v, b, left);
    wait_for_team(team);
    for (int64_t i = team->rank; i < v->batch * v->nodes; i += team->size)
        if (children_of(v, i) < 2) reject_children(v, i, left);
    wait_for_team(team);
    for (int64_t b = team->rank; b < v->batch; b += team->size) end_draft(v, b, left);
}

/* Token by token, or block and traversal verification. */
int64_t verify(const Verification *v, const Scratch *scratch, int64_t threads) {
    if (!v->joint) return run_rows(threads, v->batch, verify_sample, v, scratch, bytes_of_rows(v->codes, 0));
    ENSURE(scratch, threads * bytes_of_rows(v->codes, 0));
    for (int64_t b = 0; b < v->batch; b++) places_of(v, b);
    return run_team(threads, joint_team, (void *)v, scratch->memory);
}
