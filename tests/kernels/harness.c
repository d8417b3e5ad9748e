/* Calls one function of a library of kernels with arguments from a file, on an emulated CPU.

   harness LIBRARY features            prints what `cpu.c` says
   harness LIBRARY FUNCTION IN OUT     IN: numbers of 64 bits, then bytes, as `decode` of test_emulated.py writes them; OUT: the
                                       bytes of all regions after the call */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { MOST = 4096, ARGUMENTS = 8 };
static char *region[MOST];

static int64_t number(FILE *in) {
    int64_t x;
    if (fread(&x, sizeof x, 1, in) != 1) exit(3);
    return x;
}

/* A number, or an address as region and offset. */
static int64_t value(FILE *in) {
    const int64_t which = number(in), x = number(in);
    return which < 0 ? x : (int64_t)(intptr_t)(region[which] + x);
}

int main(int count, char **given) {
#ifdef _OPENMP
    omp_get_max_threads(); /* so that the library is there for the kernels */
#endif
    void *library = count > 2 ? dlopen(given[1], RTLD_NOW) : NULL;
    if (!library) return fprintf(stderr, "%s\n", count > 2 ? dlerror() : "too few arguments"), 2;
    if (!strcmp(given[2], "features")) {
        const char *(*features)(void) = (const char *(*)(void))dlsym(library, "cpu_features");
        return puts(features()), 0;
    }
    void (*prepare)(void) = (void (*)(void))dlsym(library, "prepare");
    void *function = dlsym(library, given[2]);
    FILE *in = fopen(given[3], "rb"), *out = fopen(given[4], "wb");
    if (!function || !in || !out) return fprintf(stderr, "no %s or no file\n", given[2]), 2;
    if (prepare) prepare();

    const int64_t regions = number(in);
    int64_t size[MOST], argument[ARGUMENTS] = {0};
    if (regions > MOST) return 3;
    for (int64_t i = 0; i < regions; i++) {
        size[i] = number(in);
        const int64_t past = number(in); /* a cache line's begin */
        region[i] = (char *)aligned_alloc(64, (size[i] + 191) / 64 * 64) + past;
        if (fread(region[i], 1, size[i], in) != (size_t)size[i]) return 3;
    }
    for (int64_t n = number(in); n > 0; n--) {
        const int64_t where = number(in), offset = number(in), address = value(in);
        memcpy(region[where] + offset, &address, sizeof address);
    }
    const int64_t arguments = number(in);
    for (int64_t i = 0; i < arguments && i < ARGUMENTS; i++) argument[i] = value(in);
    int64_t (*call)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) = function;
    call(argument[0], argument[1], argument[2], argument[3], argument[4], argument[5], argument[6], argument[7]);
    for (int64_t i = 0; i < regions; i++) fwrite(region[i], 1, size[i], out);
    return fclose(out);
}
