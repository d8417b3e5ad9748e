/* All kernels, as one unit: a library for a kind of CPU is this file compiled with its flags. */
#include "gemm_bf16.c"
#include "gemm_int8.c"
#include "gemm_amx.c"
#include "step.c"

/* Bytes of each structure that Python fills, by the name that it has there, and what it asks of the kernels besides; -1: unknown. */
int64_t number_of(const char *name) {
#define SIZE(type) {#type, sizeof(type)}
    static const struct {
        const char *name;
        int64_t number;
    } numbers[] = {
        {"gemm is fp32", GEMM_IS_FP32}, /* whether products of bf16 are computed in float32, as the CPU has no instruction for them */
        {"weight zero", WEIGHT_ZERO},   /* what is added to weights in 8 bits */
        SIZE(Scratch), SIZE(Linear), SIZE(Packing), SIZE(LinearCall), SIZE(Layer), SIZE(Shape), SIZE(Pass), SIZE(Sampling), SIZE(Rows),
        SIZE(Children), SIZE(DraftLayers), SIZE(Chain), SIZE(Node), SIZE(Verification), SIZE(QueryInputs), SIZE(Network), SIZE(Drafter), SIZE(Step),
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(name, numbers[i].name)) return numbers[i].number;
    return -1;
}
