/* Vectors of LANES numbers, in the compiler's own notation, and the functions of them that all kernels share. */
#ifndef SIMD_H
#define SIMD_H

#include "kernels.h"
#include <math.h>
#include <string.h>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
typedef float f32x4 __attribute__((vector_size(16), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t bf16x16 __attribute__((vector_size(32), aligned(2)));
typedef int16_t i16x16 __attribute__((vector_size(32), aligned(2)));
typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1)));

static inline int64_t up_to(int64_t multiple, int64_t x) { return (x + multiple - 1) / multiple * multiple; }
static inline int64_t align64(int64_t bytes) { return up_to(64, bytes); }

/* The next `bytes` of an arena, which moves on. */
static inline void *arena_alloc(char **at, int64_t bytes) {
    void *memory = *at;
    *at += align64(bytes);
    return memory;
}

static inline void prefetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i);
}

/* Into the L2 cache alone. */
static inline void prefetch_l2(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Without intrinsics GCC 12 converts the 16 numbers in parts. */
static inline f32x16 widen_all(const bf16 *x) {
#ifdef __AVX512F__
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#else
    return (f32x16)(__builtin_convertvector(*(const bf16x16 *)x, u32x16) << 16);
#endif
}

/* The bits of the lanes in which a mask is set. */
static inline unsigned bits_of(i32x16 mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    unsigned bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (unsigned)(mask[i] & 1) << i;
    return bits;
#endif
}

/* 0 or 1 in each lane, of LANES bytes. */
static inline i32x16 widen_flags(const uint8_t *x) {
#ifdef __AVX512F__
    return (i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
#else
    return __builtin_convertvector(*(const i8x16 *)x, i32x16);
#endif
}

/* To the nearest bf16, ties to even. */
static inline bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

/* `narrow` of all lanes. */
static inline bf16x16 narrow_all(f32x16 x) {
    u32x16 bits = (u32x16)x, is_number = (u32x16)(x == x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & is_number) | (0x7fc0 & ~is_number), bf16x16);
}

/* exp(x) for x <= 88, to some 2 units in the last place; 0 below -87. */
static inline f32x16 exp_all(f32x16 x) {
    const f32x16 round = 12582912.0f - (f32x16){0}; /* adding it leaves no room for a fraction */
    i32x16 large = x >= -87.0f;
    f32x16 safe = (f32x16)((i32x16)x & large), n = safe * 1.44269504f + round - round;
    f32x16 f = safe - n * 0.693359375f + n * 2.12194440e-4f, p = f * (1.0f / 5040) + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    i32x16 scale = (__builtin_convertvector(n, i32x16) + 127) << 23;
    return (f32x16)((i32x16)(p * (f32x16)scale) & large);
}

/* x / (1 + exp(-x)). */
static inline f32x16 silu(f32x16 x) {
    x = (f32x16)((i32x16)x & ~(x < -87.0f)); /* it is 0 below */
    return x / (1 + exp_all(-x));
}

/* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is x times the logistic function of twice the argument. */
static inline f32x16 gelu_tanh(f32x16 x) {
    f32x16 y = 1.5957691216f * (x + 0.044715f * x * x * x);
    i32x16 low = y < -87.0f;
    y = (f32x16)((i32x16)y & ~low);
    return (f32x16)((i32x16)(x / (1 + exp_all(-y))) & ~low);
}

static inline float reduce_add(f32x16 x) {
    union { f32x16 all; f32x8 half[2]; } a = {x};
    union { f32x8 all; f32x4 half[2]; } b = {a.half[0] + a.half[1]};
    f32x4 sum = b.half[0] + b.half[1];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline f32x16 max_all(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    const i32x16 greater = b > a;
    return (f32x16)(((i32x16)b & greater) | ((i32x16)a & ~greater));
#endif
}

/* The largest of x [size], size a multiple of LANES. */
static inline float max_of(const float *x, int64_t size) {
    f32x16 maxima = *(const f32x16 *)x;
    for (int64_t i = LANES; i < size; i += LANES) maxima = max_all(maxima, *(const f32x16 *)(x + i));
    float largest = maxima[0];
    for (int i = 1; i < LANES; i++) largest = maxima[i] > largest ? maxima[i] : largest;
    return largest;
}

/* The sum of each of LANES vectors. */
ALWAYS_INLINE f32x16 reduce_add_each(f32x16 *x) {
#ifdef __AVX512F__
    UNROLL for (int step = 1; step < LANES; step *= 2) {
        const int right = 0xffff - 0xffff / ((1 << step) + 1); /* the lanes whose number has the bit of `step` */
        int32_t moved[LANES];
        for (int i = 0; i < LANES; i++) moved[i] = i & step ? LANES + i - step : i + step;
        UNROLL for (int i = 0; i < LANES / 2 / step; i++) {
            const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
            x[i] = (f32x16)_mm512_mask_blend_ps(right, a, b) + (f32x16)_mm512_permutex2var_ps(a, _mm512_loadu_si512(moved), b);
        }
    }
    return x[0];
#else
    f32x16 sums;
    for (int i = 0; i < LANES; i++) sums[i] = reduce_add(x[i]);
    return sums;
#endif
}

#endif
