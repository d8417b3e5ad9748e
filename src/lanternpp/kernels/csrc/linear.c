/* A linear layer alone, the head of guided features, and how weights are packed. */
#include "decoder.c"

/* A row's inputs x [inputs] as products read them. */
static void load_row(Inputs *in, int64_t row, const bf16 *x) {
    int64_t k = 0;
    for (; k + LANES <= in->inputs; k += LANES) *(bf16x16 *)(in->x + offset_of(in, row, k)) = *(const bf16x16 *)(x + k);
    for (; k < in->width; k++) in->x[offset_of(in, row, k)] = k < in->inputs ? x[k] : 0;
    if (in->is_int8) quantize_row(in, row);
}

/* Rows of floats, `stride` apart. */
typedef struct {
    float *y;
    int64_t stride;
} FloatRows;

static void store_floats(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const FloatRows *to = work;
    for (int64_t r = 0; r < rows; r++) memcpy(to->y + (first + r) * to->stride + block * BLOCK_N, out[r], sizeof out[r]);
}

typedef struct {
    Inputs in;
    const Linear *layer;
    const LinearCall *call;
} LinearWork;

int64_t linear_bytes(const Linear *layer, int64_t rows) { return inputs_bytes(rows, layer->inputs); }

static void store_linear(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const LinearWork *w = work;
    const int64_t outputs = w->layer->outputs, left = outputs - block * BLOCK_N, columns = left < BLOCK_N ? left : BLOCK_N;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (first + r) * outputs + block * BLOCK_N;
        if (w->call->out_is_float) memcpy((float *)w->call->out + at, out[r], 4 * columns);
        else
            for (int64_t c = 0; c < columns; c += LANES) {
                const bf16x16 some = narrow_all(*(f32x16 *)(out[r] + c));
                memcpy((bf16 *)w->call->out + at + c, &some, 2 * (columns - c < LANES ? columns - c : LANES));
            }
    }
}

static void linear_team(const Team *team, void *work) {
    LinearWork *w = work;
    const int64_t blocks = blocks_of(w->layer);
    configure_tiles(w->in.tile_rows);
    for (int64_t i = share_begin(team, w->in.rows); i < share_end(team, w->in.rows); i++)
        load_row(&w->in, i, w->call->x + i * w->in.inputs);
    wait_for_team(team);
    gemm(w->layer, &w->in, share_begin(team, blocks), share_end(team, blocks), store_linear, w);
    release_tiles();
}

/* y = x W + b. */
void linear(const Linear *layer, const LinearCall *call, int64_t threads) {
    char *at = call->scratch;
    LinearWork w = {new_inputs(&at, call->rows, layer), layer, call};
    run_team(threads, linear_team, &w);
}

static void pack_bf16(const Packing *p, int64_t block) {
    bf16 *to = (bf16 *)p->weight + block * p->width * BLOCK_N;
    for (int64_t c = 0; c < BLOCK_N; c++) {
        const bf16 *row = p->row[block * BLOCK_N + c];
        for (int64_t k = 0; k < p->width; k++) {
            const int64_t from = p->column ? p->column[k] : k < p->inputs ? k : -1;
            to[(k / 2 * BLOCK_N + c) * 2 + k % 2] = row && from >= 0 ? row[from] : 0;
        }
    }
}

/* A scale for every output, so that the largest weight is 127 times it; or the scale that int8 rows have. */
static void pack_int8(const Packing *p, int64_t block) {
    uint8_t *to = (uint8_t *)p->weight + block * p->width * BLOCK_N;
    for (int64_t c = 0; c < BLOCK_N; c++) {
        const int64_t output = block * BLOCK_N + c;
        const void *row = p->row[output];
        float scale = row && p->given ? p->given[output] : 0;
        if (row && !p->given) {
            bf16 largest = 0;
            for (int64_t k = 0; k < p->inputs; k++) {
                const bf16 magnitude = ((const bf16 *)row)[k] & 0x7fff;
                largest = magnitude > largest ? magnitude : largest;
            }
            scale = widen(largest) / 127;
        }
        p->scale[output] = scale;
        for (int64_t k = 0; k < p->width; k++) {
            const int64_t from = p->column ? p->column[k] : k < p->inputs ? k : -1;
            int32_t number = 0;
            if (row && from >= 0)
                number = p->given ? ((const int8_t *)row)[from] : scale > 0 ? (int32_t)lrintf(widen(((const bf16 *)row)[from]) / scale) : 0;
            to[(k / 4 * BLOCK_N + c) * 4 + k % 4] = (uint8_t)(number + WEIGHT_ZERO);
        }
    }
}

static void pack_team(const Team *team, void *work) {
    const Packing *p = work;
    for (int64_t block = share_begin(team, p->blocks); block < share_end(team, p->blocks); block++)
        (p->scale ? pack_int8 : pack_bf16)(p, block);
}

/* What is added to weights in 8 bits. */
int64_t weight_zero(void) { return WEIGHT_ZERO; }

/* Weights in the layout of kernels.h. */
void pack_linear(Packing *packing, int64_t threads) { run_team(threads, pack_team, packing); }
