// The threads that share a pass: workers, bound to cores of their own where they are given; the caller is the team's first
// member.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#include <sched.h>
#endif

namespace forerun {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `word` is no longer `seen`: spins as long as a wait usually takes, then sleeps.
inline uint32_t wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen, int spins) {
    for (int i = 0; i < spins; ++i) {
        const uint32_t now = word.load(std::memory_order_acquire);
        if (now != seen) return now;
        pause_briefly();
    }
    word.wait(seen, std::memory_order_acquire);
    return word.load(std::memory_order_acquire);
}

class Team {
  public:
    // `cpus` empty: as many threads, none of them bound.
    Team(int num_threads, std::vector<int> cpus) : cpus_(std::move(cpus)), num_threads_(num_threads) {}

    ~Team() { stop_workers(); }

    int size() const { return num_threads_; }

    // Runs work(member) on every member at once and returns when all are done; one caller at a time. Work must not throw:
    // the other members would wait for ever.
    //
    // Throws std::system_error and std::bad_alloc where the system gives no more threads; the next call tries again.
    template <class Work>
    void run(const Work& work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (num_threads_ == 1) return work(0);
        if (workers_.empty()) start_workers();
        leave_workers_cores();
        job_ = [](const void* context, int member) noexcept { (*static_cast<const Work*>(context))(member); };
        context_ = &work;
        start_.fetch_add(1, std::memory_order_release);
        start_.notify_all();
        work(0);
        barrier();
    }

    // Waits for all members; to be called by each of them the same number of times.
    void barrier() {
        if (num_threads_ == 1) return;
        const uint32_t turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            turn_.notify_all();
        } else {
            wait_for_change(turn_, turn, kBarrierSpins);
        }
    }

    // The first of `count` items, shared out evenly, that belongs to `member`; its last is the next one's first.
    int64_t share(int64_t count, int member) const { return count * member / num_threads_; }

  private:
    static constexpr int kBarrierSpins = 1 << 14;  // some 0.3 ms
    static constexpr int kIdleSpins = 1 << 13;     // between the calls of one pass

    void start_workers() {
        workers_.reserve(num_threads_ - 1);
        try {
            for (int member = 1; member < num_threads_; ++member)
                workers_.emplace_back([this, member, seen = start_.load()] { serve(member, seen); });
        } catch (...) {
            stop_workers();
            throw;
        }
    }

    void serve(int member, uint32_t seen) {
        bind(member);
        for (;;) {
            seen = wait_for_change(start_, seen, kIdleSpins);
            if (closing_) return;
            job_(context_, member);
            barrier();
        }
    }

    void stop_workers() {
        closing_ = true;
        start_.fetch_add(1, std::memory_order_release);
        start_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        closing_ = false;
    }

#if defined(__linux__)
    void bind(int member) const {
        if (cpus_.empty()) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus_[member], &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }

    // The caller is never bound (its children would inherit that), only moved if it sits on a worker's core.
    void leave_workers_cores() const {
        if (cpus_.empty()) return;
        const int here = sched_getcpu();
        for (int member = 1; member < num_threads_; ++member) {
            if (cpus_[member] != here) continue;
            cpu_set_t before;
            if (pthread_getaffinity_np(pthread_self(), sizeof before, &before) != 0) return;
            bind(0);
            pthread_setaffinity_np(pthread_self(), sizeof before, &before);
            return;
        }
    }
#else
    void bind(int) const {}
    void leave_workers_cores() const {}
#endif

    std::vector<int> cpus_;
    const int num_threads_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    bool closing_ = false;
    void (*job_)(const void*, int) noexcept = nullptr;
    const void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> start_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
};

}  // namespace forerun
