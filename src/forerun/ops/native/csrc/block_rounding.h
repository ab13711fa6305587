// Rounds weights to blocks of Q4_1: the search for each block's scale and offset.
//
// The twin in torch is ops/block_rounding.py: the same operations in the same order, so every level gives its bits. Sixteen
// blocks of as many outputs are rounded at once, a lane each.
#pragma once

#include <algorithm>

#include "simd.h"

namespace forerun {

constexpr int kRoundedBlock = 32;  // weights
constexpr int kRoundedBytes = 20;  // of a block: scale and offset in fp16, then codes of four bits
constexpr float kMostCode = 15.0f;
constexpr float kTriedSteps[] = {13.4f, 13.9f, 14.3f, 14.7f, 15.1f, 15.6f};
constexpr int kRefits = 2;

// scale * code + offset for each of sixteen blocks.
struct Lines {
    alignas(64) float scale[kLanes], offset[kLanes];
};

// The nearest fp16, of the two zeros the positive one.
inline float as_half(float x) { return widen(narrow_half(x)) + 0.0f; }

inline float inverse_or_zero(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }

// The same blocks of sixteen outputs, and the share of each input in the error.
class BlockColumn {
  public:
    // `weights` [num_outputs, inputs]: of each output the block at `first`; outputs that there are not have zeros.
    BlockColumn(const float* weights, int64_t inputs, int64_t first, int num_outputs, const float* shares)
        : shares_(shares + first) {
        for (int i = 0; i < kRoundedBlock; ++i)
            for (int lane = 0; lane < kLanes; ++lane)
                weights_[i][lane] = lane < num_outputs ? weights[lane * inputs + first + i] : 0.0f;
        store(mean_weight_, sum([&](int i) { return weight(i) * share(i); }));
    }

    // The line with the least error that is found.
    Lines best_lines() const {
        float low[kLanes], high[kLanes];
        F16 least_weight = weight(0), most_weight = weight(0);
        for (int i = 1; i < kRoundedBlock; ++i) {
            least_weight = min(least_weight, weight(i));
            most_weight = max(most_weight, weight(i));
        }
        store(low, least_weight);
        store(high, most_weight);
        Lines best, guess;
        for (int lane = 0; lane < kLanes; ++lane) {
            best.scale[lane] = as_half((high[lane] - low[lane]) / kMostCode);
            best.offset[lane] = as_half(low[lane]);
        }
        float least[kLanes];
        store(least, error(best));
        for (const float steps : kTriedSteps) {
            for (int lane = 0; lane < kLanes; ++lane) {
                guess.scale[lane] = (high[lane] - low[lane]) / steps;
                guess.offset[lane] = (low[lane] + high[lane] - kMostCode * guess.scale[lane]) / 2.0f;
            }
            keep_better(best, least, fitted(guess));
        }
        for (int i = 0; i < kRefits; ++i) keep_better(best, least, fitted(best));
        return best;
    }

    // Writes the block of each of the first `num_outputs` outputs, whose own are `output_bytes` apart.
    void write(const Lines& lines, int num_outputs, int64_t output_bytes, uint8_t* out) const {
        const Coder code(lines);
        float codes[kRoundedBlock][kLanes];
        for (int i = 0; i < kRoundedBlock; ++i) store(codes[i], code(weight(i)));
        for (int lane = 0; lane < num_outputs; ++lane, out += output_bytes) {
            const fp16 scale = narrow_half(lines.scale[lane]), offset = narrow_half(lines.offset[lane]);
            std::memcpy(out, &scale, 2);
            std::memcpy(out + 2, &offset, 2);
            for (int i = 0; i < kRoundedBlock / 2; ++i) {
                const int low = static_cast<int>(codes[i][lane]), high = static_cast<int>(codes[i + kRoundedBlock / 2][lane]);
                out[4 + i] = static_cast<uint8_t>(low | high << 4);
            }
        }
    }

  private:
    // The nearest codes of weights, as whole numbers from 0 to 15.
    struct Coder {
        explicit Coder(const Lines& lines) : offset(load(lines.offset)) {
            float inverses[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) inverses[lane] = inverse_or_zero(lines.scale[lane]);
            inverse = load(inverses);
        }
        F16 operator()(F16 weights) const {
            return round_even(min(splat(kMostCode), max(splat(0.0f), (weights - offset) * inverse)));
        }
        F16 offset, inverse;
    };

    F16 weight(int i) const { return load(weights_[i]); }
    F16 share(int i) const { return splat(shares_[i]); }

    // Sum of a term for each weight of a block: the upper half onto the lower, until one is left.
    template <class Term>
    static F16 sum(const Term& term) {
        F16 sums[kRoundedBlock / 2];
        for (int i = 0; i < kRoundedBlock / 2; ++i) sums[i] = term(i) + term(i + kRoundedBlock / 2);
        for (int half = kRoundedBlock / 4; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
        return sums[0];
    }

    // The squared error of each block, weighted by shares.
    F16 error(const Lines& lines) const {
        const Coder code(lines);
        const F16 scale = load(lines.scale);
        return sum([&](int i) {
            const F16 apart = code(weight(i)) * scale + code.offset - weight(i);
            return apart * apart * share(i);
        });
    }

    // The lines that fit the weights best, given the codes that others give them: weighted linear regression.
    Lines fitted(const Lines& lines) const {
        const Coder code(lines);
        const F16 mean_weight = load(mean_weight_);
        F16 codes[kRoundedBlock];
        for (int i = 0; i < kRoundedBlock; ++i) codes[i] = code(weight(i));
        const F16 mean_code = sum([&](int i) { return codes[i] * share(i); });
        float mean_codes[kLanes], spread[kLanes], common[kLanes];
        store(mean_codes, mean_code);
        store(spread, sum([&](int i) {
            const F16 apart = codes[i] - mean_code;
            return apart * apart * share(i);
        }));
        store(common, sum([&](int i) { return (codes[i] - mean_code) * (weight(i) - mean_weight) * share(i); }));
        Lines found;
        for (int lane = 0; lane < kLanes; ++lane) {
            found.scale[lane] = as_half(common[lane] * inverse_or_zero(spread[lane]));
            found.offset[lane] = as_half(mean_weight_[lane] - found.scale[lane] * mean_codes[lane]);
        }
        return found;
    }

    // Takes the other lines of those blocks where their error is lower.
    void keep_better(Lines& best, float (&least)[kLanes], const Lines& other) const {
        float errors[kLanes];
        store(errors, error(other));
        for (int lane = 0; lane < kLanes; ++lane) {
            if (!(errors[lane] < least[lane])) continue;
            least[lane] = errors[lane];
            best.scale[lane] = other.scale[lane];
            best.offset[lane] = other.offset[lane];
        }
    }

    alignas(64) float weights_[kRoundedBlock][kLanes];
    alignas(64) float mean_weight_[kLanes];
    const float* shares_;  // of the block's inputs
};

// Rounds outputs `weights` [num_outputs, inputs], sixteen at most, into `out` [num_outputs, inputs / 32, 20].
inline void round_outputs(const float* weights, int64_t inputs, int num_outputs, const float* shares, uint8_t* out) {
    for (int64_t first = 0; first < inputs; first += kRoundedBlock, out += kRoundedBytes) {
        const BlockColumn blocks(weights, inputs, first, num_outputs, shares);
        blocks.write(blocks.best_lines(), num_outputs, inputs / kRoundedBlock * kRoundedBytes, out);
    }
}

}  // namespace forerun
