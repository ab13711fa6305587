// Products of weights in block formats with rows rounded to eight bits, as `activation_dtype="int8"` asks for.
//
// A row is rounded in blocks of 32 inputs: a scale, a 127th of the largest magnitude, and 32 whole numbers (what llama.cpp
// calls Q8_0, but that the scale is fp32). A group's codes and whole numbers are multiplied and summed up as whole numbers,
// exactly; the sum times both scales goes to the output's total, then the offset times the group's rounded inputs does. So
// the order depends on nothing but the format, and a row's rounding on nothing but the row, as in blocks.h.
//
// Codes are read as bytes, of each output four inputs side by side. Of a quad's eight inputs of sixteen outputs the planes of
// block_codes.h give two such vectors in two or three instructions each: inputs 0, 4, 1, 5 and 2, 6, 3, 7, in the order in
// which rows are stored, too.
#pragma once

#include <limits>

#include "blocks.h"
#include "bytes.h"

namespace forerun {

constexpr int kQuadInputs = 2 * kQuadSteps;

// A quad's codes as bytes: of each half of the outputs two vectors.
struct QuadBytes {
    Bytes vectors[2][2];
};

// Reads codes of `Low` + `High` bits; `is_named`: as what they name, else as they are.
template <int Low, int High, bool is_named>
class ByteReader {
  public:
    static constexpr int kBits = Low + High;
    static constexpr bool kHasAllBits = is_named;
    static constexpr bool kReadsOnce = true;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);
    static constexpr InputOrder kOrder = {0, 4, 1, 5, 2, 6, 3, 7};  // of a quad's inputs

    explicit ByteReader(const uint8_t* names) : names_(names) {}

    [[gnu::always_inline]] QuadBytes quad(const uint8_t* unit, int index) const {
        QuadBytes found;
        for (int half = 0; half < 2; ++half) {
            bytes_of<Low>(unit, index, half, found.vectors[half]);
            if constexpr (High > 0) {
                Bytes high[2];
                bytes_of<High>(unit + unit_bytes(Low), index, half, high);
                for (int i = 0; i < 2; ++i) found.vectors[half][i] = found.vectors[half][i] | shifted_left<Low>(high[i]);
            }
            if constexpr (is_named)
                for (Bytes& bytes : found.vectors[half]) bytes = names_(bytes);
        }
        return found;
    }

  private:
    // The even steps' bits of a plane, then the odd steps'.
    template <int width>
    [[gnu::always_inline]] static void bytes_of(const uint8_t* plane, int quad, int half, Bytes (&out)[2]) {
        constexpr int quads = 4 / width;
        Bytes words = load_bytes(plane + (quad / quads * 2 + half) * 64);
        if constexpr (quads > 1) words = shifted_right(words, width * (quad % quads));
        out[0] = bits_of<0, width>(words);
        out[1] = bits_of<4, width>(words);
    }

    NamedBytes names_;
};

template <>
class ByteReader<8, 0, false> {
  public:
    static constexpr int kBits = 8;
    static constexpr bool kHasAllBits = true;
    static constexpr bool kReadsOnce = true;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);
    static constexpr InputOrder kOrder = {0, 1, 2, 3, 4, 5, 6, 7};

    explicit ByteReader(const uint8_t*) {}

    [[gnu::always_inline]] QuadBytes quad(const uint8_t* unit, int index) const {
        const uint8_t* bytes = unit + index * kQuadSteps * kStepWeights;
        QuadBytes found;
        for (int i = 0; i < 2; ++i) {
            const uint8_t* pair = bytes + 2 * i * kStepWeights;
            const Bytes first = flip_sign(load_bytes(pair)), second = flip_sign(load_bytes(pair + kStepWeights));
            for (int half = 0; half < 2; ++half) found.vectors[half][i] = words_in_turn(first, second, half);
        }
        return found;
    }
};

// Codes that have been read before: a quad's four vectors, quad after quad.
template <bool has_all_bits>
class WideByteReader {
  public:
    static constexpr bool kHasAllBits = has_all_bits;
    static constexpr bool kReadsOnce = false;
    static constexpr int64_t kUnitBytes = kUnitInputs * kTile;

    [[gnu::always_inline]] QuadBytes quad(const uint8_t* unit, int index) const {
        QuadBytes found;
        for (int i = 0; i < 4; ++i) found.vectors[i / 2][i % 2] = load_bytes(unit + (index * 4 + i) * 64);
        return found;
    }
};

template <class Reader>
void widen_bytes(const Reader& reader, const uint8_t* unit, int64_t inputs, uint8_t* wide) {
    for (int64_t i = 0; i < inputs; i += kUnitInputs, unit += Reader::kUnitBytes) {
        for (int index = 0; index < kUnitSteps / kQuadSteps; ++index) {
            const QuadBytes quad = reader.quad(unit, index);
            for (int part = 0; part < 4; ++part, wide += 64) store_bytes(wide, quad.vectors[part / 2][part % 2]);
        }
    }
}

// Rows [num_rows, inputs] rounded to eight bits.
struct RoundedRows {
    int8_t* values;     // [rows, inputs], `stride` apart, of every eight in the reader's order
    float* scales;      // [inputs / 32, rows]
    int32_t* starts;    // [groups, rows] what a group's sum starts from: what its codes lack to their values
    float* group_sums;  // [groups, rows] of the rounded inputs
    int64_t num_rows, inputs, stride;

    RoundedRows from(int64_t row) const {
        return {values + row * stride, scales + row, starts + row, group_sums + row, num_rows, inputs, stride};
    }
};

// Rounds one row; `base`: what a code lacks to its value. The scale is NaN where an input is no number.
template <int Group, class Reader>
void round_row(const bf16* row, int base, const RoundedRows& out) {
    constexpr float most = 127.0f;
    constexpr bf16 infinity = 0x7f80;
    float *scale = out.scales, *sums = out.group_sums;
    int32_t* starts = out.starts;
    int8_t* values = out.values;
    for (int64_t i = 0; i < out.inputs; i += kRowBlock, scale += out.num_rows) {
        const bf16 bits = largest_magnitude(row + i);
        const float largest = widen(bits);
        *scale = bits < infinity ? largest / most : std::numeric_limits<float>::quiet_NaN();
        const F16 steps = splat(bits ? std::min(most / largest, std::numeric_limits<float>::max()) : 0.0f);
        int32_t sum = 0;
        for (int part = 0; part < kRowBlock; part += kLanes, values += kLanes) {
            store_rounded(values, load(row + i + part) * steps);
            sum += sum_of_bytes(values);
            put_in_order<Reader::kOrder>(values);
            if ((part + kLanes) % Group == 0) {
                *starts = base * sum;
                *sums = *scale * static_cast<float>(sum);
                starts += out.num_rows;
                sums += out.num_rows;
                sum = 0;
            }
        }
    }
}

// One register tile: sums [Rows, 32], as `multiply_block_tile`.
template <int Group, bool has_offsets, int Rows, class Reader, class SomeScales>
void multiply_rounded_tile(const Reader& reader, const uint8_t* unit, SomeScales scales, const RoundedRows& rows,
                           AheadOfStep ahead, float* sums) {
    constexpr int quads = kUnitSteps / kQuadSteps, group_quads = Group / kQuadInputs;
    const int64_t inputs = rows.inputs, stride = rows.stride, num_rows = rows.num_rows;
    const int8_t* values = rows.values;
    const float *row_scales = rows.scales, *group_sums = rows.group_sums;
    alignas(kCacheLine) float own_scales[2 * kTile];
    const int32_t* starts = rows.starts;
    const int64_t quad_bytes = kQuadSteps * ahead.bytes;
    for (int i = 0; i < Rows * kTile; i += kLanes) store(sums + i, zero());
    for (int64_t i = 0; i < inputs; i += kUnitInputs, unit += Reader::kUnitBytes, row_scales += num_rows) {
        ahead.begin_unit(i);
        for (int first_quad = 0; first_quad < quads; first_quad += group_quads) {
            const float* scale = scales.next(own_scales);
            I16 own[Rows][2];
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r) own[r][0] = own[r][1] = splat_whole(starts[r]);
#pragma GCC unroll kRepeatedSteps
            for (int place = 0; place < group_quads; ++place, values += kQuadInputs) {
                const QuadBytes quad = reader.quad(unit, first_quad + place);
                for (int64_t line = 0; line < quad_bytes; line += 64)
                    fetch_line(ahead.data + line, caches_for_codes<Reader, Rows>());
                ahead.data += quad_bytes;
#pragma GCC unroll 12
                for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
                    for (int part = 0; part < 2; ++part) {
                        const int8_t* four = values + r * stride + part * kBytesOfLane;
                        own[r][0] = dot_bytes<Reader::kHasAllBits>(own[r][0], quad.vectors[0][part], four);
                        own[r][1] = dot_bytes<Reader::kHasAllBits>(own[r][1], quad.vectors[1][part], four);
                    }
                }
            }
            F16 own_scale[2], own_offset[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                own_scale[half] = load(scale + half * kLanes);
                if constexpr (has_offsets) own_offset[half] = load(scale + kTile + half * kLanes);
            }
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r) {
                const F16 row_scale = splat(row_scales[r]);
                F16 group_sum;
                if constexpr (has_offsets) group_sum = splat(group_sums[r]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    float* sum = sums + r * kTile + half * kLanes;
                    F16 total = fma(to_float(own[r][half]), own_scale[half] * row_scale, load(sum));
                    if constexpr (has_offsets) total = fma(group_sum, own_offset[half], total);
                    store(sum, total);
                }
            }
            if constexpr (Rows > kRowsInRegisters) keep_in_memory(sums);
            starts += num_rows;
            group_sums += num_rows;
        }
    }
}

// Memory of one member for a product with rounded rows; `begin` is aligned to a cache line.
struct RoundedScratch {
    float* scales;  // [groups, kScalesOfGroup], where the header is read before the codes
    float* sums;    // [kMaxRows, 32]
    RoundedRows rows;
    uint8_t* wide;  // a tile's bytes

    RoundedScratch(const BlockLayout& layout, int64_t inputs, int64_t num_rows, uint8_t* begin) {
        const int64_t groups = inputs / layout.group;
        scales = reinterpret_cast<float*>(begin);
        sums = scales + 2 * groups * kTile;
        wide = reinterpret_cast<uint8_t*>(sums + kMaxRows * kTile);
        auto* values = reinterpret_cast<int8_t*>(wide + inputs * kTile);
        const int64_t stride = row_stride<int8_t>(num_rows, inputs);
        auto* row_scales = reinterpret_cast<float*>(values + num_rows * stride);
        auto* starts = reinterpret_cast<int32_t*>(row_scales + num_rows * (inputs / kRowBlock));
        auto* group_sums = reinterpret_cast<float*>(starts + num_rows * groups);
        rows = {values, row_scales, starts, group_sums, num_rows, inputs, stride};
    }

    static int64_t bytes(const BlockLayout& layout, int64_t inputs, int64_t num_rows) {
        const int64_t groups = inputs / layout.group;
        return (2 * groups * kTile + kMaxRows * kTile) * 4 + inputs * kTile +
               num_rows * (row_stride<int8_t>(num_rows, inputs) + inputs / kRowBlock * 4 + groups * 8);
    }
};

// Calls visit(reader, group, has offsets), the latter two as constants, for the format's codes as bytes.
template <class Visit>
void with_byte_reader(int32_t storage, const uint8_t* names, const Visit& visit) {
    using Group16 = std::integral_constant<int, 16>;
    using Group32 = std::integral_constant<int, 32>;
    switch (storage) {
        case kQ8_0: return visit(ByteReader<8, 0, false>(names), Group32{}, std::false_type{});
        case kQ4_0: return visit(ByteReader<4, 0, false>(names), Group32{}, std::false_type{});
        case kIQ4_NL:
        case kIQ4_XS:
        case kMXFP4: return visit(ByteReader<4, 0, true>(names), Group32{}, std::false_type{});
        case kQ4_1:
        case kQ4_K: return visit(ByteReader<4, 0, false>(names), Group32{}, std::true_type{});
        case kQ5_0: return visit(ByteReader<4, 1, false>(names), Group32{}, std::false_type{});
        case kQ5_1:
        case kQ5_K: return visit(ByteReader<4, 1, false>(names), Group32{}, std::true_type{});
        case kQ2_K: return visit(ByteReader<2, 0, false>(names), Group16{}, std::true_type{});
        case kQ3_K: return visit(ByteReader<2, 1, false>(names), Group16{}, std::false_type{});
        case kQ6_K: return visit(ByteReader<4, 2, false>(names), Group16{}, std::false_type{});
        default: return visit(ByteReader<8, 0, false>(names), Group16{}, std::true_type{});
    }
}

// What a code's byte lacks to its value.
inline int byte_base(const BlockLayout& layout) {
    return layout.low_bits == 8 || layout.values ? kSignedBias : layout.first;
}

// Rows [num_rows, inputs], kOwnRowsAtOnce at most, which are rounded, times tiles [first, last): emit(row, tile, sums [32]).
inline void multiply_some_rounded(const BlockTiles& tiles, const bf16* rows, int64_t num_rows, int64_t first, int64_t last,
                                  uint8_t* memory, int64_t bytes_ahead, EmitSums emit) {
    const BlockLayout& layout = tiles.layout();
    const RoundedScratch scratch(layout, tiles.inputs, num_rows, memory);
    const int64_t inputs = tiles.inputs;
    uint8_t names[16] = {};
    if (layout.values)
        for (int code = 0; code < 16; ++code) names[code] = static_cast<uint8_t>(layout.values[code] - kSignedBias);
    with_byte_reader(tiles.storage, names, [&](const auto& reader, auto group, auto has_offsets) {
        using Reader = std::remove_cvref_t<decltype(reader)>;
        using WideReader = WideByteReader<Reader::kHasAllBits || !kAllBitsCostMore>;
        for (int64_t row = 0; row < num_rows; ++row)
            round_row<group(), Reader>(rows + row * inputs, byte_base(layout), scratch.rows.from(row));
        using Header = HeaderReader<group(), has_offsets()>;
        const auto multiply = [&](int64_t from, int64_t count, const uint8_t* header, const uint8_t* units, AheadOfStep ahead) {
            const auto multiply_by = [&](const auto& source, const uint8_t* codes, auto scales, auto most) {
                with_count<most()>(count, [&](auto height) {
                    multiply_rounded_tile<group(), has_offsets(), height()>(source, codes, scales, scratch.rows.from(from), ahead,
                                                                            scratch.sums);
                });
            };
            if (kVectorTiles.reads_codes(num_rows))
                return multiply_by(reader, units, Header(tiles, header), std::integral_constant<int, kMaxRows>{});
            multiply_by(WideReader{}, scratch.wide, ReadScales<has_offsets()>(scratch.scales),
                        std::integral_constant<int, kVectorTiles.of_values>{});
        };
        const auto widen = [&](const uint8_t* header, const uint8_t* units) {
            read_header(Header(tiles, header), inputs, scratch.scales);
            widen_bytes(reader, units, inputs, scratch.wide);
        };
        each_block_tile(tiles, num_rows, kVectorTiles, first, last, bytes_ahead, scratch.sums, widen, multiply, emit);
    });
}

// The same of any number of rows.
inline void multiply_rounded_blocks(const BlockTiles& tiles, const bf16* rows, int64_t num_rows, int64_t first, int64_t last,
                                    uint8_t* memory, int64_t bytes_ahead, EmitSums emit) {
    if (first >= last) return;
    multiply_in_parts(rows, num_rows, tiles.inputs, kOwnRowsAtOnce, emit, [&](const bf16* some, int64_t count, EmitSums emit_some) {
        multiply_some_rounded(tiles, some, count, first, last, memory, bytes_ahead, emit_some);
    });
}

}  // namespace forerun
