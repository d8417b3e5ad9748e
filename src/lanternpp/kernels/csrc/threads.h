/* Threads that compute one pass together: OpenMP's, which are PyTorch's own, or ours where the compiler has no OpenMP. */
#ifndef THREADS_H
#define THREADS_H

#include "kernels.h"
#include <sched.h>

enum { MAX_TEAM = 256 }; /* 2 to the power of the rounds that a barrier has at most */

typedef struct {
    int64_t rank, size;
    int64_t (*reached)[8]; /* [size] by round of a barrier, how many barriers each thread has reached, in a cache line that it alone writes */
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
/* Wait until a number is at least `least`, for at most `most` spins. Waits take microseconds; in a longer one another thread may need this core. */
static inline void spin_until(const int64_t *number, int64_t least, int64_t most) {
    for (int64_t spins = 1; __atomic_load_n(number, __ATOMIC_ACQUIRE) < least && spins < most; spins++) {
        PAUSE();
        if (spins % SPINS == 0) sched_yield();
    }
}

/* A barrier by dissemination: after round r a thread knows that the 2^(r + 1) threads up to itself have reached the barrier. */
static inline void wait_for_team(const Team *team) {
    const int64_t count = *team->reached[team->rank] + 1;
    for (int64_t round = 0, step = 1; step < team->size; round++, step *= 2) {
        __atomic_store_n(&team->reached[team->rank][round], count, __ATOMIC_RELEASE);
        spin_until(&team->reached[(team->rank + team->size - step) % team->size][round], count, INT64_MAX);
    }
}

#if defined(_OPENMP)
#include <omp.h>
/* How many threads the parallel regions that the calling thread starts have from now on, PyTorch's among them; returns how many they had. */
int use_threads(int count) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(count);
    return before;
}
#else
#include <pthread.h>
int use_threads(int count) { return (void)count, 0; } /* PyTorch has threads of its own */

/* Threads that wait for the next team: starting them takes as long as a pass of a small model. */
typedef struct {
    pthread_mutex_t busy, asleep; /* busy: held while a team works */
    pthread_cond_t wake;
    int64_t threads, finished; /* besides the calling thread: how many there are, and how many of the team's are done */
    int64_t round;             /* MAX_TEAM times the number of teams so far, plus how many threads work beside the calling one in the last */
    Team team;
    Task *task;
    void *work;
} Pool;

#define NEW_POOL {.busy = PTHREAD_MUTEX_INITIALIZER, .asleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER}
static Pool pool = NEW_POOL;

static void *join_teams(void *rank) {
    for (int64_t last = 0;;) {
        spin_until(&pool.round, last + 1, 20 * SPINS); /* for some 0.2 ms, then sleep */
        pthread_mutex_lock(&pool.asleep);
        while (pool.round == last) pthread_cond_wait(&pool.wake, &pool.asleep);
        last = pool.round;
        pthread_mutex_unlock(&pool.asleep);
        if ((intptr_t)rank > last % MAX_TEAM) continue;
        Team team = pool.team;
        team.rank = (intptr_t)rank;
        pool.task(&team, pool.work);
        __atomic_fetch_add(&pool.finished, 1, __ATOMIC_RELEASE);
    }
}

#if !defined(_WIN32)
static void forget_threads(void) { pool = (Pool)NEW_POOL; } /* a forked child has none of them */
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(0, 0, forget_threads); }
#endif

/* Work on a task with threads of the pool, at most `size` in all; `busy` is held and is released. */
static void work_with_pool(Team team, int64_t size, Task *task, void *work) {
    pthread_t thread;
    while (pool.threads < size - 1 && !pthread_create(&thread, 0, join_teams, (void *)(intptr_t)(pool.threads + 1))) {
        pthread_detach(thread);
        pool.threads++;
    }
    team.size = pool.threads < size ? pool.threads + 1 : size;
    pthread_mutex_lock(&pool.asleep);
    pool.finished = 0;
    pool.team = team;
    pool.task = task;
    pool.work = work;
    __atomic_store_n(&pool.round, (pool.round / MAX_TEAM + 1) * MAX_TEAM + team.size - 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.asleep);
    task(&team, work);
    spin_until(&pool.finished, team.size - 1, INT64_MAX);
    pthread_mutex_unlock(&pool.busy);
}
#endif

/* Without OpenMP the calling thread works alone while another team works. */
static int64_t run_team(int64_t threads, Task *task, void *work, char *memory) {
    const int64_t size = threads < MAX_TEAM ? threads : MAX_TEAM;
    int64_t reached[size][8] __attribute__((aligned(64)));
    memset(reached, 0, sizeof reached);
#if defined(_OPENMP)
#pragma omp parallel num_threads((int)size)
    {
        const Team team = {omp_get_thread_num(), omp_get_num_threads(), reached, memory};
        task(&team, work);
    }
#else
    const Team team = {.size = 1, .reached = reached, .memory = memory};
    if (size < 2 || pthread_mutex_trylock(&pool.busy)) task(&team, work);
    else work_with_pool(team, size, task, work);
#endif
    return 0;
}

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
