// The threads that share a pass: workers, bound to cores of their own where they are given; the caller is the team's first
// member.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
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

// Waits until `word` is no longer `seen`, or so many spins are over; returns it.
inline uint32_t spin_for_change(const std::atomic<uint32_t>& word, uint32_t seen, int spins) {
    uint32_t now = word.load(std::memory_order_acquire);
    for (int i = 0; i < spins && now == seen; ++i) {
        pause_briefly();
        now = word.load(std::memory_order_acquire);
    }
    return now;
}

// Waits until `word` is no longer `seen`: spins as long as a wait usually takes, then sleeps.
inline uint32_t wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen, int spins) {
    const uint32_t now = spin_for_change(word, seen, spins);
    if (now != seen) return now;
    word.wait(seen, std::memory_order_acquire);
    return word.load(std::memory_order_acquire);
}

using Nanoseconds = int64_t;

inline Nanoseconds nanoseconds_now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How many members take part. Where others compute on the same cores all the time, the system stops a member for a few
// milliseconds again and again, and all others wait for it at each barrier: two threads are then many times slower than one. So
// when they have slept through much of a window of runs, the next ones go on with a member less for a while, in which what was
// lost is little, and then all of them try again. A member that is stopped now and then, as by a server that sends what was
// written, costs less than leaving it out.
class TeamSize {
  public:
    explicit TeamSize(int most) : most_(most), fewer_(most) {}

    int at(Nanoseconds now) const { return now < until_ ? fewer_ : most_; }

    // A run of `members` took so long, and they waited for each other's, slept, so long in all.
    void note(int members, Nanoseconds taken, Nanoseconds slept, Nanoseconds now) {
        if (members != members_) members_ = members, taken_ = slept_ = 0;
        taken_ += taken;
        slept_ += slept;
        if (taken_ < kWindow) return;
        if (slept_ >= kMembersLost * static_cast<double>(taken_)) {
            fewer_ = std::max(1, members - 1);
            until_ = now + std::min(kTimesLost * taken_, kLongest);
        }
        taken_ = slept_ = 0;
    }

  private:
    static constexpr Nanoseconds kWindow = 50'000'000, kLongest = 5'000'000'000;
    static constexpr double kMembersLost = 0.5;  // by sleeping: then one less takes hardly longer
    static constexpr int kTimesLost = 20;

    const int most_;
    int fewer_;
    Nanoseconds until_ = 0;
    int members_ = 0;  // of the runs of the present window, which took and slept so long
    Nanoseconds taken_ = 0, slept_ = 0;
};

class Team {
  public:
    // `cpus` empty: as many threads, none of them bound.
    Team(int num_threads, std::vector<int> cpus)
        : cpus_(std::move(cpus)), num_threads_(num_threads), team_size_(num_threads) {}

    ~Team() { stop_workers(); }

    int size() const { return num_threads_; }
    int num_taking_part() const { return taking_part_; }

    // Runs work(member) on every member that takes part, at once, and returns when all are done; one caller at a time. Work
    // must not throw: the other members would wait for ever.
    //
    // Throws std::system_error and std::bad_alloc where the system gives no more threads; the next call tries again.
    template <class Work>
    void run(const Work& work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (num_threads_ == 1) return work(0);
        const Nanoseconds begin = nanoseconds_now();
        taking_part_ = team_size_.at(begin);
        if (taking_part_ == 1) return work(0);
        if (workers_.empty()) start_workers();
        leave_workers_cores();
        job_ = [](const void* context, int member) noexcept { (*static_cast<const Work*>(context))(member); };
        context_ = &work;
        slept_.store(0, std::memory_order_relaxed);
        start_.store(turn_of(start_.load(std::memory_order_relaxed)) + kTurn + taking_part_, std::memory_order_release);
        start_.notify_all();
        work(0);
        barrier();
        const Nanoseconds end = nanoseconds_now();
        team_size_.note(taking_part_, end - begin, slept_.load(std::memory_order_relaxed), end);
    }

    // Waits for all members that take part; to be called by each of them the same number of times.
    void barrier() {
        const int members = taking_part_;  // read before the last one arrives and the caller goes on to another run
        if (members == 1) return;
        const uint32_t turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            turn_.notify_all();
        } else if (spin_for_change(turn_, turn, kBarrierSpins) == turn) {
            const Nanoseconds begin = nanoseconds_now();
            turn_.wait(turn, std::memory_order_acquire);
            slept_.fetch_add(nanoseconds_now() - begin, std::memory_order_relaxed);
        }
    }

    // The first of `count` items, shared out evenly, that belongs to `member`; its last is the next one's first.
    int64_t share(int64_t count, int member) const { return count * member / taking_part_; }

  private:
    static constexpr int kBarrierSpins = 1 << 14;  // some 0.3 ms
    static constexpr int kIdleSpins = 1 << 13;     // between the calls of one pass
    static constexpr uint32_t kTurn = 1 << 13;     // more than there can be members

    static uint32_t turn_of(uint32_t start) { return start / kTurn * kTurn; }

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
            if (member >= static_cast<int>(seen % kTurn)) continue;
            job_(context_, member);
            barrier();
        }
    }

    void stop_workers() {
        closing_ = true;
        start_.fetch_add(kTurn, std::memory_order_release);
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
    TeamSize team_size_;
    int taking_part_ = 1;  // members, in the run that goes on or was the last
    alignas(64) std::atomic<uint32_t> start_{0};  // a number of turns, and how many members take part in the last
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    alignas(64) std::atomic<Nanoseconds> slept_{0};  // of all members in this run
};

}  // namespace forerun
