/* Products with the tiles of AMX, in bf16 and in 8 bits, for any number of rows: few rows cost what reading the weights costs.

   Tiles 0 to 3 are sums, 4 inputs, 6 and 7 weights. Attention has 5, 6 and 7. */
#include "gemm.h"

#ifdef __AMX_BF16__

/* Tiles for the calling thread; those of sums and inputs have `rows` rows. */
static void configure_tiles(int64_t rows) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = i < 5 ? (uint8_t)rows : TILE_M;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* GCC 12 takes only its first 8 bytes for read */
    _tile_loadconfig(&config);
}

static void release_tiles(void) { _tile_release(); }

/* Multiply one or two tiles of rows; with `fetch` also prefetch the next weights. */
ALWAYS_INLINE void amx_bf16(int two, const Inputs *in, int64_t tile, const bf16 *weight, int fetch, float (*out)[BLOCK_N]) {
    const bf16 *x = in->x + tile * TILE_M * in->width, *next = x + TILE_M * in->width;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < in->width; k += 32, weight += 32 * BLOCK_N) {
        if (fetch) prefetch((const char *)weight + 2 * PREFETCH_BYTES, 64 * BLOCK_N);
        _tile_loadd(6, weight, 4 * BLOCK_N);
        _tile_loadd(4, x + k * TILE_M, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + BLOCK_N, 4 * BLOCK_N);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(4, next + k * TILE_M, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, out[0], 4 * BLOCK_N);
    _tile_stored(1, out[0] + BLOCK_N / 2, 4 * BLOCK_N);
    if (two) {
        _tile_stored(2, out[in->tile_rows], 4 * BLOCK_N);
        _tile_stored(3, out[in->tile_rows] + BLOCK_N / 2, 4 * BLOCK_N);
    }
}

static void gemm_bf16(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]) {
    const bf16 *weight = (const bf16 *)layer->weight + block * in->width * BLOCK_N;
    for (int64_t t = 0; t < tiles; t += 2, out += 2 * in->tile_rows)
        if (tiles - t > 1) amx_bf16(1, in, tile + t, weight, tile + t == 0, out);
        else amx_bf16(0, in, tile + t, weight, tile + t == 0, out);
}

/* The upper and the lower 8 bits of inputs have products of their own; 256 times the upper sums and the lower ones are the sums. */
static void gemm_int8(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]) {
    enum { PLANE = TILE_M * K_ALIGN };
    const __m512 left = _mm512_loadu_ps(layer->scale + block * BLOCK_N), right = _mm512_loadu_ps(layer->scale + block * BLOCK_N + 16);
    char unpacked[BLOCK_K * BLOCK_N] __attribute__((aligned(64)));
    for (int64_t from = 0, size; from < in->width; from += size) {
        const char *weights, *next;
        size = load_weights(layer, block, in->width, from, unpacked, &weights, &next);
        if (!layer->is_int4) next = weights + PREFETCH_BYTES;
        for (int64_t t = 0; t < tiles; t++) {
            const int8_t *x = in->number + ((tile + t) * in->width + from) * 2 * TILE_M;
            const char *weight = weights;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < size; k += K_ALIGN, weight += K_ALIGN * BLOCK_N, x += 2 * PLANE) {
                if (tile + t == 0) prefetch(next + (k * BLOCK_N >> layer->is_int4), K_ALIGN * BLOCK_N >> layer->is_int4);
                _tile_loadd(6, weight, 4 * BLOCK_N);
                _tile_loadd(4, x, K_ALIGN);
                _tile_dpbssd(0, 4, 6);
                _tile_loadd(7, weight + 2 * BLOCK_N, 4 * BLOCK_N);
                _tile_dpbssd(1, 4, 7);
                _tile_loadd(4, x + PLANE, K_ALIGN);
                _tile_dpbssd(2, 4, 6);
                _tile_dpbssd(3, 4, 7);
            }
            int32_t sums[4][TILE_M][16] __attribute__((aligned(64)));
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int64_t r = 0; r < in->tile_rows; r++) {
                float *y = out[t * in->tile_rows + r];
                const __m512 scale = _mm512_set1_ps(in->scale[(tile + t) * in->tile_rows + r]);
                const __m512i first = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[0][r]), 8), _mm512_load_si512(sums[2][r]));
                const __m512i second = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[1][r]), 8), _mm512_load_si512(sums[3][r]));
                const __m512 before = from ? _mm512_loadu_ps(y) : _mm512_setzero_ps(), after = from ? _mm512_loadu_ps(y + 16) : before;
                _mm512_storeu_ps(y, before + _mm512_cvtepi32_ps(first) * (scale * left));
                _mm512_storeu_ps(y + 16, after + _mm512_cvtepi32_ps(second) * (scale * right));
            }
        }
    }
}
#else
static void configure_tiles(int64_t rows) { (void)rows; }
static void release_tiles(void) {}
#endif
