// A row's likeliest tokens, found while the head's tiles are multiplied: the highest logit first, of equal ones the lowest
// token id first, NaN above every number. That order has no ties, so the candidates do not depend on who found them when.
#pragma once

#include <bit>
#include <limits>

#include "matmul.h"

namespace forerun {

constexpr int kMostCandidates = 16;

inline bool is_higher(float a, float b) { return a > b || (a != a && b == b); }

// The `count` highest of the outputs that were offered, which must come in rising order of their ids.
class alignas(64) CandidateList {
  public:
    void begin(int count) {
        count_ = count;
        size_ = 0;
        lowest_ = std::numeric_limits<float>::quiet_NaN();  // no output is below it while the list has room
    }

    int size() const { return size_; }
    float value(int place) const { return values_[place]; }
    int32_t id(int place) const { return ids_[place]; }

    // Offers a tile's outputs [output, output + 32) below `num_outputs`. Nearly always none of them gets in.
    void offer(F16 first, F16 second, int64_t output, int64_t num_outputs) {
        const F16 lowest = splat(lowest_);
        uint32_t left = lanes_above(first, lowest) | lanes_above(second, lowest) << kLanes;
        if (!left) return;
        if (const int64_t count = num_outputs - output; count < kTile) left &= count > 0 ? (1u << count) - 1 : 0;
        float values[kTile];
        store(values, first);
        store(values + kLanes, second);
        for (; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            insert(values[lane], static_cast<int32_t>(output + lane));
        }
    }

    // Takes an output whose id is above those of all equal ones in the list; returns whether it got in.
    bool insert(float value, int32_t id) {
        if (size_ == count_ && !is_higher(value, values_[count_ - 1])) return false;
        int place = size_ < count_ ? size_++ : count_ - 1;
        for (; place > 0 && is_higher(value, values_[place - 1]); --place) {
            values_[place] = values_[place - 1];
            ids_[place] = ids_[place - 1];
        }
        values_[place] = value;
        ids_[place] = id;
        if (size_ == count_) lowest_ = values_[count_ - 1];
        return true;
    }

    // Takes what another member found among outputs with higher ids.
    void merge(const CandidateList& later) {
        for (int place = 0; place < later.size_; ++place)
            if (!insert(later.values_[place], later.ids_[place])) return;
    }

  private:
    int32_t count_, size_;
    float lowest_;  // of a full list
    float values_[kMostCandidates];
    int32_t ids_[kMostCandidates];
};

}  // namespace forerun
