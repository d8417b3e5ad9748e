/* All kernels, as one unit: a library for a kind of CPU is this file compiled with its flags. */
#include "gemm_bf16.c"
#include "gemm_int8.c"
#include "gemm_amx.c"
#include "step.c"

/* Called once, before all else. */
void prepare(void) { measure_bf16(); }

/* Whether products of bf16 are computed in float32, as the CPU has no instruction for them. */
int64_t gemm_is_fp32(void) {
#ifdef __AVX512BF16__
    return 0;
#else
    return 1;
#endif
}

/* Bytes of each structure that Python fills, by the name that it has there; -1: there is none. Compared when kernels are loaded. */
int64_t size_of(const char *name) {
#define SIZE(type) {#type, sizeof(type)}
    static const struct {
        const char *name;
        int64_t bytes;
    } sizes[] = {
        SIZE(Linear), SIZE(Packing), SIZE(LinearCall), SIZE(Layer), SIZE(Shape), SIZE(Pass), SIZE(Heads), {"Warp", sizeof(Sampling)}, SIZE(Chain),
        SIZE(Rows), SIZE(Children), SIZE(Node), SIZE(Verification),
        SIZE(QueryLayers), SIZE(QueryInputs), SIZE(Drafter), SIZE(Step),
    };
#undef SIZE
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!strcmp(name, sizes[i].name)) return sizes[i].bytes;
    return -1;
}
