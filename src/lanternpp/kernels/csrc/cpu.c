/* What this CPU has and its operating system allows, by names of `kinds.py`. Compiled for the oldest CPU of its architecture. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { EAX, EBX, ECX, EDX };
enum { YMM = 0x6, ZMM = 0xe6, TILES = 0x60000 }; /* registers that the operating system keeps for each thread, bits of XCR0 */

static const struct {
    const char *name;
    uint32_t leaf, subleaf, word, bit; /* of the answer to cpuid */
    uint64_t kept;
} FEATURES[] = {
    {"movbe", 1, 0, ECX, 22, 0},
    {"popcnt", 1, 0, ECX, 23, 0},
    {"lzcnt", 0x80000001, 0, ECX, 5, 0},
    {"bmi", 7, 0, EBX, 3, 0},
    {"bmi2", 7, 0, EBX, 8, 0},
    {"avx", 1, 0, ECX, 28, YMM},
    {"fma", 1, 0, ECX, 12, YMM},
    {"f16c", 1, 0, ECX, 29, YMM},
    {"avx2", 7, 0, EBX, 5, YMM},
    {"avxvnni", 7, 1, EAX, 4, YMM},
    {"avx512f", 7, 0, EBX, 16, ZMM},
    {"avx512dq", 7, 0, EBX, 17, ZMM},
    {"avx512cd", 7, 0, EBX, 28, ZMM},
    {"avx512bw", 7, 0, EBX, 30, ZMM},
    {"avx512vl", 7, 0, EBX, 31, ZMM},
    {"avx512vnni", 7, 0, ECX, 11, ZMM},
    {"avx512bf16", 7, 1, EAX, 5, ZMM},
    {"amx_tile", 7, 0, EDX, 24, TILES},
    {"amx_bf16", 7, 0, EDX, 22, TILES},
    {"amx_int8", 7, 0, EDX, 25, TILES},
};

/* XCR0, with the bit of tiles alone where Linux lets this process use them. */
static uint64_t kept_registers(void) {
    enum { OSXSAVE = 27, REQUEST = 0x1023, TILE_DATA = 18 };
    uint32_t word[4] = {0}, low, high;
    if (!__get_cpuid(1, &word[EAX], &word[EBX], &word[ECX], &word[EDX]) || !(word[ECX] >> OSXSAVE & 1)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
#ifdef __linux__
    if ((low & TILES) && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) != 0) low &= ~(uint32_t)TILES;
#endif
    return (uint64_t)high << 32 | low;
}

static int has(size_t i, uint64_t kept) {
    uint32_t word[4] = {0};
    return __get_cpuid_count(FEATURES[i].leaf, FEATURES[i].subleaf, &word[EAX], &word[EBX], &word[ECX], &word[EDX]) &&
           (word[FEATURES[i].word] >> FEATURES[i].bit & 1) && (kept & FEATURES[i].kept) == FEATURES[i].kept;
}

/* Names with a space between them. Called by one thread. */
const char *cpu_features(void) {
    static char names[512];
    const uint64_t kept = kept_registers();
    strcpy(names, "x86_64");
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++)
        if (has(i, kept)) strcat(strcat(names, " "), FEATURES[i].name);
    return names;
}

#elif defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

const char *cpu_features(void) {
    int has_dotprod = 0;
#if defined(__APPLE__)
    size_t size = sizeof has_dotprod;
    sysctlbyname("hw.optional.arm.FEAT_DotProd", &has_dotprod, &size, NULL, 0);
#elif defined(__linux__)
    has_dotprod = getauxval(AT_HWCAP) >> 20 & 1;
#endif
    return has_dotprod ? "aarch64 dotprod" : "aarch64";
}
#endif
