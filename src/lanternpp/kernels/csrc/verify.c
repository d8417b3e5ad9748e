/* The verification of a draft: distributions of relaxed rules, token by token and jointly; in float32, on a CPU.

   The same functions as `NeighbourAcceptance.output_distribution`, `verify_tokenwise` and `verify_joint`. PyTorch takes some
   120 operations for each, and starting those costs more than computing them. A row's result depends on that row alone and not
   on how many rows or threads there are. */

#include "chain.c"

#define TINY 1.17549435e-38 /* the smallest float that is normal */

/* The state of a node during joint verification. */
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

/* x[place[i]] of WIDTH places. */
static inline f32v gather(const float *x, const int32_t *place) {
#ifdef __AVX512F__
    return (f32v)_mm512_i32gather_ps(_mm512_loadu_si512(place), x, 4);
#else
    f32v gathered;
    for (int i = 0; i < WIDTH; i++) gathered[i] = x[place[i]];
    return gathered;
#endif
}

/* The mass that each of WIDTH codes y is accepted with, min(q(y), p(y) + what its neighbours give); probs is p of all codes.

   The longest prefix of its neighbours moves whose mass is at most the limit; a code of probability 1 never moves. */
static inline f32v accepted(const float *probs, f32v p, f32v q, f32v limit, const int32_t *table, int64_t near) {
    f32v total = {0}, moved = {0};
    i32v open = p < q; /* beyond q(y) the value does not matter */
    int64_t n = 0;
    for (; n < near && __builtin_popcount(bits_of(open)) > 2; n++, table += LANES) {
        const f32v mass = gather(probs, table);
        total += mass;
        const i32v moves = open & (mass < 1) & (total <= limit);
        moved = (f32v)(((i32v)total & moves) | ((i32v)moved & ~moves));
        open = moves & (p + moved < q);
    }
    for (unsigned lanes = bits_of(open); n < near && lanes; lanes &= lanes - 1) { /* one by one, as a gather takes as long for two lanes as for all */
        const int i = __builtin_ctz(lanes);
        float sum = total[i], neighbour_mass;
        for (int64_t m = n; m < near && p[i] + moved[i] < q[i]; m++, moved[i] = sum)
            if ((neighbour_mass = probs[table[(m - n) * LANES + i]]) >= 1 || (sum += neighbour_mass) > limit[i]) break;
    }
    const f32v mass = p + moved;
    return (f32v)(((i32v)mass & (mass < q)) | ((i32v)q & ~(mass < q)));
}

/* The distribution of verifying one child drawn from q with the optimal residual; p, q and distribution [codes up to a multiple of LANES], 0 at the end. */
static void distribution_of_row(const Verification *v, const float *p, const float *q, const double *limit, float *distribution) {
    const float fixed = (float)limit[0], share_of_p = (float)limit[1];
    doubles accepted_sums = {0}, excess_sums = {0};
    for (int64_t y = 0; y < v->codes; y += LANES) {
        float excess[LANES];
        for (int64_t i = 0; i < LANES; i += WIDTH) {
            const f32v p_chunk = *(const f32v *)(p + y + i), most = fixed + share_of_p * p_chunk;
            const f32v mass = accepted(p, p_chunk, *(const f32v *)(q + y + i), most, v->table + y * v->near + i, v->near);
            *(f32v *)(distribution + y + i) = mass;
            *(f32v *)(excess + i) = (f32v)((i32v)(p_chunk - mass) & (p_chunk > mass));
        }
        for (int i = 0; i < LANES; i += 8) {
            accepted_sums += __builtin_convertvector(*(const f32x8 *)(distribution + y + i), doubles);
            excess_sums += __builtin_convertvector(*(const f32x8 *)(excess + i), doubles);
        }
    }
    double accepted_mass = 0, excess_mass = 0;
    for (int i = 0; i < 8; i++) accepted_mass += accepted_sums[i], excess_mass += excess_sums[i];
    const float share = excess_mass > 0 && accepted_mass < 1 ? (float)((1 - accepted_mass) / excess_mass) : 0;
    for (int64_t y = 0; y < v->codes; y += WIDTH) {
        const f32v p_chunk = *(const f32v *)(p + y), mass = *(f32v *)(distribution + y);
        *(f32v *)(distribution + y) = mass + share * (f32v)((i32v)(p_chunk - mass) & (p_chunk > mass));
    }
}

/* Write the codes that sample b decides along its path, the bonus last. */
static void write_decided(const Verification *v, int64_t b, int64_t kept, int64_t bonus) {
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
        float excess = x[i] - q[i] * scale;
        sum += excess > 0 ? excess : 0;
    }
    return sum;
}

/* x becomes its residual over `mass`. */
static void take_residual(float *x, const float *q, float scale, int64_t codes, int64_t code, float mass) {
    if (!q) x[code] = 0;
    for (int64_t i = 0; i < codes; i++) {
        const float excess = q ? x[i] - q[i] * scale : x[i];
        x[i] = (excess > 0 ? excess : 0) / mass;
    }
}

/* token-wise verification of one sample. */
static void verify_sample(const void *work, int64_t b, char *scratch) {
    const Verification w = *(const Verification *)work;
    float *x = arena_alloc(&scratch, bytes_of_row(w.codes)), *remaining_q = arena_alloc(&scratch, bytes_of_row(w.codes));
    const int64_t *drawn = w.drawn + b * w.nodes, *children = w.children + b * w.nodes * w.ranks;
    int64_t node = 0, level = 0;
    w.path[b * (w.levels + 1)] = 0;
    for (;; level++) {
        const float *logits = w.logits + (b * w.nodes + node) * w.codes;
        const float *q = w.q ? w.q + (b * w.nodes + node) * w.codes : NULL;
        int64_t accepted_child = -1;
        float scale = 1; /* of q, without the codes that were rejected */
        probabilities_of(&w.sampling, logits, w.codes, x, scratch);
        if (level == w.levels) break;
        for (int64_t rank = 0; rank < w.ranks && accepted_child < 0; rank++) {
            const int64_t child = children[node * w.ranks + rank];
            if (child < 0) continue;
            const int64_t code = drawn[child];
            const float q_code = q ? q[code] * scale : 1;
            if (!(q_code > 0)) continue;
            const int32_t *neighbours = w.table + code * w.near;
            const double max_moved = w.near ? w.limit[2 * level] + w.limit[2 * level + 1] * x[code] : 0;
            float moved = 0;
            int64_t num_moved = 0;
            if (logits[code] > -INFINITY) /* what the format forbids is never relaxed */
                while (num_moved < w.near && x[neighbours[num_moved]] < 1 && moved + x[neighbours[num_moved]] <= (float)max_moved) moved += x[neighbours[num_moved++]];
            const float relaxed = x[code] + moved;
            if (w.u[(b * w.levels + level) * w.ranks + rank] * q_code < relaxed) {
                accepted_child = child;
                break;
            }
            double mass = w.optimal ? residual_mass(x, q, scale, w.codes, code) : 0;
            if (!(mass > 0)) { /* the relaxed distribution */
                for (int64_t i = 0; i < num_moved; i++) x[neighbours[i]] = 0;
                x[code] = relaxed;
                mass = w.optimal ? 0 : residual_mass(x, q, scale, w.codes, code);
            }
            if (mass > 0) take_residual(x, q, scale, w.codes, code, (float)mass);
            if (q) {
                if (q != remaining_q) q = memcpy(remaining_q, q, 4 * w.codes);
                remaining_q[code] = 0;
                const double sum = sum_of_row(remaining_q, w.codes);
                scale = (float)(1 / (sum > TINY ? sum : TINY));
            }
        }
        if (accepted_child < 0) break;
        node = accepted_child;
        w.path[b * (w.levels + 1) + level + 1] = node;
    }
    const int64_t kept = level + 1;
    for (; level < w.levels; level++) w.path[b * (w.levels + 1) + level + 1] = node;
    int64_t bonus;
    draw_all(x, w.codes, w.last + b, 1, &bonus, (double *)scratch);
    write_decided(&w, b, kept, bonus);
}

/* Parents and depths of the nodes of sample b; nothing is rejected yet. */
static void place_nodes(const Verification *v, int64_t b) {
    Node *node = v->node + b * v->nodes;
    const int64_t *children = v->children + b * v->nodes * v->ranks;
    for (int64_t n = 0; n < v->nodes; n++) node[n] = (Node){n == 0, n == 0, 1, -1, n ? -1 : 0};
    for (int64_t n = 0; n < v->nodes; n++)
        for (int64_t rank = 0; rank < v->ranks; rank++) {
            const int64_t child = children[n * v->ranks + rank];
            if (child >= 0 && node[n].depth >= 0) node[child] = (Node){0, 0, 1, n, node[n].depth + 1};
        }
}

/* The number of children of node i, counted over all samples. */
static int64_t children_of(const Verification *v, int64_t i) {
    int64_t count = 0;
    while (count < v->ranks && v->children[i * v->ranks + count] >= 0) count++;
    return count;
}

/* Compute the distribution of the code after node i, counted over all samples; `scratch` has 4 rows. */
static void distribution_of_node(const Verification *v, int64_t i, char *scratch) {
    const float *logits = v->logits + i * v->codes;
    float *p = arena_alloc(&scratch, bytes_of_row(v->codes)), *distribution = v->distribution + i * v->codes;
    probabilities_of(&v->sampling, logits, v->codes, p, scratch);
    if (!v->near || v->node[i].depth < 0 || !children_of(v, i)) {
        memcpy(distribution, p, 4 * v->codes);
        return;
    }
    float *q = arena_alloc(&scratch, bytes_of_row(v->codes)); /* 0 after the last code, and where the format forbids a code: such are never relaxed */
    for (int64_t y = 0; y < up_to(BLOCK, v->codes); y++) q[y] = y < v->codes && logits[y] > -INFINITY ? v->q[i * v->codes + y] : 0;
    distribution_of_row(v, p, q, v->limit + 2 * v->node[i].depth, (float *)scratch);
    memcpy(distribution, scratch, 4 * v->codes);
}

/* The weight of a child: its parent's weight times p / q of its code, at most 1. `mass`: the sum of q without rejected siblings. */
static double weight_of(double weight, float p, float q, double mass) {
    const double child_weight = q > 0 ? weight * p * (mass / q) : 0;
    return child_weight < 1 ? child_weight : 1;
}

/* Reject all children of node i (counted over all samples) in turn: write the weights of its children where there are several, its own end
   weight, and in residual [codes up to a multiple of BLOCK] the distribution of the code after it, not normalised. */
static void reject_children(const Verification *v, int64_t i, float *residual) {
    const int64_t root = i - i % v->nodes, count = children_of(v, i);
    const int64_t *child = v->children + i * v->ranks, *drawn = v->drawn + root;
    const float *q = v->q + i * v->codes, *from = v->distribution + i * v->codes;
    double weight = v->node[i].begin, scale = weight;      /* weight: of the node; scale: of `from` */
    double q_mass = count > 1 ? sum_of_row(q, v->codes) : 1; /* the sum of q without earlier siblings */
    for (int64_t rank = 0; rank < count; rank++) {
        const int64_t code = drawn[child[rank]];
        double mass = q_mass > q[code] ? q_mass : q[code];
        int repeated = 0;
        for (int64_t j = 0; j < rank; j++) repeated |= drawn[child[j]] == code;
        if (rank && (repeated || !(q[code] > 0))) continue; /* a repetition: q had no other code */
        mass = mass > TINY ? mass : TINY;
        if (count > 1) v->node[root + child[rank]].begin = weight_of(scale, from[code], q[code], mass);
        const float p_scale = (float)scale, q_scale = (float)(1 / mass);
        for (int64_t y = 0; y < v->codes; y++) { /* the codes of rejected siblings have 0 left, so that taking more changes nothing */
            const float excess = from[y] * p_scale - q[y] * q_scale;
            residual[y] = excess > 0 ? excess : 0;
        }
        const double sum = sum_of_row(residual, v->codes), normaliser = sum + 1 - weight;
        scale = 1 / (normaliser > 0 ? normaliser : 1);
        weight = sum * scale;
        from = residual;
        q_mass -= q[code];
    }
    if (from != residual) memcpy(residual, from, 4 * v->codes);
    v->node[i].end = weight;
}

/* Compute the begin weights of the children of a sample's nodes. */
static void weigh_children(const Verification *v, int64_t b, float *residual) {
    for (int64_t i = b * v->nodes; i < (b + 1) * v->nodes; i++) {
        const int64_t child = v->ranks ? v->children[i * v->ranks] : -1, count = children_of(v, i);
        if (count > 1) reject_children(v, i, residual);
        if (count != 1) continue; /* the weight of an only child reads one code of the distribution, so `joint_team` computes the residual later, in parallel */
        const int64_t index = i * v->codes + v->drawn[b * v->nodes + child];
        v->node[b * v->nodes + child].begin = weight_of(v->node[i].begin, v->distribution[index], v->q[index], 1);
    }
}

/* Draw where the draft of a sample ends, and the code after it. */
static void end_draft(const Verification *v, int64_t b, float *residual, char *scratch) {
    const int64_t root = b * v->nodes;
    int64_t end = 0;
    double all_rejected = 1;
    for (int64_t n = v->nodes - 1; n > 0; n--) {
        Node *entry = v->node + root + (v->order ? v->order[n] : n);
        end += v->u[b] >= (entry->tail = all_rejected *= 1 - entry->end);
    }
    int64_t node = v->order ? v->order[end] : end;
    reject_children(v, root + node, residual);
    if (!(sum_of_row(residual, v->codes) > 0)) memcpy(residual, v->distribution + (root + node) * v->codes, 4 * v->codes);
    const int64_t depth = v->node[root + node].depth;
    int64_t *path = v->path + b * (v->levels + 1), bonus;
    draw_all(residual, v->codes, v->last + b, 1, &bonus, (double *)scratch);
    for (int64_t n = v->levels; n >= 0; n--) {
        path[n] = node;
        if (n <= depth) node = v->node[root + node].parent;
    }
    write_decided(v, b, depth + 1, bonus);
}

static void joint_team(const Team *team, void *work) {
    const Verification *v = work;
    char *scratch = team->memory + team->rank * bytes_of_rows(v->codes, 0);
    float *residual = arena_alloc(&scratch, bytes_of_row(v->codes));
    memset(residual, 0, 4 * up_to(BLOCK, v->codes));
    for (int64_t i = team->rank; i < v->batch * v->nodes; i += team->size) distribution_of_node(v, i, scratch);
    wait_for_team(team);
    for (int64_t b = team->rank; b < v->batch; b += team->size) weigh_children(v, b, residual);
    wait_for_team(team);
    for (int64_t i = team->rank; i < v->batch * v->nodes; i += team->size)
        if (children_of(v, i) < 2) reject_children(v, i, residual);
    wait_for_team(team);
    for (int64_t b = team->rank; b < v->batch; b += team->size) end_draft(v, b, residual, scratch);
}

/* Token by token, or block and traversal verification. */
int64_t verify(const Verification *v, const Scratch *scratch, int64_t threads) {
    if (!v->joint) return run_rows(threads, v->batch, verify_sample, v, scratch, bytes_of_rows(v->codes, 0));
    ENSURE(scratch, threads * bytes_of_rows(v->codes, 0));
    for (int64_t b = 0; b < v->batch; b++) place_nodes(v, b);
    return run_team(threads, joint_team, (void *)v, scratch->memory);
}
