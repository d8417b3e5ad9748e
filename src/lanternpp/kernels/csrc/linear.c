/* A linear layer alone, of guided features too, and how weights are packed. */
#include "decoder.c"

/* A row's inputs x [inputs], which `quantize_rows` then reads. */
static void load_row(Inputs *in, int64_t row, const bf16 *x) {
    int64_t k = 0;
    for (; k + WIDTH <= in->inputs; k += WIDTH) *(bf16v *)(in->x + offset_of(in, row, k)) = *(const bf16v *)(x + k);
    for (; k < in->width; k++) in->x[offset_of(in, row, k)] = k < in->inputs ? x[k] : 0;
}

typedef struct {
    Inputs in;
    const LinearCall *call;
} LinearWork;

static void store_linear(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const LinearWork *w = work;
    const int64_t outputs = w->call->layer->outputs, columns_left = outputs - block * BLOCK_N, columns = columns_left < BLOCK_N ? columns_left : BLOCK_N;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t offset = (first + r) * outputs + block * BLOCK_N;
        if (w->call->out_is_float) memcpy((float *)w->call->out + offset, out[r], 4 * columns);
        else
            for (int64_t c = 0; c < columns; c += WIDTH) {
                const bf16v chunk = narrow_all(*(f32v *)(out[r] + c));
                memcpy((bf16 *)w->call->out + offset + c, &chunk, 2 * (columns - c < WIDTH ? columns - c : WIDTH));
            }
    }
}

static void linear_team(const Team *team, void *work) {
    LinearWork *w = work;
    const LinearCall *call = w->call;
    const int64_t blocks = blocks_of(call->layer), inputs = w->in.inputs;
    const float extra_guidance = (float)call->guidance - 1;
    bf16 guided[inputs];
    configure_tiles(w->in.tile_rows);
    for (int64_t i = share_begin(team, call->rows); i < share_end(team, call->rows); i++) {
        const bf16 *x = call->x + i * call->pitch, *unconditional = x + call->rows * call->pitch;
        for (int64_t k = 0; k < inputs && call->branches > 1; k++) guided[k] = narrow(widen(x[k]) + extra_guidance * (widen(x[k]) - widen(unconditional[k])));
        load_row(&w->in, i, call->branches > 1 ? guided : x);
    }
    quantize_rows(&w->in, share_begin(team, call->rows), share_end(team, call->rows));
    wait_for_team(team);
    gemm(call->layer, &w->in, share_begin(team, blocks), share_end(team, blocks), store_linear, w);
    release_tiles();
}

/* y = x W + b. */
int64_t linear(const LinearCall *call, const Scratch *scratch, int64_t threads) {
    char *at = scratch->memory;
    ENSURE(scratch, inputs_bytes(call->rows, call->layer));
    LinearWork w = {new_inputs(&at, call->rows, call->layer), call};
    return run_team(threads, linear_team, &w, 0);
}

static void pack_bf16(const Packing *p, int64_t block) {
    bf16 *packed = (bf16 *)p->weight + block * p->width * BLOCK_N;
    for (int64_t c = 0; c < BLOCK_N; c++) {
        const bf16 *row = p->row[block * BLOCK_N + c];
        for (int64_t k = 0; k < p->width; k++) packed[(k / 2 * BLOCK_N + c) * 2 + k % 2] = row && k < p->inputs ? row[k] : 0;
    }
}

/* The weights [width] of an output, with zeros after its inputs; returns the largest magnitude, NaN where one is not finite. */
static float load_output(const Packing *p, int64_t output, float *weights) {
    const void *row = p->row[output];
    float largest = 0, zero = 0;
    for (int64_t k = 0; k < p->width; k++) {
        weights[k] = !row || k >= p->inputs ? 0 : p->given ? p->given[output] * ((const int8_t *)row)[k] : widen(((const bf16 *)row)[k]);
        largest = fabsf(weights[k]) > largest ? fabsf(weights[k]) : largest;
        zero += 0 * weights[k];
    }
    return largest + zero;
}

/* A scale for every output, so that the largest weight is 127 times it; or the scale that int8 rows have. */
static void pack_int8(const Packing *p, int64_t block) {
    uint8_t *packed = (uint8_t *)p->weight + block * p->width * BLOCK_N;
    float weights[p->width];
    for (int64_t c = 0; c < BLOCK_N; c++) {
        const int64_t output = block * BLOCK_N + c;
        const float largest = load_output(p, output, weights), scale = p->given ? p->given[output] : largest / 127;
        p->scale[output] = scale;
        for (int64_t k = 0; k < p->width; k++)
            packed[(k / 4 * BLOCK_N + c) * 4 + k % 4] = (uint8_t)((scale > 0 ? lrintf(weights[k] / scale) : 0) + WEIGHT_ZERO);
    }
}

/* A scale for every output, so that the largest weight is 120 times it. The factor of a group makes the furthest from 0 about -8 times factor and scale. */
static void pack_int4(const Packing *p, int64_t block) {
    uint8_t *factors = (uint8_t *)p->weight + block * p->width * (1 + BLOCK_N / 2), *packed = factors + p->width;
    float weights[p->width];
    for (int64_t c = 0; c < BLOCK_N; c++) {
        const float scale = p->scale[block * BLOCK_N + c] = load_output(p, block * BLOCK_N + c, weights) / 120;
        for (int64_t from = 0; from < p->width; from += INT4_GROUP) {
            float furthest = 0;
            for (int64_t k = from; k < from + INT4_GROUP; k++) furthest = fabsf(weights[k]) > fabsf(furthest) ? weights[k] : furthest;
            const float factor = scale > 0 ? rintf(furthest / (-8 * scale)) : 0, inverse = factor != 0 ? 1 / (factor * scale) : 0;
            factors[from + c] = (uint8_t)(FACTOR_ZERO + factor);
            for (int64_t k = from; k < from + INT4_GROUP; k++) {
                uint8_t *byte = packed + (k / 8 * BLOCK_N + c) * 4 + k % 4;
                const float number = rintf(weights[k] * inverse), q = 8 + (number > 7 ? 7 : number > -8 ? number : -8);
                *byte = k % 8 < 4 ? (uint8_t)q : *byte | (uint8_t)q << 4;
            }
        }
    }
}

static void pack_team(const Team *team, void *work) {
    const Packing *p = work;
    for (int64_t block = share_begin(team, p->blocks); block < share_end(team, p->blocks); block++)
        (p->is_int4 ? pack_int4 : p->scale ? pack_int8 : pack_bf16)(p, block);
}

/* Weights in the layout of kernels.h. */
int64_t pack_linear(Packing *packing, const Scratch *scratch, int64_t threads) { return run_team(threads, pack_team, packing, 0); }
