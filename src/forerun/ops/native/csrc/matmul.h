// Products of a few or many rows with a packed weight.
//
// A weight [outputs, inputs] is stored in tiles of 32 outputs; within a tile, step after step along the
// inputs, each step the 32 outputs' next input (fp32) or pair of inputs (all else): one stream per tile.
// Each output is one accumulator that runs over the inputs in order, whatever the number of rows: a row's
// result never depends on the rows beside it.
#pragma once

#include "amx.h"
#include "avx2.h"
#include "buffer.h"
#include "coded.h"
#include "functions.h"
#include "rounded_blocks.h"
#include "word_blocks.h"

namespace forerun {

// Coded: bf16 as in coded.h. Joined: the outputs of several weights, one after the other. Exact: weights that bf16 does not
// hold, times rows of bf16. From kQ8_0 on: blocks.h.
enum Storage : int32_t {
    kFloat32 = 0,
    kBFloat16 = 1,
    kInt8 = 2,
    kCoded = 3,
    kJoined = 4,
    kFloat16 = 5,
    kExactFloat16 = 6,
    kExactFloat32 = 7,
};

// Whether rows of bf16 are widened to fp32 for such a weight.
inline bool widens_rows(int32_t storage) { return storage == kExactFloat16 || storage == kExactFloat32; }

struct Weight {
    const void* data;
    const float* scale;  // per output (int8), else null
    const float* bias;   // per output, or null
    int64_t outputs;     // multiple of 32; padding included
    int64_t inputs;      // even; padding included
    int32_t storage;
    int32_t num_parts;
    const RareWeight* rare;     // coded: of all tiles
    const int64_t* first_rare;  // [tiles + 1] where each tile's begin
    const Weight* const* parts;  // joined: [num_parts], of as many inputs; the joined weight has no data of its own
    int64_t row_bits;            // blocks: how many rows are rounded to, 8 or 16; 0: they stay bf16

    // Rows are bf16, else fp32.
    bool narrow_inputs() const {
        return storage == kJoined ? parts[0]->narrow_inputs() : storage != kFloat32 && storage != kFloat16;
    }
    int64_t row_bytes() const { return inputs * (narrow_inputs() ? 2 : 4); }
    int64_t tiles() const { return outputs / kTile; }
    int64_t tile_bytes() const {
        if (storage == kCoded) return coded_tile_bytes(inputs);
        if (is_blocks(storage)) return blocks().tile_bytes();
        return inputs * kTile * (storage == kFloat32 || storage == kExactFloat32 ? 4 : storage == kInt8 ? 1 : 2);
    }
    const char* tile_data(int64_t tile) const { return static_cast<const char*>(data) + tile * tile_bytes(); }
    BlockTiles blocks() const { return {static_cast<const uint8_t*>(data), inputs, storage}; }
    CodedTile coded_tile(int64_t tile) const {
        return {reinterpret_cast<const uint8_t*>(tile_data(tile)), rare + first_rare[tile],
                rare + first_rare[tile + 1]};
    }
};

// Inputs of a row that a step of a tile is multiplied with.
template <class Value>
constexpr int kInputsOfStep = std::is_same_v<Value, RowInput> ? 2 : 1;

// Reads a tile of what is not coded from its first step to its last.
template <class Stored, class Value>
class PlainTile {
  public:
    explicit PlainTile(const void* data) : data_(static_cast<const Stored*>(data)) {}

    inline auto next() {
        using Part = decltype(load_pairs(data_));
        struct {
            Part first, second;
        } found{load_pairs(data_), load_pairs(data_ + kInputs * kLanes)};
        data_ += kInputs * kTile;
        return found;
    }

    // Where a step lies, if none was read yet.
    const Stored* at_step(int64_t step) const { return data_ + step * kInputs * kTile; }

  private:
    static constexpr int kInputs = kInputsOfStep<Value>;
    const Stored* data_;
};

// What to prefetch while a tile is multiplied, and how many bytes of it in each step.
struct Ahead {
    const char* data;
    int64_t bytes;
    Caches caches;
};

// How far ahead a tile that is read once is prefetched: what memory delivers to a core while it waits for a line.
constexpr int64_t kBytesAhead = 6144;

inline void fetch(const Ahead& ahead, int64_t offset) {
    fetch_line(ahead.data + offset, ahead.caches);
}

// One register tile: `Rows` rows times 32 outputs. (The accumulators are the function's own, or the compiler would keep them in
// memory, where the caller can see them. A row's address is that of every third row and once or twice the distance of rows, which
// processors add up as they read: there are too few registers for an address of each.)
template <int Rows, class Tile, class Value>
void multiply_tile(Tile tile, InputRows<Value> rows, int64_t inputs, Ahead ahead, F16 (*sums)[2]) {
    constexpr int step = kInputsOfStep<Value>;
    F16 own[Rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) own[r][0] = own[r][1] = zero();
    const Value* every_third[(Rows + 2) / 3];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r += 3) every_third[r / 3] = rows.at(r);
    for (int64_t i = 0; i < inputs; i += step) {
        const auto [first, second] = tile.next();
        fetch(ahead, 0);
        fetch(ahead, ahead.bytes / 2);
        ahead.data += ahead.bytes;
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const auto value = splat_pair(every_third[r / 3] + r % 3 * rows.stride);
            own[r][0] = dot(own[r][0], first, value);
            own[r][1] = dot(own[r][1], second, value);
        }
#pragma GCC unroll 4
        for (const Value*& row : every_third) {
            row += step;
            forget(row);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
        sums[r][0] = own[r][0];
        sums[r][1] = own[r][1];
    }
}

// The same with the number of rows as a value. (It is compiled once for all that is done with sums.)
template <class Tile, class Value>
[[gnu::noinline]] void multiply_rows(Tile tile, InputRows<Value> rows, int64_t num_rows, int64_t inputs, Ahead ahead, F16 (*sums)[2]) {
    with_count(num_rows, [&](auto height) { multiply_tile<height()>(tile, rows, inputs, ahead, sums); });
}

template <class Value>
constexpr int kRowsAtOnce = kMaxRows;

// Rows for which a tile is read no more than once, as it comes from memory.
template <class Value>
constexpr int kRowsOfOneReading = kRowsAtOnce<Value>;

#if defined(__AMX_BF16__)

template <>
constexpr int kRowsAtOnce<bf16> = kRowsOfMatrices;

// Rows of bf16 are multiplied by AMX.
template <class Tile>
[[gnu::noinline]] void multiply_rows(Tile tile, InputRows<bf16> rows, int64_t num_rows, int64_t inputs, Ahead ahead, F16 (*sums)[2]) {
    const auto weights = [tile, ahead](int64_t first, int64_t steps, bf16* buffer) mutable -> const bf16* {
        for (int64_t step = first; step < first + steps; ++step) {
            fetch(ahead, step * ahead.bytes);
            fetch(ahead, step * ahead.bytes + ahead.bytes / 2);
            if constexpr (!std::is_same_v<Tile, PlainTile<bf16, bf16>>) {
                const auto [left, right] = tile.next();
                store_pairs(buffer + (step - first) * kStepWeights, left);
                store_pairs(buffer + (step - first) * kStepWeights + kStepWeights / 2, right);
            }
        }
        if constexpr (std::is_same_v<Tile, PlainTile<bf16, bf16>>) return tile.at_step(first);
        return buffer;
    };
    with_more(num_rows, [&](auto has_more) { multiply_matrices<has_more()>(weights, rows, num_rows, inputs, sums); });
}

#elif defined(__AVX2__) && !defined(__AVX512F__)

template <>
constexpr int kRowsAtOnce<RowInput> = kRowsOfHalfTiles;
template <>
constexpr int kRowsOfOneReading<RowInput> = kRowsOfWholeTiles;
constexpr int64_t kStepsBetweenFetches = 16;

template <class Tile>
[[gnu::noinline]] void multiply_rows(Tile tile, InputRows<RowInput> rows, int64_t num_rows, int64_t inputs, Ahead ahead, F16 (*sums)[2]) {
    with_count<kRowsOfWholeTiles>(num_rows, [&](auto height) { multiply_tile<height()>(tile, rows, inputs, ahead, sums); });
}

// Two rows times bf16 as it is. (Loops over sums must be unrolled, and heights be calls of their own, or compilers keep sums in
// memory.)
[[gnu::noinline]] inline void multiply_two_rows(PlainTile<bf16, RowInput> tile, InputRows<RowInput> rows, int64_t inputs, Ahead ahead, F16 (*sums)[2]) {
    F16 left[2] = {zero(), zero()}, right[2] = {zero(), zero()};
    const bf16* weights = tile.at_step(0);
    for (int64_t i = 0; i < inputs; i += 2, weights += kStepWeights, ahead.data += ahead.bytes) {
        fetch(ahead, 0);
        fetch(ahead, ahead.bytes / 2);
        add_half_steps(weights, rows.values + i, rows.stride, 1, left);
        add_half_steps(weights + kStepWeights / 2, rows.values + i, rows.stride, 1, right);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
        sums[r][0] = left[r];
        sums[r][1] = right[r];
    }
}

// More rows: half of the outputs, then the others.
template <int Rows>
[[gnu::noinline]] void multiply_halves(PlainTile<bf16, RowInput> tile, InputRows<RowInput> rows, int64_t inputs, Ahead ahead, F16 (*sums)[2]) {
    LinesAhead lines(ahead.data);
    const int64_t steps = inputs / 2;
    for (int half = 0; half < 2; ++half) {
        F16 own[Rows];
#pragma GCC unroll 6
        for (F16& sum : own) sum = zero();
        for (int64_t step = 0; step < steps; step += kStepsBetweenFetches) {
            const int64_t count = std::min(kStepsBetweenFetches, steps - step);
            lines.fetch(count * ahead.bytes / 2);
            add_half_steps(tile.at_step(step) + half * kStepWeights / 2, rows.values + step * 2, rows.stride, count, own);
        }
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) sums[r][half] = own[r];
    }
}

inline void multiply_rows(PlainTile<bf16, RowInput> tile, InputRows<RowInput> rows, int64_t num_rows, int64_t inputs, Ahead ahead,
                          F16 (*sums)[2]) {
    with_count<kRowsOfHalfTiles>(num_rows, [&](auto height) {
        if constexpr (height() == 1) multiply_tile<1>(tile, rows, inputs, ahead, sums);
        else if constexpr (height() == 2) multiply_two_rows(tile, rows, inputs, ahead, sums);
        else multiply_halves<height()>(tile, rows, inputs, ahead, sums);
    });
}

#endif

// Ends a row's sums of 32 outputs: finish(row, first output, sums of 32 outputs), scale and bias applied.
template <class Finish>
void finish_sums(const Weight& weight, int64_t row, int64_t output, F16 first, F16 second, const Finish& finish) {
    if (weight.scale) {
        first = first * load(weight.scale + output);
        second = second * load(weight.scale + output + kLanes);
    }
    if (weight.bias) {
        first = first + load(weight.bias + output);
        second = second + load(weight.bias + output + kLanes);
    }
    finish(row, output, first, second);
}

// All rows times one tile, in register tiles of nearly equal height. What comes next is fetched meanwhile, evenly, so that
// memory never waits for the multiplying, nor the multiplying for memory: where the tile is read once, the same stream a little
// further on, else the next tile, to be found in the cache by all readings. (With more than two readings there is time for any
// way, and none beats all caches.)
template <class Tile, class Value, class Finish>
void multiply_all(const Weight& weight, Tile tile, int64_t index, InputRows<Value> rows, int64_t num_rows, const char* next,
                  const Finish& finish) {
    constexpr int most = kRowsAtOnce<Value>;
    const int64_t parts = (num_rows + most - 1) / most, bytes = weight.tile_bytes();
    const int64_t steps = weight.inputs / kInputsOfStep<Value>;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = num_rows * part / parts, count = num_rows * (part + 1) / parts - first;
        const Ahead ahead = num_rows <= kRowsOfOneReading<Value>
                                ? Ahead{weight.tile_data(index) + kBytesAhead, bytes / steps, kCachesForOneReading}
                                : Ahead{next + bytes / parts * part, bytes / parts / steps,
                                        parts <= 2 ? kCachesForSomeReadings : Caches::kAll};
        F16 sums[most][2];
        multiply_rows(tile, rows.from(first), count, weight.inputs, ahead, sums);
        for (int64_t r = 0; r < count; ++r) finish_sums(weight, first + r, index * kTile, sums[r][0], sums[r][1], finish);
    }
}

// Writes a tile of int8 or coded bf16 as plain bf16, which holds every value of them exactly.
template <class Tile>
void widen_tile(Tile tile, int64_t inputs, bf16* wide) {
    for (int64_t i = 0; i < inputs; i += 2) {
        const auto [first, second] = tile.next();
        store_pairs(wide + i * kTile, first);
        store_pairs(wide + i * kTile + 2 * kLanes, second);
    }
}

constexpr int64_t kWidenedRows = 48;  // at once, for weights that take part in fp32: what the second cache holds
// For which reading a tile once or twice (on AVX2 and by AMX: once) costs less than widening it.
constexpr int64_t kFewRows = kRowsOfOneReading<RowInput> == kMaxRows ? 2 * kMaxRows : kRowsOfOneReading<RowInput>;
constexpr int64_t kRowBytesAtOnce = 512 << 10;  // of more rows a tile would not find all in the second cache

inline int64_t rows_at_once(const Weight& weight) {
    const int64_t input_bytes = weight.narrow_inputs() ? sizeof(RowInput) : sizeof(float);
    return std::max<int64_t>({kFewRows, kRowsAtOnce<RowInput>, kRowBytesAtOnce / (weight.inputs * input_bytes)});
}

#if defined(__AMX_BF16__)

// Many rows go through a tile in panels of its inputs, of which weights fit into the first cache, and rows go past it.
constexpr int64_t kMostPanelInputs = 640;
inline int64_t num_panels(int64_t inputs) { return (inputs + kMostPanelInputs - 1) / kMostPanelInputs; }

// Memory of one member for many rows of bf16; `begin` is aligned to a cache line.
struct ManyRowsScratch {
    bf16* steps;  // a tile's weights, padded to whole registers
    bf16* rest;   // [rows, 32] inputs behind the last that fill a register, padded
    float* sums;  // [rows, 32]; where there is one panel, of 32 rows in turn

    ManyRowsScratch(int64_t num_rows, int64_t inputs, uint8_t* begin)
        : steps(reinterpret_cast<bf16*>(begin)), rest(steps + padded(inputs) * kTile),
          sums(reinterpret_cast<float*>(rest + rest_values(num_rows, inputs))) {}

    static int64_t bytes(int64_t num_rows, int64_t inputs) {
        return (padded(inputs) * kTile + rest_values(num_rows, inputs)) * 2 + sum_rows(num_rows, inputs) * kTile * 4;
    }

    // Of so many rows there is room for sums.
    static int64_t sum_rows(int64_t num_rows, int64_t inputs) { return num_panels(inputs) > 1 ? num_rows : 2 * kMatrixRows; }

  private:
    static int64_t padded(int64_t inputs) { return (inputs + kMatrixInputs - 1) / kMatrixInputs * kMatrixInputs; }
    static int64_t rest_values(int64_t num_rows, int64_t inputs) {
        return inputs % kMatrixInputs ? num_rows * kMatrixInputs : 0;
    }
};

#endif

// Bytes that `multiply` needs for each thread that calls it, from the beginning of a cache line on.
inline int64_t scratch_bytes(const Weight& weight, int64_t num_rows) {
    if (weight.storage == kJoined) {
        int64_t bytes = 0;
        for (int32_t i = 0; i < weight.num_parts; ++i) bytes = std::max(bytes, scratch_bytes(*weight.parts[i], num_rows));
        return bytes;
    }
    if (is_blocks(weight.storage)) {
        const BlockLayout& layout = block_layout(weight.storage);
        if (weight.row_bits == 8) return RoundedScratch::bytes(layout, weight.inputs, std::min(num_rows, kOwnRowsAtOnce));
        if (weight.row_bits == 16) return WordScratch::bytes(layout, weight.inputs, std::min(num_rows, kOwnRowsAtOnce));
        return BlockScratch::bytes(layout, weight.inputs, std::min(num_rows, kBlockRowsAtOnce));
    }
    if (widens_rows(weight.storage))
        return weight.inputs * std::min(num_rows, kWidenedRows) * static_cast<int64_t>(sizeof(float));
    if (!weight.narrow_inputs()) return 0;
    const int64_t at_once = std::min(num_rows, rows_at_once(weight));
    int64_t bytes = row_input_bytes(at_once, weight.inputs);
#if defined(__AMX_BF16__)
    if (num_rows > kFewRows) bytes += ManyRowsScratch::bytes(at_once, weight.inputs);
#else
    if ((weight.storage == kInt8 || weight.storage == kCoded) && num_rows > kFewRows)
        bytes += weight.inputs * kTile * static_cast<int64_t>(sizeof(bf16));
#endif
    return bytes;
}

// Rows of bf16 [num_rows, inputs] times tiles of fp16 or fp32, some rows at a time, which are widened to fp32: the bits of a
// product of fp32 weights with such rows.
template <class Stored, class Finish>
void multiply_exactly(const Weight& weight, const bf16* rows, int64_t num_rows, int64_t first_tile, int64_t last_tile,
                      float* wide, const Finish& finish) {
    for (int64_t begin = 0; begin < num_rows; begin += kWidenedRows) {
        const int64_t count = std::min(kWidenedRows, num_rows - begin), values = count * weight.inputs;
        for (int64_t i = 0; i < values; ++i) wide[i] = widen(rows[begin * weight.inputs + i]);
        for (int64_t tile = first_tile; tile < last_tile; ++tile) {
            const char* data = weight.tile_data(tile);
            const char* next = tile + 1 < last_tile ? data + weight.tile_bytes() : data;
            multiply_all(weight, PlainTile<Stored, float>(data), tile, InputRows<float>{wide, weight.inputs}, count, next,
                         [&](int64_t row, int64_t output, F16 first, F16 second) { finish(begin + row, output, first, second); });
        }
    }
}

#if defined(__AMX_BF16__)

// Many rows times one tile, whose weights are steps: finish(row, sums) for each of them. The bytes from `next` to `end` are fetched
// meanwhile. Sums are finished a block later, when they have come from the registers, and all at once, as what is stored between
// two products holds up the reading of rows.
template <class Finish>
void multiply_row_blocks(const bf16* rows, int64_t num_rows, int64_t inputs, const bf16* steps, const ManyRowsScratch& scratch,
                         const char* next, const char* end, const Finish& finish) {
    const int64_t whole = inputs / kMatrixInputs, blocks = (num_rows + kMatrixRows - 1) / kMatrixRows;
    const int64_t panels = num_panels(inputs), sum_rows = ManyRowsScratch::sum_rows(num_rows, inputs);
    const int64_t lines = (end - next) / kCacheLine / (blocks * std::max<int64_t>(1, whole)) + 1;  // to fetch in each turn
    int64_t finished = 0;
    const auto finish_until = [&](int64_t row) {
        for (; finished < row; ++finished) finish(finished, scratch.sums + finished % sum_rows * kTile);
    };
    for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t begin = whole * panel / panels, last = whole * (panel + 1) / panels;
        for (int64_t first = 0; first < num_rows; first += kMatrixRows) {
            float* const sums = scratch.sums + first % sum_rows * kTile;
            Matrices::shape(std::min<int64_t>(kMatrixRows, num_rows - first), kMatrixSteps);
            panel == 0 ? Matrices::begin_sums() : Matrices::load_tile_sums(sums);
            for (int64_t i = begin; i < last; ++i) {
                Matrices::add_tile<true>(rows + first * inputs + i * kMatrixInputs, inputs * 2, steps + i * kMatrixInputs * kTile);
                for (int64_t line = 0; line < lines && next < end; ++line, next += kCacheLine) fetch_line(next, Caches::kPastFirst);
            }
            if (panel + 1 == panels) {
                if (whole * kMatrixInputs < inputs)
                    Matrices::add_tile<true>(scratch.rest + first * kMatrixInputs, kMatrixInputs * 2,
                                             steps + whole * kMatrixInputs * kTile);
                finish_until(first);
            }
            Matrices::store_tile_sums(sums);
        }
    }
    finish_until(num_rows);
}

// More rows than the registers hold times tiles of bf16, coded or not, or int8.
template <class Finish>
void multiply_many_rows(const Weight& weight, const bf16* rows, int64_t num_rows, int64_t first_tile, int64_t last_tile,
                        uint8_t* memory, const Finish& finish) {
    const ManyRowsScratch scratch(num_rows, weight.inputs, memory);
    const int64_t rest = weight.inputs % kMatrixInputs, whole = weight.inputs - rest;
    if (rest) {
        std::fill_n(scratch.steps + weight.inputs * kTile, (kMatrixInputs - rest) * kTile, bf16{});
        std::fill_n(scratch.rest, num_rows * kMatrixInputs, bf16{});
        for (int64_t row = 0; row < num_rows; ++row)
            std::copy_n(rows + row * weight.inputs + whole, rest, scratch.rest + row * kMatrixInputs);
    }
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const char* data = weight.tile_data(tile);
        const char* next = data + weight.tile_bytes();
        const bf16* steps = scratch.steps;
        if (weight.storage == kBFloat16 && !rest)
            steps = reinterpret_cast<const bf16*>(data);
        else if (weight.storage == kBFloat16)
            std::copy_n(reinterpret_cast<const bf16*>(data), weight.inputs * kTile, scratch.steps);
        else if (weight.storage == kInt8)
            widen_tile(PlainTile<int8_t, bf16>(data), weight.inputs, scratch.steps);
        else
            widen_tile(weight.coded_tile(tile), weight.inputs, scratch.steps);
        multiply_row_blocks(rows, num_rows, weight.inputs, steps, scratch, next,
                            tile + 1 < last_tile ? next + weight.tile_bytes() : next, [&](int64_t row, const float* sums) {
                                finish_sums(weight, row, tile * kTile, load(sums), load(sums + kLanes), finish);
                            });
    }
}

#endif

// Rows of which each tile finds all in the cache, times tiles [first_tile, last_tile) of what is neither joined nor in blocks, and
// takes rows as they are, so many values apart; they are `RowInput` where the weight has narrow inputs, else fp32.
template <class Finish>
void multiply_tiles(const Weight& weight, const void* rows, int64_t stride, int64_t num_rows, int64_t first_tile, int64_t last_tile,
                    uint8_t* scratch, const Finish& finish) {
#if defined(__AMX_BF16__)
    if (weight.narrow_inputs() && num_rows > kFewRows)
        return multiply_many_rows(weight, static_cast<const bf16*>(rows), num_rows, first_tile, last_tile, scratch, finish);
#endif
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const char* data = weight.tile_data(tile);
        const char* next = tile + 1 < last_tile ? data + weight.tile_bytes() : data;
        const auto multiply_by = [&]<class Value>(auto source, const Value* values) {
            multiply_all(weight, source, tile, InputRows<Value>{values, stride}, num_rows, next, finish);
        };
        const auto multiply_narrow = [&](auto source) {
            const auto* values = static_cast<const RowInput*>(rows);
            if (num_rows <= kFewRows) return multiply_by(source, values);
            auto* wide = reinterpret_cast<bf16*>(scratch);
            widen_tile(source, weight.inputs, wide);
            multiply_by(PlainTile<bf16, RowInput>(wide), values);
        };
        switch (weight.storage) {
            case kFloat32: multiply_by(PlainTile<float, float>(data), static_cast<const float*>(rows)); break;
            case kFloat16: multiply_by(PlainTile<fp16, float>(data), static_cast<const float*>(rows)); break;
            case kBFloat16: multiply_by(PlainTile<bf16, RowInput>(data), static_cast<const RowInput*>(rows)); break;
            case kInt8: multiply_narrow(PlainTile<int8_t, RowInput>(data)); break;
            default: multiply_narrow(weight.coded_tile(tile));
        }
    }
}

// Rows [num_rows, inputs] times tiles [first_tile, last_tile); rows are bf16 where the weight has narrow inputs, else fp32. The weight's first
// output is `first_output` to `finish`.
template <class Finish>
void multiply(const Weight& weight, const void* rows, int64_t num_rows, int64_t first_tile, int64_t last_tile, uint8_t* scratch,
              const Finish& finish, int64_t first_output = 0) {
    if (weight.storage == kJoined) {
        for (int32_t i = 0; i < weight.num_parts; ++i) {
            const Weight& part = *weight.parts[i];
            const int64_t first = std::max<int64_t>(first_tile, 0), last = std::min(last_tile, part.tiles());
            if (first < last) multiply(part, rows, num_rows, first, last, scratch, finish, first_output);
            first_tile -= part.tiles();
            last_tile -= part.tiles();
            first_output += part.outputs;
        }
        return;
    }
    if (is_blocks(weight.storage)) {
        const auto emit = [&](int64_t row, int64_t tile, const float* sums) {
            F16 total[2] = {load(sums), load(sums + kLanes)};
            const int64_t output = tile * kTile;
            for (int half = 0; half < 2; ++half)
                if (weight.bias) total[half] = total[half] + load(weight.bias + output + half * kLanes);
            finish(row, first_output + output, total[0], total[1]);
        };
        const auto* narrow_rows = static_cast<const bf16*>(rows);
        if (weight.row_bits == 8)
            multiply_rounded_blocks(weight.blocks(), narrow_rows, num_rows, first_tile, last_tile, scratch, kBytesAhead, emit);
        else if (weight.row_bits == 16)
            multiply_word_blocks(weight.blocks(), narrow_rows, num_rows, first_tile, last_tile, scratch, kBytesAhead, emit);
        else
            multiply_blocks(weight.blocks(), narrow_rows, num_rows, first_tile, last_tile, scratch, kBytesAhead, emit);
        return;
    }
    const auto finish_own = [&](int64_t row, int64_t output, F16 first, F16 second) {
        finish(row, first_output + output, first, second);
    };
    if (widens_rows(weight.storage)) {
        const auto* narrow_rows = static_cast<const bf16*>(rows);
        auto* wide = reinterpret_cast<float*>(scratch);
        if (weight.storage == kExactFloat16)
            return multiply_exactly<fp16>(weight, narrow_rows, num_rows, first_tile, last_tile, wide, finish_own);
        return multiply_exactly<float>(weight, narrow_rows, num_rows, first_tile, last_tile, wide, finish_own);
    }
#if defined(__AMX_BF16__)
    const Matrices until_all_are_done;
#endif
    const int64_t row_bytes = weight.row_bytes();
    const int64_t at_once = rows_at_once(weight), parts = (num_rows + at_once - 1) / at_once;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = num_rows * part / parts, count = num_rows * (part + 1) / parts - begin;
        const void* own_rows = static_cast<const char*>(rows) + begin * row_bytes;
        int64_t stride = weight.inputs;
        uint8_t* memory = scratch;
        if (weight.narrow_inputs()) {
            const InputRows<RowInput> multiplied = row_inputs(static_cast<const bf16*>(own_rows), count, weight.inputs, memory);
            own_rows = multiplied.values;
            stride = multiplied.stride;
            memory += row_input_bytes(count, weight.inputs);
        }
        multiply_tiles(weight, own_rows, stride, count, first_tile, last_tile, memory,
                       [&](int64_t row, int64_t output, F16 first, F16 second) {
                           finish_own(begin + row, output, first, second);
                       });
    }
}

// One row of the weight, an embedding: [inputs] fp32.
inline void read_output(const Weight& weight, int64_t output, float* row) {
    if (weight.storage == kJoined) {
        int32_t i = 0;
        while (output >= weight.parts[i]->outputs) output -= weight.parts[i++]->outputs;
        return read_output(*weight.parts[i], output, row);
    }
    if (is_blocks(weight.storage)) return read_block_output(weight.blocks(), output, row);
    const int64_t tile = output / kTile, lane = output % kTile;
    const char* data = weight.tile_data(tile);
    for (int64_t i = 0; i < weight.inputs; ++i) {
        const int64_t pair = i / 2 * 2 * kTile + lane * 2 + i % 2;
        if (weight.storage == kFloat32 || weight.storage == kExactFloat32) {
            row[i] = reinterpret_cast<const float*>(data)[i * kTile + lane];
        } else if (weight.storage == kFloat16 || weight.storage == kExactFloat16) {
            row[i] = widen(reinterpret_cast<const fp16*>(data)[i * kTile + lane]);
        } else if (weight.storage == kBFloat16) {
            row[i] = widen(reinterpret_cast<const bf16*>(data)[pair]);
        } else if (weight.storage == kInt8) {
            row[i] = static_cast<float>(reinterpret_cast<const int8_t*>(data)[pair]) * weight.scale[output];
        } else {
            const auto* coded = reinterpret_cast<const uint8_t*>(data);
            row[i] = widen(decode(coded + kTableBytes + i / 2 * kStepBytes, coded,
                                  static_cast<int>(lane * 2 + i % 2)));
        }
    }
    if (weight.storage != kCoded) return;
    for (int64_t i = weight.first_rare[tile]; i < weight.first_rare[tile + 1]; ++i) {
        const RareWeight& rare = weight.rare[i];
        if (rare.place / 2 == lane) row[rare.step * 2 + rare.place % 2] = widen(rare.value);
    }
}

}  // namespace forerun
