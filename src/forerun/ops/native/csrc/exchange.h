// How the processes of a tensor-parallel group work on one pass: memory that all of them map, and counters in it that they
// watch. Nothing is summed across processes: each writes its own outputs, and all read them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "team.h"

namespace forerun {

constexpr int kMostRanks = 64;

// At the beginning of the shared memory, which starts as zeros. Counters wrap around.
struct GroupFlags {
    alignas(64) std::atomic<uint32_t> ended;     // 0, or 1 + the rank that is gone; set once
    alignas(64) std::atomic<uint32_t> posted;    // messages of rank 0 so far
    std::atomic<uint32_t> sleepers;              // ranks that sleep until the next message
    int64_t message_bytes;                       // of the last one
    struct alignas(64) Rank {
        std::atomic<uint32_t> arrived;  // exchanges that it has written its part of
        std::atomic<uint32_t> done;     // messages that it has carried out
    } ranks[kMostRanks];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "other processes read these words");

// One process's view of the group. All buffers are in the shared memory; rows are those of a pass, `max_rows` at most.
struct Exchange {
    GroupFlags* flags;
    uint8_t* message;       // what rank 0 has posted
    int64_t message_room;   // bytes
    float* update;          // [rows, width]: what a product adds to the residual stream; before a pass its input, perhaps wider
    void* attended;         // [rows, heads of all ranks, value_dim], as keys are stored
    void* activated;        // [rows, inputs of the last product], the same
    float* heads;           // [rows, query heads, then key heads of all ranks]: only where one norm runs over all of them
    float* logits;          // [2, head_rows, vocabulary]
    int32_t* candidate_ids;     // [2, ranks, head_rows, kMostCandidates]
    float* candidate_logits;    // the same
    int64_t update_room;  // values
    int64_t max_rows;
    int64_t head_rows;
    int32_t rank;
    int32_t num_ranks;
    int64_t num_threads;  // that each rank began with; its team may have others by now

    bool has_ended() const { return flags->ended.load(std::memory_order_acquire) != 0; }

    void end(int32_t gone) const {
        uint32_t running = 0;
        flags->ended.compare_exchange_strong(running, static_cast<uint32_t>(gone) + 1);
        wake();
    }

    // Exchanges that this rank has arrived at.
    uint32_t num_arrived() const { return flags->ranks[rank].arrived.load(std::memory_order_relaxed); }

    // Says that this rank has written its part of the next exchange; to be called by one thread, after all have written.
    void arrive() const { flags->ranks[rank].arrived.fetch_add(1, std::memory_order_release); }

    // Waits until all ranks have arrived at exchange number `turn`. Where the group has ended it returns at once: what is
    // computed then is of no use, but a call still runs to its end, so that the threads of this process stay together.
    void wait(uint32_t turn) const {
        for (int32_t other = 0; other < num_ranks; ++other)
            if (other != rank) wait_until(flags->ranks[other].arrived, turn);
    }

    // Arrives and waits, for calls by one thread.
    void meet() const {
        arrive();
        wait(num_arrived());
    }

    // Rank 0: hands a message and rows to the others, once they have carried out the message before.
    bool post(const uint8_t* content, int64_t num_bytes, const float* rows, int64_t num_values) const {
        const uint32_t before = flags->posted.load(std::memory_order_relaxed);
        for (int32_t other = 1; other < num_ranks; ++other) wait_until(flags->ranks[other].done, before);
        if (has_ended()) return false;
        std::memcpy(message, content, static_cast<size_t>(num_bytes));
        if (num_values) std::memcpy(update, rows, static_cast<size_t>(num_values) * sizeof(float));
        flags->message_bytes = num_bytes;
        flags->posted.store(before + 1, std::memory_order_seq_cst);
        if (flags->sleepers.load(std::memory_order_seq_cst)) wake();
        return true;
    }

    // The others: bytes of the next message; 0: none came within the time, -1: the group has ended.
    int64_t receive(int64_t timeout_ms) const {
        const uint32_t seen = flags->ranks[rank].done.load(std::memory_order_relaxed);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
        for (int64_t i = 0;; ++i) {
            if (flags->posted.load(std::memory_order_acquire) != seen) return flags->message_bytes;
            if (has_ended()) return -1;
            if (i < kIdleSpins) {
                pause_briefly();
            } else if (i < kIdleSpins + kYields) {
                std::this_thread::yield();
            } else {
                if (std::chrono::steady_clock::now() >= deadline) return 0;
                sleep_until_posted(seen, timeout_ms);
            }
        }
    }

    // The others: the message is carried out.
    void finish() const { flags->ranks[rank].done.fetch_add(1, std::memory_order_release); }

  private:
    static constexpr int64_t kSpins = 1 << 12;      // some 0.1 ms: what ranks of equal work usually differ by
    static constexpr int64_t kIdleSpins = 1 << 15;  // some 1 ms: what rank 0 does between two passes
    static constexpr int64_t kYields = 1 << 8;

    // Spins, then lets other threads run, which may be those that are waited for where there are more ranks than cores.
    void wait_until(const std::atomic<uint32_t>& count, uint32_t turn) const {
        for (int64_t i = 0; static_cast<int32_t>(count.load(std::memory_order_acquire) - turn) < 0; ++i) {
            if (i < kSpins) {
                pause_briefly();
                continue;
            }
            if (has_ended()) return;
            if (i < kSpins + kYields)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

#if defined(__linux__)
    void sleep_until_posted(uint32_t seen, int64_t timeout_ms) const {
        flags->sleepers.fetch_add(1, std::memory_order_seq_cst);
        const timespec longest{timeout_ms / 1000, timeout_ms % 1000 * 1000000};
        if (!has_ended()) syscall(SYS_futex, &flags->posted, FUTEX_WAIT, seen, &longest, nullptr, 0);
        flags->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    void wake() const { syscall(SYS_futex, &flags->posted, FUTEX_WAKE, kMostRanks, nullptr, nullptr, 0); }
#else
    void sleep_until_posted(uint32_t, int64_t) const { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }
    void wake() const {}
#endif
};

}  // namespace forerun
