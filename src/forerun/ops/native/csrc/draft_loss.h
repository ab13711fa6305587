// What a head learns from, row by row: the gradient of its loss, and the target's probabilities of the tokens that it can draft.
//
// The twins in torch are `loss_and_gradient`, `measure` and `drafted_probs` of train/draft_loss.py, with the formulas. Sums run
// in sixteen lanes, so results differ from theirs by roundings; a row's do not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "buffer.h"
#include "functions.h"

namespace forerun {

constexpr float kHybridDecay = 3.0f;  // HYBRID_DECAY of train/draft_loss.py
constexpr float kFarBelow = -1e30f;   // a logit that adds nothing, and times a probability of 0 is 0

// One row in fp32, padded to whole vectors.
struct LossScratch {
    Buffer<float> logits, wanted, odds;

    void grow(int64_t count) {
        for (auto* values : {&logits, &wanted, &odds})
            if (static_cast<int64_t>(values->size()) < count + kLanes) values->resize(count + kLanes);
    }
};

// What became of a row's drafts.
struct Drafted {
    float loss;
    float accepted;  // the chance that a draft is accepted at temperature 1
    float is_equal;  // 1 where head and target have the same first choice
};

// Writes the values of a row to `wide`, then `fill` to the end of a vector; returns its length.
template <class Stored>
inline int64_t widen_row(const Stored* row, int64_t count, float fill, float* wide) {
    int64_t i = 0;
    for (; i < count; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
        store(wide + i, keep_first(load_first(row + i, lanes), lanes, splat(fill)));
    }
    return i;
}

// The first place of the highest value.
inline int64_t first_highest(const float* values, int64_t count, float highest) {
    return std::find(values, values + count, highest) - values;
}

// Turns logits into the gradient of the loss by them. measured: whether what is returned holds more than the loss.
template <class Stored>
inline Drafted loss_row(Stored* row, const Stored* wanted_row, int64_t count, bool is_hybrid, bool measured, LossScratch& scratch) {
    float *logits = scratch.logits.data(), *wanted = scratch.wanted.data(), *odds = scratch.odds.data();
    const int64_t padded = widen_row(row, count, kFarBelow, logits);
    widen_row(wanted_row, count, 0.0f, wanted);
    F16 highest = splat(kFarBelow), most_wanted = zero(), masses = zero(), products = zero();
    for (int64_t i = 0; i < padded; i += kLanes) {
        const F16 logit = load(logits + i), odd = load(wanted + i);
        highest = max(logit, highest);
        most_wanted = max(odd, most_wanted);
        masses = masses + odd;
        products = fma(odd, logit, products);
    }
    const float top = max_lanes(highest), mass = sum_lanes(masses);
    F16 sums = zero();
    for (int64_t i = 0; i < padded; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
        const F16 weight = keep_first(exp(load(logits + i) - splat(top)), lanes, zero());
        store(odds + i, weight);
        sums = sums + weight;
    }
    const float sum = sum_lanes(sums), factor = 1.0f / sum;
    Drafted drafted{mass * (top + std::log(sum)) - sum_lanes(products), 0.0f, 0.0f};
    float of_odds = mass, of_wanted = 1.0f, of_below = 0.0f;  // factors in the gradient
    if (is_hybrid || measured) {
        F16 accepted = zero(), below = zero();
        for (int64_t i = 0; i < padded; i += kLanes) {
            const F16 odd = load(odds + i) * splat(factor), target = load(wanted + i);
            accepted = accepted + min(odd, target);
            below = below + where_below(odd, target);
        }
        drafted.accepted = sum_lanes(accepted);
        if (is_hybrid) {
            of_wanted = std::exp(-kHybridDecay * drafted.accepted);
            of_below = 1.0f - of_wanted;
            of_odds = of_wanted * mass + of_below * sum_lanes(below);
            drafted.loss = of_wanted * drafted.loss + of_below * (1.0f - drafted.accepted);
        }
    }
    if (measured)
        drafted.is_equal = first_highest(logits, count, top) == first_highest(wanted, count, max_lanes(most_wanted));
    for (int64_t i = 0; i < padded; i += kLanes) {
        const F16 odd = load(odds + i) * splat(factor), target = load(wanted + i);
        F16 gradient = odd * splat(of_odds) - target * splat(of_wanted);
        if (is_hybrid) gradient = gradient - where_below(odd, target) * splat(of_below);
        store_first(row + i, gradient, static_cast<int>(std::min<int64_t>(kLanes, count - i)));
    }
    return drafted;
}

// The softmax of a row at some of its places.
template <class Stored>
inline void drafted_probs_row(const float* logits, int64_t count, const int64_t* ids, int64_t num_ids, Stored* probs) {
    F16 highest = splat(kFarBelow);
    for (int64_t i = 0; i < count; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
        highest = max(keep_first(load_first(logits + i, lanes), lanes, highest), highest);
    }
    const F16 top = splat(max_lanes(highest));
    F16 sums = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
        sums = sums + keep_first(exp(load_first(logits + i, lanes) - top), lanes, zero());
    }
    const F16 factor = splat(1.0f / sum_lanes(sums));
    for (int64_t i = 0; i < num_ids; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, num_ids - i));
        float chosen[kLanes] = {};
        for (int lane = 0; lane < lanes; ++lane) chosen[lane] = logits[ids[i + lane]];
        store_first(probs + i, exp(load(chosen) - top) * factor, lanes);
    }
}

}  // namespace forerun
