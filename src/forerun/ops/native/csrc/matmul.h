// Products of a few or many rows with a packed weight.
//
// A weight [outputs, inputs] is stored in tiles of 32 outputs; within a tile, step after step along the
// inputs, each step the 32 outputs' next input (fp32) or pair of inputs (bf16, int8): one stream per tile.
// Each output is one accumulator that runs over the inputs in order, whatever the number of rows: a row's
// result never depends on the rows beside it.
#pragma once

#include <vector>

#include "functions.h"

namespace forerun {

constexpr int kTile = 2 * kLanes;

enum Storage : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct Weight {
    const void* data;
    const float* scale;  // per output (int8), else null
    const float* bias;   // per output, or null
    int64_t outputs;     // multiple of 32; padding included
    int64_t inputs;      // even; padding included
    int32_t storage;
    int32_t reserved;

    bool narrow_inputs() const { return storage != kFloat32; }  // rows are bf16, else fp32
    int64_t tiles() const { return outputs / kTile; }
    int64_t bytes_each() const { return storage == kFloat32 ? 4 : storage == kBFloat16 ? 2 : 1; }
};

// What to bring near in the meantime: so many bytes in each step.
struct Ahead {
    const char* data;
    int64_t bytes;
};

// One register tile: `Rows` rows times 32 outputs. (The accumulators are the function's own, or the compiler
// would keep them in memory, where the caller can see them.)
template <int Rows, class Stored, class Value>
inline void multiply_tile(const Stored* weight, const Value* rows, int64_t stride, int64_t inputs, Ahead ahead,
                          F16 (&sums)[Rows][2]) {
    constexpr int step = sizeof(Value) == 2 ? 2 : 1;  // inputs per step
    F16 own[Rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) own[r][0] = own[r][1] = zero();
    for (int64_t i = 0; i < inputs; i += step) {
        const auto first = load_pairs(weight), second = load_pairs(weight + step * kLanes);
        weight += step * kTile;
        __builtin_prefetch(ahead.data, 0, 2);
        __builtin_prefetch(ahead.data + ahead.bytes / 2, 0, 2);
        ahead.data += ahead.bytes;
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const auto value = splat_pair(rows + r * stride + i);
            own[r][0] = dot(own[r][0], first, value);
            own[r][1] = dot(own[r][1], second, value);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
        sums[r][0] = own[r][0];
        sums[r][1] = own[r][1];
    }
}

// What is done with a tile's sums: finish(row, first output, sums of 32 outputs), scale and bias applied.
template <int Rows, class Stored, class Value, class Finish>
void multiply_rows(const Weight& weight, const Stored* tile_data, int64_t tile, const Value* rows, int64_t first_row,
                   Ahead ahead, const Finish& finish) {
    F16 sums[Rows][2];
    multiply_tile<Rows>(tile_data, rows + first_row * weight.inputs, weight.inputs, weight.inputs, ahead, sums);
    const int64_t output = tile * kTile;
    for (int r = 0; r < Rows; ++r) {
        for (int half = 0; half < 2; ++half) {
            if (weight.scale) sums[r][half] = sums[r][half] * load(weight.scale + output + half * kLanes);
            if (weight.bias) sums[r][half] = sums[r][half] + load(weight.bias + output + half * kLanes);
        }
        finish(first_row + r, output, sums[r][0], sums[r][1]);
    }
}

template <int Rows = kMaxRows, class Stored, class Value, class Finish>
void multiply_any(int64_t num_rows, const Weight& weight, const Stored* tile_data, int64_t tile, const Value* rows,
                  int64_t first_row, Ahead ahead, const Finish& finish) {
    if constexpr (Rows > 1)
        if (num_rows < Rows)
            return multiply_any<Rows - 1>(num_rows, weight, tile_data, tile, rows, first_row, ahead, finish);
    multiply_rows<Rows>(weight, tile_data, tile, rows, first_row, ahead, finish);
}

// All rows times one tile, in register tiles of nearly equal height. The next tile's `next_bytes` are fetched
// meanwhile, evenly, so that memory never waits for the multiplying, nor the multiplying for memory.
template <class Stored, class Value, class Finish>
void multiply_all(const Weight& weight, const Stored* tile_data, int64_t tile, const Value* rows, int64_t num_rows,
                  const char* next, int64_t next_bytes, const Finish& finish) {
    const int64_t parts = (num_rows + kMaxRows - 1) / kMaxRows;
    const int64_t steps = weight.inputs / (sizeof(Value) == 2 ? 2 : 1);
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = num_rows * part / parts;
        const Ahead ahead{next + next_bytes * part / parts, next_bytes / parts / steps};
        multiply_any(num_rows * (part + 1) / parts - first, weight, tile_data, tile, rows, first, ahead, finish);
    }
}

// int8 to bf16, which holds every value of it exactly.
inline void widen_tile(const int8_t* tile_data, int64_t count, bf16* wide) {
    for (int64_t i = 0; i < count; i += 2 * kLanes) store_pairs(wide + i, load_pairs(tile_data + i));
}

// Rows [num_rows, inputs] times tiles [first_tile, last_tile); rows are fp32 for fp32 weights, else bf16.
template <class Finish>
void multiply(const Weight& weight, const void* rows, int64_t num_rows, int64_t first_tile, int64_t last_tile,
              const Finish& finish) {
    const int64_t tile_size = weight.inputs * kTile, tile_bytes = tile_size * weight.bytes_each();
    const auto* narrow_rows = static_cast<const bf16*>(rows);
    thread_local std::vector<bf16> wide;
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const auto* data = static_cast<const char*>(weight.data) + tile * tile_bytes;
        const char* next = tile + 1 < last_tile ? data + tile_bytes : data;
        if (weight.storage == kFloat32) {
            multiply_all(weight, reinterpret_cast<const float*>(data), tile, static_cast<const float*>(rows), num_rows, next,
                         tile_bytes, finish);
        } else if (weight.storage == kBFloat16) {
            multiply_all(weight, reinterpret_cast<const bf16*>(data), tile, narrow_rows, num_rows, next, tile_bytes, finish);
        } else if (num_rows <= kMaxRows) {
            multiply_all(weight, reinterpret_cast<const int8_t*>(data), tile, narrow_rows, num_rows, next, tile_bytes, finish);
        } else {  // widened once for all register tiles
            wide.resize(tile_size);
            widen_tile(reinterpret_cast<const int8_t*>(data), tile_size, wide.data());
            multiply_all(weight, wide.data(), tile, narrow_rows, num_rows, next, tile_bytes, finish);
        }
    }
}

// One row of the weight, an embedding: [inputs] fp32.
inline void read_output(const Weight& weight, int64_t output, float* row) {
    const int64_t tile = output / kTile, lane = output % kTile, tile_size = weight.inputs * kTile;
    for (int64_t i = 0; i < weight.inputs; ++i) {
        if (weight.storage == kFloat32) {
            row[i] = static_cast<const float*>(weight.data)[tile * tile_size + i * kTile + lane];
            continue;
        }
        const int64_t place = tile * tile_size + (i / 2) * 2 * kTile + lane * 2 + i % 2;
        row[i] = weight.storage == kBFloat16
                     ? widen(static_cast<const bf16*>(weight.data)[place])
                     : static_cast<float>(static_cast<const int8_t*>(weight.data)[place]) * weight.scale[output];
    }
}

}  // namespace forerun
