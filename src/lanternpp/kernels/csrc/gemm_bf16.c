/* Products in bf16 with float sums: with `vdpbf16ps`, or by FMA on weights that are widened in registers. */
#include "gemm.h"

/* The register tile of FMA: as many rows and columns as there are registers for sums. */
enum { FMA_M = WIDTH == 16 ? 6 : 4, FMA_VECTORS = WIDTH == 4 ? 4 : 2, DOT_M = 6, BF16_BLOCK_K = BLOCK_K / 2 };

/* Adds the products of `size` inputs of `count` rows, a constant, to out. Every 2 inputs fetch `share` bytes of `next`. */
ALWAYS_INLINE void fma_tile(int count, const bf16 *x, int64_t width, int64_t size, const bf16 *weight, const char *next, int64_t share,
                            float (*out)[BLOCK_N]) {
    float wide[FMA_M][BF16_BLOCK_K] __attribute__((aligned(64)));
    for (int r = 0; r < count; r++)
        for (int64_t k = 0; k < size; k += WIDTH) *(f32v *)(wide[r] + k) = widen_all(x + r * width + k);
    for (int first = 0; first < BLOCK_N; first += FMA_VECTORS * WIDTH, share = 0) {
        f32v sums[FMA_M][FMA_VECTORS];
        UNROLL for (int r = 0; r < count; r++)
            UNROLL for (int v = 0; v < FMA_VECTORS; v++) sums[r][v] = *(const f32v *)(out[r] + first + v * WIDTH);
        const bf16 *w = weight + 2 * first;
        for (int64_t k = 0; k < size; k += 2, w += 2 * BLOCK_N, next += share) {
            u32v both[FMA_VECTORS]; /* inputs k and k + 1 of each column */
            prefetch_l2(next, share);
            UNROLL for (int v = 0; v < FMA_VECTORS; v++) both[v] = *(const u32v *)(w + 2 * v * WIDTH);
            UNROLL for (int r = 0; r < count; r++)
                UNROLL for (int v = 0; v < FMA_VECTORS; v++) sums[r][v] += wide[r][k] * (f32v)(both[v] << 16);
            UNROLL for (int r = 0; r < count; r++)
                UNROLL for (int v = 0; v < FMA_VECTORS; v++) sums[r][v] += wide[r][k + 1] * (f32v)(both[v] & 0xffff0000);
        }
        UNROLL for (int r = 0; r < count; r++)
            UNROLL for (int v = 0; v < FMA_VECTORS; v++) *(f32v *)(out[r] + first + v * WIDTH) = sums[r][v];
    }
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
enum { GEMM_IS_FP32 = 0 };
static int dot_bf16_is_faster; /* whether `vdpbf16ps` is, which has half the rate of FMA on Intel's CPUs and twice that rate on AMD's */

/* `fma_tile` with products of bf16. */
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
#else
enum { dot_bf16_is_faster = has_amx, GEMM_IS_FP32 = !has_amx };
#define dot_tile fma_tile
#endif

/* out [rows, BLOCK_N] = x [rows, width] times one block of weights. */
ALWAYS_INLINE void gemm_skinny(int with_dot, int64_t rows, const bf16 *x, int64_t width, const bf16 *weight, float (*out)[BLOCK_N]) {
    const int64_t most = with_dot ? DOT_M : FMA_M, groups = (rows + most - 1) / most;
    const int64_t share = with_dot && rows <= 4 ? 0 : (4 * BLOCK_N + groups - 1) / groups; /* for up to 4 rows the CPU's own prefetching is faster */
    memset(out, 0, rows * sizeof *out);
    for (int64_t from = 0, size; from < width; from += size) {
        const char *next = (const char *)(weight + (from + BF16_BLOCK_K) * BLOCK_N);
        size = width - from > BF16_BLOCK_K ? BF16_BLOCK_K : width - from;
        for (int64_t g = 0, r = 0, count; g < groups; g++, r += count, next += size / 2 * share) {
            const bf16 *y = x + r * width + from, *w = weight + from * BLOCK_N;
            count = (rows - r) / (groups - g);
            if (with_dot) WITH_ROWS(DOT_M, count, dot_tile, y, width, size, w, next, share, out + r);
            else WITH_ROWS(FMA_M, count, fma_tile, y, width, size, w, next, share, out + r);
        }
    }
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define KEEP(out) __asm__ volatile("" : : "r"(out) : "memory") /* a compiler leaves out products that nobody reads */

/* Called once, before all else: times both on numbers that fit the L1 cache, which takes some 50 microseconds. */
void prepare(void) {
    bf16 x[DOT_M * 128] = {0}, weight[128 * BLOCK_N] = {0};
    float out[DOT_M][BLOCK_N];
    uint64_t min_cycles[2] = {UINT64_MAX, UINT64_MAX};
    for (int run = 0; run < 16; run++) {
        const uint64_t begin = __builtin_ia32_rdtsc();
        gemm_skinny(0, DOT_M, x, 128, weight, out);
        KEEP(out);
        const uint64_t middle = __builtin_ia32_rdtsc();
        gemm_skinny(1, DOT_M, x, 128, weight, out);
        KEEP(out);
        const uint64_t end = __builtin_ia32_rdtsc();
        min_cycles[0] = middle - begin < min_cycles[0] ? middle - begin : min_cycles[0];
        min_cycles[1] = end - middle < min_cycles[1] ? end - middle : min_cycles[1];
    }
    dot_bf16_is_faster = min_cycles[1] < min_cycles[0];
}
#else
void prepare(void) {}
#endif

#ifndef __AMX_BF16__
/* By the faster instruction. */
static void gemm_bf16(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]) {
    const int64_t first = tile * in->tile_rows, last = first + tiles * in->tile_rows, rows = (last < in->rows ? last : in->rows) - first;
    const bf16 *weight = (const bf16 *)layer->weight + block * in->width * BLOCK_N;
    const bf16 *x = in->x + first * in->width;
    if (dot_bf16_is_faster) gemm_skinny(1, rows, x, in->width, weight, out);
    else gemm_skinny(0, rows, x, in->width, weight, out);
}
#endif
