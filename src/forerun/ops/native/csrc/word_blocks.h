// Products of weights in block formats with rows rounded to sixteen bits, as `activation_dtype="int16"` asks for.
//
// A row is rounded in blocks of 32 inputs: a scale, which is a power of two, and 32 whole numbers, the largest of which has
// fifteen bits. So an input that is not 128 times smaller than its block's largest keeps each bit that bf16 has, and smaller
// ones are right to a 32768th of the largest. A group's codes and whole numbers are multiplied and summed up as whole numbers,
// exactly; the sum times both scales goes to the output's total, then the offset times the group's rounded inputs does. So the
// order depends on nothing but the format, and a row's rounding on nothing but the row, as in blocks.h, whose tiles these are.
//
// Where a format's values count up, codes are multiplied as they are, and a sum starts from what they lack to their values: the
// first value times the group's inputs, a whole number, too.
#pragma once

#include <limits>

#include "blocks.h"

namespace forerun {

// Rounds one row to `values` [inputs] and `scale` [inputs / 32, num_rows], and where `is_summed` calls write_sum(scale, sum) for each
// group of its whole numbers. A scale is NaN where an input is no number.
template <int Group, bool is_summed, class WriteSum>
void round_to_words(const bf16* row, int64_t inputs, WordInput* values, float* scale, int64_t num_rows, const WriteSum& write_sum) {
    constexpr bf16 infinity = 0x7f80;
    constexpr int bits_of_largest = 15, bias = 127, mantissa_bits = 7;
    constexpr int most = 126;  // of which the inverse is a normal number of fp32
    const auto power_of_two = [](int power) { return std::bit_cast<float>(static_cast<uint32_t>(bias + power) << 23); };
    I16 sum = splat_whole(0);
    for (int64_t i = 0; i < inputs; i += kRowBlock, scale += num_rows) {
        const bf16 largest = largest_magnitude(row + i);
        const int power = std::min(bits_of_largest - 1 + bias - (largest >> mantissa_bits), most);
        const F16 steps = splat(power_of_two(power));
        // (Of zeros it is 0: times a weight's scale it would be below fp32's normal numbers, which processors are slow with.)
        *scale = largest == 0 ? 0.0f : largest < infinity ? power_of_two(-power) : std::numeric_limits<float>::quiet_NaN();
        for (int part = 0; part < kRowBlock; part += kLanes, values += kLanes) {
            const I16 whole = store_words(values, load(row + i + part) * steps);
            if constexpr (!is_summed) continue;
            sum = sum + whole;
            if ((part + kLanes) % Group == 0) write_sum(*scale, sum_lanes(std::exchange(sum, splat_whole(0))));
        }
    }
}

// Memory of one member for a product of so many rows; `begin` is aligned to a cache line.
struct WordScratch {
    float* scales;      // [groups, kScalesOfGroup], where the header is read before the codes
    float* sums;        // [kMaxRows, 32]
    int16_t* wide;      // a tile's values
    WordInput* values;  // [rows, inputs], `stride` apart
    float* row_scales;  // [inputs / 32, rows]
    float* group_sums;  // [groups, rows]
    int32_t* starts;    // [groups, rows], in the same place: no format has both
    int64_t stride;

    WordScratch(const BlockLayout& layout, int64_t inputs, int64_t num_rows, uint8_t* begin)
        : stride(row_stride<WordInput>(num_rows, inputs)) {
        scales = reinterpret_cast<float*>(begin);
        sums = scales + 2 * (inputs / layout.group) * kTile;
        wide = reinterpret_cast<int16_t*>(sums + kMaxRows * kTile);
        values = reinterpret_cast<WordInput*>(wide + inputs * kTile);
        row_scales = reinterpret_cast<float*>(values + num_rows * stride);
        group_sums = row_scales + num_rows * (inputs / kRowBlock);
        starts = reinterpret_cast<int32_t*>(group_sums);
    }

    static int64_t bytes(const BlockLayout& layout, int64_t inputs, int64_t num_rows) {
        const int64_t groups = inputs / layout.group;
        return (2 * groups * kTile + kMaxRows * kTile) * 4 + inputs * kTile * 2 +
               num_rows * (row_stride<WordInput>(num_rows, inputs) * 2 + (inputs / kRowBlock + groups) * 4);
    }
};

// Rows [num_rows, inputs], kOwnRowsAtOnce at most, times tiles [first, last): emit(row, tile, sums [32]).
inline void multiply_some_words(const BlockTiles& tiles, const bf16* rows, int64_t num_rows, int64_t first, int64_t last,
                                uint8_t* memory, int64_t bytes_ahead, EmitSums emit) {
    const BlockLayout& layout = tiles.layout();
    const WordScratch scratch(layout, tiles.inputs, num_rows, memory);
    const int64_t inputs = tiles.inputs;
    int16_t values[kMostValues];
    for (int code = 0; code < kMostValues; ++code)
        values[code] = static_cast<int16_t>(value_of(layout, code % (1 << std::min(layout.bits(), 6))));
    with_reader(tiles.storage, values, [&](const auto& reader, auto group, auto has_offsets) {
        using Reader = std::remove_cvref_t<decltype(reader)>;
        const auto first_value = static_cast<uint32_t>(layout.first);  // products wrap around where an input is no number
        using Header = HeaderReader<group(), has_offsets()>;
        for (int64_t row = 0; row < num_rows; ++row) {
            float* group_sum = scratch.group_sums + row;
            int32_t* start = scratch.starts + row;
            round_to_words<group(), has_offsets() || Reader::kReadsCodes>(
                rows + row * inputs, inputs, scratch.values + row * scratch.stride, scratch.row_scales + row, num_rows,
                [&](float scale, int32_t sum) {
                    if constexpr (has_offsets()) *std::exchange(group_sum, group_sum + num_rows) = scale * static_cast<float>(sum);
                    else *std::exchange(start, start + num_rows) = static_cast<int32_t>(first_value * static_cast<uint32_t>(sum));
                });
        }
        const auto multiply = [&](int64_t from, int64_t count, const uint8_t* header, const uint8_t* units, AheadOfStep ahead) {
            const BlockRows<WordInput> block{{scratch.values + from * scratch.stride, scratch.stride},
                                             scratch.group_sums + from, inputs, false, num_rows, scratch.row_scales + from,
                                             scratch.starts + from};
            const auto multiply_by = [&](const auto& source, const uint8_t* codes, auto scales, auto most) {
                with_count<most()>(count, [&](auto height) {
                    multiply_block_tile<group(), has_offsets(), height()>(source, codes, scales, block, ahead, scratch.sums);
                });
            };
            if (kVectorTiles.reads_codes(num_rows))
                return multiply_by(reader, units, Header(tiles, header), std::integral_constant<int, kMaxRows>{});
            using WideReader = ValueReader<std::conditional_t<Reader::kReadsCodes, Code, int16_t>>;
            multiply_by(WideReader{}, reinterpret_cast<const uint8_t*>(scratch.wide), ReadScales<has_offsets()>(scratch.scales),
                        std::integral_constant<int, kVectorTiles.of_values>{});
        };
        const auto widen = [&](const uint8_t* header, const uint8_t* units) {
            read_header(Header(tiles, header), inputs, scratch.scales);
            widen_codes(reader, units, inputs, scratch.wide);
        };
        each_block_tile(tiles, num_rows, kVectorTiles, first, last, bytes_ahead, scratch.sums, widen, multiply, emit);
    });
}

// The same of any number of rows.
inline void multiply_word_blocks(const BlockTiles& tiles, const bf16* rows, int64_t num_rows, int64_t first, int64_t last,
                                 uint8_t* memory, int64_t bytes_ahead, EmitSums emit) {
    if (first >= last) return;
    multiply_in_parts(rows, num_rows, tiles.inputs, kOwnRowsAtOnce, emit, [&](const bf16* some, int64_t count, EmitSums emit_some) {
        multiply_some_words(tiles, some, count, first, last, memory, bytes_ahead, emit_some);
    });
}

}  // namespace forerun
