/* All kernels, as one unit: a library for a kind of CPU is this file compiled with its flags. */
#include "gemm_bf16.c"
#include "gemm_int8.c"
#include "gemm_amx.c"
#include "step.c"
#include "sizes.c"

/* Called once, before all else. */
void prepare(void) { measure_bf16(); }

/* Whether products of bf16 are computed in float32, as the CPU has no instruction for them. */
int64_t widens(void) {
#ifdef __AVX512BF16__
    return 0;
#else
    return 1;
#endif
}
