/* Threads that compute one pass together: OpenMP's, which are PyTorch's own, or ours where the compiler has no OpenMP. */
#ifndef THREADS_H
#define THREADS_H

#include "kernels.h"

#if defined(_WIN32)
enum { MAX_TEAM = 1 };
#define sched_yield()
#else
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
enum { MAX_TEAM = 64 };
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

typedef struct {
    int64_t rank, size;
    int64_t (*reached)[8]; /* [size] how many barriers each thread has reached, in a cache line that it alone writes */
    char *memory; /* scratch memory of all */
} Team;

typedef void Task(const Team *team, void *work);

/* Work on one row. */
typedef void RowTask(const void *work, int64_t row, char *scratch);

typedef struct {
    RowTask *task;
    const void *work;
    int64_t rows, bytes;
} RowsOfTeam;

/* The part [begin, end) of `count` pieces of work that is a thread's. */
static inline int64_t share_begin(const Team *team, int64_t count) { return count * team->rank / team->size; }
static inline int64_t share_end(const Team *team, int64_t count) { return count * (team->rank + 1) / team->size; }

#if defined(__x86_64__)
enum { SPINS = 1000 };
#define PAUSE() __builtin_ia32_pause()
#else
enum { SPINS = 20000 };
#define PAUSE()
#endif
/* A barrier. Waits take microseconds, so threads spin; in a longer wait another thread may have no core, so yield this one. */
static inline void wait_for_team(const Team *team) {
    const int64_t count = *team->reached[team->rank] + 1;
    __atomic_store_n(team->reached[team->rank], count, __ATOMIC_RELEASE);
    for (int64_t other = 0; other < team->size; other++)
        for (int64_t spins = 1; __atomic_load_n(team->reached[other], __ATOMIC_ACQUIRE) < count; spins++) {
            PAUSE();
            if (spins % SPINS == 0) sched_yield();
        }
}

#if defined(_OPENMP)
static int64_t run_team(int64_t threads, Task *task, void *work, char *memory) {
    int64_t reached[threads][8] __attribute__((aligned(64)));
    memset(reached, 0, sizeof reached);
#pragma omp parallel num_threads((int)threads)
    {
        const Team team = {omp_get_thread_num(), omp_get_num_threads(), reached, memory};
        task(&team, work);
    }
    return 0;
}

/* How many threads the parallel regions that the calling thread starts have from now on, PyTorch's among them; returns how many they had. */
int use_threads(int count) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(count);
    return before;
}
#else
int use_threads(int count) { return (void)count, 0; } /* PyTorch has threads of its own */

typedef struct {
    Team team;
    Task *task;
    void *work;
} Start;

static void *start_thread(void *from) {
    const Start *start = from;
    start->task(&start->team, start->work);
    return 0;
}

static int64_t run_team(int64_t threads, Task *task, void *work, char *memory) {
    Start start[MAX_TEAM];
    int64_t reached[MAX_TEAM][8] __attribute__((aligned(64))) = {{0}};
    const int64_t size = threads > MAX_TEAM ? MAX_TEAM : threads < 1 ? 1 : threads;
    for (int64_t i = 0; i < size; i++) start[i] = (Start){{i, size, reached, memory}, task, work};
#ifndef _WIN32
    pthread_t thread[MAX_TEAM];
    for (int64_t i = 1; i < size; i++)
        if (pthread_create(&thread[i], 0, start_thread, &start[i])) abort();
#endif
    start_thread(&start[0]);
#ifndef _WIN32
    for (int64_t i = 1; i < size; i++) pthread_join(thread[i], 0);
#endif
    return 0;
}
#endif

static void rows_of_team(const Team *team, void *work) {
    const RowsOfTeam *rows = work;
    for (int64_t row = team->rank; row < rows->rows; row += team->size) rows->task(rows->work, row, team->memory + team->rank * rows->bytes);
}

/* Run `task` on every row, each by one of the threads, which have `bytes_per_thread` of scratch memory each. */
static int64_t run_rows(int64_t threads, int64_t rows, RowTask *task, const void *work, const Scratch *scratch, int64_t bytes_per_thread) {
    ENSURE(scratch, threads * bytes_per_thread);
    RowsOfTeam shared = {task, work, rows, bytes_per_thread};
    return run_team(threads, rows_of_team, &shared, scratch->memory);
}
#endif
