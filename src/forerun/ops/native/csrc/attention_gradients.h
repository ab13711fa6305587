// Gradients of causal attention, for training a head: those of one query head of one text, by the formulas of FlashAttention's
// backward pass (arXiv 2205.14135). Weights of keys are computed again from their logarithmic sums.
//
// All products are of blocks of 32 by 32. Scores are computed transposed, a key's beside one another: so what they are multiplied
// with next lies as it is needed, but for the pairs of keys of the queries' gradients, which are joined.
//
// The twin is torch's `_scaled_dot_product_flash_attention_for_cpu_backward`.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AMX_BF16__)
#include "amx.h"
#endif
#include "buffer.h"
#include "functions.h"

namespace forerun {

constexpr int64_t kSide = 32;  // of a block

// Of one head: all [rows, dim] bf16 but log_sums [rows]. `out` and the logarithms of the sums of exponentials may be those of
// attention to more than these keys; then these gradients are the share of these keys.
struct CausalHead {
    const bf16 *query, *key, *value, *out, *of_out;
    const float* log_sums;
    bf16 *of_query, *of_key, *of_value;
};

// sums [32, 32] = rows [32, depth] times pairs [depth / 2, 32, 2], or that added to them. Lengths are from a row to the next.
template <bool is_added>
inline void multiply_block(const bf16* rows, int64_t row_length, const bf16* pairs, int64_t pair_length, int64_t depth, float* sums,
                           int64_t sum_length) {
#if defined(__AMX_BF16__)
    const int64_t row_bytes = row_length * sizeof(bf16), pair_bytes = pair_length * sizeof(bf16), sum_bytes = sum_length * sizeof(float);
    for (int64_t first = 0; first < kSide; first += kMatrixRows) {
        float* own = sums + first * sum_length;
        if constexpr (is_added)
            Matrices::load_sums(own, own + kLanes, sum_bytes);
        else
            Matrices::begin_sums();
        for (int64_t i = 0; i < depth; i += kMatrixInputs) {
            const bf16* steps = pairs + i / 2 * pair_length;
            Matrices::add(rows + first * row_length + i, row_bytes, steps, steps + 2 * kLanes, pair_bytes);
        }
        Matrices::store_sums(own, own + kLanes, sum_bytes);
    }
#else
    constexpr int64_t together = 4;
    for (int64_t first = 0; first < kSide; first += together) {
        F16 totals[together][2];
        for (int64_t r = 0; r < together; ++r)
            for (int half = 0; half < 2; ++half)
                totals[r][half] = is_added ? load(sums + (first + r) * sum_length + half * kLanes) : zero();
        for (int64_t i = 0; i < depth; i += 2) {
            const bf16* steps = pairs + i / 2 * pair_length;
            const Pairs both[2] = {load_pairs(steps), load_pairs(steps + 2 * kLanes)};
            for (int64_t r = 0; r < together; ++r) {
                const auto factor = splat_pair(rows + (first + r) * row_length + i);
                for (int half = 0; half < 2; ++half) totals[r][half] = dot(totals[r][half], both[half], factor);
            }
        }
        for (int64_t r = 0; r < together; ++r)
            for (int half = 0; half < 2; ++half) store(sums + (first + r) * sum_length + half * kLanes, totals[r][half]);
    }
#endif
}

// Computes the gradients of one head after the other, all [rows, dim]; dim is a multiple of 32.
class CausalGradients {
  public:
    // Takes all the memory that heads of this size need, so that none is taken, and refused, while they are computed.
    void begin(int64_t rows, int64_t dim) {
        rows_ = rows, dim_ = dim, padded_ = (rows + kSide - 1) / kSide * kSide;
        for (auto* packed : {&keys_, &values_, &transposed_keys_}) packed->reserve(padded_ * dim);
        for (auto* sums : {&of_keys_, &of_values_}) sums->reserve(padded_ * dim);
        for (auto* packed : {&queries_, &of_outs_, &joined_queries_, &joined_of_outs_}) packed->reserve(kSide * dim);
        of_queries_.reserve(kSide * dim);
    }

    void compute(const CausalHead& head, float scale) {
        const int64_t rows = rows_, dim = dim_;
        pack_keys(head);
        for (int64_t first = 0; first < rows; first += kSide) {
            pack_queries(head, first);
            for (int64_t key = 0; key <= first; key += kSide) {
                multiply_block<false>(keys_.data() + key * dim, dim, queries_.data(), 2 * kSide, dim, scores_, kSide);
                multiply_block<false>(values_.data() + key * dim, dim, of_outs_.data(), 2 * kSide, dim, of_weights_, kSide);
                weigh(key == first, scale);
                for (int64_t d = 0; d < dim; d += kSide) {
                    const int64_t sums = key * dim + d;
                    multiply_block<true>(weights_, kSide, joined_of_outs_.data() + 2 * d, 2 * dim, kSide, of_values_.data() + sums,
                                         dim);
                    multiply_block<true>(of_scores_, kSide, joined_queries_.data() + 2 * d, 2 * dim, kSide, of_keys_.data() + sums,
                                         dim);
                    multiply_block<true>(transposed_keys_.data() + d * padded_ + key, padded_, joined_of_scores_, 2 * kSide, kSide,
                                         of_queries_.data() + d * kSide, kSide);
                }
            }
            for (int64_t r = 0; r < std::min(kSide, rows - first); ++r)
                for (int64_t d = 0; d < dim; ++d) head.of_query[(first + r) * dim + d] = narrow(of_queries_[d * kSide + r]);
        }
        for (int64_t i = 0; i < rows * dim; i += kLanes) {
            store(head.of_key + i, load(of_keys_.data() + i));
            store(head.of_value + i, load(of_values_.data() + i));
        }
    }

  private:
    void pack_keys(const CausalHead& head) {
        for (auto* packed : {&keys_, &values_, &transposed_keys_}) packed->assign(padded_ * dim_, 0);
        std::copy_n(head.key, rows_ * dim_, keys_.data());
        std::copy_n(head.value, rows_ * dim_, values_.data());
        for (int64_t d = 0; d < dim_; ++d)
            for (int64_t row = 0; row < rows_; ++row) transposed_keys_[d * padded_ + row] = head.key[row * dim_ + d];
        for (auto* sums : {&of_keys_, &of_values_}) sums->assign(padded_ * dim_, 0.0f);
    }

    // Of the queries from `first` on; those behind the last are zero, and so is what they add.
    void pack_queries(const CausalHead& head, int64_t first) {
        const int64_t count = std::min(kSide, rows_ - first);
        for (auto* packed : {&queries_, &of_outs_, &joined_queries_, &joined_of_outs_}) packed->assign(kSide * dim_, 0);
        of_queries_.assign(kSide * dim_, 0.0f);
        std::fill_n(log_sums_, kSide, 1e30f);  // they weigh no key
        std::fill_n(means_, kSide, 0.0f);
        for (int64_t r = 0; r < count; ++r) {
            const bf16 *query = head.query + (first + r) * dim_, *of_out = head.of_out + (first + r) * dim_;
            for (int64_t d = 0; d < dim_; ++d) {
                const int64_t by_dims = (d / 2 * kSide + r) * 2 + d % 2, by_rows = (r / 2 * dim_ + d) * 2 + r % 2;
                queries_[by_dims] = joined_queries_[by_rows] = query[d];
                of_outs_[by_dims] = joined_of_outs_[by_rows] = of_out[d];
            }
            F16 sum = zero();
            for (int64_t d = 0; d < dim_; d += kLanes) sum = fma(load(head.out + (first + r) * dim_ + d), load(of_out + d), sum);
            means_[r] = sum_lanes(sum);
            log_sums_[r] = head.log_sums[first + r];
        }
    }

    // From scores [key, row] and the gradients of weights to the weights and the gradients of scores. On the diagonal a row sees
    // no later key.
    void weigh(bool is_diagonal, float scale) {
        for (int64_t key = 0; key < kSide; ++key)
            for (int64_t row = 0; row < kSide; row += kLanes) {
                const int64_t at = key * kSide + row;
                F16 weight = exp(load(scores_ + at) * splat(scale) - load(log_sums_ + row));
                if (is_diagonal) weight = keep_first(zero(), static_cast<int>(key - row), weight);
                store(weights_ + at, weight);
                store(of_scores_ + at, weight * (load(of_weights_ + at) - load(means_ + row)) * splat(scale));
            }
        for (int64_t key = 0; key < kSide; key += 2)
            for (int64_t row = 0; row < kSide; row += kLanes) {
                const bf16* both = of_scores_ + key * kSide + row;
                store_pairs(joined_of_scores_ + key * kSide + 2 * row, join(both, both + kSide));
            }
    }

    int64_t rows_ = 0, dim_ = 0, padded_ = 0;
    Buffer<bf16> keys_, values_;                  // [padded rows, dim]
    Buffer<bf16> transposed_keys_;                // [dim, padded rows]
    Buffer<float> of_keys_, of_values_;           // [padded rows, dim]
    Buffer<bf16> queries_, of_outs_;              // [dim / 2, 32, 2]
    Buffer<bf16> joined_queries_, joined_of_outs_;  // [32 / 2, dim, 2]
    Buffer<float> of_queries_;                    // [dim, 32]
    float log_sums_[kSide], means_[kSide];
    alignas(64) float scores_[kSide * kSide], of_weights_[kSide * kSide];  // [key, row]
    alignas(64) bf16 weights_[kSide * kSide], of_scores_[kSide * kSide];   // likewise
    alignas(64) bf16 joined_of_scores_[kSide * kSide];                     // [key / 2, row, 2]
};

}  // namespace forerun
