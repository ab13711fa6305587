// Products of bf16 rows with a tile of weights by AMX, the matrix registers of Intel's servers from Sapphire Rapids on.
// (matrix_attention.h multiplies other things by them.)
//
// A register holds sixteen rows of 64 bytes. One instruction multiplies up to sixteen rows of 32 inputs with sixteen outputs:
// the products of even inputs are summed up in order from zero, those of odd inputs beside them, and the sum of both is added to
// the output. So an output depends on nothing but its row and its weights, as everywhere, yet its bits are
// others than those of `vdpbf16ps`: the level computes one row by AMX, too. (TDPBF16PS, as measured.)
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>
#include <type_traits>

#include "coded.h"
#if defined(FORERUN_EMULATED_AMX)
#include "emulated_amx.h"
#endif

namespace forerun {

constexpr int kMatrixRows = 16;
constexpr int kMatrixInputs = 32;  // of one instruction
constexpr int kMatrixSteps = kMatrixInputs / 2;
constexpr int kRowsOfMatrices = 2 * kMatrixRows;  // which are multiplied at once

// The registers, which are a thread's own: sums 0 to 3 [rows, 16 outputs], rows 4 and 5 [rows, inputs], weights 6 and 7 [pairs of
// inputs, 16 outputs, 2]. The first sixteen rows are multiplied in 0, 1 and 4, more in 2, 3 and 5. Used while one lives.
class Matrices {
  public:
    Matrices() = default;
    Matrices(const Matrices&) = delete;
    Matrices& operator=(const Matrices&) = delete;
    ~Matrices() {
        if (rows_ == 0) return;
        rows_ = 0;
        _tile_release();  // so that the system need not save them
    }

    // Gives them the shapes for 1 to 32 rows and 1 to 16 steps.
    static void shape(int64_t num_rows, int64_t steps) {
        if (num_rows == rows_ && steps == steps_) return;
        rows_ = num_rows;
        steps_ = steps;
        const int64_t first = std::min<int64_t>(num_rows, kMatrixRows), second = num_rows - first;
        const int64_t rows_of[8] = {first, first, second, second, first, second, steps, steps};
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; ++i) {
            if (rows_of[i] == 0) continue;
            shapes.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? 4 * steps : 64);
            shapes.rows[i] = static_cast<uint8_t>(rows_of[i]);
        }
        keep_order();
        _tile_loadconfig(&shapes);
    }

    // Of the following, `has_more` says whether there are more than sixteen rows.
    template <bool has_more>
    static void begin_sums() {
        _tile_zero(0);
        _tile_zero(1);
        if (!has_more) return;
        _tile_zero(2);
        _tile_zero(3);
    }

    // Adds rows times steps [steps, 32 outputs, 2]. Rows that are `read_once` leave the first cache to others.
    template <bool has_more, bool read_once = false>
    static void add(const bf16* steps, const bf16* rows, int64_t row_bytes) {
        constexpr int step_bytes = kStepWeights * sizeof(bf16);
        const auto* more = reinterpret_cast<const char*>(rows) + kMatrixRows * row_bytes;
        keep_order();
        if constexpr (read_once)
            _tile_stream_loadd(4, rows, row_bytes);
        else
            _tile_loadd(4, rows, row_bytes);
        _tile_loadd(6, steps, step_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, steps + kStepWeights / 2, step_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (!has_more) return;
        if constexpr (read_once)
            _tile_stream_loadd(5, more, row_bytes);
        else
            _tile_loadd(5, more, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }

    // Writes the sums [rows, 32 outputs].
    template <bool has_more>
    static void store_sums(float* out) {
        constexpr int row_bytes = kTile * sizeof(float);
        _tile_stored(0, out, row_bytes);
        _tile_stored(1, out + kLanes, row_bytes);
        if (has_more) {
            _tile_stored(2, out + kMatrixRows * kTile, row_bytes);
            _tile_stored(3, out + kMatrixRows * kTile + kLanes, row_bytes);
        }
        keep_order();
    }

    // For gradients, in registers that all hold sixteen rows of 64 bytes: sums [32, 32] = rows [32, depth] times pairs
    // [depth / 2, 32, 2], or that added to them. Lengths are from a row to the next.
    template <bool is_added>
    static void multiply_block(const bf16* rows, int64_t row_length, const bf16* pairs, int64_t pair_length, int64_t depth,
                               float* sums, int64_t sum_length) {
        const int64_t row_bytes = row_length * sizeof(bf16), pair_bytes = pair_length * sizeof(bf16);
        const int64_t sum_bytes = sum_length * sizeof(float);
        float* const four[4] = {sums, sums + kLanes, sums + kMatrixRows * sum_length, sums + kMatrixRows * sum_length + kLanes};
        if constexpr (is_added)
            load_four<true>(four, sum_bytes);
        else
            begin_sums<true>();
        for (int64_t i = 0; i < depth; i += kMatrixInputs) {
            const bf16* steps = pairs + i / 2 * pair_length;
            keep_order();
            _tile_loadd(4, rows + i, row_bytes);
            _tile_loadd(6, steps, pair_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, steps + 2 * kLanes, pair_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, rows + kMatrixRows * row_length + i, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        store_few<4>(four, sum_bytes);
    }

    // For attention, in registers that all hold sixteen rows of 64 bytes: the first `count` of four sums, in registers 0 to 3.
    template <int count>
    static void begin_few() {
        _tile_zero(0);
        if constexpr (count > 1) _tile_zero(1);
        if constexpr (count > 2) _tile_zero(2);
        if constexpr (count > 3) _tile_zero(3);
    }
    template <int count>
    static void store_few(float* const (&sums)[4], int64_t row_bytes) {
        _tile_stored(0, sums[0], row_bytes);
        if constexpr (count > 1) _tile_stored(1, sums[1], row_bytes);
        if constexpr (count > 2) _tile_stored(2, sums[2], row_bytes);
        if constexpr (count > 3) _tile_stored(3, sums[3], row_bytes);
        keep_order();
    }

    // Adds to each sum its own rows times the same steps.
    template <int count>
    static void add_rows(const bf16* const (&rows)[4], int64_t row_bytes, const bf16* steps, int64_t step_bytes) {
        keep_order();
        _tile_loadd(6, steps, step_bytes);
        _tile_loadd(4, rows[0], row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (count > 1) {
            _tile_loadd(5, rows[1], row_bytes);
            _tile_dpbf16ps(1, 5, 6);
        }
        if constexpr (count > 2) {
            _tile_loadd(4, rows[2], row_bytes);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (count > 3) {
            _tile_loadd(5, rows[3], row_bytes);
            _tile_dpbf16ps(3, 5, 6);
        }
    }

    // The same for even sums, 0 and 1, and odd sums, 2 and 3, of 16 outputs, or of twice as many, each.
    template <bool has_both>
    static void load_four(float* const (&sums)[4], int64_t row_bytes) {
        keep_order();
        _tile_loadd(0, sums[0], row_bytes);
        if (has_both) _tile_loadd(1, sums[1], row_bytes);
        _tile_loadd(2, sums[2], row_bytes);
        if (has_both) _tile_loadd(3, sums[3], row_bytes);
    }
    template <bool has_both>
    static void store_four(float* const (&sums)[4], int64_t row_bytes) {
        _tile_stored(0, sums[0], row_bytes);
        if (has_both) _tile_stored(1, sums[1], row_bytes);
        _tile_stored(2, sums[2], row_bytes);
        if (has_both) _tile_stored(3, sums[3], row_bytes);
        keep_order();
    }
    template <bool has_both>
    static void add_both(const bf16* even, const bf16* odd, int64_t row_bytes, const bf16* steps, int64_t step_bytes) {
        keep_order();
        _tile_loadd(4, even, row_bytes);
        _tile_loadd(6, steps, step_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (has_both) {
            _tile_loadd(7, steps + kMatrixInputs, step_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_loadd(5, odd, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (has_both) _tile_dpbf16ps(3, 5, 7);
    }

  private:
    // What is written before this is in memory; GCC does not know that the instructions read and write it.
    static void keep_order() { asm volatile("" : : : "memory"); }

    static inline thread_local int64_t rows_ = 0, steps_ = 0;
};

// Calls visit(count), a constant of 1 to 4.
template <class Visit>
void with_few(int count, const Visit& visit) {
    switch (count) {
        case 1: visit(std::integral_constant<int, 1>{}); break;
        case 2: visit(std::integral_constant<int, 2>{}); break;
        case 3: visit(std::integral_constant<int, 3>{}); break;
        default: visit(std::integral_constant<int, 4>{});
    }
}

// Calls visit(has_more) with what `Matrices` is to know of the rows.
template <class Visit>
void with_more(int64_t num_rows, const Visit& visit) {
    num_rows > kMatrixRows ? visit(std::true_type{}) : visit(std::false_type{});
}

// Up to 32 rows times one tile of 32 outputs. weights(first, steps, buffer) gives the weights of the next up to sixteen
// steps, where they lie or in the buffer.
template <bool has_more, class Weights>
void multiply_matrices(Weights weights, const bf16* rows, int64_t num_rows, int64_t inputs, F16 (*sums)[2]) {
    alignas(64) bf16 buffers[2][kMatrixSteps * kStepWeights];
    Matrices::shape(num_rows, kMatrixSteps);
    Matrices::begin_sums<has_more>();
    const int64_t whole = inputs / kMatrixInputs;
    const bf16* steps = whole > 0 ? weights(0, kMatrixSteps, buffers[0]) : nullptr;
    for (int64_t i = 0; i < whole; ++i) {
        // what is written is read a turn later: registers are filled from memory alone, not from what is on its way to it
        const bf16* next = i + 1 < whole ? weights((i + 1) * kMatrixSteps, kMatrixSteps, buffers[(i + 1) % 2]) : nullptr;
        Matrices::add<has_more>(steps, rows + i * kMatrixInputs, inputs * 2);
        steps = next;
    }
    if (const int64_t i = whole * kMatrixInputs; i < inputs) {  // the rest is padded with zeros, which add nothing
        const int64_t left = inputs - i;
        bf16* const padded = buffers[0];
        const bf16* last = weights(i / 2, left / 2, padded);
        if (last != padded) std::copy(last, last + left * kTile, padded);
        std::fill(padded + left * kTile, padded + kMatrixInputs * kTile, bf16{});
        alignas(64) bf16 padded_rows[kRowsOfMatrices * kMatrixInputs] = {};
        for (int64_t row = 0; row < num_rows; ++row)
            std::copy(rows + row * inputs + i, rows + (row + 1) * inputs, padded_rows + row * kMatrixInputs);
        Matrices::add<has_more>(padded, padded_rows, kMatrixInputs * 2);
    }
    Matrices::store_sums<has_more>(reinterpret_cast<float*>(sums));
}

}  // namespace forerun

#endif
