/* Names that are going. */
#define COLUMNS BLOCK_N
#define ROWS TILE_M
#define half bf16
#define floats f32x16
#define halves bf16x16
#define ints i32x16
#define words u32x16
#define eight f32x8
#define exponential exp_all
#define highest_of max_of
#define sum_of reduce_add
#define padded align64
#define take arena_alloc
#ifdef _OPENMP
static int64_t thread_number(void) { return omp_get_thread_num(); }
static int64_t team_size(void) { return omp_get_num_threads(); }
#else
static int64_t thread_number(void) { return 0; }
static int64_t team_size(void) { return 1; }
#endif
