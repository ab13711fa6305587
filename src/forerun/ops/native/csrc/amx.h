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
constexpr int kRowsOfMatrices = 2 * kMatrixRows;  // that are multiplied with weights while these are looked up

// The registers, which are a thread's own: sums 0 and 1 [rows, 16 outputs], rows 2 [rows, inputs], weights 3 [pairs of inputs, 16
// outputs, 2]; of more than sixteen rows the others have sums 4 and 5, rows 6. Used while one lives.
//
// Few registers are used on purpose. The processor renames each that is written; where another thread computes on the same core
// it has, as measured, some nine in all for that, and what finds none waits for the instructions before it to end. With all
// eight in use four products took 250 cycles then instead of 64; with the first four, in which weights are read twice
// as often, 120.
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
        const int64_t rows_of[7] = {first, first, first, steps, second, second, second};
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 7; ++i) {
            if (rows_of[i] == 0) continue;
            shapes.row_bytes[i] = static_cast<uint16_t>(i == 2 || i == 6 ? 4 * steps : 64);
            shapes.rows[i] = static_cast<uint8_t>(rows_of[i]);
        }
        keep_order();
        _tile_loadconfig(&shapes);
    }

    // Of the following, `has_second` says whether both sums are used.
    template <bool has_second = true>
    static void begin_sums() {
        _tile_zero(0);
        if (has_second) _tile_zero(1);
    }
    // Goes on from sums [rows, 16 outputs] each, or writes them; `row_bytes` are from a row to the next.
    static void load_sums(const float* first, const float* second, int64_t row_bytes) {
        keep_order();
        _tile_loadd(0, first, row_bytes);
        _tile_loadd(1, second, row_bytes);
    }
    template <bool has_second = true>
    static void store_sums(float* first, float* second, int64_t row_bytes) {
        _tile_stored(0, first, row_bytes);
        if (has_second) _tile_stored(1, second, row_bytes);
        keep_order();
    }

    // Adds rows times steps [steps, 16 outputs, 2] of the one sum's outputs and of the other's. Rows that are `read_once` leave the
    // first cache to others.
    template <bool read_once = false>
    static void add(const bf16* rows, int64_t row_bytes, const bf16* first_steps, const bf16* second_steps, int64_t step_bytes) {
        keep_order();
        if constexpr (read_once)
            _tile_stream_loadd(2, rows, row_bytes);
        else
            _tile_loadd(2, rows, row_bytes);
        _tile_loadd(3, first_steps, step_bytes);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(3, second_steps, step_bytes);
        _tile_dpbf16ps(1, 2, 3);
    }

    // Adds to each sum its own rows times the same steps.
    template <bool has_second = true>
    static void add_rows(const bf16* first_rows, const bf16* second_rows, int64_t row_bytes, const bf16* steps, int64_t step_bytes) {
        keep_order();
        _tile_loadd(3, steps, step_bytes);
        _tile_loadd(2, first_rows, row_bytes);
        _tile_dpbf16ps(0, 2, 3);
        if (!has_second) return;
        _tile_loadd(2, second_rows, row_bytes);
        _tile_dpbf16ps(1, 2, 3);
    }

    // Of up to sixteen rows times a tile, steps [steps, 32 outputs, 2], sums [rows, 32 outputs].
    template <bool read_once = false>
    static void add_tile(const bf16* rows, int64_t row_bytes, const bf16* steps) {
        add<read_once>(rows, row_bytes, steps, steps + kStepWeights / 2, kStepWeights * sizeof(bf16));
    }
    static void load_tile_sums(const float* sums) { load_sums(sums, sums + kLanes, kTileRowBytes); }
    static void store_tile_sums(float* sums) { store_sums(sums, sums + kLanes, kTileRowBytes); }

    // The same of up to 32 rows; `has_more` says whether they are more than sixteen.
    template <bool has_more>
    static void begin_all_sums() {
        begin_sums();
        if (!has_more) return;
        _tile_zero(4);
        _tile_zero(5);
    }
    template <bool has_more>
    static void add_all(const bf16* rows, int64_t row_bytes, const bf16* steps) {
        if (!has_more) return add_tile(rows, row_bytes, steps);
        constexpr int step_bytes = kStepWeights * sizeof(bf16);
        keep_order();
        _tile_loadd(2, rows, row_bytes);
        _tile_loadd(3, steps, step_bytes);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(6, reinterpret_cast<const char*>(rows) + kMatrixRows * row_bytes, row_bytes);
        _tile_dpbf16ps(4, 6, 3);
        _tile_loadd(3, steps + kStepWeights / 2, step_bytes);
        _tile_dpbf16ps(1, 2, 3);
        _tile_dpbf16ps(5, 6, 3);
    }
    template <bool has_more>
    static void store_all_sums(float* sums) {
        store_tile_sums(sums);
        if (!has_more) return;
        float* const more = sums + kMatrixRows * kTile;
        _tile_stored(4, more, kTileRowBytes);
        _tile_stored(5, more + kLanes, kTileRowBytes);
        keep_order();
    }

  private:
    static constexpr int kTileRowBytes = kTile * sizeof(float);

    // What is written before this is in memory; GCC does not know that the instructions read and write it.
    static void keep_order() { asm volatile("" : : : "memory"); }

    static inline thread_local int64_t rows_ = 0, steps_ = 0;
};

// One row, widened to fp32, may be multiplied without matrix registers, to the same bits: even inputs and odd ones are summed up
// each for themselves.

// Whether no sum of products of these inputs with whole numbers lies below fp32's normal numbers, all of which the registers take
// for zero: inputs of 2^-100 and more are multiples of 2^-107, and so are such sums.
inline bool have_normal_sums(const bf16* row, int64_t inputs) {
    constexpr uint16_t least = 27 << 7, magnitude = 0x7fff;
    bool all = true;
    for (int64_t i = 0; i < inputs; ++i) all &= (row[i] & magnitude) == 0 || (row[i] & magnitude) >= least;
    return all;
}

struct SplitSum {
    F16 even, odd;
};
inline SplitSum sum_for(const WideInput*) { return {zero(), zero()}; }
inline F16 total_of(SplitSum sum) { return sum.even + sum.odd; }

inline SplitSum splat_pair(const WideInput* p) { return {splat(p[0].value), splat(p[1].value)}; }
inline SplitSum dot(SplitSum sum, Pairs weights, SplitSum inputs) {
    const __m512i bits = (__m512i)weights.v;
    const F16 even = {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
    const F16 odd = {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
    return {fma(even, inputs.even, sum.even), fma(odd, inputs.odd, sum.odd)};
}

// Calls visit(has_more) with what `Matrices` is to know of the rows.
template <class Visit>
void with_more(int64_t num_rows, const Visit& visit) {
    num_rows > kMatrixRows ? visit(std::true_type{}) : visit(std::false_type{});
}

// Up to 32 rows times one tile of 32 outputs. weights(first, steps, buffer) gives the weights of the next up to sixteen
// steps, where they lie or in the buffer.
template <bool has_more, class Weights>
void multiply_matrices(Weights weights, InputRows<bf16> rows, int64_t num_rows, int64_t inputs, F16 (*sums)[2]) {
    alignas(64) bf16 buffers[2][kMatrixSteps * kStepWeights];
    Matrices::shape(num_rows, kMatrixSteps);
    Matrices::begin_all_sums<has_more>();
    const int64_t whole = inputs / kMatrixInputs;
    const bf16* steps = whole > 0 ? weights(0, kMatrixSteps, buffers[0]) : nullptr;
    for (int64_t i = 0; i < whole; ++i) {
        // what is written is read a turn later: registers are filled from memory alone, not from what is on its way to it
        const bf16* next = i + 1 < whole ? weights((i + 1) * kMatrixSteps, kMatrixSteps, buffers[(i + 1) % 2]) : nullptr;
        Matrices::add_all<has_more>(rows.values + i * kMatrixInputs, rows.stride * 2, steps);
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
            std::copy(rows.at(row) + i, rows.at(row) + inputs, padded_rows + row * kMatrixInputs);
        Matrices::add_all<has_more>(padded_rows, kMatrixInputs * 2, padded);
    }
    Matrices::store_all_sums<has_more>(reinterpret_cast<float*>(sums));
}

}  // namespace forerun

#endif
