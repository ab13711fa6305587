// bf16 weights in 12 bits, nothing lost: the low byte as it is, and four bits that name one of the sixteen high bytes
// (sign and most of the exponent) most frequent in the tile. A trained matrix has few of them: its exponents carry less
// than three bits (DFloat11, arXiv 2504.11651). The rare weight with another high byte is listed beside the tiles.
//
// A tile is a table of sixteen high bytes, four times, then step after step 32 bytes of names and 64 low bytes. Low bytes
// lie eight of outputs 0 to 15, eight of outputs 16 to 31, and so on: interleaving low and high bytes, as processors do it
// within every 16, gives the pairs of the former and of the latter in order. The name of low byte b is in byte b % 32, in
// the low four bits if b < 32.
#pragma once

#include <algorithm>

#include "simd.h"

namespace forerun {

constexpr int kTile = 2 * kLanes;  // outputs that lie side by side
constexpr int kStepWeights = 2 * kTile;  // of two inputs
constexpr int kNameBytes = kStepWeights / 2;
constexpr int kStepBytes = kNameBytes + kStepWeights;
constexpr int kNames = 16;
constexpr int kTableBytes = 64;

// A weight whose high byte has no name; a tile's are in the order of their steps.
struct RareWeight {
    uint32_t step;
    uint16_t place;  // 2 * output + input, both counted within tile and step
    bf16 value;
};

inline int64_t coded_tile_bytes(int64_t inputs) { return kTableBytes + inputs / 2 * kStepBytes; }

// Where the low byte of a step's weight lies.
inline int byte_of(int place) {
    const int half = place / kNameBytes, within = place % kNameBytes;
    return within / 8 * 16 + half * 8 + within % 8;
}

inline bf16 decode(const uint8_t* step, const uint8_t* table, int place) {
    const int byte = byte_of(place);
    const int name = step[byte % kNameBytes] >> (byte < kNameBytes ? 0 : 4) & (kNames - 1);
    return static_cast<bf16>(table[name] << 8 | step[kNameBytes + byte]);
}

template <class SomePairs>
struct StepOf {
    SomePairs first, second;  // of 16 outputs each
};
using PairsOfStep = StepOf<Pairs>;

// The sixteen high bytes, ready to be looked up, and what to do with them.
class HighBytes {
  public:
#if defined(__AVX512BW__)
    explicit HighBytes(const uint8_t* table) : bytes_(_mm512_loadu_si512(table)) {}

    PairsOfStep decode_step(const uint8_t* step) const {
        const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(step)));
        const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        const __m512i names = _mm512_and_si512(_mm512_srlv_epi16(twice, shifts), _mm512_set1_epi8(kNames - 1));
        const __m512i high = _mm512_shuffle_epi8(bytes_, names), low = _mm512_loadu_si512(step + kNameBytes);
        return {pairs_of(_mm512_unpacklo_epi8(low, high)), pairs_of(_mm512_unpackhi_epi8(low, high))};
    }

  private:
    __m512i bytes_;
#elif defined(__AVX2__)
    explicit HighBytes(const uint8_t* table) : bytes_(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table))) {}

    PairsOfStep decode_step(const uint8_t* step) const {
        const __m256i* parts = reinterpret_cast<const __m256i*>(step);
        const __m256i names = _mm256_loadu_si256(parts), mask = _mm256_set1_epi8(kNames - 1);
        const __m256i low[2] = {_mm256_loadu_si256(parts + 1), _mm256_loadu_si256(parts + 2)};
        const __m256i high[2] = {_mm256_shuffle_epi8(bytes_, _mm256_and_si256(names, mask)),
                                 _mm256_shuffle_epi8(bytes_, _mm256_and_si256(_mm256_srli_epi16(names, 4), mask))};
        return {pairs_of(_mm256_unpacklo_epi8(low[0], high[0]), _mm256_unpacklo_epi8(low[1], high[1])),
                pairs_of(_mm256_unpackhi_epi8(low[0], high[0]), _mm256_unpackhi_epi8(low[1], high[1]))};
    }

  private:
    __m256i bytes_;
#elif defined(FORERUN_NEON)
    explicit HighBytes(const uint8_t* table) : bytes_(vld1q_u8(table)) {}

    PairsOfStep decode_step(const uint8_t* step) const {
        const uint8x16_t names[2] = {vld1q_u8(step), vld1q_u8(step + 16)}, mask = vdupq_n_u8(kNames - 1);
        const auto pairs = [&](int part, uint8x16_t of_part) {
            const uint8x16_t low = vld1q_u8(step + kNameBytes + part * 16), high = vqtbl1q_u8(bytes_, of_part);
            struct {
                uint16x8_t first, second;
            } found{vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))};
            return found;
        };
        const auto a = pairs(0, vandq_u8(names[0], mask)), b = pairs(1, vandq_u8(names[1], mask));
        const auto c = pairs(2, vshrq_n_u8(names[0], 4)), d = pairs(3, vshrq_n_u8(names[1], 4));
        return {pairs_of(a.first, b.first, c.first, d.first), pairs_of(a.second, b.second, c.second, d.second)};
    }

  private:
    uint8x16_t bytes_;
#else
    explicit HighBytes(const uint8_t* table) : bytes_(table) {}

    PairsOfStep decode_step(const uint8_t* step) const {
        bf16 weights[kStepWeights];
        for (int place = 0; place < kStepWeights; ++place) weights[place] = decode(step, bytes_, place);
        return {load_pairs(weights), load_pairs(weights + kStepWeights / 2)};
    }

  private:
    const uint8_t* bytes_;
#endif
};

// Reads a tile from its first step to its last.
class CodedTile {
  public:
    CodedTile(const uint8_t* data, const RareWeight* first, const RareWeight* last)
        : high_bytes_(data), step_(data + kTableBytes), rare_(first), last_(last), next_rare_(step_of_next()) {}

    inline PairsOfStep next() {
        PairsOfStep found = high_bytes_.decode_step(step_);
        if (num_read_ == next_rare_) [[unlikely]]
            correct(found);
        ++num_read_;
        step_ += kStepBytes;
        return found;
    }

  private:
    uint32_t step_of_next() const { return rare_ == last_ ? UINT32_MAX : rare_->step; }

    // (Inline: a call would have all sums of a register tile written to memory and read again.)
    [[gnu::always_inline]] void correct(PairsOfStep& found) {
        bf16 weights[kStepWeights];
        store_pairs(weights, found.first);
        store_pairs(weights + kStepWeights / 2, found.second);
        for (; next_rare_ == num_read_; next_rare_ = step_of_next()) {
            weights[rare_->place] = rare_->value;
            ++rare_;
        }
        found = {load_pairs(weights), load_pairs(weights + kStepWeights / 2)};
    }

    HighBytes high_bytes_;
    const uint8_t* step_;
    const RareWeight* rare_;
    const RareWeight* last_;
    uint32_t next_rare_;
    uint32_t num_read_ = 0;
};

// A tile's 32 outputs as rows of bf16 [32, width], padded with zeros up to 32 rows and an even width.
struct TileRows {
    const bf16* rows;
    int64_t num_rows;
    int64_t width;

    bf16 at(int64_t step, int place) const {
        const int64_t row = place / 2, input = step * 2 + place % 2;
        return row < num_rows && input < width ? rows[row * width + input] : 0;
    }
    int64_t steps() const { return (width + 1) / 2; }
};

// Fills a tile's table; returns how many of its weights have none of these high bytes.
inline int64_t choose_high_bytes(const TileRows& tile, uint8_t* table) {
    int64_t counts[256] = {};
    for (int64_t step = 0; step < tile.steps(); ++step)
        for (int place = 0; place < kStepWeights; ++place) ++counts[tile.at(step, place) >> 8];
    int bytes[256];
    for (int i = 0; i < 256; ++i) bytes[i] = i;
    std::stable_sort(bytes, bytes + 256, [&](int a, int b) { return counts[a] > counts[b]; });
    int64_t num_named = 0;
    for (int name = 0; name < kNames; ++name) num_named += counts[bytes[name]];
    for (int i = 0; i < kTableBytes; ++i) table[i] = static_cast<uint8_t>(bytes[i % kNames]);
    return tile.steps() * kStepWeights - num_named;
}

// Writes a tile, and its rare weights, as many as `choose_high_bytes` counted.
inline void code_tile(const TileRows& tile, const uint8_t* table, uint8_t* out, RareWeight* rare) {
    uint8_t names[256];
    std::fill(names, names + 256, kNames);
    for (int name = 0; name < kNames; ++name) names[table[name]] = static_cast<uint8_t>(name);
    std::copy(table, table + kTableBytes, out);
    out += kTableBytes;
    for (int64_t step = 0; step < tile.steps(); ++step, out += kStepBytes) {
        std::fill(out, out + kNameBytes, 0);
        for (int place = 0; place < kStepWeights; ++place) {
            const bf16 value = tile.at(step, place);
            const int byte = byte_of(place), name = names[value >> 8];
            out[kNameBytes + byte] = static_cast<uint8_t>(value);
            if (name == kNames)
                *rare++ = {static_cast<uint32_t>(step), static_cast<uint16_t>(place), value};
            else
                out[byte % kNameBytes] |= static_cast<uint8_t>(byte < kNameBytes ? name : name << 4);
        }
    }
}

}  // namespace forerun
