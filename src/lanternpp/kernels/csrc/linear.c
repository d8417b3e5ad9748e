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
    int stream; /* outputs go past the caches, where they are too many to be read again soon */
} LinearWork;

static void store_linear(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const LinearWork *w = work;
    const int64_t outputs = w->call->layer->outputs, columns_left = outputs - block * BLOCK_N, columns = columns_left < BLOCK_N ? columns_left : BLOCK_N;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t offset = (first + r) * outputs + block * BLOCK_N;
        float *y = (float *)w->call->out + offset;
#ifdef __AVX512F__
        if (w->stream && columns == BLOCK_N) {
            _mm512_stream_ps(y, _mm512_loadu_ps(out[r]));
            _mm512_stream_ps(y + WIDTH, _mm512_loadu_ps(out[r] + WIDTH));
            continue;
        }
#endif
        if (w->call->out_is_float) memcpy(y, out[r], 4 * columns);
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
#ifdef __AVX512F__
    _mm_sfence();
#endif
    release_tiles();
}

/* y = x W + b. */
int64_t linear(const LinearCall *call, const Scratch *scratch, int64_t threads) {
    char *at = scratch->memory;
    ENSURE(scratch, inputs_bytes(call->rows, call->layer));
    LinearWork w = {new_inputs(&at, call->rows, call->layer), call, 0};
    w.stream = call->out_is_float && call->rows > 2 * TILE_M && call->layer->outputs % LANES == 0 && (intptr_t)call->out % 64 == 0;
    return run_team(threads, linear_team, &w, 0);
}

static void pack_bf16(const Packing *p, int64_t block) {
    bf16 *packed = (bf16 *)p->weight + block * p->width * BLOCK_N;
    for (int64_t c = 0; c < BLOCK_N; c++) {
        const bf16 *row = p->row[block * BLOCK_N + c];
        for (int64_t k = 0; k < p->width; k++) packed[(k / 2 * BLOCK_N + c) * 2 + k % 2] = row && k < p->inputs ? row[k] : 0;
    }
}

/* A scale for every output, so that the largest weight is 127 times it; or the scale that int8 rows have. */
static void pack_int8(const Packing *p, int64_t block) {
    uint8_t *packed = (uint8_t *)p->weight + block * p->width * BLOCK_N;
    for (int64_t c = 0; c < BLOCK_N; c++) {
        const int64_t output = block * BLOCK_N + c;
        const void *row = p->row[output];
        float scale = row && p->given ? p->given[output] : 0;
        if (row && !p->given) scale = widen(largest_magnitude(row, p->inputs)) / 127;
        p->scale[output] = scale;
        for (int64_t k = 0; k < p->width; k++) {
            int32_t number = 0;
            if (row && k < p->inputs)
                number = p->given ? ((const int8_t *)row)[k] : scale > 0 ? (int32_t)lrintf(widen(((const bf16 *)row)[k]) / scale) : 0;
            packed[(k / 4 * BLOCK_N + c) * 4 + k % 4] = (uint8_t)(number + WEIGHT_ZERO);
        }
    }
}

static void pack_team(const Team *team, void *work) {
    const Packing *p = work;
    for (int64_t block = share_begin(team, p->blocks); block < share_end(team, p->blocks); block++)
        (p->scale ? pack_int8 : pack_bf16)(p, block);
}

/* Weights in the layout of kernels.h. */
int64_t pack_linear(Packing *packing, const Scratch *scratch, int64_t threads) { return run_team(threads, pack_team, packing, 0); }
