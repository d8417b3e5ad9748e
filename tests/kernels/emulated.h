/* Products of bfloat16 and, with -DTILES, the tiles of AMX, computed in plain C on a CPU of AVX-512 that lacks them.

   Compiled in front of the kernels by `-include`, so that code for newer CPUs runs where tests run. Results are those of
   Intel's Software Developer's Manual (VDPBF16PS, VCVTNE2PS2BF16, TDPBF16PS, TDPBSSD), sizes of tiles included: a tile of a
   wrong size ends the process. Numbers too small for a normal float are not put to zero. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __AVX512F__
#error "the emulation is written for a CPU with AVX-512"
#endif

#ifndef __AVX512BF16__
#define __AVX512BF16__ 1

static inline float emulated_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline uint16_t emulated_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40;
}

static inline __m512 emulated_dpbf16(__m512 sums, __m512i a, __m512i b) {
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    const __m512 even = _mm512_mul_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16));
    const __m512 odd = _mm512_mul_ps((__m512)_mm512_and_si512(a, upper), (__m512)_mm512_and_si512(b, upper));
    return _mm512_add_ps(_mm512_add_ps(sums, odd), even);
}

static inline __m512i emulated_cvtne2(__m512 above, __m512 below) {
    float from[32];
    uint16_t to[32];
    _mm512_storeu_ps(from, below);
    _mm512_storeu_ps(from + 16, above);
    for (int i = 0; i < 32; i++) to[i] = emulated_half(from[i]);
    return _mm512_loadu_si512(to);
}

#define __m512bh __m512i
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtne2ps_pbh emulated_cvtne2
#endif

#if defined(TILES) && !defined(__AMX_BF16__)
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define __AMX_TILE__ 1

static __thread struct {
    int loaded, rows[8], bytes[8];
    uint8_t data[8][16][64];
} emulated;

static void emulated_need(int fits) {
    if (!fits) abort();
}

static void emulated_loadconfig(const void *from) {
    const uint8_t *config = from;
    emulated_need(config[0] == 1 && config[1] == 0);
    emulated.loaded = 1;
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * i, 2);
        emulated.bytes[i] = bytes;
        emulated.rows[i] = config[48 + i];
        emulated_need(bytes <= 64 && bytes % 4 == 0 && config[48 + i] <= 16);
    }
    memset(emulated.data, 0, sizeof emulated.data);
}

static void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }

static void emulated_zero(int tile) {
    emulated_need(emulated.loaded);
    memset(emulated.data[tile], 0, sizeof emulated.data[tile]);
}

static void emulated_loadd(int tile, const void *from, int64_t stride) {
    emulated_zero(tile);
    for (int r = 0; r < emulated.rows[tile]; r++) memcpy(emulated.data[tile][r], (const char *)from + r * stride, emulated.bytes[tile]);
}

static void emulated_stored(int tile, void *to, int64_t stride) {
    emulated_need(emulated.loaded);
    for (int r = 0; r < emulated.rows[tile]; r++) memcpy((char *)to + r * stride, emulated.data[tile][r], emulated.bytes[tile]);
}

/* Whether tile a [M, K] times tile b [K / pack, N] makes tile c [M, N]. */
static void emulated_fit(int c, int a, int b) {
    emulated_need(emulated.loaded && c != a && c != b && a != b);
    emulated_need(emulated.rows[c] == emulated.rows[a]);
    emulated_need(emulated.bytes[c] == emulated.bytes[b]);
    emulated_need(emulated.bytes[a] == 4 * emulated.rows[b]);
}

static void emulated_tdpbf16(int c, int a, int b) {
    emulated_fit(c, a, b);
    for (int m = 0; m < emulated.rows[c]; m++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        const __m512i upper = _mm512_set1_epi32(0xffff0000);
        for (int k = 0; k < emulated.rows[b]; k++) {
            int32_t pair;
            memcpy(&pair, emulated.data[a][m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(pair), y = _mm512_loadu_si512(emulated.data[b][k]);
            even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, upper), (__m512)_mm512_and_si512(y, upper), odd);
        }
        float *row = (float *)emulated.data[c][m];
        _mm512_storeu_ps(row, _mm512_add_ps(_mm512_loadu_ps(row), _mm512_add_ps(even, odd)));
    }
}

static void emulated_tdpbssd(int c, int a, int b) {
    emulated_fit(c, a, b);
    for (int m = 0; m < emulated.rows[c]; m++)
        for (int n = 0; n < emulated.bytes[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, emulated.data[c][m] + 4 * n, 4);
            for (int k = 0; k < emulated.bytes[a]; k++)
                sum += (int8_t)emulated.data[a][m][k] * (int8_t)emulated.data[b][k / 4][4 * n + k % 4];
            memcpy(emulated.data[c][m] + 4 * n, &sum, 4);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_tdpbf16
#define _tile_dpbssd emulated_tdpbssd
#define syscall(...) 0 /* the system lets the process use tiles */
#endif
