/* Vectors of WIDTH numbers, in the compiler's own notation, and the functions of them that all kernels share. */
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

/* tile(rows, ...), an inlined function, with a constant for `rows`, which is 1 to `most`, so that its sums are registers; most: 2 to 6. */
#define WITH_ROWS(most, rows, tile, ...) \
    do { \
        if (rows == 1) tile(1, __VA_ARGS__); \
        else if (rows == 2) tile(2, __VA_ARGS__); \
        else if (most > 3 && rows == 3) tile(3, __VA_ARGS__); \
        else if (most > 4 && rows == 4) tile(4, __VA_ARGS__); \
        else if (most > 5 && rows == 5) tile(5, __VA_ARGS__); \
        else tile(most, __VA_ARGS__); \
    } while (0)

/* Numbers of a vector: as many as registers have, as GCC 12 computes wider vectors in memory. */
#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
typedef float f32v __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
typedef float f32x4 __attribute__((vector_size(16), aligned(4)));
typedef int32_t i32v __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint32_t u32v __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int64_t i64v __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint16_t bf16v __attribute__((vector_size(2 * WIDTH), aligned(2)));
typedef uint16_t u16v __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int16_t i16v __attribute__((vector_size(2 * WIDTH), aligned(2)));
typedef int8_t i8v __attribute__((vector_size(WIDTH), aligned(1)));

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

/* Without intrinsics GCC 12 converts the numbers in parts. */
static inline f32v widen_all(const bf16 *x) {
#if defined(__AVX512F__)
    return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#elif defined(__AVX2__)
    return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
#else
    return (f32v)vshll_n_u16(vld1_u16(x), 16);
#endif
}

/* The bits of the lanes in which a mask is set. */
static inline unsigned bits_of(i32v mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__)
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#else
    unsigned bits = 0;
    for (int i = 0; i < WIDTH; i++) bits |= (unsigned)(mask[i] & 1) << i;
    return bits;
#endif
}

/* The number in each of WIDTH bytes. */
static inline i32v widen_unsigned(const uint8_t *x) {
#ifdef __AVX512F__
    return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
#elif defined(__AVX2__)
    return (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
#else
    return __builtin_convertvector(*(const i8v *)x, i32v);
#endif
}

/* Numbers of 8 bits. */
static inline i8v narrow_bytes(i32v x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    return (i8v)_mm_cvtsi128_si64(_mm_packs_epi16(half, half));
#else
    return __builtin_convertvector(x, i8v);
#endif
}

/* To the nearest bf16, ties to even. */
static inline bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

/* `narrow` of all lanes. */
static inline bf16v narrow_all(f32v x) {
    u32v bits = (u32v)x, is_number = (u32v)(x == x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & is_number) | (0x7fc0 & ~is_number), bf16v);
}

/* exp(x) for x <= 88, to some 2 units in the last place; 0 below -87. */
static inline f32v exp_all(f32v x) {
    const f32v round = 12582912.0f - (f32v){0}; /* adding it leaves no room for a fraction */
    i32v large = x >= -87.0f;
    f32v safe = (f32v)((i32v)x & large), n = safe * 1.44269504f + round - round;
    f32v f = safe - n * 0.693359375f + n * 2.12194440e-4f, p = f * (1.0f / 5040) + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    i32v scale = (__builtin_convertvector(n, i32v) + 127) << 23;
    return (f32v)((i32v)(p * (f32v)scale) & large);
}

/* x / (1 + exp(-x)). */
static inline f32v silu(f32v x) {
    x = (f32v)((i32v)x & ~(x < -87.0f)); /* it is 0 below */
    return x / (1 + exp_all(-x));
}

/* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is x times the logistic function of twice the argument. */
static inline f32v gelu_tanh(f32v x) {
    f32v y = 1.5957691216f * (x + 0.044715f * x * x * x);
    i32v low = y < -87.0f;
    y = (f32v)((i32v)y & ~low);
    return (f32v)((i32v)(x / (1 + exp_all(-y))) & ~low);
}

static inline float reduce_add(f32v x) {
    union { f32v all; f32x4 part[WIDTH / 4]; } a = {x};
    for (int count = WIDTH / 8; count; count /= 2)
        for (int i = 0; i < count; i++) a.part[i] += a.part[i + count];
    return (a.part[0][0] + a.part[0][1]) + (a.part[0][2] + a.part[0][3]);
}

/* The largest of x [size], size a multiple of WIDTH. */
static inline float max_of(const float *x, int64_t size) {
    f32v maxima = *(const f32v *)x;
    for (int64_t i = WIDTH; i < size; i += WIDTH) {
        const f32v chunk = *(const f32v *)(x + i);
        maxima = (f32v)(((i32v)chunk & (chunk > maxima)) | ((i32v)maxima & ~(chunk > maxima)));
    }
    float largest = maxima[0];
    for (int i = 1; i < WIDTH; i++) largest = maxima[i] > largest ? maxima[i] : largest;
    return largest;
}

/* The sum of each of WIDTH vectors. */
ALWAYS_INLINE f32v reduce_add_each(f32v *x) {
#if defined(__AVX512F__)
    UNROLL for (int step = 1; step < WIDTH; step *= 2) {
        const int right = 0xffff - 0xffff / ((1 << step) + 1); /* the lanes whose number has the bit of `step` */
        int32_t moved[WIDTH];
        for (int i = 0; i < WIDTH; i++) moved[i] = i & step ? WIDTH + i - step : i + step;
        UNROLL for (int i = 0; i < WIDTH / 2 / step; i++) {
            const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
            x[i] = (f32v)_mm512_mask_blend_ps(right, a, b) + (f32v)_mm512_permutex2var_ps(a, _mm512_loadu_si512(moved), b);
        }
    }
    return x[0];
#elif defined(__AVX__)
    __m256 sums[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const __m256 a = (__m256)x[i], b = (__m256)x[i + 4];
        sums[i] = _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
    }
    return (f32v)_mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
#else
    return (f32v)vpaddq_f32(vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]), vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]));
#endif
}

#endif
