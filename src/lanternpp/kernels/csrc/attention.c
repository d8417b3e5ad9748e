/* Attention of a few queries over the keys and values of one head. Channels of a head are padded to a multiple of HEAD_ALIGN. */
#include "gemm.h"

/* Vectors of channels, and queries, whose values are summed at once, as there are registers. */
enum { HEAD_ALIGN = 32, VALUE_VECTORS = 4, QUERY_TILE = WIDTH == 16 ? 4 : 2 };

/* The sums where their mask [count] is set, else -infinity; up to WIDTH are read of the mask. */
static inline f32v masked(f32v sums, const uint8_t *mask, int64_t count) {
    uint8_t mask_bytes[WIDTH] = {0};
    if (count < WIDTH) mask = memcpy(mask_bytes, mask, count > 0 ? count : 0);
    const i32v kept = widen_unsigned(mask) != 0, negative_infinity = (i32v)((f32v){0} - INFINITY);
    return (f32v)(((i32v)sums & kept) | (negative_infinity & ~kept));
}

/* exp(x) over its sum, of x [size], size a multiple of WIDTH. */
static void softmax(float *x, int64_t size) {
    const float highest = max_of(x, size);
    f32v total = {0};
    for (int64_t j = 0; j < size; j += WIDTH) {
        f32v *chunk = (f32v *)(x + j);
        total += *chunk = exp_all(*chunk - highest);
    }
    const float scale = 1 / reduce_add(total);
    for (int64_t j = 0; j < size; j += WIDTH) *(f32v *)(x + j) *= scale;
}

#ifdef __AVX512BF16__
/* x [size] as bf16, where it was; size is a multiple of LANES. */
static void narrow_in_place(float *x, int64_t size) {
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        const __m512 lower = _mm512_loadu_ps(x + i), upper = i + LANES < size ? _mm512_loadu_ps(x + i + LANES) : _mm512_setzero_ps();
        _mm512_storeu_si512((bf16 *)x + i, (__m512i)_mm512_cvtne2ps_pbh(upper, lower));
    }
}

/* 32 channels of values [size, d] at slot j and at the next one, zeros after the last, in pairs. */
ALWAYS_INLINE void load_pairs(const bf16 *values, int64_t j, int64_t size, int64_t d, __m512i pairs[2]) {
    int16_t order[64];
    for (int i = 0; i < 64; i++) order[i] = i / 2 + i % 2 * 32;
    const __m512i even = j < size ? _mm512_loadu_si512(values + j * d) : _mm512_setzero_si512();
    const __m512i odd = j + 1 < size ? _mm512_loadu_si512(values + (j + 1) * d) : _mm512_setzero_si512();
    pairs[0] = _mm512_permutex2var_epi16(even, _mm512_loadu_si512(order), odd);
    pairs[1] = _mm512_permutex2var_epi16(even, _mm512_loadu_si512(order + 32), odd);
}
#endif

/* out [count] of [d] = weights [count, stride] times values [size, d]; count is a constant. Weights in pairs are of bf16, each row where its floats were. */
ALWAYS_INLINE void weigh_tile(int count, int in_pairs, const float *weights, int64_t stride, const bf16 *values, const bf16 *next, int64_t size,
                              int64_t d, bf16 **out) {
    for (int64_t i = 0; i < d; i += VALUE_VECTORS * WIDTH) {
        f32v sums[QUERY_TILE][VALUE_VECTORS] = {0};
        for (int64_t j = 0; !in_pairs && j < size; j++) {
            if (next && !i) prefetch_l2(next + j * d, 2 * d);
            UNROLL for (int c = 0; c < VALUE_VECTORS; c++) {
                if (i + c * WIDTH >= d) break;
                const f32v value = widen_all(values + j * d + i + c * WIDTH);
                UNROLL for (int q = 0; q < count; q++) sums[q][c] += weights[q * stride + j] * value;
            }
        }
#ifdef __AVX512BF16__
        for (int64_t j = 0; in_pairs && j < size; j += 2) {
            if (next && !i) prefetch_l2(next + j * d, 4 * d);
            UNROLL for (int c = 0; c < VALUE_VECTORS; c += 2) {
                if (i + c * WIDTH >= d) break;
                __m512i pairs[2];
                load_pairs(values + i + c * WIDTH, j, size, d, pairs);
                UNROLL for (int q = 0; q < count; q++) {
                    int32_t two;
                    memcpy(&two, (const bf16 *)(weights + q * stride) + j, 4);
                    UNROLL for (int v = 0; v < 2; v++)
                        sums[q][c + v] = (f32v)_mm512_dpbf16_ps((__m512)sums[q][c + v], (__m512bh)_mm512_set1_epi32(two), (__m512bh)pairs[v]);
                }
            }
        }
#endif
        for (int64_t q = 0; q < count; q++)
            for (int64_t c = 0; c < VALUE_VECTORS && i + c * WIDTH < d; c++) *(bf16v *)(out[q] + i + c * WIDTH) = narrow_all(sums[q][c]);
    }
}

/* `weigh_tile` for any count. Meanwhile the keys at `next` are fetched. */
ALWAYS_INLINE void weigh_values(int in_pairs, const float *weights, int64_t stride, int64_t count, const bf16 *values, const bf16 *next,
                                int64_t size, int64_t d, bf16 **out) {
    for (int64_t tiles = (count + QUERY_TILE - 1) / QUERY_TILE, first = 0, tile; tiles; tiles--, first += tile) {
        const float *weight = weights + first * stride;
        const bf16 *fetched = first ? 0 : next;
        tile = (count - first) / tiles;
        WITH_ROWS(QUERY_TILE, tile, weigh_tile, in_pairs, weight, stride, values, fetched, size, d, out + first);
    }
}

/* Attention of `count` queries [count, d] over keys and values [size, d], query q where its mask is set: out [count] of [d].

   weights [count, stride] is scratch, stride a multiple of LANES and at least size. A query's result depends on that query alone. */
ALWAYS_INLINE void attend_f32(const float *query, int64_t count, const bf16 *keys, const bf16 *values, const bf16 *next,
                              const uint8_t **mask, int64_t size, int64_t d, float *weights, int64_t stride, bf16 **out) {
    for (int64_t j = 0; j < stride; j += WIDTH) {
        prefetch_l2(values + j * d, 2 * WIDTH * d);
        f32v key[WIDTH][d / WIDTH]; /* slots after the last repeat the last */
        for (int64_t k = 0; k < WIDTH; k++)
            for (int64_t i = 0; i < d / WIDTH; i++)
                key[k][i] = widen_all(keys + (j + k < size ? j + k : size - 1) * d + i * WIDTH);
        for (int64_t q = 0; q < count; q++) {
            const f32v *query_chunks = (const f32v *)(query + q * d);
            f32v sums[WIDTH];
            UNROLL for (int k = 0; k < WIDTH; k++) {
                sums[k] = (f32v){0}; /* start from 0: of a sum of two products a compiler chooses which one it rounds */
                for (int64_t i = 0; i < d / WIDTH; i++) sums[k] += query_chunks[i] * key[k][i];
            }
            *(f32v *)(weights + q * stride + j) = masked(reduce_add_each(sums), mask[q] + j, size - j);
        }
    }
    for (int64_t q = 0; q < count; q++) softmax(weights + q * stride, stride);
    weigh_values(0, weights, stride, count, values, next, size, d, out);
}

#ifdef __AVX512BF16__
/* `attend_f32` by products of bf16, to which queries and weights are rounded. While keys are read, values are fetched. */
ALWAYS_INLINE void attend_bf16(float *query, int64_t count, const bf16 *keys, const bf16 *values, const bf16 *next,
                               const uint8_t **mask, int64_t size, int64_t d, float *weights, int64_t stride, bf16 **out) {
    const int64_t full_size = size / LANES * LANES, tail_size = size - full_size;
    bf16 tail_keys[LANES * d]; /* the keys of the last vector of weights, zeros after them */
    memcpy(tail_keys, keys + full_size * d, 2 * tail_size * d);
    memset(tail_keys + tail_size * d, 0, 2 * (LANES - tail_size) * d);
    narrow_in_place(query, count * d);
    for (int64_t j = 0; j < size; j += LANES) {
        const bf16 *key = j < full_size ? keys + j * d : tail_keys;
        prefetch_l2(values + j * d, 2 * LANES * d);
        for (int64_t q = 0; q < count; q++) {
            const bf16 *query_channels = (const bf16 *)query + q * d;
            f32v sums[WIDTH];
            UNROLL for (int k = 0; k < LANES; k++) {
                __m512 sum = _mm512_setzero_ps();
                for (int64_t i = 0; i < d; i += 32)
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(query_channels + i), (__m512bh)_mm512_loadu_si512(key + k * d + i));
                sums[k] = (f32v)sum;
            }
            *(f32v *)(weights + q * stride + j) = masked(reduce_add_each(sums), mask[q] + j, size - j);
        }
    }
    for (int64_t q = 0; q < count; q++) {
        softmax(weights + q * stride, stride);
        narrow_in_place(weights + q * stride, stride);
    }
    weigh_values(1, weights, stride, count, values, next, size, d, out);
}
#endif

enum { FEW_QUERIES = 4 }; /* up to this many queries AMX tiles are slower */

/* `attend_f32` with constants, so that a key stays in registers: of channels where their number is usual, and of one query, which needs no copy of keys. */
static void attend(float *query, int64_t count, const bf16 *keys, const bf16 *values, const bf16 *next, const uint8_t **mask, int64_t size,
                   int64_t d, float *weights, int64_t stride, bf16 **out) {
#ifdef __AVX512BF16__
    if (dot_bf16_is_faster) {
        if (d == 64) attend_bf16(query, count, keys, values, next, mask, size, 64, weights, stride, out);
        else attend_bf16(query, count, keys, values, next, mask, size, d, weights, stride, out);
        return;
    }
#endif
#ifndef __AMX_BF16__
    if (d == 64 && count == 1) attend_f32(query, 1, keys, values, next, mask, size, 64, weights, stride, out);
    else if (d == 64) attend_f32(query, count, keys, values, next, mask, size, 64, weights, stride, out);
    else if (d == 128) attend_f32(query, count, keys, values, next, mask, size, 128, weights, stride, out);
    else attend_f32(query, count, keys, values, next, mask, size, d, weights, stride, out);
#endif
}

#ifdef __AMX_BF16__
/* Rows of 16 numbers of 32 bits as columns. */
static void transpose(__m512i x[16]) {
#pragma GCC unroll 4
    for (int step = 1; step < 16; step *= 2) {
        int32_t left[16], right[16];
        for (int i = 0; i < 16; i++) {
            left[i] = i & step ? 16 + i - step : i;
            right[i] = i & step ? 16 + i : i + step;
        }
        const __m512i first = _mm512_loadu_si512(left), second = _mm512_loadu_si512(right);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & step)) {
                const __m512i row = x[i];
                x[i] = _mm512_permutex2var_epi32(row, first, x[i + step]);
                x[i + step] = _mm512_permutex2var_epi32(row, second, x[i + step]);
            }
    }
}

/* Values [size, d] as tiles of weights: [up to 32 / 2, d, 2], slots in pairs, with zeros after the last. */
static void pack_values(const bf16 *values, int64_t size, int64_t d, bf16 *pairs) {
    for (int64_t j = 0; j < up_to(32, size); j += 2)
        for (int64_t i = 0; i < d; i += 32, pairs += 64) {
            __m512i two[2];
            load_pairs(values + i, j, size, d, two);
            _mm512_storeu_si512(pairs, two[0]);
            _mm512_storeu_si512(pairs + 32, two[1]);
        }
}

/* exp(x) for x <= 0, some 3e-6 of itself away, far less than what rounding to bf16 changes; 1e-38 below -87. */
static inline __m512 exp_rounded(__m512 x) {
    const __m512 y = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-126));
    const __m512 n = _mm512_roundscale_ps(y, 0), f = _mm512_sub_ps(y, n);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(9.6181291e-3f), _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(6.9314718e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(f, p, _mm512_set1_ps(1)), n);
}

/* `attend` for up to 16 queries, `step` floats apart, with the CPU's tiles; d is a multiple of 32.

   pairs: the values by `pack_values`. bias [size] of 16, `bias_stride` floats apart: 0 where a query's mask is set, else -infinity. Each 32
   channels of out are `out_stride` times as far apart as in order.
   scratch: 32 d bf16, and for up to a multiple of 32 slots 16 floats and 16 bf16 each. */
static void attend_amx(const float *query, int64_t step, int64_t count, const bf16 *keys, const bf16 *pairs,
                            const float *bias, int64_t bias_stride, int64_t size, int64_t d, char *scratch, bf16 **out, int64_t out_stride) {
    const int64_t stride = up_to(32, size);
    bf16 *packed = (bf16 *)scratch, *tail = packed + 16 * d, *weights;
    float *scores = (float *)(tail + 16 * d), totals[16]; /* of these 1 over the sum */
    weights = (bf16 *)(scores + 16 * stride);
    for (int64_t i = 0; i < d; i += 32) { /* [d / 2, 16, 2] */
        __m512i some[16];
        for (int64_t q = 0; q < 16; q++) {
            bf16 two[2 * LANES] = {0};
            for (int64_t j = 0; j < 32 && q < count; j += LANES)
                *(bf16v *)(two + j) = narrow_all(*(const f32v *)(query + q * step + i + j));
            some[q] = _mm512_loadu_si512(two);
        }
        transpose(some);
        for (int64_t j = 0; j < 16; j++) _mm512_storeu_si512(packed + 16 * i + 32 * j, some[j]);
    }
    for (int64_t j = 0; j < size; j += 16) {
        const bf16 *some = keys + j * d;
        if (size - j < 16) {
            memset(tail, 0, 32 * d);
            some = memcpy(tail, some, 2 * (size - j) * d);
        }
        _tile_zero(7);
        for (int64_t i = 0; i < d; i += 32) {
            _tile_loadd(5, some + i, 2 * d);
            _tile_loadd(6, packed + 16 * i, 64);
            _tile_dpbf16ps(7, 5, 6);
        }
        _tile_stored(7, scores + 16 * j, 64);
    }
    __m512 highest = _mm512_set1_ps(-3e38f);
    f32v total = {0};
    for (int64_t j = 0; j < size; j++) {
        __m512 score = _mm512_loadu_ps(scores + 16 * j) + _mm512_loadu_ps(bias + j * bias_stride);
        _mm512_storeu_ps(scores + 16 * j, score);
        highest = _mm512_max_ps(highest, score);
    }
    for (int64_t j = 0; j < size; j++) {
        const __m512 weight = exp_rounded(_mm512_sub_ps(_mm512_loadu_ps(scores + 16 * j), highest));
        _mm512_storeu_ps(scores + 16 * j, weight);
        total += (f32v)weight;
    }
    memset(scores + 16 * size, 0, 64 * (stride - size));
    *(f32v *)totals = 1 / (total + 1e-30f);
    /* From slots by queries to queries by slots, two slots at a time. */
    int16_t order[32];
    for (int i = 0; i < 16; i++) {
        order[2 * i] = i;
        order[2 * i + 1] = 16 + i;
    }
    for (int64_t j = 0; j < stride; j += 32) {
        __m512i some[16];
        for (int64_t k = 0; k < 16; k++) {
            const float *two = scores + 16 * (j + 2 * k);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(two + 16), _mm512_loadu_ps(two));
            some[k] = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
        }
        transpose(some);
        for (int64_t q = 0; q < count; q++) _mm512_storeu_si512(weights + q * stride + j, some[q]);
    }
    for (int64_t c = 0; c < d; c += 16) {
        float sums[16][16];
        _tile_zero(7);
        for (int64_t j = 0; j < stride; j += 32) {
            _tile_loadd(5, weights + j, 2 * stride);
            _tile_loadd(6, pairs + j * d + 2 * c, 4 * d);
            _tile_dpbf16ps(7, 5, 6);
        }
        _tile_stored(7, sums, 64);
        for (int64_t q = 0; q < count; q++)
            *(bf16v *)(out[q] + c / 32 * 32 * out_stride + c % 32) = narrow_all(*(f32v *)sums[q] * totals[q]);
    }
}
#endif

