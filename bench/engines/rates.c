/* What a machine can do: the rates of its instructions, and reading. Compiled and called by engines.py.

   The loops of instructions are written out in assembly, so that nothing but registers is read or written in them. */
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

/* Twelve independent accumulators: five cycles of latency on two ports need ten. */
#define ACCUMULATE(instruction, accumulator, operands)                                                                 \
    instruction " " operands accumulator "0\n" instruction " " operands accumulator "1\n" instruction " " operands     \
    accumulator "2\n" instruction " " operands accumulator "3\n" instruction " " operands accumulator "4\n" instruction \
    " " operands accumulator "5\n" instruction " " operands accumulator "6\n" instruction " " operands accumulator     \
    "7\n" instruction " " operands accumulator "8\n" instruction " " operands accumulator "9\n" instruction " "        \
    operands accumulator "10\n" instruction " " operands accumulator "11\n"
#define VECTOR_LOOP(name, instruction, register)                                                                       \
    static void name(int64_t count) {                                                                                  \
        __asm__ volatile("1:\n" ACCUMULATE(instruction, "%%" register, "%%" register "12, %%" register "13, ")        \
                         "dec %0\njnz 1b\n"                                                                            \
                         : "+r"(count)::"cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",  \
                           "xmm9", "xmm10", "xmm11");                                                                  \
    }
VECTOR_LOOP(fma_256, "vfmadd231ps", "ymm")
VECTOR_LOOP(fma_512, "vfmadd231ps", "zmm")
VECTOR_LOOP(dpbf16, "vdpbf16ps", "zmm")
VECTOR_LOOP(dpbusd_512, "vpdpbusd", "zmm")
VECTOR_LOOP(dpbusd_256, "%{vex%} vpdpbusd", "ymm")

struct __attribute__((packed)) Tiles {
    uint8_t palette, row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Tiles of 16 rows of 64 bytes: four accumulators, two operands of each side. */
#define TILE_LOOP(name, instruction)                                                                                   \
    static void name(int64_t count) {                                                                                  \
        struct Tiles tiles = {.palette = 1};                                                                           \
        for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = 16;                                       \
        __asm__ volatile("ldtilecfg %1\ntilezero %%tmm4\ntilezero %%tmm5\ntilezero %%tmm6\ntilezero %%tmm7\n"         \
                         "1:\n" instruction " %%tmm6, %%tmm4, %%tmm0\n" instruction " %%tmm6, %%tmm5, %%tmm1\n"       \
                         instruction " %%tmm7, %%tmm4, %%tmm2\n" instruction " %%tmm7, %%tmm5, %%tmm3\n"              \
                         "dec %0\njnz 1b\ntilerelease\n"                                                               \
                         : "+r"(count) : "m"(tiles) : "cc");                                                           \
    }
TILE_LOOP(tile_bf16, "tdpbf16ps")
TILE_LOOP(tile_int8, "tdpbssd")

static const struct {
    const char *name;
    void (*run)(int64_t);
    double operations; /* of one turn of the loop; a product and a sum are two */
} LOOPS[] = {
    {"avx2 fma fp32", fma_256, 12 * 16},       {"avx512 fma fp32", fma_512, 12 * 32},
    {"avx512 vdpbf16ps", dpbf16, 12 * 64},     {"avx512 vpdpbusd", dpbusd_512, 12 * 128},
    {"avx2 vpdpbusd", dpbusd_256, 12 * 64},    {"amx bf16", tile_bf16, 4 * 16 * 16 * 64},
    {"amx int8", tile_int8, 4 * 16 * 16 * 128},
};

/* Operations a second of all threads; 0 for an unknown name. The caller knows that the CPU has the instruction. */
double rate(const char *name, int threads) {
    double best = 0;
    syscall(SYS_arch_prctl, 0x1023, 18); /* asks for tiles; fails where there are none */
    for (size_t i = 0; i < sizeof(LOOPS) / sizeof(*LOOPS); i++) {
        if (strcmp(LOOPS[i].name, name)) continue;
        const int64_t turns = 1 << 20;
        for (int run = 0; run < 20; run++) {
            double began = 0;
#pragma omp parallel num_threads(threads)
            {
                LOOPS[i].run(turns / 8); /* the clock settles */
#pragma omp barrier
#pragma omp master
                began = now();
#pragma omp barrier
                LOOPS[i].run(turns);
            }
            double found = threads * turns * LOOPS[i].operations / (now() - began);
            best = found > best ? found : best;
        }
    }
    return best;
}
#else
double rate(const char *name, int threads) { return 0; }
#endif

typedef uint64_t Line __attribute__((vector_size(64)));

/* Bytes a second that all threads together read from a buffer of so many bytes, again and again; 0 without memory for it. */
double reading(int64_t bytes, int threads) {
    const int64_t lines = bytes / (8 * threads * sizeof(Line)) * 8;
    Line *buffer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) return 0;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    double best = 0;
    volatile uint64_t sink = 0;
    const int repeats = 1 + (int)((1 << 28) / bytes);
#pragma omp parallel num_threads(threads)
    memset(buffer + omp_get_thread_num() * lines, 1, lines * sizeof(Line));
    for (int run = 0; run < 16; run++) {
        double began = now();
#pragma omp parallel num_threads(threads)
        {
            const Line *own = buffer + omp_get_thread_num() * lines;
            Line sum[8] = {0};
            for (int again = 0; again < repeats; again++)
                for (int64_t i = 0; i < lines; i += 8) {
                    __builtin_prefetch(own + i + 64);
                    for (int j = 0; j < 8; j++) sum[j] |= own[i + j];
                }
            for (int j = 0; j < 8; j++) sink |= sum[j][0];
        }
        double found = repeats * lines * threads * sizeof(Line) / (now() - began);
        best = found > best ? found : best;
    }
    munmap(buffer, bytes);
    return best;
}
