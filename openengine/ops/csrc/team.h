// The threads that run one call together. A kernel's work is a function of the team and of its arguments that every
// thread calls; one call may be such a function alone, or many in a row (forward.cpp) without leaving its threads.

#ifndef OE_TEAM_H
#define OE_TEAM_H

#include "common.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

// A kernel's function for a team, called from other files of its level.
#define OE_SHARED(name) extern "C" void OE_JOIN(name, OE_LEVEL)
#define OE_SHARE(name) OE_JOIN(name, OE_LEVEL)

// The team's own barrier. That of the OpenMP runtime puts threads to sleep at once where a process has more of them
// than CPUs, as it has with a second thread that uses PyTorch: a wake-up costs more than most kernels take.
struct Team {
    int thread, threads;
    int* arrived;  // of all waits so far
    int max_spins;  // before a CPU that somebody else needs is given up
    int waits;

    // Return when every thread has come here.
    OE_INLINE_MEMBER void wait() {
        if (threads == 1) return;
        const int all = threads * ++waits;
        if (__atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL) == all) return;
        for (int spins = 0; __atomic_load_n(arrived, __ATOMIC_ACQUIRE) < all; spins++) {
#if defined(__x86_64__)
            _mm_pause();
#endif
#if defined(__unix__) || defined(__APPLE__)
            if (spins >= max_spins) sched_yield();
#endif
        }
    }

    // The first of this thread's share of `count` items; that of the next thread begins where it ends.
    OE_INLINE_MEMBER int64_t first(int64_t count) const { return count * thread / threads; }
    OE_INLINE_MEMBER int64_t last(int64_t count) const { return count * (thread + 1) / threads; }
};

namespace {

// Call `work(team)` in every thread of a team.
template <class Work>
OE_INLINE void together(int threads, const Work& work) {
    // With more threads than CPUs, those that are waited for have none; else they come within the microseconds that
    // 4,096 spins take, unless the machine is busy.
    const int max_spins = threads > omp_get_num_procs() ? 0 : 4096;
    int arrived = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Team team = {omp_get_thread_num(), omp_get_num_threads(), &arrived, max_spins, 0};
        work(team);
    }
}

}  // namespace

#endif
