// Matrix products shared out over the team: with a head they find each row's likeliest tokens, too.
#pragma once

#include "candidates.h"
#include "layer.h"

namespace forerun {

template <class Stored>
const Stored* stored_rows(const float* rows, int64_t num_rows, int64_t width, int64_t padded, Buffer<uint8_t>& buffer) {
    Stored* stored = Workspace::grown<Stored>(buffer, num_rows * padded);
    for (int64_t row = 0; row < num_rows; ++row) {
        std::fill(stored + row * padded + width, stored + (row + 1) * padded, Stored{});
        store_row(rows + row * width, width, stored + row * padded);
    }
    return stored;
}

// The rows as a product with the weight reads them; the rest of what it needs is made ready, too.
inline const void* rows_for(Workspace& space, const Weight& weight, const float* rows, int64_t num_rows, int64_t width) {
    space.grow_scratch(weight, num_rows);
    if (weight.narrow_inputs()) return stored_rows<bf16>(rows, num_rows, width, weight.inputs, space.inputs);
    return stored_rows<float>(rows, num_rows, width, weight.inputs, space.inputs);
}

// Shares out the weight's tiles; finish(member, row, first output, sums of 32 outputs).
template <class Finish>
void multiply_shared(Team& team, Workspace& space, const Weight& weight, const void* inputs, int64_t num_rows,
                     const Finish& finish) {
    team.run([&](int member) {
        multiply(weight, inputs, num_rows, team.share(weight.tiles(), member), team.share(weight.tiles(), member + 1),
                 space.scratch_of(member),
                 [&](int64_t row, int64_t output, F16 first, F16 second) { finish(member, row, output, first, second); });
    });
}

// Logits are soft_cap(factor * sum); cap 0: none.
struct Finishing {
    float factor;
    float cap;

    F16 operator()(F16 sum) const {
        if (factor != 1.0f) sum = sum * splat(factor);
        return soft_cap(sum, cap);
    }
};

// Stores a tile's 32 outputs of a row [num_outputs], as far as there are so many.
inline void store_outputs(float* row, int64_t output, int64_t num_outputs, F16 first, F16 second) {
    for (int half = 0; half < 2; ++half, output += kLanes) {
        const int64_t left = num_outputs - output;
        if (left <= 0) return;
        store_first(row + output, half ? second : first, static_cast<int>(std::min<int64_t>(kLanes, left)));
    }
}

// The product's `count` highest outputs of each row, as lists [num_rows]; the outputs go to `out`, which may be null.
inline const CandidateList* multiply_and_choose(Team& team, Workspace& space, const Weight& weight, const void* inputs,
                                                int64_t num_rows, int64_t num_outputs, const Finishing& finished, int count,
                                                float* out) {
    CandidateList* lists = space.begin_candidates(num_rows, count);
    multiply_shared(team, space, weight, inputs, num_rows,
                    [&](int member, int64_t row, int64_t output, F16 first, F16 second) {
                        first = finished(first);
                        second = finished(second);
                        if (out) store_outputs(out + row * num_outputs, output, num_outputs, first, second);
                        lists[member * num_rows + row].offer(first, second, output, num_outputs);
                    });
    for (int member = 1; member < team.size(); ++member)
        for (int64_t row = 0; row < num_rows; ++row) lists[row].merge(lists[member * num_rows + row]);
    return lists;
}

}  // namespace forerun
