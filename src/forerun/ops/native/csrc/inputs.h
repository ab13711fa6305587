// What a pass's first layer reads: the embeddings of its tokens, and rotations by position.
#pragma once

#include <vector>

#include "layer.h"

namespace forerun {

// Embeddings: the rows of a packed weight, or a table's.
struct TokenTable {
    const Weight* packed;  // or null
    const void* rows;      // [num_tokens, width]
    int64_t num_tokens;
    float scale;
    int32_t storage;  // of `rows`

    // Writes a token's embedding, [width].
    void read(int64_t token, int64_t width, Buffer<float>& buffer, float* out) const {
        if (packed) {
            buffer.resize(packed->inputs);
            read_output(*packed, token, buffer.data());
            scale_row(buffer.data(), scale, nullptr, width, out);
        } else if (storage == kFloat32) {
            scale_row(static_cast<const float*>(rows) + token * width, scale, nullptr, width, out);
        } else {
            for (int64_t i = 0; i < width; ++i) out[i] = widen(static_cast<const bf16*>(rows)[token * width + i]) * scale;
        }
    }
};

// Cosines and sines of positions [0, num_positions), [num_positions, half] each; half 0: a layer that knows no positions.
struct RotationTable {
    const float* cos;
    const float* sin;
    int64_t half;
    int64_t num_positions;
};

// The rotations of a pass's rows, of each table.
class RotatedRows {
  public:
    const Rotation* look_up(const RotationTable* tables, int64_t num_tables, const int64_t* positions, int64_t num_rows) {
        rotations_.resize(num_tables);
        angles_.resize(num_tables);
        for (int64_t t = 0; t < num_tables; ++t) {
            const RotationTable& table = tables[t];
            float* cos = Workspace::grown(angles_[t], 2 * num_rows * table.half);
            float* sin = cos + num_rows * table.half;
            for (int64_t row = 0; row < num_rows; ++row) {
                std::copy_n(table.cos + positions[row] * table.half, table.half, cos + row * table.half);
                std::copy_n(table.sin + positions[row] * table.half, table.half, sin + row * table.half);
            }
            rotations_[t] = {cos, sin, table.half};
        }
        return rotations_.data();
    }

  private:
    std::vector<Rotation> rotations_;
    std::vector<Buffer<float>> angles_;
};

}  // namespace forerun
