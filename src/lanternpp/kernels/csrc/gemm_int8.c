/* Weights in 8 bits: how rows of inputs are quantised, and the products of CPUs without tiles. See gemm.h for the three ways. */
#include "gemm.h"

static const float ROUND = 12582912.0f; /* added to a float of up to 22 bits, its lower bits are the nearest whole number's */

/* The largest magnitude of x [count], as bits, which are in the order of the numbers. */
static inline bf16 largest_magnitude(const bf16 *x, int64_t count) {
    bf16 largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t k = 0; k < count; k++) {
        const bf16 magnitude = x[k] & 0x7fff;
        largest = largest > magnitude ? largest : magnitude;
    }
    return largest;
}

static inline i32v nearest(f32v x) { return (i32v)(x + ROUND) - 0x4b400000; }

/* Weights of a block from input `from` on in 8 bits: all, or of weights of 4 bits those of up to BLOCK_K inputs, in `unpacked`. Returns how many
   inputs these are. next: where the weights lie that follow BLOCK_K inputs later, in their own bits. */
static int64_t load_weights(const Linear *layer, int64_t block, int64_t width, int64_t from, char *unpacked, const char **weight, const char **next) {
    const char *packed = (const char *)layer->weight + block * width * (layer->is_int4 ? 1 + BLOCK_N / 2 : BLOCK_N), *numbers = packed + width;
    const u16v zero = 0x8080 - (u16v){0}, flip = zero ^ (0x101 * WEIGHT_ZERO); /* with `zero` no byte borrows from the next one */
    int64_t k = from;
    *weight = layer->is_int4 ? unpacked : packed + from * BLOCK_N;
    *next = layer->is_int4 ? numbers + (from + BLOCK_K) * BLOCK_N / 2 : packed + (from + BLOCK_K) * BLOCK_N;
    if (!layer->is_int4) return width - from;
    for (; k < from + BLOCK_K && k < width; k += INT4_GROUP) {
        u16v factor[BLOCK_N / WIDTH], offset[BLOCK_N / WIDTH];
        prefetch_l2(packed + k + BLOCK_K, INT4_GROUP);
        UNROLL for (int c = 0; c < BLOCK_N / WIDTH; c++) {
            const i32v wide = widen_unsigned((const uint8_t *)packed + k + c * WIDTH) - FACTOR_ZERO;
            factor[c] = (u16v)((wide & 0xffff) * 0x10001);
            offset[c] = zero - 0x0808 * factor[c];
        }
        UNROLL for (int i = 0; i < INT4_GROUP; i += 8, unpacked += 8 * BLOCK_N)
            UNROLL for (int c = 0; c < BLOCK_N / WIDTH; c++) {
                const u16v two = *(const u16v *)(numbers + (k + i) * BLOCK_N / 2 + 4 * c * WIDTH);
                *(u16v *)(unpacked + 4 * c * WIDTH) = ((two & 0x0f0f) * factor[c] + offset[c]) ^ flip;
                *(u16v *)(unpacked + 4 * (BLOCK_N + c * WIDTH)) = ((two >> 4 & 0x0f0f) * factor[c] + offset[c]) ^ flip;
            }
    }
    return k - from;
}

#ifdef INT8_GROUPED
/* Group by group. Threads begin with different groups, as the scales of a group share a cache line. */
static void quantize_rows(const Inputs *in, int64_t first, int64_t last) {
    const int64_t groups = in->width / K_ALIGN;
    for (int64_t i = 0; in->is_int8 && first < last && i < groups; i++)
        for (int64_t g = (i + first * groups / in->rows) % groups, row = first; row < last; row++) {
            const int64_t at = (row / TILE_M * groups + g) * TILE_M + row % TILE_M;
            const bf16 *x = in->x + row * in->width + g * K_ALIGN, largest = largest_magnitude(x, K_ALIGN);
            const float scale = widen(largest) / 127;
            const float inverse = scale > 1e-30f && largest < 0x7f80 ? 1 / scale : 0;
            int8_t *number = in->number + at * K_ALIGN;
            i32v sum = {0};
            for (int64_t k = 0; k < K_ALIGN; k += WIDTH) {
                const i32v some = nearest(widen_all(x + k) * inverse);
                sum += some;
                *(i8v *)(number + k) = narrow_bytes(some);
            }
            int32_t total = 0;
            for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
            in->scale[at] = largest < 0x7f80 ? scale : NAN;
            in->start[at] = -WEIGHT_ZERO * total;
        }
}

/* The vectors of products: DOT_N outputs, of each 4 inputs. */
#if defined(__AVX512VNNI__)
enum { DOT_N = 16, GROUPED_M = 6 };
typedef __m512i dot_vec;
#ifndef DOT4 /* with the intrinsic GCC 12 copies every sum twice */
#define DOT4(sum, weight, x) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x))
#endif
#elif defined(__AVXVNNI__)
enum { DOT_N = 8, GROUPED_M = 3 };
typedef __m256i dot_vec;
#define DOT4(sum, weight, x) sum = _mm256_dpbusd_avx_epi32(sum, weight, x)
#else
enum { DOT_N = 4, GROUPED_M = 6 };
typedef int32x4_t dot_vec;
/* The products of 4 of 16 inputs x; the intrinsic of GCC 12 wants an architecture beside the extension. */
#define DOT4_LANE(sum, weight, x, lane) __asm__("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(sum) : "w"(weight), "w"(x))
#endif
typedef int32_t dot_ints __attribute__((vector_size(4 * DOT_N), aligned(4)));
typedef float dot_floats __attribute__((vector_size(4 * DOT_N), aligned(4)));

/* Add the sums of `count` rows (a constant) over some groups to out, or with `first` store them, without the outputs' scales.

   Each group fetches `share` bytes of `next`, a multiple of 64, a line for every 4 inputs until all are. */
ALWAYS_INLINE void grouped_tile(int count, const int8_t *x, const float *scale, const int32_t *start, int64_t groups, const char *weight,
                                const char *next, int64_t share, int first, float (*out)[BLOCK_N]) {
    for (int column = 0; column < BLOCK_N; column += 2 * DOT_N) {
        const int8_t *number = x;
        const char *w = weight + 4 * column;
        const int64_t fetched = 16 * K_ALIGN * (column / (2 * DOT_N)), to_fetch = share - fetched; /* with the columns before, and from here on */
        dot_floats sums[GROUPED_M][2] = {0};
        if (!first)
            UNROLL for (int r = 0; r < count; r++)
                UNROLL for (int v = 0; v < 2; v++) sums[r][v] = *(const dot_floats *)(out[r] + column + v * DOT_N);
        for (int64_t g = 0; g < groups; g++, number += TILE_M * K_ALIGN) {
            dot_vec products[GROUPED_M][2];
            UNROLL for (int r = 0; r < count; r++) {
                const dot_ints begin = start[g * TILE_M + r] - (dot_ints){0};
                UNROLL for (int v = 0; v < 2; v++) products[r][v] = (dot_vec)begin;
            }
#if defined(__ARM_FEATURE_DOTPROD)
            for (int k = 0; k < K_ALIGN; k += 16, w += 16 * BLOCK_N) {
                const dot_vec *weights = (const dot_vec *)w; /* BLOCK_N / DOT_N = 8 vectors for each 4 inputs */
                if (16 * k < to_fetch) prefetch_l2(next + g * share + fetched + 16 * k, 256);
                UNROLL for (int r = 0; r < count; r++) {
                    const dot_vec x_all = (dot_vec) * (const dot_ints *)(number + r * K_ALIGN + k);
                    UNROLL for (int v = 0; v < 2; v++) {
                        DOT4_LANE(products[r][v], weights[v], x_all, 0);
                        DOT4_LANE(products[r][v], weights[8 + v], x_all, 1);
                        DOT4_LANE(products[r][v], weights[16 + v], x_all, 2);
                        DOT4_LANE(products[r][v], weights[24 + v], x_all, 3);
                    }
                }
            }
#else
            UNROLL for (int k = 0; k < K_ALIGN; k += 4, w += 4 * BLOCK_N) {
                if (16 * k < to_fetch) prefetch_l2(next + g * share + fetched + 16 * k, 64);
                const dot_vec left = (dot_vec) * (const dot_ints *)w, right = (dot_vec) * (const dot_ints *)(w + 4 * DOT_N);
                UNROLL for (int r = 0; r < count; r++) {
                    int32_t four;
                    memcpy(&four, number + r * K_ALIGN + k, 4);
                    const dot_vec x_four = (dot_vec)(four - (dot_ints){0});
                    DOT4(products[r][0], left, x_four);
                    DOT4(products[r][1], right, x_four);
                }
            }
#endif
            UNROLL for (int r = 0; r < count; r++)
                UNROLL for (int v = 0; v < 2; v++)
                    sums[r][v] += __builtin_convertvector((dot_ints)products[r][v], dot_floats) * scale[g * TILE_M + r];
        }
        UNROLL for (int r = 0; r < count; r++)
            UNROLL for (int v = 0; v < 2; v++) *(dot_floats *)(out[r] + column + v * DOT_N) = sums[r][v];
    }
}

static void gemm_int8(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]) {
    const int64_t groups = in->width / K_ALIGN, first = tile * TILE_M, left = in->rows - first;
    const int64_t rows = tiles * TILE_M < left ? tiles * TILE_M : left;
    char unpacked[BLOCK_K * BLOCK_N] __attribute__((aligned(64)));
    int64_t visits = 0; /* of the weights by groups of rows */
    for (int64_t r = 0; r < rows; r += TILE_M) visits += ((rows - r < TILE_M ? rows - r : TILE_M) + GROUPED_M - 1) / GROUPED_M;
    const int64_t share = layer->is_int4 || visits > 1 || DOT_N < 16 ? up_to(64, (K_ALIGN * BLOCK_N >> layer->is_int4) / visits) : 0;
    for (int64_t g = 0, some; g < groups; g += some) {
        const char *w, *next;
        some = load_weights(layer, block, in->width, g * K_ALIGN, unpacked, &w, &next) / K_ALIGN;
        if (visits > 1 && some > BLOCK_K / K_ALIGN) some = BLOCK_K / K_ALIGN;
        for (int64_t t = 0; t < rows; t += TILE_M) {
            const int64_t in_tile = rows - t < TILE_M ? rows - t : TILE_M, parts = (in_tile + GROUPED_M - 1) / GROUPED_M;
            const int64_t at = ((first + t) / TILE_M * groups + g) * TILE_M;
            for (int64_t part = 0, r = 0, count; part < parts; part++, r += count, next += some * share) {
                const int8_t *x = in->number + (at + r) * K_ALIGN;
                count = (in_tile - r) / (parts - part);
                WITH_ROWS(GROUPED_M, count, grouped_tile, x, in->scale + at + r, in->start + at + r, some, w, next, share, g == 0, out + t + r);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < BLOCK_N; c++) out[r][c] *= layer->scale[block * BLOCK_N + c];
}

#else /* 16 bits: no product's sum leaves 32 bits, as the magnitudes of a row add up to some 16 million */
static void quantize_row(const Inputs *in, int64_t row) {
    const bf16 *x = in->x + row * in->width, largest = largest_magnitude(x, in->width);
    f32v total = {0};
    for (int64_t k = 0; k < in->width; k += WIDTH) {
        const f32v chunk = widen_all(x + k);
        total += (f32v)((i32v)chunk & 0x7fffffff);
    }
    const float scale_of_largest = widen(largest) / 0x7f7f, scale_of_sum = reduce_add(total) / 16000000, scale = scale_of_largest > scale_of_sum ? scale_of_largest : scale_of_sum;
    const float inverse = scale > 1e-30f && largest < 0x7f80 ? 1 / scale : 0;
    in->scale[row] = largest < 0x7f80 ? scale : NAN;
#ifdef INT8_PLANES
    enum { PLANE = TILE_M * K_ALIGN };
    int8_t *upper = in->number + row / in->tile_rows * 2 * TILE_M * in->width + row % in->tile_rows * K_ALIGN;
    for (int64_t k = 0; k < in->width; k += WIDTH) {
        const i32v number = nearest(widen_all(x + k) * inverse), low = number << 24 >> 24;
        int8_t *numbers = upper + k / K_ALIGN * 2 * PLANE + k % K_ALIGN;
        *(i8v *)numbers = __builtin_convertvector((number - low) >> 8, i8v);
        *(i8v *)(numbers + PLANE) = __builtin_convertvector(low, i8v);
    }
#else
    int16_t *numbers = (int16_t *)in->number + row * in->width;
    for (int64_t k = 0; k < in->width; k += WIDTH)
        *(i16v *)(numbers + k) = __builtin_convertvector(nearest(widen_all(x + k) * inverse), i16v);
#endif
}

static void quantize_rows(const Inputs *in, int64_t first, int64_t last) {
    for (; in->is_int8 && first < last; first++) quantize_row(in, first);
}
#endif

#ifdef INT8_WIDE
enum { WIDE_M = 4 };

#if defined(__AVX512BW__)
static inline i32v widen_bytes(const int8_t *x) { return (i32v)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)x)); }
static inline i32v multiply_pairs(i32v a, i32v b) { return (i32v)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
static inline i32v add_pairs(i32v a, i32v b) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return (i32v)_mm512_permutex2var_epi32((__m512i)a, even, (__m512i)b) + (i32v)_mm512_permutex2var_epi32((__m512i)a, odd, (__m512i)b);
}
#elif defined(__AVX2__)
static inline i32v widen_bytes(const int8_t *x) { return (i32v)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)x)); }
static inline i32v multiply_pairs(i32v a, i32v b) { return (i32v)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static inline i32v add_pairs(i32v a, i32v b) { return (i32v)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)a, (__m256i)b), 0xd8); }
#endif

/* Sums of `size` inputs of `count` rows, a constant, `width` apart. Meanwhile the weights at `next`, where it is not null, are fetched. */
ALWAYS_INLINE void wide_tile(int count, const int16_t *x, int64_t width, int64_t size, const int8_t *weight, const char *next, int next_bytes,
                             int32_t (*sums)[BLOCK_N]) {
#if defined(__AVX2__)
    enum { COLUMNS = WIDTH / 2 }; /* of a vector, which has two sums for each */
    const int vectors = WIDTH == 16 || count <= 2 ? 4 : 2; /* as there are registers */
    for (int first = 0; first < BLOCK_N; first += vectors * COLUMNS, next = 0) {
        i32v parts[WIDE_M][4] = {0}, w[4];
        const int8_t *from = weight + 4 * first;
        for (int64_t k = 0; k < size; k += 4, from += 4 * BLOCK_N) {
            if (next) prefetch_l2(next + k / 4 * next_bytes, next_bytes);
            UNROLL for (int c = 0; c < vectors; c++) w[c] = widen_bytes(from + 4 * COLUMNS * c);
            UNROLL for (int r = 0; r < count; r++) {
                int64_t four;
                memcpy(&four, x + r * width + k, 8);
                const i32v x_four = (i32v)(four - (i64v){0});
                UNROLL for (int c = 0; c < vectors; c++) parts[r][c] += multiply_pairs(x_four, w[c]);
            }
        }
        UNROLL for (int r = 0; r < count; r++)
            UNROLL for (int c = 0; c < vectors; c += 2) *(i32v *)(sums[r] + first + COLUMNS * c) = add_pairs(parts[r][c], parts[r][c + 1]);
    }
#else
    for (int r = 0; r < count; r++, x += width) {
        int32_t all[BLOCK_N] = {0};
        for (int64_t k = 0; k < size; k += 4)
            for (int c = 0; c < BLOCK_N; c++) {
                const int8_t *w = weight + k * BLOCK_N + 4 * c;
                all[c] += x[k] * w[0] + x[k + 1] * w[1] + x[k + 2] * w[2] + x[k + 3] * w[3];
            }
        memcpy(sums[r], all, sizeof all);
    }
#endif
}

static void gemm_int8(const Linear *layer, int64_t block, const Inputs *in, int64_t tile, int64_t tiles, float (*out)[BLOCK_N]) {
    const int64_t first = tile * TILE_M, rows = (first + tiles * TILE_M < in->rows ? first + tiles * TILE_M : in->rows) - first;
    char unpacked[BLOCK_K * BLOCK_N] __attribute__((aligned(64)));
    for (int64_t from = 0, size; from < in->width; from += size) {
        const char *weight, *next;
        size = load_weights(layer, block, in->width, from, unpacked, &weight, &next);
        for (int64_t r = 0, groups = (rows + WIDE_M - 1) / WIDE_M, count; groups; groups--, r += count, next = 0) {
            const int16_t *x = (const int16_t *)in->number + (first + r) * in->width + from;
            int32_t sums[WIDE_M][BLOCK_N];
            count = (rows - r) / groups;
            WITH_ROWS(WIDE_M, count, wide_tile, x, in->width, size, (const int8_t *)weight, next, 4 * BLOCK_N >> layer->is_int4, sums);
            for (int64_t i = 0; i < count; i++)
                for (int64_t c = 0; c < BLOCK_N; c++)
                    out[r + i][c] = (from ? out[r + i][c] : 0) + sums[i][c] * (in->scale[first + r + i] * layer->scale[block * BLOCK_N + c]);
        }
    }
}
#endif
