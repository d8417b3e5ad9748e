/* A whole step of a batch: draft, the target's pass, verification, commit. Plain decoding and chains of a parallel drafter.

   The same functions, in the same order, as `Engine.step` calls one by one: the results are the same bits. A step from Python makes
   some 150 tensors, which takes longer than what is computed beside the passes. */

#include "verify.c"

typedef struct {
    const DraftLayers *layers;
    int64_t batch, known, queries;
    int64_t stride;          /* rows from one sample to the next in the two that follow */
    const bf16 *next_embeds; /* [batch, stride, dim] */
    const bf16 *features;    /* [batch, stride, (1 + aux) dim] */
    const bf16 *hints;       /* [batch, known + queries, dim], or null */
    bf16 *out;               /* [batch, known + queries, dim] */
} QueryInputs;

/* A decoder with its cache, and room for a pass over `nodes` nodes of every row. */
typedef struct {
    const Shape *shape;
    const Layer *layers;
    const float *rotary; /* [positions, 2, head_dim] */
    int64_t positions, slots;
    bf16 *kv;
    const int64_t *start;
    int64_t *used;   /* [rows] */
    float *rotation; /* [rows, nodes, 2, head_dim] */
    int64_t *slot;   /* [rows, nodes] */
    uint8_t *mask;   /* [rows, nodes, slots] */
} Network;

/* A parallel drafter's state, and room for its pass. Its cache has one row per sample, and a pass 2 levels nodes. */
typedef struct {
    Network decoder;
    const DraftLayers *layers;
    int64_t *waiting;                   /* [batch] */
    bf16 *next_embeds, *features;       /* [batch, levels + 1, dim], [batch, levels + 1, (1 + aux) dim] */
    bf16 *hints;                        /* [batch, levels, dim] */
    const bf16 *prev;                   /* [codes, hidden] */
    bf16 *all_hints, *x, *out;          /* [batch, 2 levels, dim] */
    bf16 *level_features, *query;       /* [batch levels, dim], [batch levels, hidden], with room for a multiple of TILE_M rows */
    double *u;                          /* [batch, levels] */
} Drafter;

typedef struct {
    int64_t first, last; /* the stages that are run, of DRAFT, PASS, VERIFY and COMMIT */
    int64_t batch, branches, levels, length, width; /* width: of a row of `decided` and of `accepted` */
    double guidance;
    Network target; /* of levels + 1 nodes, and branches batch rows */
    const Linear *head;
    const bf16 *embed;   /* [codes, dim] */
    int64_t parts;       /* 1 + layers whose output the drafter reads */
    const int64_t *part; /* [layers], as of `Pass` */
    const int64_t *seed; /* [batch], as are the next two */
    int64_t *passes, *count;
    int64_t *decided, *accepted; /* [batch, width] */
    int64_t *root, *root_count;  /* [batch], the proposer's own */
    bf16 *x, *features;          /* [branches batch, nodes, dim], [branches batch, nodes, parts dim]; nodes = levels + 1 */
    bf16 *guided;                /* [batch, nodes, parts dim]; a drafter's `features` */
    Drafter *drafter;            /* null: plain decoding */
    Verification verification;   /* whose `drawn`, `q`, `logits`, `u` and `last` are written here */
} Step;

enum { DRAFT, PASS, VERIFY, COMMIT };
enum { ACCEPT_NOISE = 1, BONUS_NOISE = 2, DRAFT_NOISE = 16 };

static int64_t drafter_inputs_bytes(const DraftLayers *l, int64_t known, int64_t rows) {
    return inputs_bytes(known, &l->fc) + inputs_bytes(rows, &l->hint) + align64(4 * known * l->dim) + align64(4 * rows * l->dim) + 64;
}

/* A row of inputs of `fc`: the embedding, the features, and what layers returned, each divided by its root mean square. */
static void join(const DraftLayers *l, const bf16 *embed, const bf16 *features, bf16 *out) {
    memcpy(out, embed, 2 * l->dim);
    memcpy(out + l->dim, features, 2 * l->dim);
    for (int64_t part = 1; part <= l->aux; part++) {
        const bf16 *x = features + part * l->dim;
        f32v sum = {0};
        for (int64_t i = 0; i < l->dim; i += WIDTH) sum += widen_all(x + i) * widen_all(x + i);
        const float scale = 1 / sqrtf(reduce_add(sum) / l->dim + l->eps);
        for (int64_t i = 0; i < l->dim; i += WIDTH)
            *(bf16v *)(out + (1 + part) * l->dim + i) = narrow_all(widen_all(x + i) * scale);
    }
}

typedef struct {
    const QueryInputs *call;
    Inputs joined, hints;
    FloatRows joined_products, hint_products; /* [rows, dim] */
} InputsWork;

/* Write channels [from, to) of all rows of `out`: the products of hints, plus those of known positions or the learned queries. */
static void write_inputs(const InputsWork *w, int64_t from, int64_t to) {
    const DraftLayers *l = w->call->layers;
    const int64_t known = w->call->known, nodes = known + w->call->queries;
    for (int64_t row = 0; row < w->hints.rows; row++) {
        const int64_t n = row % nodes - known, level = n < l->query_count ? n : l->query_count - 1;
        for (int64_t c = from; c < to; c += WIDTH) {
            f32v x = *(f32v *)(w->hint_products.y + row * l->dim + c);
            x += n < 0 ? *(f32v *)(w->joined_products.y + (row / nodes * known + row % nodes) * l->dim + c) : widen_all(l->queries + level * l->dim + c);
            *(bf16v *)(w->call->out + row * l->dim + c) = narrow_all(x);
        }
    }
}

static void inputs_team(const Team *team, void *work) {
    InputsWork *w = work;
    const QueryInputs *q = w->call;
    const DraftLayers *l = q->layers;
    const int64_t blocks = l->dim / BLOCK_N, begin = share_begin(team, blocks), end = share_end(team, blocks);
    bf16 joined[(2 + l->aux) * l->dim];
    for (int64_t r = share_begin(team, w->joined.rows); r < share_end(team, w->joined.rows); r++) {
        const int64_t from = r / q->known * q->stride + r % q->known;
        join(l, q->next_embeds + from * l->dim, q->features + from * (1 + l->aux) * l->dim, joined);
        load_row(&w->joined, r, joined);
    }
    quantize_rows(&w->joined, share_begin(team, w->joined.rows), share_end(team, w->joined.rows));
    for (int64_t r = share_begin(team, w->hints.rows); q->hints && r < share_end(team, w->hints.rows); r++)
        load_row(&w->hints, r, q->hints + r * l->dim);
    if (q->hints) quantize_rows(&w->hints, share_begin(team, w->hints.rows), share_end(team, w->hints.rows));
    wait_for_team(team);
    configure_tiles(w->hints.tile_rows);
    if (q->hints) gemm(&l->hint, &w->hints, begin, end, store_floats, &w->hint_products);
    else
        for (int64_t r = 0; r < w->hints.rows; r++) memset(w->hint_products.y + r * l->dim + begin * BLOCK_N, 0, 4 * (end - begin) * BLOCK_N);
    configure_tiles(w->joined.tile_rows);
    gemm(&l->fc, &w->joined, begin, end, store_floats, &w->joined_products);
    write_inputs(w, begin * BLOCK_N, end * BLOCK_N);
    release_tiles();
}

/* `ParallelDrafter.inputs`: what the drafter's decoder reads at known positions, and at queries. */
int64_t drafter_inputs(const QueryInputs *inputs, const Scratch *scratch, int64_t threads) {
    const int64_t known = inputs->batch * inputs->known, rows = known + inputs->batch * inputs->queries;
    const DraftLayers *layers = inputs->layers;
    char *at = (char *)align64((int64_t)scratch->memory);
    ENSURE(scratch, drafter_inputs_bytes(layers, known, rows));
    InputsWork work = {.call = inputs};
    work.joined = new_inputs(&at, known, &layers->fc);
    work.hints = new_inputs(&at, rows, &layers->hint);
    work.joined_products = (FloatRows){arena_alloc(&at, 4 * known * layers->dim), layers->dim};
    work.hint_products = (FloatRows){arena_alloc(&at, 4 * rows * layers->dim), layers->dim};
    return run_team(threads, inputs_team, &work, 0);
}

static inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* Number `index` of `Noise.fine` for a purpose, of a sample's seed and step. */
static double fine(int64_t seed, int64_t step, uint32_t purpose, uint32_t index) {
    const uint32_t golden = 0x9E3779B9u, a = 0x7FEB352Du, b = 0x846CA68Bu;
    const uint32_t low = (uint32_t)seed, high = (uint32_t)((uint64_t)seed >> 32), step_bits = (uint32_t)step;
    const uint32_t first = mix(mix(low + (purpose + 1) * golden) ^ mix(step_bits + high * a));
    const uint32_t second = mix(mix(step_bits + (purpose + 1) * a) ^ mix(high + low * b));
    double number[2];
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t bits = mix(((2 * index + i) * golden + first) ^ second);
        number[i] = (double)(((float)(bits >> 9) + 0.5f) * 0x1p-23f);
    }
    return number[0] + (number[1] - 0.5) * 0x1p-23;
}

/* The draft codes of every sample's chain, by the drafter's pass over the codes decided last and a query for every further level. */
static void draft(const Step *s, const Scratch *scratch, int64_t threads) {
    const Drafter d = *s->drafter;
    const Network net = d.decoder;
    const int64_t levels = s->levels, dim = net.shape->dim, first_query = levels + 1, span = 2 * levels, rotation = 2 * net.shape->head_dim;
    int64_t known = 1;
    for (int64_t b = 0; b < s->batch; b++) known = d.waiting[b] > known ? d.waiting[b] : known;
    const int64_t nodes = known + levels - 1;
    memset(net.mask, 0, s->batch * nodes * net.slots);
    memset(d.all_hints, 0, 2 * s->batch * nodes * dim);
    for (int64_t b = 0; b < s->batch; b++) {
        const int64_t waiting = d.waiting[b], used = net.used[b], start = net.start[b];
        bf16 *hints = d.all_hints + b * nodes * dim;
        if (waiting) memcpy(hints + (waiting - 1) * dim, d.hints + b * levels * dim, 2 * dim);
        memcpy(hints + known * dim, d.hints + (b * levels + 1) * dim, 2 * (levels - 1) * dim);
        for (int64_t n = 0; n < nodes; n++) {
            /* A query's slot does not depend on how many inputs wait: sums over slots are rounded in the order of slots. */
            const int64_t cache_slot = n < known ? n : first_query + n - known, position = used + (n < known ? n : waiting + n - known), i = b * nodes + n;
            uint8_t *mask = net.mask + i * net.slots;
            net.slot[i] = used + cache_slot;
            memcpy(net.rotation + i * rotation, net.rotary + (position < net.positions ? position : net.positions - 1) * rotation, 4 * rotation);
            if (start < used) memset(mask + start, 1, used - start);
            for (int64_t j = 0; j < span && j <= cache_slot; j++) mask[used + j] = j >= first_query || j < waiting || j == cache_slot;
        }
    }
    const QueryInputs inputs = {d.layers, s->batch, known, levels - 1, levels + 1, d.next_embeds, d.features, d.all_hints, d.x};
    drafter_inputs(&inputs, scratch, threads);
    int64_t no_parts[net.shape->layers];
    memset(no_parts, 0, sizeof no_parts);
    const Pass pass = {net.shape, net.layers, s->batch, nodes, net.slots, d.x, net.rotation, net.slot, net.mask, net.kv, d.out, 1, no_parts};
    decode(&pass, scratch, threads);
    for (int64_t b = 0; b < s->batch; b++) {
        const bf16 *out = d.out + b * nodes * dim;
        net.used[b] += d.waiting[b];
        memcpy(d.level_features + b * levels * dim, out + (d.waiting[b] ? d.waiting[b] - 1 : 0) * dim, 2 * dim);
        memcpy(d.level_features + (b * levels + 1) * dim, out + known * dim, 2 * (levels - 1) * dim);
        for (int64_t level = 0; level < levels; level++) d.u[b * levels + level] = fine(s->seed[b], s->passes[b], DRAFT_NOISE + level, 0);
    }
    const LinearCall down = {&d.layers->down, d.level_features, d.query, s->batch * levels, dim, 1, 0, 1};
    linear(&down, scratch, threads);
    const Verification *v = &s->verification;
    const Chain chain = {.layers = d.layers, .batch = s->batch, .levels = levels, .codes = v->codes, .sampling = v->sampling, .features = d.level_features,
                         .query = d.query, .prev = d.prev, .u = d.u, .probs = (float *)v->q, .drawn = (int64_t *)v->drawn};
    sample_chain(&chain, scratch, threads);
}

/* The target's pass over every sample's draft, guided features of its nodes and their logits. */
static void forward(const Step *s, const Scratch *scratch, int64_t threads) {
    const int64_t nodes = s->levels + 1, dim = s->target.shape->dim, rotation = 2 * s->target.shape->head_dim, rows = s->branches * s->batch, wide = s->parts * dim;
    const Verification *v = &s->verification;
    memset(s->target.mask, 0, rows * nodes * s->target.slots);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t n = 0; n < nodes; n++) {
            const int64_t i = row * nodes + n, used = s->target.used[row], position = used + n;
            memcpy(s->x + i * dim, s->embed + v->drawn[row % s->batch * nodes + n] * dim, 2 * dim);
            memcpy(s->target.rotation + i * rotation, s->target.rotary + (position < s->target.positions ? position : s->target.positions - 1) * rotation, 4 * rotation);
            memset(s->target.mask + i * s->target.slots + s->target.start[row], 1, position + 1 - s->target.start[row]);
            s->target.slot[i] = position;
        }
    const Pass pass = {s->target.shape, s->target.layers, rows, nodes, s->target.slots, s->x, s->target.rotation, s->target.slot, s->target.mask, s->target.kv, s->features, s->parts, s->part};
    decode(&pass, scratch, threads);
    for (int64_t i = 0; i < s->batch * nodes * wide; i += WIDTH) {
        f32v x = widen_all(s->features + i);
        if (s->branches > 1) x += ((float)s->guidance - 1) * (x - widen_all(s->features + s->batch * nodes * wide + i));
        *(bf16v *)(s->guided + i) = narrow_all(x);
    }
    const LinearCall head = {s->head, s->guided, (float *)v->logits, s->batch * nodes, wide, 1, 1, 1};
    linear(&head, scratch, threads);
}

static void verify_drafts(const Step *s, const Scratch *scratch, int64_t threads) {
    const Verification *v = &s->verification;
    for (int64_t b = 0; b < s->batch; b++) {
        double *u = (double *)v->u + (v->joint ? b : b * s->levels);
        for (int64_t i = 0; i < (v->joint ? 1 : s->levels); i++) u[i] = fine(s->seed[b], s->passes[b], ACCEPT_NOISE, i);
        ((double *)v->last)[b] = fine(s->seed[b], s->passes[b], BONUS_NOISE, 0);
    }
    verify(v, scratch, threads);
}

/* Append the accepted codes. A finished sample accepts nothing; its writes fall into the margin of `decided`. */
static void commit(const Step *s) {
    const int64_t nodes = s->levels + 1, dim = s->target.shape->dim, wide = s->parts * dim;
    const Verification *v = &s->verification;
    for (int64_t b = 0; b < s->batch; b++) {
        const int64_t room = s->length - s->count[b], kept = v->kept[b] < room ? v->kept[b] : room, *following = v->following + b * nodes;
        for (int64_t row = b; row < s->branches * s->batch; row += s->batch) s->target.used[row] += kept;
        memcpy(s->decided + b * s->width + s->count[b], following, 8 * nodes);
        s->accepted[b * s->width + s->passes[b]] = kept;
        s->passes[b] += kept > 0;
        s->count[b] += kept;
        s->root_count[b] += kept;
        s->root[b] = v->bonus[b];
        if (!s->drafter) continue;
        const Drafter *d = s->drafter;
        d->waiting[b] = kept;
        for (int64_t n = 0; n < nodes; n++) memcpy(d->next_embeds + (b * nodes + n) * dim, s->embed + following[n] * dim, 2 * dim);
        for (int64_t i = 0; i < s->levels; i++) { /* the target's features at rejected nodes */
            bf16 *hint = d->hints + (b * s->levels + i) * dim;
            if (kept + i < nodes) memcpy(hint, s->guided + (b * nodes + kept + i) * wide, 2 * dim);
            else memset(hint, 0, 2 * dim);
        }
    }
}

static int64_t larger(int64_t x, int64_t y) { return x > y ? x : y; }

static int64_t step_bytes(const Step *s, int64_t threads) {
    const Drafter *d = s->drafter;
    const Pass pass = {.shape = s->target.shape, .layers = s->target.layers, .rows = s->branches * s->batch, .nodes = s->levels + 1, .slots = s->target.slots};
    int64_t max_bytes = larger(pass_bytes(&pass, threads), threads * bytes_of_rows(s->verification.codes, 0));
    max_bytes = larger(max_bytes, inputs_bytes(s->batch * pass.nodes, s->head));
    if (d) {
        max_bytes = larger(max_bytes, drafter_inputs_bytes(d->layers, s->batch * pass.nodes, s->batch * 2 * s->levels));
        max_bytes = larger(max_bytes, inputs_bytes(s->batch * s->levels, &d->layers->down));
        max_bytes = larger(max_bytes, chain_bytes(d->layers, s->batch, s->levels, threads));
        const Pass drafter_pass = {.shape = d->decoder.shape, .layers = d->decoder.layers, .rows = s->batch, .nodes = 2 * s->levels, .slots = d->decoder.slots};
        max_bytes = larger(max_bytes, pass_bytes(&drafter_pass, threads));
    }
    return max_bytes + 64;
}

int64_t run_step(const Step *s, const Scratch *scratch, int64_t threads) {
    ENSURE(scratch, step_bytes(s, threads));
    if (s->first <= DRAFT) {
        for (int64_t b = 0; b < s->batch; b++) ((int64_t *)s->verification.drawn)[b * (s->levels + 1)] = s->root[b];
        if (s->drafter) draft(s, scratch, threads);
    }
    if (s->first <= PASS && s->last >= PASS) forward(s, scratch, threads);
    if (s->first <= VERIFY && s->last >= VERIFY) verify_drafts(s, scratch, threads);
    if (s->last >= COMMIT) commit(s);
    return 0;
}
