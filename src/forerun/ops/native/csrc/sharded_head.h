// One process's part of a head: the logits of its tokens; rank 0 gathers all of them, and the likeliest.
#pragma once

#include "exchange.h"
#include "product.h"

namespace forerun {

// What a call of the head works on: rank r has the outputs from `first_output` on, rank 0 those from 0. Its rows are in
// `exchange.update`.
struct ShardedHead {
    const Weight* weight;
    int64_t first_output;
    int64_t num_outputs;  // of all ranks
    Finishing finished;
    int num_candidates;   // of each row

    // out [num_rows, num_outputs], ids and values [num_rows, num_candidates]: of rank 0, else null. Rows are computed in
    // chunks, whose logits take turns in two buffers: a rank that writes to one has met the others since they read it.
    void run(Team& team, Workspace& space, const Exchange& exchange, int64_t num_rows, int64_t width, float* out, int32_t* ids,
             float* values) const {
        for (int64_t first = 0, half = 0; first < num_rows; first += exchange.head_rows, half ^= 1) {
            const int64_t count = std::min(exchange.head_rows, num_rows - first);
            float* shared = exchange.logits + half * exchange.head_rows * num_outputs;
            float* logits = exchange.rank ? shared : out + first * num_outputs;
            CandidateList* lists = multiply_own(team, space, exchange.update + first * width, count, width, logits);
            if (exchange.rank) publish_candidates(exchange, half, lists, count);
            exchange.meet();
            if (exchange.rank) continue;
            const int64_t own = std::min(weight->outputs, num_outputs);
            for (int64_t row = 0; row < count; ++row) {
                std::memcpy(logits + row * num_outputs + own, shared + row * num_outputs + own,
                            static_cast<size_t>(num_outputs - own) * sizeof(float));
                take_candidates(exchange, half, row, lists[row]);
                for (int place = 0; place < num_candidates; ++place) {
                    ids[(first + row) * num_candidates + place] = lists[row].id(place);
                    values[(first + row) * num_candidates + place] = lists[row].value(place);
                }
            }
        }
    }

  private:
    // Logits [count, num_outputs], this rank's of them; returns the likeliest of each row.
    CandidateList* multiply_own(Team& team, Workspace& space, const float* rows, int64_t count, int64_t width,
                                float* logits) const {
        const void* inputs = rows_for(space, *weight, rows, count, width);
        CandidateList* lists = space.begin_candidates(count, num_candidates);
        multiply_shared(team, space, *weight, inputs, count, [&](int member, int64_t row, int64_t output, F16 first, F16 second) {
            output += first_output;
            first = finished(first);
            second = finished(second);
            store_outputs(logits + row * num_outputs, output, num_outputs, first, second);
            if (num_candidates) lists[member * count + row].offer(first, second, output, num_outputs);
        });
        for (int member = 1; member < team.size(); ++member)
            for (int64_t row = 0; row < count; ++row) lists[row].merge(lists[member * count + row]);
        return lists;
    }

    static int64_t candidates_of(const Exchange& exchange, int64_t half, int32_t rank, int64_t row) {
        return ((half * exchange.num_ranks + rank) * exchange.head_rows + row) * kMostCandidates;
    }

    // A list that is not full, of a rank with few outputs, ends with the id -1.
    void publish_candidates(const Exchange& exchange, int64_t half, const CandidateList* lists, int64_t count) const {
        for (int64_t row = 0; row < count; ++row) {
            const int64_t place = candidates_of(exchange, half, exchange.rank, row);
            for (int i = 0; i < num_candidates; ++i) {
                const bool is_there = i < lists[row].size();
                exchange.candidate_ids[place + i] = is_there ? lists[row].id(i) : -1;
                exchange.candidate_logits[place + i] = is_there ? lists[row].value(i) : 0.0f;
            }
        }
    }

    // Higher ranks have higher ids, as `insert` wants them.
    void take_candidates(const Exchange& exchange, int64_t half, int64_t row, CandidateList& list) const {
        for (int32_t rank = 1; rank < exchange.num_ranks; ++rank) {
            const int64_t place = candidates_of(exchange, half, rank, row);
            for (int i = 0; i < num_candidates && exchange.candidate_ids[place + i] >= 0; ++i)
                if (!list.insert(exchange.candidate_logits[place + i], exchange.candidate_ids[place + i])) break;
        }
    }
};

}  // namespace forerun
