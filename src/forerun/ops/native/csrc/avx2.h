// Products of bf16 rows with a tile of weights by AVX2, which has sixteen registers and fills one with a number of fp32 as it
// reads it. So rows are widened to fp32 before (`RowInput`), and more than two of them are multiplied with half of a tile's
// outputs at a time: twelve sums, two vectors of weights and a row's input are what the registers hold.
#pragma once

#include "buffer.h"
#include "coded.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace forerun {

constexpr int kRowsOfWholeTiles = 2;  // at most
constexpr int kRowsOfHalfTiles = 6;

// sum += a * b. (Compilers like to write the sum over a factor, and then run out of registers.)
[[gnu::always_inline]] inline void add_product(__m256& sum, __m256 a, __m256 b) {
#if defined(__GNUC__)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum = _mm256_fmadd_ps(a, b, sum);
#endif
}

// What is fetched into the second cache while a tile is multiplied: each line once, as processors that are asked for a line more
// often have fewer others on the way.
class LinesAhead {
  public:
    explicit LinesAhead(const void* begin) : next_(static_cast<const char*>(begin)), end_(next_) {}

    void fetch(int64_t bytes) {
        for (end_ += bytes; next_ < end_; next_ += kCacheLine) fetch_line(next_, Caches::kPastFirst);
    }

  private:
    const char *next_, *end_;
};

// Adds the products of weights of 16 outputs with one input of each row [Rows, row_length] to their sums.
template <int Rows>
[[gnu::always_inline]] inline void add_products(F16 weights, const float* inputs, int64_t row_length, F16 (&sums)[Rows]) {
    const float* fourth = inputs + 3 * row_length;  // other rows are once or twice a row behind these two
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
        const __m256 input = _mm256_broadcast_ss((r < 3 ? inputs : fourth) + r % 3 * row_length);
        add_product(sums[r].a, weights.a, input);
        add_product(sums[r].b, weights.b, input);
    }
}

// The products of pairs of weights of 16 outputs with two inputs of each row.
template <int Rows, class SomePairs>
[[gnu::always_inline]] inline void add_step(SomePairs weights, const RowInput* rows, int64_t row_length, F16 (&sums)[Rows]) {
    add_products(even_of(weights), &rows->value, row_length, sums);
    add_products(odd_of(weights), &rows->value + 1, row_length, sums);
}

// Those of several steps, whose weights begin so far apart; each is read twice, as registers are few.
template <int Distance = kStepWeights, int Rows>
[[gnu::always_inline]] inline void add_half_steps(const bf16* weights, const RowInput* rows, int64_t row_length, int64_t num_steps,
                                                  F16 (&sums)[Rows]) {
    for (int64_t step = 0; step < num_steps; ++step, weights += Distance, rows += 2) {
        const bf16* again = weights;
        add_products(even_of(load_pairs(weights)), &rows->value, row_length, sums);
        forget(again);
        add_products(odd_of(load_pairs(again)), &rows->value + 1, row_length, sums);
    }
}

}  // namespace forerun

#endif
