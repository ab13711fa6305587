// Mixtures of experts: several MLPs in place of one, of which each row takes a few (arXiv 1701.06538).
#pragma once

#include <algorithm>
#include <vector>

#include "matmul.h"

namespace forerun {

struct Experts {
    Weight router;                 // an output for each expert
    const Weight* const* gate_up;  // of each expert; tiles of 16 gates and their 16 ups
    const Weight* const* down;
    int64_t num_experts;
    int64_t num_chosen;   // for each row
    int64_t sums_to_one;  // whether the weights of a row's experts are divided by their sum

    int64_t inner() const { return down[0]->inputs; }
};

// Which experts the rows of a pass take. An assignment is one row at one of its experts; they are numbered by expert, and by row
// for each of them.
class Assignments {
  public:
    // Makes room for so many rows, none of which has chosen yet.
    void begin(const Experts& experts, int64_t num_rows) {
        num_experts_ = experts.num_experts;
        num_chosen_ = experts.num_chosen;
        const auto count = static_cast<size_t>(num_rows * num_chosen_);
        if (chosen_.size() < count) {
            chosen_.resize(count);
            weights_.resize(count);
            places_.resize(count);
            rows_.resize(count);
        }
        num_rows_ = num_rows;
        begins_.assign(num_experts_ + 1, 0);
    }

    int64_t size() const { return num_rows_ * num_chosen_; }

    // Chooses a row's experts by the router's logits, which become probabilities: the likeliest, and of equal ones the first.
    void choose(int64_t row, float* logits, bool sums_to_one) {
        int32_t* chosen = chosen_.data() + row * num_chosen_;
        become_probabilities(logits);
        int64_t count = 0;  // the likeliest first
        for (int32_t expert = 0; expert < num_experts_; ++expert) {
            int64_t place = count;
            while (place && logits[expert] > logits[chosen[place - 1]]) --place;
            if (place == num_chosen_) continue;
            count = std::min(count + 1, num_chosen_);
            std::copy_backward(chosen + place, chosen + count - 1, chosen + count);
            chosen[place] = expert;
        }
        std::sort(chosen, chosen + num_chosen_);
        float sum = 0.0f;
        for (int64_t i = 0; i < num_chosen_; ++i) sum += logits[chosen[i]];
        for (int64_t i = 0; i < num_chosen_; ++i)
            weights_[row * num_chosen_ + i] = sums_to_one ? logits[chosen[i]] / sum : logits[chosen[i]];
    }

    // Numbers the assignments, once all rows have chosen.
    void sort() {
        for (int64_t i = 0; i < size(); ++i) ++begins_[chosen_[i] + 1];
        for (int64_t expert = 0; expert < num_experts_; ++expert) begins_[expert + 1] += begins_[expert];
        for (int64_t i = 0; i < size(); ++i) {
            places_[i] = begins_[chosen_[i]]++;
            rows_[places_[i]] = i / num_chosen_;
        }
        std::copy_backward(begins_.begin(), begins_.end() - 1, begins_.end());
        begins_[0] = 0;
    }

    int64_t num_experts() const { return num_experts_; }
    int64_t begin_of(int64_t expert) const { return begins_[expert]; }
    int64_t end_of(int64_t expert) const { return begins_[expert + 1]; }
    int64_t row_of(int64_t assignment) const { return rows_[assignment]; }

    // Adds up what a row's experts gave, [size(), width], each times its weight, in the place of the first of them.
    float* add_up(int64_t row, float* given, int64_t width) const {
        const int64_t* places = places_.data() + row * num_chosen_;
        const float* weights = weights_.data() + row * num_chosen_;
        float* out = given + places[0] * width;
        for (int64_t first = 0; first < width; first += kLanes) {
            const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - first));
            F16 sum = zero();
            for (int64_t i = 0; i < num_chosen_; ++i)
                sum = fma(load_first(given + places[i] * width + first, lanes), splat(weights[i]), sum);
            store_first(out + first, sum, lanes);
        }
        return out;
    }

  private:
    void become_probabilities(float* logits) const {
        const float largest = *std::max_element(logits, logits + num_experts_);
        for (int64_t first = 0; first < num_experts_; first += kLanes) {
            const int lanes = static_cast<int>(std::min<int64_t>(kLanes, num_experts_ - first));
            store_first(logits + first, exp(load_first(logits + first, lanes) - splat(largest)), lanes);
        }
        float sum = 0.0f;
        for (int64_t expert = 0; expert < num_experts_; ++expert) sum += logits[expert];
        for (int64_t expert = 0; expert < num_experts_; ++expert) logits[expert] /= sum;
    }

    int64_t num_experts_ = 0, num_chosen_ = 0, num_rows_ = 0;
    std::vector<int32_t> chosen_;   // of each row, in ascending order
    std::vector<float> weights_;    // of each of these
    std::vector<int64_t> places_;   // of each of these: its assignment
    std::vector<int64_t> rows_;     // of each assignment
    std::vector<int64_t> begins_;   // of each expert: its first assignment; one more at the end
};

}  // namespace forerun
