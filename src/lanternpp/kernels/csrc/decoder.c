/* One pass of a decoder over some nodes of every row, with a KV cache: the function of `Decoder.forward`.

   PyTorch takes some 50 operations a layer for it, and for a few rows starting them costs more than computing them; here a layer is
   some stages with a barrier after each. Sums and the residual stream are float32, keys, values and what is multiplied are bf16, or
   8 bits as gemm.h has them. A row's result depends on that row alone and not on how many rows or threads there are. */
#include "attention.c"

enum { SKINNY_ROWS = 4 }; /* up to this many rows every thread prepares all inputs itself, which is faster than waiting for other threads */

/* The memory of a pass, and what follows from its shape. */
typedef struct {
    Shape s;
    Pass p;
    const Layer *layers;
    int64_t m, head, group, dim, lines, lanes; /* head, dim: padded; lines of a block of qkv; lanes of the attention bias */
    int skinny;
    float *stream, *qkv, *product; /* [m, dim], [blocks, lines, BLOCK_N], [m, dim] */
    float *bias;                   /* [rows, slots, lanes]: 0 where a node attends, else -infinity */
    int64_t (*span)[2];            /* [rows] the slots from the first to after the last that a node of the row attends to */
    Inputs normed, attended, active;
    char *thread_memory;
    int64_t thread_bytes;
} Work;

/* The memory of one thread. */
typedef struct {
    Inputs normed, attended, active;
    float *query, *weights; /* [queries, head], [queries, slots] */
    bf16 *values, *out;     /* [slots, head] as tiles, [queries, head] */
    char *scratch;
    const uint8_t **mask;
    bf16 **where;
} Buffers;

static void plan_buffers(const Work *w, Buffers *buffers, char **at) {
    const int64_t queries = w->p.nodes * w->group, slots = up_to(32, w->p.slots);
    const int64_t rows = w->m < SKINNY_ROWS ? w->m : SKINNY_ROWS; /* also with more rows in all: bytes never shrink as rows grow */
    buffers->normed = new_inputs(at, rows, &w->layers->wqkv);
    buffers->attended = new_inputs(at, rows, &w->layers->wo);
    buffers->active = new_inputs(at, rows, &w->layers->w2);
    buffers->query = arena_alloc(at, 4 * queries * w->head);
    buffers->weights = arena_alloc(at, 4 * queries * slots);
    buffers->values = arena_alloc(at, 2 * slots * w->head);
    buffers->out = arena_alloc(at, 2 * queries * w->head);
    buffers->scratch = arena_alloc(at, 64 * w->head + 96 * slots);
    buffers->mask = arena_alloc(at, 8 * queries);
    buffers->where = arena_alloc(at, 8 * queries);
}

static Work plan(const Pass *pass, char **at) {
    const Shape *shape = pass->shape;
    const Layer *layers = pass->layers;
    Work w = {.s = *shape, .p = *pass, .layers = layers};
    const int64_t heads = shape->heads + 2 * shape->kv_heads;
    w.m = pass->rows * pass->nodes;
    w.skinny = w.m <= SKINNY_ROWS;
    w.head = up_to(HEAD_ALIGN, shape->head_dim);
    w.group = shape->heads / shape->kv_heads;
    w.dim = up_to(K_ALIGN, shape->dim);
    w.lines = up_to(TILE_M, w.m);
    w.lanes = up_to(16, pass->nodes);
    w.stream = arena_alloc(at, 4 * w.m * w.dim);
    w.product = arena_alloc(at, 4 * w.m * w.dim);
    w.qkv = arena_alloc(at, 4 * w.lines * up_to(BLOCK_N, heads * shape->head_dim));
    w.bias = arena_alloc(at, 4 * pass->rows * pass->slots * w.lanes);
    w.span = arena_alloc(at, 16 * pass->rows);
    w.normed = new_inputs(at, w.m, &layers->wqkv);
    w.attended = new_inputs(at, w.m, &layers->wo);
    w.active = new_inputs(at, w.m, &layers->w2);
    Buffers buffers;
    char *begin = w.thread_memory = *at;
    plan_buffers(&w, &buffers, at);
    w.thread_bytes = *at - begin;
    *at = begin;
    return w;
}

static int64_t pass_bytes(const Pass *pass, int64_t threads) {
    char *at = (char *)64;
    const Work w = plan(pass, &at);
    return at - (char *)64 + threads * w.thread_bytes;
}

/* x [nodes, dim] of all rows as the residual stream, with zeros after the last channel. */
static void load_stream(const Work *w, const Team *team) {
    for (int64_t i = share_begin(team, w->m); i < share_end(team, w->m); i++)
        for (int64_t j = 0; j < w->dim; j++) w->stream[i * w->dim + j] = j < w->s.dim ? widen(w->p.x[i * w->s.dim + j]) : 0;
}

/* The slots that nodes attend to, as spans and, for tiles, as numbers that are added to scores. */
static void read_mask(const Work *w, const Team *team) {
    const Pass *p = &w->p;
#ifdef __AMX_BF16__
    for (int64_t i = share_begin(team, p->rows * p->slots); i < share_end(team, p->rows * p->slots); i++)
        for (int64_t n = 0; n < w->lanes; n++) {
            const uint8_t *seen = p->mask + (i / p->slots * p->nodes + n) * p->slots + i % p->slots;
            w->bias[i * w->lanes + n] = n >= p->nodes || *seen ? 0 : -INFINITY;
        }
#endif
    for (int64_t row = share_begin(team, p->rows); row < share_end(team, p->rows); row++) {
        int64_t from = p->slots, to = 0;
        for (int64_t n = 0; n < p->nodes; n++) {
            const uint8_t *seen = p->mask + (row * p->nodes + n) * p->slots, *nearest = memchr(seen, 1, from);
            if (nearest) from = nearest - seen;
            for (int64_t j = p->slots; j > to; j--)
                if (seen[j - 1]) to = j;
        }
        w->span[row][0] = from < to ? from : to; /* an idle row has none */
        w->span[row][1] = to;
    }
}

/* The factor of RMSNorm for x [dim]: 1 over the root mean square; 1 without a weight. */
static float rms_scale(const Work *w, const float *x, const float *weight) {
    f32v sum = {0}; /* explicit vectors: an auto-vectorised loop may add in another order in each of its copies */
    if (!weight) return 1;
    for (int64_t j = 0; j < w->dim; j += WIDTH) sum += *(const f32v *)(x + j) * *(const f32v *)(x + j);
    return 1 / sqrtf(reduce_add(sum) / w->s.dim + w->s.eps);
}

static inline f32v normed_at(const float *x, const float *weight, float scale, int64_t j) {
    const f32v chunk = *(const f32v *)(x + j);
    return weight ? chunk * scale * *(const f32v *)(weight + j) : chunk;
}

/* The first of the rows that a thread prepares, and the one after the last: its share, or all. */
static int64_t first_row(const Work *w, const Team *team) { return w->skinny ? 0 : share_begin(team, w->m); }
static int64_t end_row(const Work *w, const Team *team) { return w->skinny ? w->m : share_end(team, w->m); }

/* Quantise the inputs of a GEMM that reads 8 bits: this thread's rows of shared inputs, or all rows of its own inputs. */
static const Inputs *quantize_own_rows(const Work *w, const Team *team, const Inputs *in) {
    quantize_rows(in, first_row(w, team), end_row(w, team));
    if (!w->skinny) wait_for_team(team);
    return in;
}

/* The residual stream, normalised, as inputs of a product. */
static const Inputs *norm_stage(const Work *w, const Team *team, const float *weight, const Inputs *thread_inputs) {
    const Inputs *in = w->skinny ? thread_inputs : &w->normed;
    for (int64_t i = first_row(w, team); i < end_row(w, team); i++) {
        const float *x = w->stream + i * w->dim, scale = rms_scale(w, x, weight);
        for (int64_t j = 0; j < w->dim; j += WIDTH) *(bf16v *)(in->x + offset_of(in, i, j)) = narrow_all(normed_at(x, weight, scale, j));
    }
    return quantize_own_rows(w, team, in);
}

/* Quantise inputs that all threads have written together. */
static const Inputs *quantize_stage(const Work *w, const Team *team, const Inputs *written, Inputs *thread_inputs) {
    thread_inputs->x = written->x;
    return written->is_int8 ? quantize_own_rows(w, team, w->skinny ? thread_inputs : written) : written;
}

/* The product of inputs with a layer, normalised where there is a weight, is added to the residual stream. */
static void residual_stage(Work *w, const Team *team, const Linear *layer, const Inputs *in, const float *weight) {
    const int64_t blocks = blocks_of(layer);
    FloatRows rows = {weight ? w->product : w->stream, w->dim};
    gemm(layer, in, share_begin(team, blocks), share_end(team, blocks), weight ? store_floats : add_floats, &rows);
    wait_for_team(team);
    if (!weight) return;
    for (int64_t i = share_begin(team, w->m); i < share_end(team, w->m); i++) {
        float *x = w->product + i * w->dim;
        for (int64_t j = BLOCK_N * blocks; j < w->dim; j++) x[j] = 0;
        const float scale = rms_scale(w, x, weight);
        for (int64_t j = 0; j < w->dim; j += WIDTH) *(f32v *)(w->stream + i * w->dim + j) += normed_at(x, weight, scale, j);
    }
    wait_for_team(team);
}

/* act(gate) * up: a block has LANES gates and then the LANES values that they multiply. */
static void store_gated(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const Work *w = work;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < LANES; c += WIDTH) {
            const f32v gate = *(f32v *)(out[r] + c), up = *(f32v *)(out[r] + LANES + c);
            const f32v activated = w->s.gate_kind == GATE_SILU ? silu(gate) : gelu_tanh(gate);
            *(bf16v *)(w->active.x + offset_of(&w->active, first + r, block * LANES + c)) = narrow_all(activated * up);
        }
}

/* Channels `from` to `from` + head_dim of a row of qkv. */
static void load_head(const Work *w, int64_t row, int64_t from, float *out) {
    const int64_t d = w->s.head_dim;
    if ((from | d) % WIDTH == 0)
        for (int64_t c = from; c < from + d; c += WIDTH, out += WIDTH)
            *(f32v *)out = *(const f32v *)(w->qkv + (c / BLOCK_N * w->lines + row) * BLOCK_N + c % BLOCK_N);
    else
        for (int64_t c = from; c < from + d; c++) *out++ = w->qkv[(c / BLOCK_N * w->lines + row) * BLOCK_N + c % BLOCK_N];
}

/* The norm of queries and keys over the channels x [head_dim] of a head. */
static void norm_head(const Work *w, const Layer *layer, int64_t head, float *x) {
    const int64_t d = w->s.head_dim;
    const float *weight = layer->qk_norm + head * d, *bias = layer->qk_bias ? layer->qk_bias + head * d : 0;
    float sum = 0, squares = 0;
    for (int64_t j = 0; j < d; j++) sum += x[j];
    const float mean = w->s.qk_kind == QK_LAYER ? sum / d : 0;
    for (int64_t j = 0; j < d; j++) squares += (x[j] - mean) * (x[j] - mean);
    const float scale = 1 / sqrtf(squares / d + w->s.qk_eps);
    for (int64_t j = 0; j < d; j++) x[j] = (x[j] - mean) * scale * weight[j] + (bias ? bias[j] : 0);
}

/* y [head] = x [head_dim] rotated by a row of the rotary table [2, head_dim], zeros after it. */
static void rotate(const Work *w, const float *restrict x, const float *restrict rotation, float *restrict y) {
    const int64_t d = w->s.head_dim, half = d / 2;
    for (int64_t i = 0; i < half; i++) {
        /* fmaf fixes which product is rounded first; compilers choose differently in the copies of a loop */
        y[i] = fmaf(x[i + half], rotation[d + i], x[i] * rotation[i]);
        y[i + half] = fmaf(x[i], rotation[d + i + half], x[i + half] * rotation[i + half]);
    }
    for (int64_t i = d; i < w->head; i++) y[i] = 0;
}

/* Of one key-value head: store keys and values of a row's nodes in the cache, and its queries in the thread's buffers. */
static void prepare_head(const Work *w, const Buffers *buffers, const Layer *layer, int64_t row, int64_t head, bf16 *keys, bf16 *values) {
    const Shape *s = &w->s;
    const int64_t d = s->head_dim, width = w->head;
    float channels[width], rotated[width];
    for (int64_t j = d; j < width; j++) channels[j] = 0;
    for (int64_t n = 0; n < w->p.nodes; n++) {
        const int64_t i = row * w->p.nodes + n, slot = w->p.slot[i];
        const float *rotation = w->p.rotation + i * 2 * d;
        load_head(w, i, (s->heads + head) * d, channels);
        if (s->qk_kind) norm_head(w, layer, s->heads + head, channels);
        rotate(w, channels, rotation, rotated);
        load_head(w, i, (s->heads + s->kv_heads + head) * d, channels);
        for (int64_t j = 0; j < width; j += WIDTH) {
            *(bf16v *)(keys + slot * width + j) = narrow_all(*(f32v *)(rotated + j));
            *(bf16v *)(values + slot * width + j) = narrow_all(*(f32v *)(channels + j));
        }
        for (int64_t g = 0; g < w->group; g++) {
            const int64_t q = n * w->group + g, h = head * w->group + g;
            float *query = buffers->query + q * width;
            load_head(w, i, h * d, channels);
            if (s->qk_kind) norm_head(w, layer, h, channels);
            rotate(w, channels, rotation, query);
            for (int64_t j = 0; j < width; j += WIDTH) *(f32v *)(query + j) *= s->scale;
        }
    }
}

#ifdef __AMX_BF16__
/* Attention of many queries with tiles: those of one node after the other for each query head of the group. */
static void attend_tiles(const Work *w, const Buffers *buffers, int64_t row, const bf16 *keys, const bf16 *values, int64_t size, int64_t stride) {
    const int64_t d = w->head, nodes = w->p.nodes, from = w->span[row][0];
    pack_values(values, size, d, buffers->values);
    for (int64_t g = 0; g < w->group; g++)
        for (int64_t n = 0; n < nodes; n += TILE_M) {
            bf16 *where[TILE_M];
            const int64_t count = nodes - n < TILE_M ? nodes - n : TILE_M;
            for (int64_t q = 0; q < count; q++) where[q] = buffers->where[(n + q) * w->group + g];
            attend_amx(buffers->query + (n * w->group + g) * d, w->group * d, count, keys, buffers->values,
                       w->bias + (row * w->p.slots + from) * w->lanes + n, w->lanes, size, d, buffers->scratch, where, stride);
        }
}
#endif

/* One key-value head of one row: store its keys and values in the cache, then attend with its queries. */
static void attend_head(const Work *w, const Buffers *buffers, int64_t l, int64_t row, int64_t head) {
    const Pass *p = &w->p;
    const int64_t d = w->head, queries = p->nodes * w->group, from = w->span[row][0], size = w->span[row][1] - from;
    bf16 *keys = p->kv + ((l * 2 * p->rows + row) * w->s.kv_heads + head) * p->slots * d;
    bf16 *values = keys + p->rows * w->s.kv_heads * p->slots * d;
    const int tiles = has_amx && queries > FEW_QUERIES, direct = w->s.head_dim == d && (tiles || !has_tiles(&w->attended));
    prepare_head(w, buffers, w->layers + l, row, head, keys, values);
    for (int64_t q = 0; q < queries; q++) {
        const int64_t i = row * p->nodes + q / w->group, h = head * w->group + q % w->group;
        buffers->mask[q] = p->mask + i * p->slots + from;
        buffers->where[q] = direct ? w->attended.x + offset_of(&w->attended, i, h * d) : buffers->out + q * d;
    }
#ifdef __AMX_BF16__
    if (tiles) attend_tiles(w, buffers, row, keys + from * d, values + from * d, size, direct && has_tiles(&w->attended) ? TILE_M : 1);
    else
#endif
        attend(buffers->query, queries, keys + from * d, values + from * d, keys + (p->slots + from) * d, buffers->mask, size, d, buffers->weights,
               up_to(LANES, size), buffers->where);
    for (int64_t q = 0; q < queries && !direct; q++) {
        const int64_t i = row * p->nodes + q / w->group, first = (head * w->group + q % w->group) * w->s.head_dim;
        for (int64_t j = 0; j < w->s.head_dim; j++) w->attended.x[offset_of(&w->attended, i, first + j)] = buffers->out[q * d + j];
    }
}

/* The QKV product and attention. Where heads divide evenly among threads, a thread attends with the heads that it has computed itself. */
static void attention_stage(const Work *w, const Team *team, const Buffers *buffers, int64_t l, const Inputs *in) {
    const Linear *layer = &w->layers[l].wqkv;
    const int64_t d = w->s.head_dim, heads = w->s.heads, kv_heads = w->s.kv_heads;
    if (d % BLOCK_N == 0 && kv_heads % team->size == 0) {
        for (int64_t part = 0, begin = 0, blocks; part < 3; part++, begin += blocks) {
            blocks = (part ? kv_heads : heads) * d / BLOCK_N;
            gemm(layer, in, begin + share_begin(team, blocks), begin + share_end(team, blocks), 0, w->qkv);
        }
        for (int64_t row = 0; row < w->p.rows; row++)
            for (int64_t head = share_begin(team, kv_heads); head < share_end(team, kv_heads); head++) attend_head(w, buffers, l, row, head);
    } else {
        gemm(layer, in, share_begin(team, blocks_of(layer)), share_end(team, blocks_of(layer)), 0, w->qkv);
        wait_for_team(team);
        for (int64_t task = team->rank; task < w->p.rows * kv_heads; task += team->size) attend_head(w, buffers, l, task / kv_heads, task % kv_heads);
    }
    wait_for_team(team);
}

/* A thread's rows of the residual stream, normalised where there is a weight, to a part of `out`. */
static void write_part(const Work *w, const Team *team, const float *weight, int64_t part) {
    for (int64_t i = share_begin(team, w->m); i < share_end(team, w->m); i++) {
        const float *x = w->stream + i * w->dim, scale = rms_scale(w, x, weight);
        bf16 *out = w->p.out + (i * w->p.parts + part) * w->s.dim;
        for (int64_t j = 0; j < w->s.dim; j += WIDTH) {
            const bf16v chunk = narrow_all(normed_at(x, weight, scale, j));
            memcpy(out + j, &chunk, 2 * (w->s.dim - j < WIDTH ? w->s.dim - j : WIDTH));
        }
    }
}

static void decode_team(const Team *team, void *work) {
    Work *w = work;
    Buffers buffers = {0};
    char *at = w->thread_memory + team->rank * w->thread_bytes;
    plan_buffers(w, &buffers, &at);
    zero_padding(&w->attended, team);
    zero_padding(&w->active, team);
    configure_tiles(w->normed.tile_rows);
    load_stream(w, team);
    read_mask(w, team);
    wait_for_team(team);
    for (int64_t l = 0; l < w->s.layers; l++) {
        const Layer *layer = w->layers + l;
        if (l && w->p.part[l - 1]) write_part(w, team, 0, w->p.part[l - 1]);
        const Inputs *normed = norm_stage(w, team, layer->attention_norm, &buffers.normed);
        attention_stage(w, team, &buffers, l, normed);
        const Inputs *attended = quantize_stage(w, team, &w->attended, &buffers.attended);
        residual_stage(w, team, &layer->wo, attended, layer->attention_out_norm);
        normed = norm_stage(w, team, layer->ffn_norm, &buffers.normed);
        gemm(&layer->w13, normed, share_begin(team, blocks_of(&layer->w13)), share_end(team, blocks_of(&layer->w13)), store_gated, w);
        wait_for_team(team);
        const Inputs *active = quantize_stage(w, team, &w->active, &buffers.active);
        residual_stage(w, team, &layer->w2, active, layer->ffn_out_norm);
    }
    write_part(w, team, w->s.norm, 0);
    release_tiles();
}

int64_t decode(const Pass *pass, const Scratch *scratch, int64_t threads) {
    char *at = scratch->memory;
    ENSURE(scratch, pass_bytes(pass, threads));
    Work w = plan(pass, &at);
    return run_team(threads, decode_team, &w, 0);
}
