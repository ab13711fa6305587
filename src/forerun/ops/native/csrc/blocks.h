// Products with weights in GGUF's block formats, whose values are scale * code + offset: scale and offset are shared by a
// group of 16 or 32 inputs of an output.
//
// A tile of 32 outputs is a header, the scales and offsets of all its groups, and then its codes, unit after unit
// (block_codes.h). Whatever the format, the header gives fp32 scales and offsets, and the codes, as exact bf16 values, are
// multiplied by the rows. Each group's products are summed up from zero, in the order of the inputs; the sum times the scale
// goes to the output's total, then the offset times the sum of the row's inputs does. So a weight takes part with just the
// value that its format gives it, and the order depends on nothing but the format.
#pragma once

#include <limits>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "avx2.h"
#include "block_codes.h"

namespace forerun {

// Numbers of the formats, which are GGUF's types by their names; kGroups16 is any group of 16 int8 codes with an fp32 scale
// and offset, which holds all others.
enum BlockStorage : int32_t {
    kQ8_0 = 16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4, kGroups16,
    kLastBlocks = kGroups16
};

// How scales, and offsets if there are any, lie in a tile's header, [32] outputs side by side each time.
enum class Scales {
    kHalf,         // of each group fp16: scale, offset
    kBrain,        // of each group bf16: scale
    kSteps,        // of each 256 inputs fp16: scale, minimum; then of each group int8: steps of the scale, of the minimum
    kSharedSteps,  // the same, but four bits for the steps of the scale and four above them for the minimum's
    kFloat,        // of each group fp32: scale, offset
};

constexpr int kRowBlock = 32;  // inputs of a row that share a scale, where rows are rounded
constexpr int64_t kStepsInputs = 256;  // that share a scale of which their groups' scales are multiples

struct BlockLayout {
    int low_bits, high_bits;  // of a code, see block_codes.h
    int group;                // inputs
    Scales scales;
    bool has_offsets;
    const int8_t* values;  // [16] that codes name; null: a code counts from `first` up
    int first;             // 0 where there are offsets

    int bits() const { return low_bits + high_bits; }
    int per_group() const { return has_offsets ? 2 : 1; }
};

constexpr int8_t kNormalFloat4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kHalvesOfE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline const BlockLayout& block_layout(int32_t storage) {
    static constexpr BlockLayout layouts[] = {
        /* Q8_0 */ {8, 0, 32, Scales::kHalf, false, nullptr, 0},
        /* Q4_0 */ {4, 0, 32, Scales::kHalf, false, nullptr, -8},
        /* Q4_1 */ {4, 0, 32, Scales::kHalf, true, nullptr, 0},
        /* Q5_0 */ {4, 1, 32, Scales::kHalf, false, nullptr, -16},
        /* Q5_1 */ {4, 1, 32, Scales::kHalf, true, nullptr, 0},
        /* Q2_K */ {2, 0, 16, Scales::kSharedSteps, true, nullptr, 0},
        /* Q3_K */ {2, 1, 16, Scales::kSteps, false, nullptr, -4},
        /* Q4_K */ {4, 0, 32, Scales::kSteps, true, nullptr, 0},
        /* Q5_K */ {4, 1, 32, Scales::kSteps, true, nullptr, 0},
        /* Q6_K */ {4, 2, 16, Scales::kSteps, false, nullptr, -32},
        /* IQ4_NL */ {4, 0, 32, Scales::kHalf, false, kNormalFloat4, 0},
        /* IQ4_XS */ {4, 0, 32, Scales::kSteps, false, kNormalFloat4, 0},
        /* MXFP4 */ {4, 0, 32, Scales::kBrain, false, kHalvesOfE2M1, 0},
        /* groups of 16 */ {8, 0, 16, Scales::kFloat, true, nullptr, 0},
    };
    return layouts[storage - kQ8_0];
}

inline bool is_blocks(int32_t storage) { return storage >= kQ8_0 && storage <= kLastBlocks; }

inline float value_of(const BlockLayout& layout, int code) {
    if (layout.low_bits == 8) return static_cast<float>(static_cast<int8_t>(code));
    return static_cast<float>(layout.values ? layout.values[code] : layout.first + code);
}

inline int64_t header_bytes(const BlockLayout& layout, int64_t inputs) {
    const int64_t groups = inputs / layout.group, sets = kTile * layout.per_group();
    switch (layout.scales) {
        case Scales::kHalf:
        case Scales::kBrain: return groups * sets * 2;
        case Scales::kSteps: return inputs / kStepsInputs * sets * 2 + groups * sets;
        case Scales::kSharedSteps: return inputs / kStepsInputs * sets * 2 + groups * kTile;
        default: return groups * sets * 4;
    }
}

inline int64_t block_tile_bytes(const BlockLayout& layout, int64_t inputs) {
    return header_bytes(layout, inputs) + inputs / kUnitInputs * unit_bytes(layout.bits());
}

template <class T>
inline T read_at(const uint8_t* data, int64_t index) {
    T value;
    std::memcpy(&value, data + index * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
}

// The scale (set 0) or offset (set 1) of one group of one output, by its definition.
inline float scale_at(const BlockLayout& layout, const uint8_t* header, int64_t inputs, int64_t group, int lane, int set) {
    const int sets = layout.per_group();
    const int64_t place = (group * sets + set) * kTile + lane;
    if (layout.scales == Scales::kHalf) return widen(read_at<fp16>(header, place));
    if (layout.scales == Scales::kBrain) return widen(read_at<bf16>(header, place));
    if (layout.scales == Scales::kFloat) return read_at<float>(header, place);
    const int64_t whole = group * layout.group / kStepsInputs;
    const float unit = widen(read_at<fp16>(header, (whole * sets + set) * kTile + lane));
    const uint8_t* steps = header + inputs / kStepsInputs * sets * kTile * 2;
    const float count = layout.scales == Scales::kSharedSteps
                            ? static_cast<float>(steps[group * kTile + lane] >> 4 * set & 15)
                            : static_cast<float>(static_cast<int8_t>(steps[place]));
    return unit * (set ? -count : count);
}

// A weight's tiles in one of the block formats.
struct BlockTiles {
    const uint8_t* data;
    int64_t inputs;
    int32_t storage;

    const BlockLayout& layout() const { return block_layout(storage); }
    int64_t tile_bytes() const { return block_tile_bytes(layout(), inputs); }
};

// What a group has of a tile's outputs: scales [32], and offsets [32] behind them if the format has any.
template <bool has_offsets>
constexpr int kScalesOfGroup = (has_offsets ? 2 : 1) * kTile;

// Reads a tile's header group after group; `scale_at` is the twin. The next tile's is fetched meanwhile.
template <int Group, bool has_offsets>
class HeaderReader {
  public:
    HeaderReader(const BlockTiles& tiles, const uint8_t* header)
        : kind_(tiles.layout().scales), step_sizes_(header), groups_(header), tile_bytes_(tiles.tile_bytes()) {
        if (kind_ == Scales::kSteps || kind_ == Scales::kSharedSteps)
            groups_ += tiles.inputs / kStepsInputs * kCount * static_cast<int64_t>(sizeof(fp16));
    }

    // The next group's scales and offsets in fp32: where they lie, or written to `own`.
    [[gnu::always_inline]] const float* next(float* own) {
        switch (kind_) {
            case Scales::kHalf: return widen_all<fp16>(own);
            case Scales::kBrain: return widen_all<bf16>(own);
            case Scales::kFloat: return reinterpret_cast<const float*>(pass(groups_, kCount * sizeof(float)));
            default: return count_steps(own);
        }
    }

  private:
    static constexpr int kCount = kScalesOfGroup<has_offsets>;

    // Goes on from `place`, which is returned. The lines that begin in as many bytes of the next header are fetched.
    [[gnu::always_inline]] const uint8_t* pass(const uint8_t*& place, int64_t bytes) const {
        const uint8_t* ahead = place + tile_bytes_;
        for (int64_t i = -reinterpret_cast<uintptr_t>(ahead) % kCacheLine; i < bytes; i += kCacheLine) fetch_line(ahead + i, kCachesForSomeReadings);
        return std::exchange(place, place + bytes);
    }

    template <class Stored>
    [[gnu::always_inline]] const float* widen_all(float* own) {
        const auto* stored = reinterpret_cast<const Stored*>(pass(groups_, kCount * sizeof(Stored)));
        for (int i = 0; i < kCount; i += kLanes) store(own + i, load(stored + i));
        return own;
    }

    [[gnu::always_inline]] const float* count_steps(float* own) {
        if (num_counted_++ % (kStepsInputs / Group) == 0) {
            const auto* sizes = reinterpret_cast<const fp16*>(pass(step_sizes_, kCount * sizeof(fp16)));
            for (int i = 0; i < kCount; i += kLanes) store(sizes_ + i, i < kTile ? load(sizes + i) : load(sizes + i) * splat(-1.0f));
        }
        const bool is_shared = kind_ == Scales::kSharedSteps;
        const uint8_t* steps = pass(groups_, is_shared ? kTile : kCount);
        for (int set = 0; set * kTile < kCount; ++set) {
            for (int i = 0; i < kTile; i += kLanes) {
                const F16 count = is_shared ? load_nibbles(steps + i, set) : load(reinterpret_cast<const int8_t*>(steps) + set * kTile + i);
                store(own + set * kTile + i, load(sizes_ + set * kTile + i) * count);
            }
        }
        return own;
    }

    Scales kind_;
    const uint8_t* step_sizes_;
    const uint8_t* groups_;  // all else
    int64_t tile_bytes_;
    int64_t num_counted_ = 0;
    float sizes_[kCount] = {};  // of steps, that of minima negative
};

// The same of a header that has been read before.
template <bool has_offsets>
class ReadScales {
  public:
    explicit ReadScales(const float* next) : next_(next) {}

    [[gnu::always_inline]] const float* next(float*) { return std::exchange(next_, next_ + kScalesOfGroup<has_offsets>); }

  private:
    const float* next_;
};

template <int Group, bool has_offsets>
void read_header(HeaderReader<Group, has_offsets> header, int64_t inputs, float* scales) {
    constexpr int count = kScalesOfGroup<has_offsets>;
    for (int64_t i = 0; i < inputs; i += Group, scales += count) {
        const float* found = header.next(scales);
        if (found != scales) std::copy_n(found, count, scales);
    }
}

// Sums of each group's inputs of a row [inputs]: [inputs / group] fp32.
inline void sum_groups(const bf16* row, int64_t inputs, int group, float* sums) {
    for (int64_t i = 0; i < inputs; i += group)
        *sums++ = sum_lanes(group == kLanes ? load(row + i) : load(row + i) + load(row + i + kLanes));
}

// What to fetch ahead in each step of a tile, as `Ahead` of matmul.h: where codes are read, the same stream a little further
// on, past the header of the next tile; where their values are, the next tile.
struct AheadOfStep {
    const uint8_t* data;
    int64_t bytes;
    int64_t header_at;  // at which of the tile's inputs the next header is passed over; -1: at none
    int64_t header_bytes;

    [[gnu::always_inline]] void begin_unit(int64_t input) {
        if (input == header_at) data += header_bytes;
    }
};

// Rows that a tile is multiplied by at once, with the sums of their groups if the format has offsets: [Rows, groups]. For rows of
// whole numbers all such arrays are [groups or blocks, rows in all].
template <class Value = RowInput>
struct BlockRows : InputRows<Value> {
    const float* group_sums;
    int64_t inputs;
    bool are_divided = false;         // for codes that are multiplied where they lie, on AVX2
    int64_t num_in_all = 0;           // rows of whole numbers
    const float* scales = nullptr;    // [inputs / 32, rows in all]
    const int32_t* starts = nullptr;  // [groups, rows in all], where codes are multiplied as they are: what sums start from
};

// Where a register tile of so many rows fetches codes to: with more than a few rows, lines past the second cache are gone again
// before their turn comes.
template <class Reader, int Rows>
inline Caches caches_for_codes() {
    constexpr int few_rows = 4;
    if (!Reader::kReadsOnce) return Caches::kAll;
    return Rows <= few_rows ? kCachesForOneReading : kCachesForSomeReadings;
}

// What a group's products are summed up in, for a row of such inputs and sixteen outputs, and what they come to.
inline F16 sum_for(const RowInput*) { return zero(); }
inline F16 total_of(F16 sum) { return sum; }

// Keeps the compiler from holding values in registers from here on, of which there are not enough for those of a group beside
// the totals of more rows than this.
constexpr int kRowsInRegisters = 6;

inline void keep_in_memory(float* values) {
#if defined(__GNUC__)
    asm volatile("" : : "r"(values) : "memory");
#else
    (void)values;
#endif
}

// One register tile: sums [Rows, 32]. (A row's address is that of every third row and once or twice the distance of rows,
// which processors add up as they read.)
template <int Group, bool has_offsets, int Rows, class Reader, class SomeScales, class Value>
void multiply_block_tile(const Reader& reader, const uint8_t* unit, SomeScales scales, const BlockRows<Value>& rows,
                         AheadOfStep ahead, float* sums) {
    constexpr int quads = kUnitSteps / kQuadSteps, group_quads = Group / 2 / kQuadSteps;
    constexpr int fetch_steps = Reader::kBits < 8 ? 8 / Reader::kBits : 1;  // in which a cache line is read
    const int64_t inputs = rows.inputs, stride = rows.stride;
    constexpr bool are_whole = std::is_same_v<Value, WordInput>;
    const int64_t of_next_row = are_whole ? 1 : inputs / Group, of_next_group = are_whole ? rows.num_in_all : 1;
    const Value* values = rows.values;
    const float *group_sums = rows.group_sums, *row_scales = rows.scales;
    const int32_t* starts = rows.starts;
    constexpr bool has_starts = Reader::kReadsCodes && !has_offsets;
    alignas(kCacheLine) float own_scales[2 * kTile];
    for (int i = 0; i < Rows * kTile; i += kLanes) store(sums + i, zero());
    for (int64_t i = 0; i < inputs; i += kUnitInputs, unit += Reader::kUnitBytes) {
        ahead.begin_unit(i);
        for (int first_quad = 0; first_quad < quads; first_quad += group_quads) {
            const float* scale = scales.next(own_scales);
            decltype(sum_for(values)) own[Rows][2];
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r) {
                if constexpr (has_starts) own[r][0] = own[r][1] = splat_whole(starts[r]);
                else own[r][0] = own[r][1] = sum_for(values);
            }
            for (int place = 0; place < group_quads; ++place, values += 2 * kQuadSteps) {
                const auto quad = reader.quad(unit, first_quad + place);
                const Value* every_third[(Rows + 2) / 3];
#pragma GCC unroll 4
                for (int r = 0; r < Rows; r += 3) {
                    every_third[r / 3] = values + r * stride;
                    forget(every_third[r / 3]);
                }
#pragma GCC unroll kRepeatedSteps
                for (int step = 0; step < kQuadSteps; ++step) {
                    const auto [first, second] = reader.step(quad, step);
                    if (step % fetch_steps == 0) fetch_line(ahead.data + step * ahead.bytes, caches_for_codes<Reader, Rows>());
#pragma GCC unroll 12
                    for (int r = 0; r < Rows; ++r) {
                        const auto value = splat_pair(every_third[r / 3] + r % 3 * stride + 2 * step);
                        own[r][0] = dot(own[r][0], first, value);
                        own[r][1] = dot(own[r][1], second, value);
                    }
                }
                ahead.data += kQuadSteps * ahead.bytes;
            }
            F16 own_scale[2], own_offset[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                own_scale[half] = load(scale + half * kLanes);
                if constexpr (has_offsets) own_offset[half] = load(scale + kTile + half * kLanes);
            }
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r) {
                F16 group_sum, row_scale;
                if constexpr (has_offsets) group_sum = splat(group_sums[r * of_next_row]);
                if constexpr (are_whole) row_scale = splat(row_scales[r]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    float* sum = sums + r * kTile + half * kLanes;
                    F16 scaled = own_scale[half];
                    if constexpr (are_whole) scaled = scaled * row_scale;
                    F16 total = fma(total_of(own[r][half]), scaled, load(sum));
                    if constexpr (has_offsets) total = fma(group_sum, own_offset[half], total);
                    store(sum, total);
                }
            }
            if constexpr (Rows > kRowsInRegisters) keep_in_memory(sums);
            if constexpr (has_offsets) group_sums += of_next_group;
            if constexpr (has_starts) starts += of_next_group;
        }
        if constexpr (are_whole) row_scales += of_next_group;
    }
}

// A tile's codes as the values they stand for, for `ValueReader`.
template <class Reader>
void widen_codes(const Reader& reader, const uint8_t* unit, int64_t inputs, typename Reader::Stored* wide) {
    for (int64_t i = 0; i < inputs; i += kUnitInputs, unit += Reader::kUnitBytes) {
        for (int index = 0; index < kUnitSteps / kQuadSteps; ++index) {
            const auto quad = reader.quad(unit, index);
#pragma GCC unroll 4
            for (int step = 0; step < kQuadSteps; ++step, wide += kStepWeights) {
                const auto [first, second] = reader.step(quad, step);
                store_pairs(wide, first);
                store_pairs(wide + kStepWeights / 2, second);
            }
        }
    }
}

// How many rows a register tile has at most that reads codes, where it is enough, and one that reads their values.
struct RegisterTiles {
    int of_codes, of_values;

    bool reads_codes(int64_t num_rows) const { return num_rows <= of_codes; }
    int64_t count(int64_t num_rows) const { return reads_codes(num_rows) ? 1 : (num_rows + of_values - 1) / of_values; }
};

// In vectors: with more of several, what ends a group, a sum for each row, takes longer than it takes the processor to multiply
// all that it can look ahead to.
constexpr RegisterTiles kVectorTiles{kMaxRows, kMaxRows < 8 ? kMaxRows : 8};

#if defined(__AMX_BF16__)

constexpr RegisterTiles kBlockTiles{kRowsOfMatrices, kMatrixRows};

// Rows times a tile by AMX: sums [num_rows, 32].
template <int Group, bool has_offsets, bool has_more, class Reader>
void multiply_block_matrices(const Reader& reader, const uint8_t* unit, const float* scales, const BlockRows<>& rows,
                             int64_t num_rows, AheadOfStep ahead, float* sums) {
    constexpr int quads = kUnitSteps / kQuadSteps, groups_of_unit = kUnitInputs / Group;
    constexpr int fetch_steps = Reader::kBits < 8 ? 8 / Reader::kBits : 1;  // in which a cache line is read
    alignas(64) bf16 buffers[2][kUnitSteps * kStepWeights];
    alignas(64) float products[2][kRowsOfMatrices * kTile];  // of a group
    const int64_t inputs = rows.inputs, groups = inputs / Group;
    int64_t next_input = 0;
    const auto weights_of_next_unit = [&](bf16* wide) {
        ahead.begin_unit(std::exchange(next_input, next_input + kUnitInputs));
        const auto* here = std::is_same_v<Reader, ValueReader<bf16>> ? reinterpret_cast<const bf16*>(unit) : wide;
        for (int index = 0; index < quads; ++index, ahead.data += kQuadSteps * ahead.bytes) {
            const auto quad = reader.quad(unit, index);
#pragma GCC unroll 4
            for (int step = 0; step < kQuadSteps; ++step, wide += kStepWeights) {
                if (step % fetch_steps == 0)
                    fetch_line(ahead.data + step * ahead.bytes, Reader::kReadsOnce ? kCachesForOneReading : Caches::kPastFirst);
                if constexpr (std::is_same_v<Reader, ValueReader<bf16>>) continue;
                const auto [first, second] = reader.step(quad, step);
                store_pairs(wide, first);
                store_pairs(wide + kStepWeights / 2, second);
            }
        }
        unit += Reader::kUnitBytes;
        return here;
    };
    const auto add_to_sums = [&](int64_t group) {
        const float* scale = scales + group * kScalesOfGroup<has_offsets>;
        const float *product = products[group % 2], *group_sums = rows.group_sums + group;
        F16 own_scale[2], own_offset[2];
        for (int half = 0; half < 2; ++half) {
            own_scale[half] = load(scale + half * kLanes);
            if constexpr (has_offsets) own_offset[half] = load(scale + kTile + half * kLanes);
        }
        for (int64_t r = 0; r < num_rows; ++r) {
            F16 group_sum;
            if constexpr (has_offsets) group_sum = splat(group_sums[r * groups]);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const int64_t place = r * kTile + half * kLanes;
                F16 total = fma(load(product + place), own_scale[half], load(sums + place));
                if constexpr (has_offsets) total = fma(group_sum, own_offset[half], total);
                store(sums + place, total);
            }
        }
    };
    std::fill(sums, sums + num_rows * kTile, 0.0f);
    Matrices::shape(num_rows, Group / 2);
    // What is written is read a turn later: registers are filled from memory alone, not from what is on its way to it.
    const bf16 *weights = weights_of_next_unit(buffers[0]), *next = nullptr;
    for (int64_t group = 0; group < groups; ++group, weights += Group * kTile) {
        const int64_t place = group % groups_of_unit, number = group / groups_of_unit;
        if (place == 0) {
            if (group > 0) weights = next;
            if (group + groups_of_unit < groups) next = weights_of_next_unit(buffers[(number + 1) % 2]);
        }
        Matrices::begin_all_sums<has_more>();
        Matrices::add_all<has_more>(rows.values + group * Group, rows.stride * 2, weights);
        Matrices::store_all_sums<has_more>(products[group % 2]);
        if (group > 0) add_to_sums(group - 1);
    }
    add_to_sums(groups - 1);
}

// Rows times a tile whose codes, or values, are `unit`. Of values the header has been read to `scales`.
template <int Group, bool has_offsets, class Reader>
[[gnu::noinline]] void multiply_block_rows(const Reader& reader, const uint8_t* unit, HeaderReader<Group, has_offsets> header, float* scales,
                                           const BlockRows<>& rows, int64_t num_rows, AheadOfStep ahead, float* sums) {
    if constexpr (!std::is_same_v<Reader, ValueReader<bf16>>) read_header(header, rows.inputs, scales);
    with_more(num_rows, [&](auto has_more) {
        multiply_block_matrices<Group, has_offsets, has_more()>(reader, unit, scales, rows, num_rows, ahead, sums);
    });
}

#elif defined(__AVX2__) && !defined(__AVX512F__)

constexpr RegisterTiles kBlockTiles{kRowsOfWholeTiles, kRowsOfHalfTiles};

// A register tile of values: half of the outputs, then the others.
template <int Group, bool has_offsets, int Rows>
[[gnu::noinline]] void multiply_value_tile(const bf16* weights, const float* scales, const BlockRows<>& rows, AheadOfStep ahead, float* sums) {
    const int64_t inputs = rows.inputs, groups = inputs / Group;
    const float* group_sums = rows.group_sums;
    LinesAhead lines(ahead.data);
    for (int i = 0; i < Rows * kTile; i += kLanes) store(sums + i, zero());
    for (int half = 0; half < kTile; half += kLanes, sums += kLanes, weights += kStepWeights / 2) {
        for (int64_t group = 0; group < groups; ++group) {
            F16 own[Rows];
            for (F16& sum : own) sum = zero();
            lines.fetch(Group / 2 * ahead.bytes / 2);
            add_half_steps(weights + group * Group * kTile, rows.values + group * Group, rows.stride, Group / 2, own);
            const float* of_group = scales + group * kScalesOfGroup<has_offsets>;
            const F16 scale = load(of_group + half);
            F16 offset;
            if constexpr (has_offsets) offset = load(of_group + kTile + half);
#pragma GCC unroll 6
            for (int r = 0; r < Rows; ++r) {
                F16 total = fma(own[r], scale, load(sums + r * kTile));
                if constexpr (has_offsets) total = fma(splat(group_sums[r * groups + group]), offset, total);
                store(sums + r * kTile, total);
            }
            keep_in_memory(sums);
        }
    }
}

// Codes of up to four bits that count up are multiplied where they lie: in step s of a quad a code is taken 16^s times too
// large, and the row's input that it meets as much too small. A power of two changes no bit of their product, as fp32 holds
// even the smallest bf16 divided by 4096. (Where a process flushes numbers below fp32's normal ones to zero, inputs below
// 2^-114 count as zero.)
inline bool multiplies_in_place(const BlockLayout& layout, int64_t num_rows) {
    return layout.bits() <= 4 && !layout.values && kBlockTiles.reads_codes(num_rows);
}

inline void divide_by_places(RowInput* inputs, int64_t count) {
    const __m256 factors = _mm256_setr_ps(1, 1, 0x1p-4f, 0x1p-4f, 0x1p-8f, 0x1p-8f, 0x1p-12f, 0x1p-12f);
    for (int64_t i = 0; i < count; i += 2 * kQuadSteps)
        _mm256_storeu_ps(&inputs[i].value, _mm256_mul_ps(_mm256_loadu_ps(&inputs[i].value), factors));
}

// A register tile of such codes and one or two rows, whose inputs `divide_by_places` has divided.
template <int Group, bool has_offsets, int Rows, class Reader>
[[gnu::noinline]] void multiply_counted_tile(const Reader& reader, const uint8_t* unit, const float* scale,
                                             const BlockRows<>& rows, AheadOfStep ahead, float* sums) {
    constexpr int quads = kUnitSteps / kQuadSteps, group_quads = Group / 2 / kQuadSteps, parts = kTile / 8;
    const int64_t inputs = rows.inputs, stride = rows.stride, groups = inputs / Group;
    const float *values = &rows.values->value, *group_sums = rows.group_sums;
    for (int i = 0; i < Rows * kTile; i += kLanes) store(sums + i, zero());
    for (int64_t i = 0; i < inputs; i += kUnitInputs, unit += Reader::kUnitBytes, ahead.data += Reader::kUnitBytes) {
        ahead.begin_unit(i);
        for (int64_t line = 0; line < Reader::kUnitBytes; line += kCacheLine) fetch_line(ahead.data + line, kCachesForOneReading);
        for (int first_quad = 0; first_quad < quads; first_quad += group_quads) {
            F16 own[2][Rows];
#pragma GCC unroll 2
            for (int r = 0; r < Rows; ++r) own[0][r] = own[1][r] = zero();
            for (int place = 0; place < group_quads; ++place, values += 2 * kQuadSteps) {
                const auto quad = reader.quad(unit, first_quad + place);
                __m256i codes[2][parts];  // of even inputs, of odd ones
#pragma GCC unroll 4
                for (int part = 0; part < parts; ++part) {
                    codes[0][part] = reader.codes_of_steps(quad, part / 2, part % 2);
                    codes[1][part] = _mm256_srli_epi32(codes[0][part], 16);
                }
#pragma GCC unroll 8
                for (int input = 0; input < 2 * kQuadSteps; ++input) {
                    const int shift = input / 2 * 4;
                    const auto weights = [&](int part) __attribute__((always_inline)) {
                        __m256i code = _mm256_and_si256(codes[input % 2][part], _mm256_set1_epi32(15 << shift));
                        if constexpr (!has_offsets) code = _mm256_add_epi32(code, _mm256_set1_epi32(-(1 << (Reader::kBits - 1)) * (1 << shift)));
                        return _mm256_cvtepi32_ps(code);
                    };
                    add_products(F16{weights(0), weights(1)}, values + input, stride, own[0]);
                    add_products(F16{weights(2), weights(3)}, values + input, stride, own[1]);
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const F16 own_scale = load(scale + half * kLanes);
                F16 own_offset;
                if constexpr (has_offsets) own_offset = load(scale + kTile + half * kLanes);
#pragma GCC unroll 2
                for (int r = 0; r < Rows; ++r) {
                    float* sum = sums + r * kTile + half * kLanes;
                    F16 total = fma(own[half][r], own_scale, load(sum));
                    if constexpr (has_offsets) total = fma(splat(group_sums[r * groups]), own_offset, total);
                    store(sum, total);
                }
            }
            scale += kScalesOfGroup<has_offsets>;
            ++group_sums;
        }
    }
}

// Rows times a tile whose codes, or values, are `unit`. Of values the header has been read to `scales`.
template <int Group, bool has_offsets, class Reader>
void multiply_block_rows(const Reader& reader, const uint8_t* unit, HeaderReader<Group, has_offsets> header, float* scales,
                         const BlockRows<>& rows, int64_t num_rows, AheadOfStep ahead, float* sums) {
    if constexpr (std::is_same_v<Reader, ValueReader<bf16>>) {
        with_count<kBlockTiles.of_values>(num_rows, [&](auto height) {
            multiply_value_tile<Group, has_offsets, height()>(reinterpret_cast<const bf16*>(unit), scales, rows, ahead, sums);
        });
    } else {
        if (rows.are_divided) read_header(header, rows.inputs, scales);
        with_count<kBlockTiles.of_codes>(num_rows, [&](auto height) {
            if constexpr (Reader::kBits <= 4)
                if (rows.are_divided)
                    return multiply_counted_tile<Group, has_offsets, height()>(reader, unit, scales, rows, ahead, sums);
            multiply_block_tile<Group, has_offsets, height()>(reader, unit, header, rows, ahead, sums);
        });
    }
}

#else

constexpr RegisterTiles kBlockTiles = kVectorTiles;

// Rows times a tile whose codes, or values, are `unit`. Of values the header has been read to `scales`.
template <int Group, bool has_offsets, class Reader>
void multiply_block_rows(const Reader& reader, const uint8_t* unit, HeaderReader<Group, has_offsets> header, float* scales,
                         const BlockRows<>& rows, int64_t num_rows, AheadOfStep ahead, float* sums) {
    constexpr bool reads_values = std::is_same_v<Reader, ValueReader<bf16>>;
    with_count<reads_values ? kBlockTiles.of_values : kBlockTiles.of_codes>(num_rows, [&](auto height) {
        if constexpr (reads_values)
            multiply_block_tile<Group, has_offsets, height()>(reader, unit, ReadScales<has_offsets>(scales), rows, ahead, sums);
        else
            multiply_block_tile<Group, has_offsets, height()>(reader, unit, header, rows, ahead, sums);
    });
}

#endif

// Rows that go through all tiles at once where a member keeps its own of them, rounded or widened, in the second cache.
constexpr int64_t kOwnRowsAtOnce = 128;
#if defined(FORERUN_WIDENS_ROWS)
constexpr int64_t kBlockRowsAtOnce = kOwnRowsAtOnce;
#else
constexpr int64_t kBlockRowsAtOnce = std::numeric_limits<int64_t>::max();  // it keeps none
#endif

// Memory of one member for a product, in floats and bf16; `begin` is aligned to a cache line.
struct BlockScratch {
    float* scales;      // [groups, kScalesOfGroup], where the header is read before the codes
    float* sums;        // [kMostRows, 32]
    float* group_sums;  // [rows, groups]
    bf16* wide;         // a tile's values
    uint8_t* inputs;    // the rows as they are multiplied

    BlockScratch(const BlockLayout& layout, int64_t inputs, int64_t num_rows, uint8_t* begin) {
        const int64_t groups = inputs / layout.group;
        scales = reinterpret_cast<float*>(begin);
        sums = scales + 2 * groups * kTile;
        wide = reinterpret_cast<bf16*>(sums + kMostRows * kTile);
        group_sums = reinterpret_cast<float*>(wide + inputs * kTile);
        this->inputs = reinterpret_cast<uint8_t*>(group_sums + num_rows * groups);
    }

    static int64_t bytes(const BlockLayout& layout, int64_t inputs, int64_t num_rows) {
        const int64_t groups = inputs / layout.group;
        return (2 * groups * kTile + kMostRows * kTile) * 4 + inputs * kTile * 2 + num_rows * groups * 4 +
               row_input_bytes(num_rows, inputs);
    }

  private:
    static constexpr int kMostRows = std::max(kBlockTiles.of_codes, kBlockTiles.of_values);
};

// Calls visit(reader, group, has offsets), the latter two as constants. `values` are what codes stand for. For rows of
// words, codes that count up are read as `Code`; codes of eight bits are int8 and need no table.
template <class Value, class Visit>
void with_reader(int32_t storage, const Value* values, const Visit& visit) {
    using Counted = std::conditional_t<std::is_same_v<Value, bf16>, bf16, Code>;
    using Group16 = std::integral_constant<int, 16>;
    using Group32 = std::integral_constant<int, 32>;
    switch (storage) {
        case kQ8_0: return visit(CodeReader<8, 0, Value>(values), Group32{}, std::false_type{});
        case kQ4_0: return visit(CodeReader<4, 0, Counted>(values), Group32{}, std::false_type{});
        case kIQ4_NL:
        case kIQ4_XS:
        case kMXFP4: return visit(CodeReader<4, 0, Value>(values), Group32{}, std::false_type{});
        case kQ4_1:
        case kQ4_K: return visit(CodeReader<4, 0, Counted>(values), Group32{}, std::true_type{});
        case kQ5_0: return visit(CodeReader<4, 1, Counted>(values), Group32{}, std::false_type{});
        case kQ5_1:
        case kQ5_K: return visit(CodeReader<4, 1, Counted>(values), Group32{}, std::true_type{});
        case kQ2_K: return visit(CodeReader<2, 0, Counted>(values), Group16{}, std::true_type{});
        case kQ3_K: return visit(CodeReader<2, 1, Counted>(values), Group16{}, std::false_type{});
        case kQ6_K: return visit(CodeReader<4, 2, Counted>(values), Group16{}, std::false_type{});
        default: return visit(CodeReader<8, 0, Value>(values), Group16{}, std::true_type{});
    }
}

// What is done with a row's sums of a tile, emit(row, tile, sums [32]): a reference, so that products are compiled once,
// whatever it is.
class EmitSums {
  public:
    template <class Emit>
    EmitSums(const Emit& emit)
        : emit_(&emit), call_([](const void* own, int64_t row, int64_t tile, const float* sums) {
              (*static_cast<const Emit*>(own))(row, tile, sums);
          }) {}
    void operator()(int64_t row, int64_t tile, const float* sums) const { call_(emit_, row, tile, sums); }

  private:
    const void* emit_;
    void (*call_)(const void*, int64_t, int64_t, const float*);
};

// Multiplies any number of rows [num_rows, inputs]: some(rows, how many, emit) so many at once.
template <class Some>
void multiply_in_parts(const bf16* rows, int64_t num_rows, int64_t inputs, int64_t at_once, EmitSums emit, const Some& some) {
    for (int64_t begin = 0, count; begin < num_rows; begin += count) {
        count = std::min(at_once, num_rows - begin);
        some(rows + begin * inputs, count, [&](int64_t row, int64_t tile, const float* sums) { emit(begin + row, tile, sums); });
    }
}

// Goes through tiles [first, last) with rows in register tiles of nearly equal height: multiply(first row, rows, header, codes,
// ahead) writes the sums of some rows, for which emit(row, tile, sums [32]) is called. Where these read values,
// widen(header, codes) is called first, once for a tile.
template <class Widen, class Multiply>
void each_block_tile(const BlockTiles& tiles, int64_t num_rows, RegisterTiles register_tiles, int64_t first, int64_t last,
                     int64_t bytes_ahead, const float* sums, const Widen& widen, const Multiply& multiply, EmitSums emit) {
    const BlockLayout& layout = tiles.layout();
    const int64_t inputs = tiles.inputs, bytes = tiles.tile_bytes(), steps = inputs / 2, parts = register_tiles.count(num_rows);
    const int64_t of_header = header_bytes(layout, inputs), of_unit = unit_bytes(layout.bits());
    const int64_t units_ahead = (bytes_ahead + of_unit - 1) / of_unit, header_at = std::max<int64_t>(0, inputs - units_ahead * kUnitInputs);
    const bool reads_codes = register_tiles.reads_codes(num_rows);
    for (int64_t tile = first; tile < last; ++tile) {
        const uint8_t* header = tiles.data + tile * bytes;
        const uint8_t* units = header + of_header;
        const uint8_t* next = tile + 1 < last ? header + bytes : header;
        if (!reads_codes) widen(header, units);
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t from = num_rows * part / parts, count = num_rows * (part + 1) / parts - from;
            multiply(from, count, header, units,
                     reads_codes ? AheadOfStep{units + units_ahead * of_unit, of_unit / kUnitSteps, header_at, of_header}
                                 : AheadOfStep{next + bytes / parts * part, bytes / parts / steps, -1, 0});
            for (int64_t r = 0; r < count; ++r) emit(from + r, tile, sums + r * kTile);
        }
    }
}

// Rows [num_rows, inputs], kBlockRowsAtOnce at most, times tiles [first, last): emit(row, tile, sums [32]).
inline void multiply_some_blocks(const BlockTiles& tiles, const bf16* rows, int64_t num_rows, int64_t first, int64_t last,
                                 uint8_t* memory, int64_t bytes_ahead, EmitSums emit) {
    const BlockLayout& layout = tiles.layout();
    const BlockScratch scratch(layout, tiles.inputs, num_rows, memory);
    const int64_t inputs = tiles.inputs, groups = inputs / layout.group;
    if (layout.has_offsets)
        for (int64_t row = 0; row < num_rows; ++row)
            sum_groups(rows + row * inputs, inputs, layout.group, scratch.group_sums + row * groups);
#if defined(__AMX_BF16__)
    const Matrices until_all_are_done;
    auto* wide_row = reinterpret_cast<WideInput*>(scratch.wide);
    const bool uses_vectors = num_rows == 1 && have_normal_sums(rows, inputs);
    if (uses_vectors) widen_inputs(rows, inputs, wide_row);
#endif
    const InputRows<RowInput> row_values = row_inputs(rows, num_rows, inputs, scratch.inputs);
    bool are_divided = false;
#if defined(__AVX2__) && !defined(__AVX512F__)
    are_divided = multiplies_in_place(layout, num_rows);
    if (are_divided) divide_by_places(reinterpret_cast<RowInput*>(scratch.inputs), num_rows * row_values.stride);
#endif
    bf16 values[kMostValues];
    for (int code = 0; code < kMostValues; ++code)
        values[code] = narrow(value_of(layout, code % (1 << std::min(layout.bits(), 6))));
    with_reader(tiles.storage, values, [&](const auto& reader, auto group, auto has_offsets) {
        using Header = HeaderReader<group(), has_offsets()>;
        const auto multiply = [&](int64_t from, int64_t count, const uint8_t* header, const uint8_t* units, AheadOfStep ahead) {
            const float* group_sums = scratch.group_sums + from * groups;
#if defined(__AMX_BF16__)
            if (uses_vectors)
                return multiply_block_tile<group(), has_offsets(), 1>(
                    reader, units, Header(tiles, header), BlockRows<WideInput>{{wide_row, inputs}, group_sums, inputs}, ahead, scratch.sums);
#endif
            const BlockRows<> block{row_values.from(from), group_sums, inputs, are_divided};
            const auto multiply_by = [&](const auto& source, const uint8_t* unit) {
                multiply_block_rows(source, unit, Header(tiles, header), scratch.scales, block, count, ahead, scratch.sums);
            };
            if (kBlockTiles.reads_codes(num_rows)) return multiply_by(reader, units);
            multiply_by(ValueReader<bf16>{}, reinterpret_cast<const uint8_t*>(scratch.wide));
        };
        const auto widen = [&](const uint8_t* header, const uint8_t* units) {
            read_header(Header(tiles, header), inputs, scratch.scales);
            widen_codes(reader, units, inputs, scratch.wide);
        };
        each_block_tile(tiles, num_rows, kBlockTiles, first, last, bytes_ahead, scratch.sums, widen, multiply, emit);
    });
}

// The same of any number of rows.
inline void multiply_blocks(const BlockTiles& tiles, const bf16* rows, int64_t num_rows, int64_t first, int64_t last,
                            uint8_t* memory, int64_t bytes_ahead, EmitSums emit) {
    if (first >= last) return;
    multiply_in_parts(rows, num_rows, tiles.inputs, kBlockRowsAtOnce, emit, [&](const bf16* some, int64_t count, EmitSums emit_some) {
        multiply_some_blocks(tiles, some, count, first, last, memory, bytes_ahead, emit_some);
    });
}

// One output's weights, by their definition: [inputs] fp32.
inline void read_block_output(const BlockTiles& tiles, int64_t output, float* row) {
    const BlockLayout& layout = tiles.layout();
    const uint8_t* header = tiles.data + output / kTile * tiles.tile_bytes();
    const uint8_t* units = header + header_bytes(layout, tiles.inputs);
    const int lane = static_cast<int>(output % kTile);
    float scale = 0.0f, offset = 0.0f;
    for (int64_t i = 0; i < tiles.inputs; ++i) {
        if (i % layout.group == 0) {
            scale = scale_at(layout, header, tiles.inputs, i / layout.group, lane, 0);
            if (layout.has_offsets) offset = scale_at(layout, header, tiles.inputs, i / layout.group, lane, 1);
        }
        const uint8_t* unit = units + i / kUnitInputs * unit_bytes(layout.bits());
        const auto within = static_cast<int>(i % kUnitInputs);
        const int code = code_at(unit, layout.low_bits, layout.high_bits, within / 2, lane, within % 2);
        row[i] = scale * value_of(layout, code);
        if (layout.has_offsets) row[i] += offset;
    }
}

}  // namespace forerun
