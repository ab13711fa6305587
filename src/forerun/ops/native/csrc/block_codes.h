// The codes of block formats in a tile: small integers of 2 to 8 bits, read as the bf16 values that they stand for.
//
// A unit is 32 inputs of a tile's 32 outputs: sixteen steps of two inputs. Codes of up to six bits lie in planes of 16-bit
// words, a vector of 32 words for outputs 0 to 15 (of each output its even input, then its odd one), one for outputs 16 to
// 31, and so on. A word holds its inputs' bits in the order of the steps, the first step's lowest: as many steps as fit. The
// low bits of all codes are one plane, the high bits, if there are any, a second behind it. So a step's codes are a shift
// away, and looking a word up in a register of values needs no more than its lowest bits. Codes of eight bits are bytes,
// step after step, as int8 weights are.
#pragma once

#include "coded.h"

namespace forerun {

constexpr int kUnitInputs = 32;
constexpr int kUnitSteps = kUnitInputs / 2;
constexpr int kMostValues = 64;  // that a code of up to six bits can name

constexpr int64_t unit_bytes(int bits) { return bits * int64_t{128}; }

// The code of one weight, by its definition. `low` and `high` are bits.
inline int code_at(const uint8_t* unit, int low, int high, int step, int output, int parity) {
    if (low == 8) return unit[step * kStepWeights + 2 * output + parity];
    const int half = output / kLanes, word = 2 * (output % kLanes) + parity;
    const auto bits_in = [&](const uint8_t* plane, int width) {
        const int steps = 16 / width;
        uint16_t bits;
        std::memcpy(&bits, plane + 2 * ((step / steps * 2 + half) * 2 * kLanes + word), sizeof bits);
        return bits >> width * (step % steps) & ((1 << width) - 1);
    };
    return bits_in(unit, low) | (high ? bits_in(unit + unit_bytes(low), high) << low : 0);
}

// Puts a code where `code_at` finds it; the unit must be zero there.
inline void put_code(uint8_t* unit, int low, int high, int step, int output, int parity, int code) {
    if (low == 8) {
        unit[step * kStepWeights + 2 * output + parity] = static_cast<uint8_t>(code);
        return;
    }
    const int half = output / kLanes, word = 2 * (output % kLanes) + parity;
    const auto put = [&](uint8_t* plane, int width, int value) {
        const int steps = 16 / width;
        uint8_t* place = plane + 2 * ((step / steps * 2 + half) * 2 * kLanes + word);
        uint16_t bits;
        std::memcpy(&bits, place, sizeof bits);
        bits = static_cast<uint16_t>(bits | value << width * (step % steps));
        std::memcpy(place, &bits, sizeof bits);
    };
    put(unit, low, code & ((1 << low) - 1));
    if (high) put(unit + unit_bytes(low), high, code >> low);
}

// Reads codes of `Low` + `High` bits. `values` [64] is what they stand for, repeated where there are fewer, so that bits
// above a code's own change nothing.
template <int Low, int High>
class CodeReader {
  public:
    static constexpr int kBits = Low + High;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);

#if defined(__AVX512BW__)
    explicit CodeReader(const bf16* values)
        : values_(_mm512_loadu_si512(values)), more_values_(_mm512_loadu_si512(values + kMostValues / 2)),
          low_bits_(_mm512_set1_epi16((1 << Low) - 1)) {}

    template <int step>
    [[gnu::always_inline]] PairsOfStep read(const uint8_t* unit) const {
        return {pairs<step, 0>(unit), pairs<step, 1>(unit)};
    }

  private:
    template <int step, int half>
    [[gnu::always_inline]] Pairs pairs(const uint8_t* unit) const {
        __m512i code = shifted<step, half, Low, 0>(unit);
        if constexpr (High > 0) {
            constexpr int choose = 0xca;  // the second where the first is set, else the third
            code = _mm512_ternarylogic_epi32(low_bits_, code, shifted<step, half, High, Low>(unit + unit_bytes(Low)), choose);
        }
        if constexpr (kBits <= 5) return pairs_of(_mm512_permutexvar_epi16(code, values_));
        return pairs_of(_mm512_permutex2var_epi16(values_, code, more_values_));
    }

    // A step's words of a plane, moved so that its bits begin at bit `to`.
    template <int step, int half, int width, int to>
    [[gnu::always_inline]] static __m512i shifted(const uint8_t* plane) {
        constexpr int steps = 16 / width, right = width * (step % steps) - to;
        const __m512i words = _mm512_loadu_si512(plane + (step / steps * 2 + half) * 64);
        if constexpr (right == 0) return words;
        if constexpr (right > 0) return _mm512_srli_epi16(words, right);
        return _mm512_slli_epi16(words, right > 0 ? 0 : -right);
    }

    __m512i values_, more_values_, low_bits_;
#elif defined(__AVX2__)
    explicit CodeReader(const bf16* values) : first_(splat_first(values)) {
        int8_t names[16];  // of codes that fit; others count up from the first value
        for (int i = 0; i < 16; ++i) names[i] = static_cast<int8_t>(widen(values[i]));
        names_ = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(names)));
    }

    template <int step>
    [[gnu::always_inline]] PairsOfStep read(const uint8_t* unit) const {
        return {pairs<step, 0>(unit), pairs<step, 1>(unit)};
    }

  private:
    static __m256 splat_first(const bf16* values) { return _mm256_set1_ps(widen(values[0])); }

    template <int step, int half>
    [[gnu::always_inline]] Pairs pairs(const uint8_t* unit) const {
        const __m256i codes[2] = {code_words<step, half, 0>(unit), code_words<step, half, 1>(unit)};
        return {{even(codes[0]), even(codes[1])}, {odd(codes[0]), odd(codes[1])}};
    }

    // Of eight outputs.
    template <int step, int half, int part>
    [[gnu::always_inline]] static __m256i code_words(const uint8_t* unit) {
        const __m256i low = shifted<step, half, part, Low>(unit);
        if constexpr (High == 0) return low;
        return _mm256_or_si256(low, _mm256_slli_epi16(shifted<step, half, part, High>(unit + unit_bytes(Low)), Low));
    }

    template <int step, int half, int part, int width>
    [[gnu::always_inline]] static __m256i shifted(const uint8_t* plane) {
        constexpr int steps = 16 / width;
        const auto* words = reinterpret_cast<const __m256i*>(plane + (step / steps * 2 + half) * 64) + part;
        const __m256i bits = _mm256_srli_epi16(_mm256_loadu_si256(words), width * (step % steps));
        return _mm256_and_si256(bits, _mm256_set1_epi16((1 << width) - 1));
    }

    [[gnu::always_inline]] __m256 even(__m256i codes) const {
        if constexpr (kBits <= 4) return named(_mm256_slli_epi32(_mm256_shuffle_epi8(names_, codes), 24));
        return counted(_mm256_and_si256(codes, _mm256_set1_epi32(0xffff)));
    }
    [[gnu::always_inline]] __m256 odd(__m256i codes) const {
        if constexpr (kBits <= 4) return named(_mm256_slli_epi32(_mm256_shuffle_epi8(names_, codes), 8));
        return counted(_mm256_srli_epi32(codes, 16));
    }
    static __m256 named(__m256i highest_bytes) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(highest_bytes, 24)); }
    __m256 counted(__m256i codes) const { return _mm256_add_ps(_mm256_cvtepi32_ps(codes), first_); }

    __m256i names_;
    __m256 first_;
#else
    explicit CodeReader(const bf16* values) : values_(values) {}

    template <int step>
    PairsOfStep read(const uint8_t* unit) const {
        return {pairs(unit, step, 0), pairs(unit, step, kLanes)};
    }

  private:
    Pairs pairs(const uint8_t* unit, int step, int output) const {
        const auto value = [&](int lane, int parity) {
            return widen(values_[code_at(unit, Low, High, step, output + lane, parity)]);
        };
        return {each([&](int i) { return value(i, 0); }), each([&](int i) { return value(i, 1); })};
    }

    const bf16* values_;
#endif
};

template <>
class CodeReader<8, 0> {
  public:
    static constexpr int kBits = 8;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);

    explicit CodeReader(const bf16*) {}

    template <int step>
    [[gnu::always_inline]] PairsOfStep read(const uint8_t* unit) const {
        const auto* bytes = reinterpret_cast<const int8_t*>(unit) + step * kStepWeights;
        return {load_pairs(bytes), load_pairs(bytes + kStepWeights / 2)};
    }
};

// Codes that have been looked up before: the values themselves, bf16, step after step.
class ValueReader {
  public:
    static constexpr int kBits = 16;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);

    template <int step>
    [[gnu::always_inline]] PairsOfStep read(const uint8_t* unit) const {
        const bf16* values = reinterpret_cast<const bf16*>(unit) + step * kStepWeights;
        return {load_pairs(values), load_pairs(values + kStepWeights / 2)};
    }
};

// body(0), body(1), ... as constants.
template <int Count, class Body>
[[gnu::always_inline]] inline void unrolled(Body body) {
    [&]<int... place>(std::integer_sequence<int, place...>) [[gnu::always_inline]] {
        (body(std::integral_constant<int, place>{}), ...);
    }(std::make_integer_sequence<int, Count>{});
}

}  // namespace forerun
