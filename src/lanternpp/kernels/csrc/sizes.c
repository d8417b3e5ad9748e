/* Bytes of each structure that Python fills, by the name that it has there; -1: there is none. Compared when kernels are loaded. */
int64_t size_of(const char *name) {
#define SIZE(type) {#type, sizeof(type)}
    static const struct {
        const char *name;
        int64_t bytes;
    } sizes[] = {
        SIZE(Linear), SIZE(Packing), SIZE(LinearCall), SIZE(Layer), SIZE(Shape), SIZE(Pass), SIZE(Heads), {"Warp", sizeof(Sampling)}, SIZE(Chain),
        SIZE(Logits), SIZE(Rows), SIZE(Children), SIZE(Laws), SIZE(Node), SIZE(Verification),
        SIZE(QueryLayers), SIZE(QueryInputs), SIZE(Drafter), SIZE(Step),
    };
#undef SIZE
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!strcmp(name, sizes[i].name)) return sizes[i].bytes;
    return -1;
}
