/* One pass of a pre-norm transformer decoder, in bfloat16, for inference on a CPU.

   The same function as `Decoder.forward` of decoder.py with a KV cache. PyTorch takes some 50 operations a layer for it, and
   for a few rows starting them costs more than computing them; here a layer is five stages with a barrier after each.
   Sums are float32, and so is the residual stream; weights, keys, values and the inputs of products are bfloat16. Weights may
   also have 8 bits: inputs are then whole numbers of 16 bits times a scale for each row, and sums are exact up to these scales.
   A row's result depends on that row alone and not on how many rows or threads there are. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define COLUMNS 32 /* of a block of weights: twice LANES */
#define ROWS 16    /* of a tile of inputs */
#define MOST_ROWS 128 /* of inputs whose products with a block of weights are computed before they are used */
#define CHUNK 256 /* inputs of a block that all rows are multiplied with before the next ones: they stay in the L1 cache */
#define LANES 16   /* channels of a head that are handled at once */
#define CHANNELS 4 /* of such vectors that attention sums at once */
#define QUERIES 4  /* that attention handles at once */
#define STEP (4 * COLUMNS) /* bytes of weights that are multiplied with rows of inputs at once */
#define MOST_WHOLE 30 /* rows that are multiplied with a block of weights in 8 bits before the next one, without tiles */
#define DEPTH 64   /* inputs of a tile of weights in 8 bits */
#define AHEAD 16384 /* bytes of weights between what is multiplied and what is fetched */

typedef uint16_t half; /* a bfloat16: the upper half of a float */
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float eight __attribute__((vector_size(32), aligned(4)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));

/* A linear layer: weights [blocks, inputs / 2, COLUMNS, 2], so that a block is read from front to back.

   In 8 bits they are [blocks, inputs / 4, COLUMNS, 4], with zeros up to a multiple of DEPTH inputs. */
typedef struct {
    const void *weight; /* half, or int8_t where there is a scale */
    const float *scale; /* [blocks, COLUMNS], or null */
    const float *bias;  /* [blocks, COLUMNS], or null */
    int64_t inputs, outputs;
} Linear;

typedef struct {
    const float *attention_norm, *ffn_norm; /* [dim]; the first may be null: no norm */
    Linear wqkv, wo, w13, w2;               /* of w13, gate and up alternate by half blocks */
} Layer;

typedef struct {
    int64_t layers, dim, heads, kv_heads, head_dim, hidden;
    const float *norm; /* [dim], or null: no last norm */
    float eps;
} Shape;

typedef struct {
    int64_t rows, nodes, slots;
    const half *x;         /* [rows, nodes, dim] */
    const float *rotation; /* [rows, nodes, 2, head_dim] */
    const int64_t *slot;   /* [rows, nodes] */
    const uint8_t *mask;   /* [rows, nodes, slots], 0 or 1: what a node attends to */
    half *kv;              /* [layers, 2, rows, kv_heads, slots, head_dim] */
    half *out;             /* [rows, nodes, parts, dim]: the features, then what some layers return */
    char *scratch;         /* as many bytes as `scratch_bytes` says */
    int64_t parts;
    const int64_t *part; /* [layers]: the part of out that a layer's output goes to; 0: none */
} Pass;

static inline float widen(half x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Without intrinsics GCC 12 converts the 16 numbers in parts. */
static inline floats widen_all(const half *x) {
#ifdef __AVX512F__
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#else
    return (floats)(__builtin_convertvector(*(const halves *)x, words) << 16);
#endif
}

/* 0 or 1 in each lane, of LANES bytes. */
static inline ints flags(const uint8_t *x) {
#ifdef __AVX512F__
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
#else
    return __builtin_convertvector(*(const bytes *)x, ints);
#endif
}

/* To the nearest bfloat16, ties to even. */
static inline half narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (half)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

/* `narrow` of all lanes. */
static inline halves narrow_all(floats x) {
    words bits = (words)x, known = (words)(x == x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & known) | (0x7fc0 & ~known), halves);
}

/* exp(x) for x <= 88, to some 2 units in the last place; 0 below -87. */
static inline floats exponential(floats x) {
    const floats round = 12582912.0f - (floats){0}; /* adding it leaves no room for a fraction */
    ints large = x >= -87.0f;
    floats safe = (floats)((ints)x & large), n = safe * 1.44269504f + round - round;
    floats f = safe - n * 0.693359375f + n * 2.12194440e-4f, p = f * (1.0f / 5040) + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    ints scale = (__builtin_convertvector(n, ints) + 127) << 23;
    return (floats)((ints)(p * (floats)scale) & large);
}

/* x / (1 + exp(-x)). */
static inline floats silu(floats x) {
    x = (floats)((ints)x & ~(x < -87.0f)); /* it is 0 below */
    return x / (1 + exponential(-x));
}

/* Where inputs i to i + LANES of a row are: in [rows, inputs], or tile after tile in [rows / ROWS, inputs / 32, ROWS, 32]. */
static inline int64_t place(int64_t row, int64_t i, int64_t inputs, int in_tiles) {
    return in_tiles ? (row / ROWS * inputs + i / 32 * 32) * ROWS + row % ROWS * 32 + i % 32 : row * inputs + i;
}

/* RMSNorm of a row x [count] as bfloat16, to its `place` in out; without a weight, x itself. */
static void normalise(const float *x, const float *weight, float eps, int64_t count, half *out, int64_t row, int in_tiles) {
    float sum = 0, scale = 1;
    if (weight) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
        scale = 1 / sqrtf(sum / count + eps);
    }
    for (int64_t i = 0; i < count; i += LANES) {
        floats some = *(const floats *)(x + i);
        if (weight) some = some * scale * *(const floats *)(weight + i);
        *(halves *)(out + place(row, i, count, in_tiles)) = narrow_all(some);
    }
}

static int64_t up_to(int64_t multiple, int64_t x) { return (x + multiple - 1) / multiple * multiple; }

#ifdef __AVX512BW__
/* Add to the sums of `count` rows, a constant, their products with `size` inputs of a block of weights.

   Each of its steps reads STEP bytes of weights, and fetches `share` bytes from `next` on. */
typedef void Add(int count, const half *x, int64_t pitch, int64_t size, const char *weight, const char *next, int64_t share, char *sums);

/* sums [rows, bytes] = x [rows, inputs] times one block of weights, `inputs_of_step` of them in STEP bytes, by groups of up to `most` rows,
   at most 8. The weights that are multiplied soon are fetched meanwhile. */
static inline __attribute__((always_inline)) void by_groups(Add add, int most, int inputs_of_step, int rows, const half *x, int64_t inputs,
                                                            const char *weight, char *sums, int64_t bytes) {
    const char *next = weight + AHEAD;
    const int groups = (rows + most - 1) / most;
    const int64_t share = (STEP + groups - 1) / groups;
    memset(sums, 0, rows * bytes);
    for (int64_t from = 0, size; from < inputs; from += size) {
        size = groups > 1 && inputs - from > CHUNK ? CHUNK : inputs - from;
        for (int g = 0, r = 0, count; g < groups; g++, r += count, next += size / inputs_of_step * share) {
            const half *y = x + r * inputs + from;
            const char *w = weight + from / inputs_of_step * STEP;
            count = (rows - r) / (groups - g);
#define IF(n) if (n == count && n <= most) add(n, y, inputs, size, w, next, share, sums + r * bytes);
            IF(1) else IF(2) else IF(3) else IF(4) else IF(5) else IF(6) else IF(7) else IF(8)
#undef IF
        }
    }
}
#endif

#ifdef __AVX512BF16__
static inline __attribute__((always_inline)) void add_halves(int count, const half *x, int64_t pitch, int64_t size, const char *weight,
                                                             const char *next, int64_t share, char *sums) {
    float (*out)[COLUMNS] = (float (*)[COLUMNS])sums;
    __m512 left[8], right[8];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) left[r] = _mm512_loadu_ps(out[r]), right[r] = _mm512_loadu_ps(out[r] + COLUMNS / 2);
    for (int64_t i = 0; i < size; i += 2, weight += STEP, next += share) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(weight), second = (__m512bh)_mm512_loadu_si512(weight + STEP / 2);
        for (int64_t j = 0; j < share; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            int32_t pair;
            memcpy(&pair, x + r * pitch + i, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            left[r] = _mm512_dpbf16_ps(left[r], both, first);
            right[r] = _mm512_dpbf16_ps(right[r], both, second);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) _mm512_storeu_ps(out[r], left[r]), _mm512_storeu_ps(out[r] + COLUMNS / 2, right[r]);
}

/* out [rows, COLUMNS] = x [rows, inputs] times one block of weights. */
static void few_rows(int rows, const half *x, int64_t inputs, const half *weight, float (*out)[COLUMNS]) {
    by_groups(add_halves, 8, 2, rows, x, inputs, (const char *)weight, (char *)out, sizeof *out);
}
#else /* without products of bfloat16: of floats, in as many rows and columns as there are registers for sums */
#if defined(__AVX512F__)
#define FEW 8
#define WIDTH 16
#define VECTORS 2
#elif defined(__AVX__)
#define FEW 4
#define WIDTH 8
#define VECTORS 2
#else
#define FEW 4
#define WIDTH 4
#define VECTORS 4
#endif
typedef float wide __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint32_t wide_words __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* `few_rows` of `count` rows, a constant; rows beyond `rows` repeat the last. */
static inline __attribute__((always_inline)) void rows_of(int count, int rows, const half *x, int64_t inputs, const half *weight,
                                                          float (*out)[COLUMNS]) {
    float some[FEW][CHUNK] __attribute__((aligned(64)));
    for (int first = 0; first < COLUMNS; first += VECTORS * WIDTH) {
        wide sums[FEW][VECTORS] = {0};
        for (int64_t from = 0, size; from < inputs; from += size) {
            size = inputs - from < CHUNK ? inputs - from : CHUNK;
            for (int r = 0; r < count; r++)
                for (int64_t i = 0; i < size; i += LANES)
                    *(floats *)(some[r] + i) = widen_all(x + (r < rows ? r : rows - 1) * inputs + from + i);
            const half *w = weight + from * COLUMNS + 2 * first;
            for (int64_t i = 0; i < size; i += 2, w += 2 * COLUMNS) {
                wide_words both[VECTORS]; /* inputs i and i + 1 of each column */
                for (int v = 0; v < VECTORS; v++) both[v] = *(const wide_words *)(w + 2 * v * WIDTH);
                for (int j = 0; j < 2 * VECTORS * WIDTH; j += 32) __builtin_prefetch((const char *)(w + j) + AHEAD);
#pragma GCC unroll 8
                for (int r = 0; r < count; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) sums[r][v] += some[r][i] * (wide)(both[v] << 16);
#pragma GCC unroll 8
                for (int r = 0; r < count; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) sums[r][v] += some[r][i + 1] * (wide)(both[v] & 0xffff0000);
            }
        }
        for (int r = 0; r < rows && r < count; r++)
            for (int v = 0; v < VECTORS; v++) *(wide *)(out[r] + first + v * WIDTH) = sums[r][v];
    }
}

/* out [rows, COLUMNS] = x [rows, inputs] times one block of weights. */
static void few_rows(int rows, const half *x, int64_t inputs, const half *weight, float (*out)[COLUMNS]) {
    for (; rows > 0; rows -= FEW, x += FEW * inputs, out += FEW)
        if (rows == 1) rows_of(1, rows, x, inputs, weight, out);
        else if (rows == 2) rows_of(2, rows, x, inputs, weight, out);
        else if (rows <= 4 || FEW == 4) rows_of(4, rows, x, inputs, weight, out);
        else rows_of(FEW, rows, x, inputs, weight, out);
}
#endif

static int tiles; /* whether the kernel lets this process use the CPU's tiles */

#ifdef __AMX_BF16__
/* Begin to read what a tile's products AHEAD bytes further on will need: the CPU's own guesses are late for few rows. */
static inline void prefetch(const void *weight) {
    for (int i = 0; i < 2048; i += 64) _mm_prefetch((const char *)weight + AHEAD + i, _MM_HINT_T0);
}

/* Tiles for the calling thread: of products of up to `rows` rows 0 and 1 sums, 2 inputs, 3 and 4 weights; 5 to 7 of attention,
   and of products of more rows 5 and 7 sums, 6 inputs. */
static void configure(int rows) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = i < 3 ? rows : 16;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* GCC 12 takes only its first 8 bytes for read */
    _tile_loadconfig(&config);
}
#endif

/* Whether products are of floats, as the CPU multiplies no bfloat16. */
int64_t widens(void) {
#ifdef __AVX512BF16__
    return 0;
#else
    return 1;
#endif
}

/* Ask for the CPU's tiles. Called once, before all else. */
void prepare(void) {
#ifdef __AMX_BF16__
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    tiles = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#endif
}

/* Rows of inputs for weights in 8 bits: about x / scale [rows, inputs], zeros up to a multiple of DEPTH. */
typedef struct {
    int8_t *number; /* [rows, 2, inputs]: with tiles upper, then lower bits, both signed; else [rows, inputs] of int16_t */
    float *scale;   /* [rows] */
} Whole;

/* x [rows, inputs] as whole numbers. No product's sum leaves 32 bits: magnitudes add up to some 16 million in a row. */
static void quantise(const half *x, int64_t rows, int64_t inputs, Whole *out) {
    const int64_t width = up_to(DEPTH, inputs);
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        half highest = 0;
        float total = 0;
#pragma omp simd reduction(max : highest)
        for (int64_t i = 0; i < inputs; i++) {
            half magnitude = x[i] & 0x7fff; /* ordered as the numbers are */
            highest = highest > magnitude ? highest : magnitude;
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < inputs; i++) total += widen(x[i] & 0x7fff);
        const float largest = widen(highest) / 0x7f7f, mean = total / 16000000, scale = largest > mean ? largest : mean;
        const float inverse = scale > 1e-30f ? 1 / scale : 0;
        int8_t *upper = out->number + 2 * r * width, *lower = upper + width;
        out->scale[r] = highest > 0x7f80 ? NAN : scale;
        if (width > inputs) memset(upper, 0, 2 * width);
        for (int64_t i = 0; i < inputs; i += LANES) {
            ints number = (ints)(widen_all(x + i) * inverse + 12582912.0f) - 0x4b400000; /* to the nearest */
            ints low = number << 24 >> 24;
            if (tiles) {
                *(bytes *)(upper + i) = __builtin_convertvector((number - low) >> 8, bytes);
                *(bytes *)(lower + i) = __builtin_convertvector(low, bytes);
            } else *(shorts *)(upper + 2 * i) = __builtin_convertvector(number, shorts);
        }
    }
}

#ifdef __AVX512BW__
/* The sums are two for each of 8 columns, in 4 vectors. */
static inline __attribute__((always_inline)) void add_wholes(int count, const half *x, int64_t pitch, int64_t size, const char *weight,
                                                             const char *next, int64_t share, char *parts) {
    __m512i sums[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sums[r][c] = ((__m512i *)parts)[4 * r + c];
    for (int64_t i = 0; i < size; i += 4, weight += STEP, next += share) {
        __m512i some[4];
        for (int64_t j = 0; j < share; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) some[c] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(weight + 32 * c)));
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            int64_t four;
            memcpy(&four, x + r * pitch + i, 8);
            const __m512i x_four = _mm512_set1_epi64(four);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++)
#ifdef __AVX512VNNI__ /* with the intrinsic GCC 12 copies every sum twice */
                __asm__("vpdpwssd %2, %1, %0" : "+v"(sums[r][c]) : "v"(x_four), "v"(some[c]));
#else
                sums[r][c] = _mm512_add_epi32(sums[r][c], _mm512_madd_epi16(x_four, some[c]));
#endif
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) ((__m512i *)parts)[4 * r + c] = sums[r][c];
}

/* sums [rows, COLUMNS] = x [rows, width] times one block of weights in 8 bits, of up to MOST_WHOLE rows. */
static void some_whole_rows(int rows, const int16_t *x, int64_t width, const int8_t *weight, int32_t (*sums)[COLUMNS]) {
    __m512i parts[MOST_WHOLE][4];
    by_groups(add_wholes, 6, 4, rows, (const half *)x, width, (const char *)weight, (char *)parts, sizeof *parts);
    int32_t order[16];
    for (int i = 0; i < 16; i++) order[i] = 2 * i;
    const __m512i even = _mm512_loadu_si512(order), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < 4; c += 2)
            _mm512_storeu_si512(sums[r] + 8 * c,
                                _mm512_add_epi32(_mm512_permutex2var_epi32(parts[r][c], even, parts[r][c + 1]),
                                                 _mm512_permutex2var_epi32(parts[r][c], odd, parts[r][c + 1])));
}
#else
/* `some_whole_rows` of up to `count` rows, a constant; rows beyond `rows` repeat the last. */
static inline __attribute__((always_inline)) void few_whole_rows(int count, int rows, const int16_t *x, int64_t width, const int8_t *weight,
                                                                 int32_t (*sums)[COLUMNS]) {
    const int16_t *row[4];
    for (int r = 0; r < count; r++) row[r] = x + (r < rows ? r : rows - 1) * width;
#if defined(__AVX2__)
    for (int first = 0; first < COLUMNS; first += 8) {
        __m256i parts[4][2]; /* of a row: two sums for each of 4 columns */
        for (int r = 0; r < count; r++) parts[r][0] = parts[r][1] = _mm256_setzero_si256();
        const int8_t *w = weight + 4 * first;
        for (int64_t i = 0; i < width; i += 4, w += 4 * COLUMNS) {
            const __m256i left = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
            const __m256i right = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16)));
#pragma GCC unroll 4
            for (int r = 0; r < count; r++) {
                int64_t four;
                memcpy(&four, row[r] + i, 8);
                const __m256i x_four = _mm256_set1_epi64x(four);
                parts[r][0] = _mm256_add_epi32(parts[r][0], _mm256_madd_epi16(x_four, left));
                parts[r][1] = _mm256_add_epi32(parts[r][1], _mm256_madd_epi16(x_four, right));
            }
        }
        for (int r = 0; r < rows && r < count; r++) {
            const __m256i pairs = _mm256_hadd_epi32(parts[r][0], parts[r][1]); /* columns 0, 1, 4, 5, 2, 3, 6, 7 */
            _mm256_storeu_si256((__m256i *)(sums[r] + first), _mm256_permute4x64_epi64(pairs, 0xd8));
        }
    }
#else
    for (int r = 0; r < rows && r < count; r++) {
        int32_t all[COLUMNS] = {0};
        const int8_t *w = weight;
        for (int64_t i = 0; i < width; i += 4, w += 4 * COLUMNS) {
            const int16_t *four = row[r] + i;
#pragma omp simd
            for (int c = 0; c < COLUMNS; c++)
                all[c] += four[0] * w[4 * c] + four[1] * w[4 * c + 1] + four[2] * w[4 * c + 2] + four[3] * w[4 * c + 3];
        }
        memcpy(sums[r], all, sizeof all);
    }
#endif
}

static void some_whole_rows(int rows, const int16_t *x, int64_t width, const int8_t *weight, int32_t (*sums)[COLUMNS]) {
    if (rows == 1) few_whole_rows(1, rows, x, width, weight, sums);
    else if (rows == 2) few_whole_rows(2, rows, x, width, weight, sums);
    else
        for (int r = 0; r < rows; r += 4) few_whole_rows(4, rows - r, x + r * width, width, weight, sums + r);
}
#endif

/* `product` with weights in 8 bits. */
static void whole_product(const Linear *layer, int64_t block, const Whole *x, int64_t first, int rows, float (*out)[COLUMNS]) {
    const int64_t width = up_to(DEPTH, layer->inputs);
    const int8_t *weight = (const int8_t *)layer->weight + block * width * COLUMNS, *from = x->number + 2 * first * width;
    const float *scale = layer->scale + block * COLUMNS;
    int32_t sums[MOST_WHOLE][COLUMNS]; /* in tiles of up to ROWS / 2 rows, of the upper and of the lower bits, else whole */
    for (int done = 0, step; done < rows; done += step, from += 2 * step * width) {
        int together = 1; /* rows of sums for a row of x */
#ifdef __AMX_BF16__
        if (tiles) {
            step = ROWS / 2, together = 2;
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t i = 0; i < width; i += DEPTH) {
                if (first + done == 0) prefetch(weight + i * COLUMNS);
                _tile_loadd(2, from + i, width);
                _tile_loadd(3, weight + i * COLUMNS, 4 * COLUMNS);
                _tile_loadd(4, weight + i * COLUMNS + 2 * COLUMNS, 4 * COLUMNS);
                _tile_dpbssd(0, 2, 3);
                _tile_dpbssd(1, 2, 4);
            }
            _tile_stored(0, sums[0], 4 * COLUMNS);
            _tile_stored(1, sums[0] + COLUMNS / 2, 4 * COLUMNS);
        } else
#endif
        {
            step = rows;
            some_whole_rows(rows, (const int16_t *)from, width, weight, sums);
        }
        for (int r = 0; r < step && done + r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) {
                uint32_t sum = sums[r * together][c];
                if (together == 2) sum = 256 * sum + sums[2 * r + 1][c];
                out[done + r][c] = (int32_t)sum * (x->scale[first + done + r] * scale[c]);
            }
    }
}

#ifdef __AMX_BF16__
/* Add the products of inputs `from` to `to` of one or two tiles of rows to out; `spread` is ROWS where x is in tiles, else 1. */
static inline __attribute__((always_inline)) void add_tiles(int two, const half *x, int64_t inputs, int64_t spread, const half *weight,
                                                            int64_t from, int64_t to, const char *next, int64_t share,
                                                            float (*out)[COLUMNS]) {
    const int64_t pitch = spread > 1 ? 64 : 2 * inputs;
    if (from) {
        _tile_loadd(0, out[0], 4 * COLUMNS);
        _tile_loadd(1, out[0] + COLUMNS / 2, 4 * COLUMNS);
        if (two) _tile_loadd(5, out[ROWS], 4 * COLUMNS);
        if (two) _tile_loadd(7, out[ROWS] + COLUMNS / 2, 4 * COLUMNS);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(5);
        _tile_zero(7);
    }
    for (int64_t i = from; i < to; i += 32, next += share) {
        for (int64_t j = 0; j < share; j += 64) _mm_prefetch(next + j, _MM_HINT_T1);
        _tile_loadd(2, x + i * spread, pitch); /* each tile is read while others are multiplied */
        _tile_loadd(3, weight + i * COLUMNS, 4 * COLUMNS);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(4, weight + i * COLUMNS + COLUMNS, 4 * COLUMNS);
        _tile_dpbf16ps(1, 2, 4);
        if (two) _tile_loadd(6, x + ROWS * inputs + i * spread, pitch);
        if (two) _tile_dpbf16ps(5, 6, 3);
        if (two) _tile_dpbf16ps(7, 6, 4);
    }
    _tile_stored(0, out[0], 4 * COLUMNS);
    _tile_stored(1, out[0] + COLUMNS / 2, 4 * COLUMNS);
    if (two) _tile_stored(5, out[ROWS], 4 * COLUMNS);
    if (two) _tile_stored(7, out[ROWS] + COLUMNS / 2, 4 * COLUMNS);
}

/* `product` of more than ROWS rows: every tile of weights is multiplied with two others. The block behind this one is fetched
   meanwhile, an equal share of it in every step. */
static void many_rows(const half *x, int64_t inputs, int in_tiles, const half *weight, int rows, float (*out)[COLUMNS]) {
    const int64_t pairs = (rows + 2 * ROWS - 1) / (2 * ROWS), share = up_to(64, 64 * COLUMNS / pairs), spread = in_tiles ? ROWS : 1;
    const char *next = (const char *)(weight + inputs * COLUMNS);
    for (int64_t from = 0, to; from < inputs; from = to) {
        to = inputs < from + CHUNK ? inputs : from + CHUNK;
        for (int64_t r = 0; r < rows; r += 2 * ROWS, next += (to - from) / 32 * share) {
            if (rows - r > ROWS) add_tiles(1, x + r * inputs, inputs, spread, weight, from, to, next, share, out + r);
            else add_tiles(0, x + r * inputs, inputs, spread, weight, from, to, next, share, out + r);
        }
    }
}
#endif

/* out [MOST_ROWS, COLUMNS] = rows `first` and following of x times one block of weights, rows <= MOST_ROWS.

   `whole` is x by `quantise`; else more than ROWS rows of x may be `in_tiles`. x is readable, and out can be written, up to a multiple
   of ROWS where there are more than ROWS rows, and of 4. */
static void product(const Linear *layer, int64_t block, const half *x, int in_tiles, const Whole *whole, int64_t first, int rows,
                    float (*out)[COLUMNS]) {
    const int64_t inputs = layer->inputs;
    const half *weight = (const half *)layer->weight + block * inputs * COLUMNS;
    x += first * inputs;
    const int most = tiles ? ROWS : MOST_WHOLE;
    if (layer->scale)
        for (int r = 0; r < rows; r += most) whole_product(layer, block, whole, first + r, rows - r < most ? rows - r : most, out + r);
    else
#ifdef __AMX_BF16__
    if (tiles && (rows > ROWS || in_tiles)) many_rows(x, inputs, in_tiles, weight, rows, out);
    else if (tiles) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < inputs; i += 32) {
            if (!first) prefetch(weight + i * COLUMNS);
            _tile_loadd(2, x + i, 2 * inputs);
            _tile_loadd(3, weight + i * COLUMNS, 4 * COLUMNS);
            _tile_loadd(4, weight + i * COLUMNS + COLUMNS, 4 * COLUMNS);
            _tile_dpbf16ps(0, 2, 3);
            _tile_dpbf16ps(1, 2, 4);
        }
        _tile_stored(0, out[0], 4 * COLUMNS);
        _tile_stored(1, out[0] + COLUMNS / 2, 4 * COLUMNS);
    } else
#endif
        few_rows(rows, x, inputs, weight, out);
    if (layer->bias)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) out[r][c] += layer->bias[block * COLUMNS + c];
}

/* Add out [rows, COLUMNS] to columns `block` * COLUMNS and following of y [rows, width]. */
static void add_block(float (*out)[COLUMNS], int64_t rows, int64_t block, int64_t width, float *y) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < COLUMNS; c += LANES) *(floats *)(y + r * width + block * COLUMNS + c) += *(floats *)(out[r] + c);
}

/* Channels `from` to `from` + d of a row of x [blocks, lines, COLUMNS], one after the other; both are multiples of LANES. */
static inline void channels(const float *x, int64_t lines, int64_t row, int64_t from, int64_t d, float *out) {
    for (int64_t c = from; c < from + d; c += LANES, out += LANES)
        *(floats *)out = *(const floats *)(x + (c / COLUMNS * lines + row) * COLUMNS + c % COLUMNS);
}

/* y [head_dim] = x rotated by a row of the rotary table [2, head_dim]. */
static void rotate(const float *restrict x, const float *restrict rotation, int64_t size, float *restrict y) {
    int64_t half_size = size / 2;
    for (int64_t i = 0; i < half_size; i++) {
        y[i] = x[i] * rotation[i] + x[i + half_size] * rotation[size + i];
        y[i + half_size] = x[i + half_size] * rotation[i + half_size] + x[i] * rotation[size + i + half_size];
    }
}

static inline float sum_of(floats x) {
    union { floats all; eight half[2]; } a = {x};
    union { eight all; four half[2]; } b = {a.half[0] + a.half[1]};
    four sum = b.half[0] + b.half[1];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The sum of each of LANES vectors. */
static inline __attribute__((always_inline)) floats sums_of(floats *x) {
#ifdef __AVX512F__
    int32_t order[LANES];
    for (int i = 0; i < LANES; i++) order[i] = 2 * i;
    const __m512i even = _mm512_loadu_si512(order), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
#pragma GCC unroll 4
    for (int count = LANES / 2; count; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++)
            x[i] = (floats)_mm512_permutex2var_ps((__m512)x[2 * i], even, (__m512)x[2 * i + 1]) +
                   (floats)_mm512_permutex2var_ps((__m512)x[2 * i], odd, (__m512)x[2 * i + 1]);
    return x[0];
#else
    floats sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_of(x[i]);
    return sums;
#endif
}

/* The largest of x [size], size a multiple of LANES. */
static inline float highest_of(const float *x, int64_t size) {
    floats most = *(const floats *)x;
    for (int64_t i = LANES; i < size; i += LANES) {
        const floats each = *(const floats *)(x + i);
        const ints more = each > most;
        most = (floats)(((ints)each & more) | ((ints)most & ~more));
    }
    float highest = most[0];
    for (int i = 1; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    return highest;
}

/* The sums where their mask [count] is set, else -infinity; up to LANES are read of the mask. */
static inline floats where_seen(floats sums, const uint8_t *mask, int64_t count) {
    uint8_t seen[LANES] = {0};
    if (count < LANES) mask = memcpy(seen, mask, count);
    const ints kept = flags(mask) != 0, none = (ints)((floats){0} - INFINITY);
    return (floats)(((ints)sums & kept) | (none & ~kept));
}

/* exp(x) over its sum, of x [size], size a multiple of LANES. */
static void softmax(float *x, int64_t size) {
    const float highest = highest_of(x, size);
    floats total = {0};
    for (int64_t j = 0; j < size; j += LANES) {
        floats *some = (floats *)(x + j);
        total += *some = exponential(*some - highest);
    }
    const float scale = 1 / sum_of(total);
    for (int64_t j = 0; j < size; j += LANES) *(floats *)(x + j) *= scale;
}

/* Attention of `count` queries [count, d] over keys and values [size, d], query q where its mask is set: out [count] of [d].

   weights [count, stride] is scratch, stride a multiple of LANES and at least size. A query's result depends on that query alone. */
static inline __attribute__((always_inline)) void attend_to(const float *query, int64_t count, const half *keys, const half *values, const uint8_t **mask, int64_t size,
                   int64_t d, float *weights, int64_t stride, half **out) {
    for (int64_t j = 0; j < size; j += LANES) {
        floats key[LANES][d / LANES]; /* behind the last one, the last again */
        for (int64_t k = 0; k < LANES; k++)
            for (int64_t i = 0; i < d / LANES; i++)
                key[k][i] = widen_all(keys + (j + k < size ? j + k : size - 1) * d + i * LANES);
        for (int64_t q = 0; q < count; q++) {
            const floats *some = (const floats *)(query + q * d);
            floats sums[LANES];
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) {
                sums[k] = some[0] * key[k][0];
                for (int64_t i = 1; i < d / LANES; i++) sums[k] += some[i] * key[k][i];
            }
            *(floats *)(weights + q * stride + j) = where_seen(sums_of(sums), mask[q] + j, size - j);
        }
    }
    for (int64_t q = 0; q < count; q++) softmax(weights + q * stride, stride);
    for (int64_t first = 0; first < count; first += QUERIES)
        for (int64_t i = 0; i < d; i += CHANNELS * LANES) {
            const float *weight[QUERIES];
            floats sums[QUERIES][CHANNELS] = {0};
            for (int q = 0; q < QUERIES; q++) weight[q] = weights + (first + q < count ? first + q : count - 1) * stride;
            for (int64_t j = 0; j < size; j++)
#pragma GCC unroll 4
                for (int c = 0; c < CHANNELS; c++) {
                    if (i + c * LANES >= d) break;
                    floats value = widen_all(values + j * d + i + c * LANES);
#pragma GCC unroll 4
                    for (int q = 0; q < QUERIES; q++) sums[q][c] += weight[q][j] * value;
                }
            for (int64_t q = 0; q < QUERIES && first + q < count; q++)
                for (int64_t c = 0; c < CHANNELS && i + c * LANES < d; c++)
                    *(halves *)(out[first + q] + i + c * LANES) = narrow_all(sums[q][c]);
        }
}

#ifdef __AVX512BF16__
/* x [size] as bfloat16, where it was; size is a multiple of LANES. */
static void narrow_here(float *x, int64_t size) {
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        const __m512 lower = _mm512_loadu_ps(x + i), upper = i + LANES < size ? _mm512_loadu_ps(x + i + LANES) : _mm512_setzero_ps();
        _mm512_storeu_si512((half *)x + i, (__m512i)_mm512_cvtne2ps_pbh(upper, lower));
    }
}

static inline __m512bh pairs_at(const half *x) { return (__m512bh)_mm512_loadu_si512(x); }

/* `attend_to` by products of bfloat16, to which queries and weights are rounded; d is a multiple of 32.

   While keys are read values are fetched, and meanwhile the keys at `next`. */
static inline __attribute__((always_inline)) void attend_in_halves(float *query, int64_t count, const half *keys, const half *values,
                                                                   const half *next, const uint8_t **mask, int64_t size, int64_t d,
                                                                   float *weights, int64_t stride, half **out) {
    const int64_t whole = size / LANES * LANES, left = size - whole;
    half last[LANES * d]; /* the keys of the last vector of weights, zeros behind them */
    memcpy(last, keys + whole * d, 2 * left * d);
    memset(last + left * d, 0, 2 * (LANES - left) * d);
    narrow_here(query, count * d);
    for (int64_t j = 0; j < size; j += LANES) {
        const half *key = j < whole ? keys + j * d : last;
        for (int64_t i = 0; i < LANES * d; i += 32) _mm_prefetch((const char *)(values + j * d + i), _MM_HINT_T0);
        for (int64_t q = 0; q < count; q++) {
            const half *some = (const half *)query + q * d;
            floats sums[LANES];
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) {
                __m512 sum = _mm512_setzero_ps();
                for (int64_t i = 0; i < d; i += 32) sum = _mm512_dpbf16_ps(sum, pairs_at(some + i), pairs_at(key + k * d + i));
                sums[k] = (floats)sum;
            }
            *(floats *)(weights + q * stride + j) = where_seen(sums_of(sums), mask[q] + j, size - j);
        }
    }
    for (int64_t q = 0; q < count; q++) {
        softmax(weights + q * stride, stride);
        narrow_here(weights + q * stride, stride);
    }
    int16_t order[64]; /* of channels of two slots, in pairs */
    for (int i = 0; i < 64; i++) order[i] = i / 2 + i % 2 * 32;
    const __m512i lower = _mm512_loadu_si512(order), upper = _mm512_loadu_si512(order + 32);
    for (int64_t first = 0; first < count; first += QUERIES)
        for (int64_t i = 0; i < d; i += CHANNELS * LANES) {
            const half *weight[QUERIES];
            __m512 sums[QUERIES][CHANNELS];
#pragma GCC unroll 4
            for (int q = 0; q < QUERIES; q++) {
                weight[q] = (const half *)(weights + (first + q < count ? first + q : count - 1) * stride);
#pragma GCC unroll 4
                for (int c = 0; c < CHANNELS; c++) sums[q][c] = _mm512_setzero_ps();
            }
            for (int64_t j = 0; j < size; j += 2) {
                for (int64_t c = 0; c < 2 * d && !first; c += 32) _mm_prefetch((const char *)(next + j * d + c), _MM_HINT_T0);
#pragma GCC unroll 2
                for (int c = 0; c < CHANNELS; c += 2) {
                    if (i + c * LANES >= d) break;
                    const half *from = values + j * d + i + c * LANES;
                    const __m512i even = _mm512_loadu_si512(from), odd = j + 1 < size ? _mm512_loadu_si512(from + d) : _mm512_setzero_si512();
                    const __m512bh left = (__m512bh)_mm512_permutex2var_epi16(even, lower, odd);
                    const __m512bh right = (__m512bh)_mm512_permutex2var_epi16(even, upper, odd);
#pragma GCC unroll 4
                    for (int q = 0; q < QUERIES; q++) {
                        int32_t two;
                        memcpy(&two, weight[q] + j, 4);
                        const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                        sums[q][c] = _mm512_dpbf16_ps(sums[q][c], both, left);
                        sums[q][c + 1] = _mm512_dpbf16_ps(sums[q][c + 1], both, right);
                    }
                }
            }
            for (int64_t q = 0; q < QUERIES && first + q < count; q++)
                for (int64_t c = 0; c < CHANNELS && i + c * LANES < d; c++)
                    *(halves *)(out[first + q] + i + c * LANES) = narrow_all((floats)sums[q][c]);
        }
}
#endif

/* `attend_to`, with a constant number of channels where that is a usual one, so that a key stays in registers. */
static void attend(float *query, int64_t count, const half *keys, const half *values, const half *next, const uint8_t **mask, int64_t size,
                   int64_t d, float *weights, int64_t stride, half **out) {
#ifdef __AVX512BF16__
    if (d == 64) attend_in_halves(query, count, keys, values, next, mask, size, 64, weights, stride, out);
    else if (d % 32 == 0) attend_in_halves(query, count, keys, values, next, mask, size, d, weights, stride, out);
    else
#endif
    if (d == 64) attend_to(query, count, keys, values, mask, size, 64, weights, stride, out);
    else if (d == 128) attend_to(query, count, keys, values, mask, size, 128, weights, stride, out);
    else attend_to(query, count, keys, values, mask, size, d, weights, stride, out);
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

/* Values [size, d] as tiles of weights: [up to 32 / 2, d, 2], slots in pairs, with zeros behind the last. */
static void pair_up(const half *values, int64_t size, int64_t d, half *pairs) {
    int16_t order[64];
    for (int i = 0; i < 64; i++) order[i] = i / 2 + i % 2 * 32;
    const __m512i first = _mm512_loadu_si512(order), second = _mm512_loadu_si512(order + 32);
    for (int64_t j = 0; j < up_to(32, size); j += 2)
        for (int64_t i = 0; i < d; i += 32, pairs += 64) {
            __m512i even = j < size ? _mm512_loadu_si512(values + j * d + i) : _mm512_setzero_si512();
            __m512i odd = j + 1 < size ? _mm512_loadu_si512(values + (j + 1) * d + i) : _mm512_setzero_si512();
            _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(even, first, odd));
            _mm512_storeu_si512(pairs + 32, _mm512_permutex2var_epi16(even, second, odd));
        }
}

/* `attend` for up to 16 queries, `step` floats apart, with the CPU's tiles; d is a multiple of 32.

   pairs: the values by `pair_up`. bias [size], `apart` floats apart, of 16: 0 where a query's mask is set, else -infinity. Each 32
   channels of out are `spread` times as far apart as in order.
   scratch: 32 d halves, and of up to 32 slots each 16 floats and 16 halves. */
static void attend_in_tiles(const float *query, int64_t step, int64_t count, const half *keys, const half *pairs,
                            const float *bias, int64_t apart, int64_t size, int64_t d, char *scratch, half **out, int64_t spread) {
    const int64_t stride = up_to(32, size);
    half *packed = (half *)scratch, *tail = packed + 16 * d, *weights;
    float *scores = (float *)(tail + 16 * d), totals[16]; /* of these 1 over the sum */
    weights = (half *)(scores + 16 * stride);
    for (int64_t i = 0; i < d; i += 32) { /* [d / 2, 16, 2] */
        __m512i some[16];
        for (int64_t q = 0; q < 16; q++) {
            half two[2 * LANES] = {0};
            for (int64_t j = 0; j < 32 && q < count; j += LANES)
                *(halves *)(two + j) = narrow_all(*(const floats *)(query + q * step + i + j));
            some[q] = _mm512_loadu_si512(two);
        }
        transpose(some);
        for (int64_t j = 0; j < 16; j++) _mm512_storeu_si512(packed + 16 * i + 32 * j, some[j]);
    }
    for (int64_t j = 0; j < size; j += 16) {
        const half *some = keys + j * d;
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
    floats total = {0};
    for (int64_t j = 0; j < size; j++) {
        __m512 score = _mm512_loadu_ps(scores + 16 * j) + _mm512_loadu_ps(bias + j * apart);
        _mm512_storeu_ps(scores + 16 * j, score);
        highest = _mm512_max_ps(highest, score);
    }
    for (int64_t j = 0; j < size; j++) {
        floats *score = (floats *)(scores + 16 * j);
        total += *score = exponential(*score - (floats)highest);
    }
    memset(scores + 16 * size, 0, 64 * (stride - size));
    *(floats *)totals = 1 / (total + 1e-30f);
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
            *(halves *)(out[q] + c / 32 * 32 * spread + c % 32) = narrow_all(*(floats *)sums[q] * totals[q]);
    }
}
#endif

/* The calling thread's number among those of a parallel region, and how many they are. `use_threads`: how many the regions that it
   starts have from now on, those of PyTorch's operations among them; returned is how many they had. */
#ifdef _OPENMP
int64_t use_threads(int64_t count) {
    const int64_t before = omp_get_max_threads();
    omp_set_num_threads((int)count);
    return before;
}
static int64_t thread_number(void) { return omp_get_thread_num(); }
static int64_t team_size(void) { return omp_get_num_threads(); }
#else
int64_t use_threads(int64_t count) { return count; }
static int64_t thread_number(void) { return 0; }
static int64_t team_size(void) { return 1; }
#endif

static int64_t padded(int64_t bytes) { return up_to(64, bytes); }

/* The most inputs of a linear layer, up to a multiple of DEPTH. */
static int64_t widest(const Shape *s) {
    int64_t wide = s->heads * s->head_dim;
    wide = wide > s->dim ? wide : s->dim;
    return up_to(DEPTH, wide > s->hidden ? wide : s->hidden);
}

static int64_t bytes_of_a_thread(const Shape *s, int64_t m, int64_t nodes, int64_t slots) {
    int64_t queries = nodes * s->heads / s->kv_heads, most = up_to(ROWS, m);
    int64_t tiled = padded(2 * up_to(32, slots) * s->head_dim) + padded(64 * s->head_dim + 96 * up_to(32, slots));
    return padded(2 * most * s->dim) + padded(2 * most * widest(s)) + padded(4 * most) + padded(4 * queries * s->head_dim) +
           padded(4 * queries * up_to(LANES, slots)) + 2 * padded(8 * queries) + tiled;
}

int64_t scratch_bytes(const Shape *s, int64_t rows, int64_t nodes, int64_t slots, int64_t threads) {
    int64_t m = rows * nodes, heads = s->heads + 2 * s->kv_heads, most = up_to(ROWS, m);
    return padded(4 * m * s->dim) + padded(4 * most * up_to(COLUMNS, heads * s->head_dim)) + padded(2 * most * s->heads * s->head_dim) +
           padded(2 * most * s->hidden) + padded(4 * rows * slots * up_to(16, nodes)) + padded(16 * rows) + threads * bytes_of_a_thread(s, m, nodes, slots);
}

static void *take(char **at, int64_t bytes) {
    void *found = *at;
    *at += padded(bytes);
    return found;
}

void decode(const Shape *shape, const Layer *layers, const Pass *pass, int64_t threads) {
    const Shape s = *shape;
    const Pass p = *pass;
    const int64_t m = p.rows * p.nodes, d = s.head_dim, group = s.heads / s.kv_heads, most = up_to(ROWS, m);
    const int64_t width = (s.heads + 2 * s.kv_heads) * d, queries = p.nodes * group;
    char *at = p.scratch;
    float *stream = take(&at, 4 * m * s.dim);        /* the residual stream */
    float *qkv = take(&at, 4 * most * up_to(COLUMNS, width)); /* [blocks, lines, COLUMNS] */
    half *mixed = take(&at, 2 * most * s.heads * d); /* what attention returns */
    half *active = take(&at, 2 * most * s.hidden);   /* silu(gate) * up */
    const float root = sqrtf((float)d);
    const int even = d == 16 || d == 64 || d == 256; /* the root is a power of 2, by which products are as exact as quotients */
    const int64_t lanes = up_to(16, p.nodes), lines = m > ROWS ? most : up_to(4, m);
    float *bias = take(&at, 4 * p.rows * p.slots * lanes); /* [rows, slots, lanes]: 0 where a node attends, else -infinity */
    int64_t (*span)[2] = take(&at, 16 * p.rows); /* the slots from the first to behind the last that a node of the row attends to */
#ifdef __AMX_BF16__
    const int tiled = tiles && d % 32 == 0;
#else
    const int tiled = 0;
#endif
    const int in_tiles = tiled && m > ROWS && !layers->wqkv.scale; /* the inputs of products */

#pragma omp parallel num_threads((int)threads)
    {
        const int64_t me = thread_number(), team = team_size();
        char *own = at + me * bytes_of_a_thread(shape, m, p.nodes, p.slots);
        half *normed = take(&own, 2 * most * s.dim);
        const int apart = m > ROWS; /* whether each thread normalises some of the rows for all */
        if (apart) normed = (half *)at;
        /* A thread attends with heads whose queries, keys and values it has computed itself, where all have as many. */
        const int by_head = d % COLUMNS == 0 && s.kv_heads % team == 0;
        const int64_t some_heads = by_head ? s.kv_heads / team : s.kv_heads;
        Whole whole = {take(&own, 2 * most * widest(shape)), take(&own, 4 * most)};
        float *query = take(&own, 4 * queries * d);
        float *weights = take(&own, 4 * queries * up_to(LANES, p.slots));
        half *pairs = take(&own, 2 * up_to(32, p.slots) * d);
        char *scratch = take(&own, 64 * d + 96 * up_to(32, p.slots));
        float block[MOST_ROWS][COLUMNS];
        const uint8_t **mask = take(&own, 8 * queries); /* of a query, and where its result goes */
        half **where = take(&own, 8 * queries);
#ifdef __AMX_BF16__
        const int64_t tile_rows = layers->wqkv.scale ? 2 * m : m; /* with weights in 8 bits, a row of inputs takes two */
        if (tiles) configure(tile_rows < ROWS ? (int)tile_rows : ROWS);
#endif
/* For blocks of a layer, and rows `first` to `first + rows` of x: their product is in `out`, which is `to`. */
#define BLOCKS(linear, x, to, begin, end)                                                                     \
    for (int64_t b = begin, until = end; b < until; b++)                                                      \
        for (int64_t first = 0, rows; first < m; first += MOST_ROWS)                                          \
            for (float (*out)[COLUMNS] = (rows = m - first < MOST_ROWS ? m - first : MOST_ROWS,               \
                                          product(&(linear), b, x, in_tiles, &whole, first, (int)rows, to), to); out; out = NULL)
#define BLOCKS_OF(linear) (((linear).outputs + COLUMNS - 1) / COLUMNS)
/* The same for those blocks that are this thread's. */
#define PRODUCTS(linear, x, to)                                                                               \
    if ((linear).scale) quantise(x, m, (linear).inputs, &whole);                                              \
    BLOCKS(linear, x, to, BLOCKS_OF(linear) * me / team, BLOCKS_OF(linear) * (me + 1) / team)
/* This thread's rows of the residual stream, or all, to `normed`. */
#define NORMALISE(weight)                                                                                     \
    for (int64_t i = apart ? m * me / team : 0; i < (apart ? m * (me + 1) / team : m); i++)                   \
        normalise(stream + i * s.dim, weight, s.eps, s.dim, normed, i, in_tiles);                             \
    if (apart) {                                                                                              \
        _Pragma("omp barrier")                                                                                \
    }

        for (int64_t i = m * me / team; i < m * (me + 1) / team; i++)
            for (int64_t j = 0; j < s.dim; j++) stream[i * s.dim + j] = widen(p.x[i * s.dim + j]);
        if (tiled)
            for (int64_t i = me; i < p.rows * p.slots; i += team)
                for (int64_t n = 0; n < lanes; n++) {
                    const uint8_t *seen = p.mask + (i / p.slots * p.nodes + n) * p.slots + i % p.slots;
                    bias[i * lanes + n] = n >= p.nodes || *seen ? 0 : -INFINITY;
                }
        for (int64_t row = me; row < p.rows; row += team) {
            int64_t from = p.slots, to = 0;
            for (int64_t n = 0; n < p.nodes; n++) {
                const uint8_t *seen = p.mask + (row * p.nodes + n) * p.slots, *nearest = memchr(seen, 1, from);
                if (nearest) from = nearest - seen;
                for (int64_t j = p.slots; j > to; j--)
                    if (seen[j - 1]) to = j;
            }
            span[row][0] = from < to ? from : to; /* an idle row has none */
            span[row][1] = to;
        }
/* This thread's rows of the residual stream, normalised where there is a weight, to a part of `out`. */
#define WRITE(weight, number)                                                                                 \
    for (int64_t i = m * me / team; i < m * (me + 1) / team; i++)                                             \
        normalise(stream + i * s.dim, weight, s.eps, s.dim, p.out, i * p.parts + (number), 0)

        for (int64_t l = 0; l < s.layers; l++) {
            const Layer layer = layers[l];
#pragma omp barrier
            if (l && p.part[l - 1]) WRITE(NULL, p.part[l - 1]);
            NORMALISE(layer.attention_norm)
            if (layer.wqkv.scale) quantise(normed, m, s.dim, &whole);
            for (int64_t part = 0, begin = 0, end; part < 3; part++, begin = end) { /* queries, keys, values */
                end = begin + (part ? s.kv_heads : s.heads) * d / COLUMNS;
                int64_t mine = begin + (end - begin) * me / team, last = begin + (end - begin) * (me + 1) / team;
                if (!by_head) mine = part ? 0 : BLOCKS_OF(layer.wqkv) * me / team, last = part ? 0 : BLOCKS_OF(layer.wqkv) * (me + 1) / team;
                BLOCKS(layer.wqkv, normed, (float (*)[COLUMNS])(qkv + (b * lines + first) * COLUMNS), mine, last)
                    ;
            }
            if (!by_head) {
#pragma omp barrier
            }
            /* One key-value head of one row at a time: its keys and values go to the cache, then its queries attend. */
            for (int64_t task = by_head ? 0 : me; task < p.rows * some_heads; task += by_head ? 1 : team) {
                int64_t row = task / some_heads, head = task % some_heads + (by_head ? me * some_heads : 0);
                int64_t from = span[row][0], to = span[row][1];
                half *keys = p.kv + ((l * 2 * p.rows + row) * s.kv_heads + head) * p.slots * d;
                half *values = keys + p.rows * s.kv_heads * p.slots * d;
                float given[d], turned[d];
                for (int64_t n = 0; n < p.nodes; n++) {
                    int64_t i = row * p.nodes + n, slot = p.slot[i];
                    const uint8_t *seen = p.mask + i * p.slots;
                    channels(qkv, lines, i, (s.heads + head) * d, d, given);
                    rotate(given, p.rotation + i * 2 * d, d, turned);
                    channels(qkv, lines, i, (s.heads + s.kv_heads + head) * d, d, given);
                    for (int64_t j = 0; j < d; j += LANES) {
                        *(halves *)(keys + slot * d + j) = narrow_all(*(floats *)(turned + j));
                        *(halves *)(values + slot * d + j) = narrow_all(*(floats *)(given + j));
                    }
                    for (int64_t g = 0; g < group; g++) {
                        int64_t q = n * group + g, h = head * group + g;
                        channels(qkv, lines, i, h * d, d, given);
                        rotate(given, p.rotation + i * 2 * d, d, query + q * d);
                        for (int64_t j = 0; j < d; j += LANES) {
                            floats *some = (floats *)(query + q * d + j);
                            *some = even ? *some * (1 / root) : *some / root;
                        }
                        mask[q] = seen;
                        where[q] = mixed + place(i, h * d, s.heads * d, in_tiles);
                    }
                }
#ifdef __AMX_BF16__
                if (tiled) {
                    pair_up(values + from * d, to - from, d, pairs);
                    for (int64_t g = 0; g < group; g++)
                        for (int64_t n = 0; n < p.nodes; n += 16) {
                            half *some[16];
                            int64_t count = p.nodes - n < 16 ? p.nodes - n : 16;
                            for (int64_t q = 0; q < count; q++) some[q] = where[(n + q) * group + g];
                            attend_in_tiles(query + (n * group + g) * d, group * d, count, keys + from * d, pairs,
                                            bias + (row * p.slots + from) * lanes + n, lanes, to - from, d, scratch, some,
                                            in_tiles ? ROWS : 1);
                        }
                    continue;
                }
#endif
                for (int64_t q = 0; q < queries; q++) mask[q] += from;
                attend(query, queries, keys + from * d, values + from * d, keys + (p.slots + from) * d, mask, to - from, d, weights,
                       up_to(LANES, to - from), where);
            }
#pragma omp barrier
            PRODUCTS(layer.wo, mixed, block)
                add_block(out, rows, b, s.dim, stream + first * s.dim);
#pragma omp barrier
            NORMALISE(layer.ffn_norm)
            PRODUCTS(layer.w13, normed, block)
                for (int64_t r = 0; r < rows; r++) {
                    floats gate = *(floats *)out[r], up = *(floats *)(out[r] + LANES);
                    *(halves *)(active + place(first + r, b * LANES, s.hidden, in_tiles)) = narrow_all(silu(gate) * up);
                }
#pragma omp barrier
            PRODUCTS(layer.w2, active, block)
                add_block(out, rows, b, s.dim, stream + first * s.dim);
        }
#pragma omp barrier
        WRITE(s.norm, 0);
#ifdef __AMX_BF16__
        if (tiles) _tile_release();
#endif
    }
}
