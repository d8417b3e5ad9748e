/* Products in bf16 with float sums: with `vdpbf16ps`, or by FMA on weights that are widened in registers. */
#include "gemm.h"

/* The register tile of FMA: as many rows and columns as there are registers for sums. */
#if defined(__AVX512F__)
enum { FMA_M = 8, FMA_WIDTH = 16, FMA_VECTORS = 2 };
#elif defined(__AVX__)
enum { FMA_M = 4, FMA_WIDTH = 8, FMA_VECTORS = 2 };
#else
enum { FMA_M = 4, FMA_WIDTH = 4, FMA_VECTORS = 4 };
#endif
enum { FMA_K = 256 }; /* inputs of a row that are widened at once */
typedef float fma_vec __attribute__((vector_size(4 * FMA_WIDTH), aligned(4)));
typedef uint32_t fma_bits __attribute__((vector_size(4 * FMA_WIDTH), aligned(4)));

/* `count` rows, a constant, of which those beyond `rows` repeat the last. */
ALWAYS_INLINE void fma_tile(int count, int64_t rows, const bf16 *x, int64_t width, const bf16 *weight, float (*out)[BLOCK_N]) {
    float wide[FMA_M][FMA_K] __attribute__((aligned(64)));
    for (int first = 0; first < BLOCK_N; first += FMA_VECTORS * FMA_WIDTH) {
        fma_vec sums[FMA_M][FMA_VECTORS] = {0};
        for (int64_t from = 0, size; from < width; from += size) {
            size = width - from < FMA_K ? width - from : FMA_K;
            for (int r = 0; r < count; r++)
                for (int64_t k = 0; k < size; k += LANES) *(f32x16 *)(wide[r] + k) = widen_all(x + (r < rows ? r : rows - 1) * width + from + k);
            const bf16 *w = weight + from * BLOCK_N + 2 * first;
            for (int64_t k = 0; k < size; k += 2, w += 2 * BLOCK_N) {
                fma_bits both[FMA_VECTORS]; /* inputs k and k + 1 of each column */
                for (int v = 0; v < FMA_VECTORS; v++) both[v] = *(const fma_bits *)(w + 2 * v * FMA_WIDTH);
                prefetch((const char *)w + PREFETCH_BYTES, 4 * FMA_VECTORS * FMA_WIDTH);
                UNROLL for (int r = 0; r < count; r++)
                    UNROLL for (int v = 0; v < FMA_VECTORS; v++) sums[r][v] += wide[r][k] * (fma_vec)(both[v] << 16);
                UNROLL for (int r = 0; r < count; r++)
                    UNROLL for (int v = 0; v < FMA_VECTORS; v++) sums[r][v] += wide[r][k + 1] * (fma_vec)(both[v] & 0xffff0000);
            }
        }
        for (int r = 0; r < rows && r < count; r++)
            for (int v = 0; v < FMA_VECTORS; v++) *(fma_vec *)(out[r] + first + v * FMA_WIDTH) = sums[r][v];
    }
}

/* out [rows, BLOCK_N] = x [rows, width] times one block of weights. */
static void gemm_skinny_fma(int64_t rows, const bf16 *x, int64_t width, const bf16 *weight, float (*out)[BLOCK_N]) {
    for (; rows > 0; rows -= FMA_M, x += FMA_M * width, out += FMA_M)
        if (rows == 1) fma_tile(1, rows, x, width, weight, out);
        else if (rows == 2) fma_tile(2, rows, x, width, weight, out);
        else if (rows <= 4 || FMA_M == 4) fma_tile(4, rows, x, width, weight, out);
        else fma_tile(FMA_M, rows, x, width, weight, out);
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
static int dot_bf16_is_faster; /* whether `vdpbf16ps` is, which has half the rate of FMA on Intel's CPUs and twice that rate on AMD's */

enum { DOT_M = 6 };

/* Adds the products of `size` inputs of `count` rows, a constant, to out. Every 2 inputs fetch `share` bytes of `next`. */
ALWAYS_INLINE void dot_tile(int count, const bf16 *x, int64_t width, int64_t size, const bf16 *weight, const char *next, int64_t share,
                            float (*out)[BLOCK_N]) {
    __m512 left[DOT_M], right[DOT_M];
    UNROLL for (int r = 0; r < count; r++) left[r] = _mm512_loadu_ps(out[r]), right[r] = _mm512_loadu_ps(out[r] + BLOCK_N / 2);
    for (int64_t k = 0; k < size; k += 2, weight += 2 * BLOCK_N, next += share) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(weight), second = (__m512bh)_mm512_loadu_si512(weight + BLOCK_N);
        prefetch_l2(next, share);
        UNROLL for (int r = 0; r < count; r++) {
            int32_t pair;
            memcpy(&pair, x + r * width + k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            left[r] = _mm512_dpbf16_ps(left[r], both, first);
            right[r] = _mm512_dpbf16_ps(right[r], both, second);
        }
    }
    UNROLL for (int r = 0; r < count; r++) _mm512_storeu_ps(out[r], left[r]), _mm512_storeu_ps(out[r] + BLOCK_N / 2, right[r]);
}

/* `gemm_skinny_fma` with products of bf16. */
static void gemm_skinny_dot(int64_t rows, const bf16 *x, int64_t width, const bf16 *weight, float (*out)[BLOCK_N]) {
    memset(out, 0, rows * sizeof *out);
    const int64_t groups = (rows + DOT_M - 1) / DOT_M, share = rows > 4 ? (4 * BLOCK_N + groups - 1) / groups : 0;
    for (int64_t from = 0, size; from < width; from += size) {
        const char *next = (const char *)(weight + (from + BLOCK_K / 2) * BLOCK_N);
        size = groups > 1 && width - from > BLOCK_K / 2 ? BLOCK_K / 2 : width - from;
        for (int64_t g = 0, r = 0, count; g < groups; g++, r += count, next += size / 2 * share) {
            const bf16 *y = x + r * width + from, *w = weight + from * BLOCK_N;
            count = (rows - r) / (groups - g);
            switch (count) {
            case 1: dot_tile(1, y, width, size, w, next, share, out + r); break;
            case 2: dot_tile(2, y, width, size, w, next, share, out + r); break;
            case 3: dot_tile(3, y, width, size, w, next, share, out + r); break;
            case 4: dot_tile(4, y, width, size, w, next, share, out + r); break;
            case 5: dot_tile(5, y, width, size, w, next, share, out + r); break;
            default: dot_tile(DOT_M, y, width, size, w, next, share, out + r);
            }
        }
    }
}

#define KEEP(out) __asm__ volatile("" : : "r"(out) : "memory") /* a compiler leaves out products that nobody reads */

/* Times both on numbers that fit the L1 cache, which takes some 50 microseconds. */
static void measure_bf16(void) {
    bf16 x[DOT_M * 128] = {0}, weight[128 * BLOCK_N + PREFETCH_BYTES / 2] = {0};
    float out[DOT_M][BLOCK_N];
    uint64_t min_cycles[2] = {UINT64_MAX, UINT64_MAX};
    for (int run = 0; run < 16; run++) {
        const uint64_t begin = __builtin_ia32_rdtsc();
        gemm_skinny_fma(DOT_M, x, 128, weight, out);
        KEEP(out);
        const uint64_t middle = __builtin_ia32_rdtsc();
        gemm_skinny_dot(DOT_M, x, 128, weight, out);
        KEEP(out);
        const uint64_t end = __builtin_ia32_rdtsc();
        min_cycles[0] = middle - begin < min_cycles[0] ? middle - begin : min_cycles[0];
        min_cycles[1] = end - middle < min_cycles[1] ? end - middle : min_cycles[1];
    }
    dot_bf16_is_faster = min_cycles[1] < min_cycles[0];
}
#else
static void measure_bf16(void) {}
#endif

#ifndef __AMX_BF16__
/* By the faster instruction. */
static void gemm_bf16(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]) {
    const int64_t first = tile * in->tile_rows, rows = tiles * in->tile_rows, rows_left = in->rows - first;
    const bf16 *weight = (const bf16 *)layer->weight + block * in->width * BLOCK_N;
    const bf16 *x = in->x + first * in->width;
#ifdef __AVX512BF16__
    if (dot_bf16_is_faster) gemm_skinny_dot(rows < rows_left ? rows : rows_left, x, in->width, weight, out);
    else
#endif
        gemm_skinny_fma(rows < rows_left ? rows : rows_left, x, in->width, weight, out);
}
#endif
