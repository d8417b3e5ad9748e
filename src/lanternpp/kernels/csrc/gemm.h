/* GEMM of rows of inputs with blocks of a linear layer's weights: the instructions, and the layouts that they read. */
#ifndef GEMM_H
#define GEMM_H

#include "simd.h"
#include "threads.h"

/* Weights and activations of 8 bits: how activations are quantised, by the instruction that multiplies them.

   INT8_GROUPED  8 bits, a scale for every K_ALIGN inputs of a row: vpdpbusd, sdot. Sums of a group are exact.
   INT8_PLANES   16 bits, a scale for every row, as two numbers of 8 bits: the tiles of AMX. Sums are exact.
   INT8_WIDE     16 bits, a scale for every row: vpmaddwd, or any CPU. Sums are exact.

   A row's result depends on that row alone and not on how many rows or threads there are. */
#if defined(__AMX_INT8__)
#define INT8_PLANES 1
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define INT8_GROUPED 1
#define WEIGHT_ZERO 128
#elif defined(__ARM_FEATURE_DOTPROD)
#define INT8_GROUPED 1
#else
#define INT8_WIDE 1
#endif
#ifndef WEIGHT_ZERO
#define WEIGHT_ZERO 0
#endif

/* Rows of inputs in the layout that products read. Tiles hold up to TILE_M rows each, and as many as the first. */
typedef struct {
    int64_t rows, inputs, width; /* width: inputs up to a multiple of K_ALIGN */
    int64_t tiles, tile_rows;
    int is_int8;
    bf16 *x;        /* [rows, width]; for the tiles of AMX [tiles, width / 32, TILE_M, 32] */
    int8_t *number; /* GROUPED [tiles, groups, TILE_M, K_ALIGN], PLANES [tiles, groups, 2, TILE_M, K_ALIGN], WIDE int16 [rows, width] */
    float *scale;   /* GROUPED [tiles, groups, TILE_M], else [rows] */
    int32_t *start; /* GROUPED [tiles, groups, TILE_M]: what cancels WEIGHT_ZERO */
} Inputs;

#ifdef __AMX_BF16__
enum { has_amx = 1 };
#else
enum { has_amx = 0 };
#endif

/* Whether bf16 inputs lie in tiles. */
static inline int has_tiles(const Inputs *in) { return has_amx && !in->is_int8; }

/* Where inputs k to k + WIDTH of a row are in x. */
static inline int64_t offset_of(const Inputs *in, int64_t row, int64_t k) {
    if (!has_tiles(in)) return row * in->width + k;
    return (row / in->tile_rows * in->width + k / 32 * 32) * TILE_M + row % in->tile_rows * 32 + k % 32;
}

/* Memory for `rows` rows of inputs of a layer; what is after the last input of a row has to be zero. */
static inline Inputs new_inputs(char **at, int64_t rows, const Linear *layer) {
    const int64_t padded_rows = up_to(TILE_M, rows), width = up_to(K_ALIGN, layer->inputs), groups = width / K_ALIGN;
    Inputs in = {rows, layer->inputs, width, padded_rows / TILE_M, TILE_M, layer->scale != 0, 0, 0, 0, 0};
#ifdef __AMX_INT8__
    in.tile_rows = in.tiles ? (rows + in.tiles - 1) / in.tiles : 0; /* a tile's products take as long as it has rows */
#endif
    in.x = arena_alloc(at, 2 * padded_rows * width);
    in.number = arena_alloc(at, 2 * padded_rows * width);
    in.scale = arena_alloc(at, 4 * padded_rows * groups);
    in.start = arena_alloc(at, 4 * padded_rows * groups);
    return in;
}

static inline int64_t inputs_bytes(int64_t rows, const Linear *layer) {
    char *at = (char *)64;
    new_inputs(&at, rows, layer);
    return at - (char *)64;
}

/* Write zeros after the last input of a thread's rows. */
static inline void zero_padding(const Inputs *in, const Team *team) {
    for (int64_t row = share_begin(team, in->rows); row < share_end(team, in->rows); row++)
        for (int64_t k = in->inputs; k < in->width; k++) in->x[offset_of(in, row, k)] = 0;
}

static inline int64_t blocks_of(const Linear *layer) { return (layer->outputs + BLOCK_N - 1) / BLOCK_N; }

/* Quantise x of rows [first, last) to 8 or 16 bits, where the GEMM reads these. */
static void quantize_rows(const Inputs *in, int64_t first, int64_t last);

/* out [rows of the tiles, BLOCK_N] = the rows of `tiles` tiles from `tile` on times one block of weights, without the bias.

   At most MAX_BLOCK_M rows; out has room for as many rows as full tiles have. */
static void gemm_bf16(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]);
static void gemm_int8(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]);

/* Products of all rows with some blocks of weights go to `store`, which gets rows [first, first + rows) of a block. */
typedef void Store(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]);

/* Rows of floats, `stride` apart, that products are written to or added to. */
typedef struct {
    float *y;
    int64_t stride;
} FloatRows;

static void store_floats(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const FloatRows *destination = work;
    for (int64_t r = 0; r < rows; r++) memcpy(destination->y + (first + r) * destination->stride + block * BLOCK_N, out[r], sizeof out[r]);
}

static void add_floats(void *work, int64_t block, int64_t first, int64_t rows, float (*out)[BLOCK_N]) {
    const FloatRows *destination = work;
    float *y = destination->y + first * destination->stride + block * BLOCK_N;
    for (int64_t r = 0; r < rows; r++, y += destination->stride)
        for (int64_t c = 0; c < BLOCK_N; c += WIDTH) *(f32v *)(y + c) += *(f32v *)(out[r] + c);
}

/* All rows times blocks [begin, end). Without `store` products stay in `work`, floats [blocks, rows up to a multiple of TILE_M, BLOCK_N]. */
static void gemm(const Linear *layer, const Inputs *in, int64_t begin, int64_t end, Store *store, void *work) {
    float product[MAX_BLOCK_M][BLOCK_N] __attribute__((aligned(64)));
    for (int64_t block = begin; block < end; block++)
        for (int64_t tile = 0, tiles; tile < in->tiles; tile += tiles) {
            const int64_t max_tiles = MAX_BLOCK_M / TILE_M, first = tile * in->tile_rows;
            tiles = in->tiles - tile < max_tiles ? in->tiles - tile : max_tiles;
            const int64_t rows = tiles * in->tile_rows, rows_left = in->rows - first;
            float (*out)[BLOCK_N] = store ? product : (float (*)[BLOCK_N])work + block * up_to(TILE_M, in->rows) + first;
            (in->is_int8 ? gemm_int8 : gemm_bf16)(layer, block, in, tile, tiles, out);
            for (int64_t r = 0; layer->bias && r < rows; r++)
                for (int64_t c = 0; c < BLOCK_N; c++) out[r][c] += layer->bias[block * BLOCK_N + c];
            if (store) store(work, block, first, rows < rows_left ? rows : rows_left, out);
        }
}

#endif
