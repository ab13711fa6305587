// The codes of block formats in a tile: small integers of 2 to 8 bits, read as the values that they stand for, bf16 or whole
// numbers, or as they are.
//
// A unit is 32 inputs of a tile's 32 outputs: sixteen steps of two inputs, four quads of four steps. Codes of up to six bits
// lie in planes of 16-bit words, a vector of 32 words for outputs 0 to 15 (of each output its even input, then its odd one),
// one for outputs 16 to 31, and so on. Each of a word's four nibbles is for one step of a quad: all of it for one quad's where
// the plane has four bits of a code, parts of it for two or four quads' where it has two bits or one. The low bits of all
// codes are one plane, the high bits, if there are any, a second behind it. So a step's codes are a shift away, and looking
// a word up in a register of values needs no more than its lowest bits. Codes of eight bits are bytes, step after step, as
// int8 weights are.
#pragma once

#include "coded.h"
#include "words.h"

namespace forerun {

constexpr int kUnitInputs = 32;
constexpr int kUnitSteps = kUnitInputs / 2;
constexpr int kQuadSteps = 4;
constexpr int kMostValues = 64;  // that a code of up to six bits can name

constexpr int64_t unit_bytes(int bits) { return bits * int64_t{128}; }

// Where a plane of so many bits of each code has those of one weight.
struct PlaceInPlane {
    int64_t byte;
    int shift;

    PlaceInPlane(int width, int step, int output, int parity) {
        const int quad = step / kQuadSteps, quads = 4 / width;  // that share a vector
        const int vector = quad / quads * 2 + output / kLanes, word = 2 * (output % kLanes) + parity;
        byte = 2 * (vector * 2 * kLanes + word);
        shift = 4 * (step % kQuadSteps) + width * (quad % quads);
    }
};

// The code of one weight, by its definition. `low` and `high` are bits.
inline int code_at(const uint8_t* unit, int low, int high, int step, int output, int parity) {
    if (low == 8) return unit[step * kStepWeights + 2 * output + parity];
    const auto bits_in = [&](const uint8_t* plane, int width) {
        const PlaceInPlane place(width, step, output, parity);
        uint16_t bits;
        std::memcpy(&bits, plane + place.byte, sizeof bits);
        return bits >> place.shift & ((1 << width) - 1);
    };
    return bits_in(unit, low) | (high ? bits_in(unit + unit_bytes(low), high) << low : 0);
}

// Writes a unit of `codes` [16 steps, 32 outputs, 2 inputs], so that `code_at` finds each.
inline void pack_unit(const uint8_t* codes, int low, int high, uint8_t* unit) {
    if (low == 8) {
        std::copy(codes, codes + kUnitSteps * kStepWeights, unit);
        return;
    }
    const auto pack_plane = [&](uint8_t* plane, int width, int first_bit) {
        const int quads = 4 / width;
        for (int vectors = 0; vectors < width; ++vectors, plane += kStepWeights * 2) {  // for both halves of the outputs
            uint16_t words[kStepWeights] = {};
            for (int quad = 0; quad < quads; ++quad) {
                for (int step = 0; step < kQuadSteps; ++step) {
                    const uint8_t* of_step = codes + ((vectors * quads + quad) * kQuadSteps + step) * kStepWeights;
                    const int shift = 4 * step + width * quad;
                    for (int i = 0; i < kStepWeights; ++i)
                        words[i] |= static_cast<uint16_t>((of_step[i] >> first_bit & ((1 << width) - 1)) << shift);
                }
            }
            std::memcpy(plane, words, sizeof words);
        }
    };
    pack_plane(unit, low, 0);
    if (high) pack_plane(unit + unit_bytes(low), high, low);
}

// Sixteen weights' pairs as they are multiplied: by rows of bf16, or of whole numbers.
template <class Value>
using PairsOf = std::conditional_t<std::is_same_v<Value, bf16>, Pairs, WordPairs>;

// The codes themselves, which words are multiplied as where a format's values count up from its first one: no table is needed.
using Code = uint8_t;

template <class Value>
constexpr bool kAreCodes = std::is_same_v<Value, Code>;
template <class Value>
using StoredAs = std::conditional_t<kAreCodes<Value>, int16_t, Value>;

// Reads codes of `Low` + `High` bits, as `Code` or as values. `values` [64] is what they stand for, bf16 or whole numbers, repeated
// where there are fewer, so that bits above a code's own change nothing.
template <int Low, int High, class Value>
class CodeReader {
  public:
    using Stored = StoredAs<Value>;
    static constexpr bool kReadsCodes = kAreCodes<Value>;
    static constexpr int kBits = Low + High;
    static constexpr bool kReadsOnce = true;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);

#if defined(__AVX512BW__)
    explicit CodeReader(const Stored* values)
        : values_(_mm512_loadu_si512(values)), more_values_(_mm512_loadu_si512(values + kMostValues / 2)),
          low_bits_(_mm512_set1_epi16(kRepeated * ((1 << Low) - 1))), all_bits_(_mm512_set1_epi16(kRepeated * ((1 << kBits) - 1))) {}

    struct Quad {
        __m512i low[2], high[2];  // of each half of the outputs
    };

    [[gnu::always_inline]] static Quad quad(const uint8_t* unit, int index) {
        Quad found;
        for (int half = 0; half < 2; ++half) {
            found.low[half] = words_of<Low>(unit, index, half);
            if constexpr (High > 0) found.high[half] = words_of<High>(unit + unit_bytes(Low), index, half);
        }
        return found;
    }

    [[gnu::always_inline]] StepOf<PairsOf<Value>> step(const Quad& quad, int index) const {
        return {pairs(quad, index, 0), pairs(quad, index, 1)};
    }

  private:
    // Codes of two planes that no table is asked for are put together as bytes, two steps' at once.
    static constexpr bool kJoinsBytes = kReadsCodes && High > 0;
    static constexpr int kRepeated = kJoinsBytes ? 0x101 : 1;

    // A quad's words of a plane: each nibble begins with its bits.
    template <int width>
    [[gnu::always_inline]] static __m512i words_of(const uint8_t* plane, int quad, int half) {
        constexpr int quads = 4 / width;
        const __m512i words = _mm512_loadu_si512(plane + (quad / quads * 2 + half) * 64);
        if constexpr (quads == 1) return words;
        return _mm512_srlv_epi16(words, _mm512_set1_epi16(static_cast<int16_t>(width * (quad % quads))));
    }

    // In each word the codes of step `odd` and of the next but one.
    [[gnu::always_inline]] __m512i joined(const Quad& quad, int odd, int half) const {
        const __m512i low = moved(quad.low[half], 4 * odd), high = moved(quad.high[half], 4 * odd - Low);
        return _mm512_and_si512(_mm512_ternarylogic_epi32(low_bits_, low, high, kFirstWhereSet), all_bits_);
    }

    static constexpr int kFirstWhereSet = 0xca;

    [[gnu::always_inline]] PairsOf<Value> pairs(const Quad& quad, int index, int half) const {
        if constexpr (kJoinsBytes) {
            const __m512i codes = joined(quad, index % 2, half);
            return {index < 2 ? _mm512_and_si512(codes, _mm512_set1_epi16(0xff)) : _mm512_srli_epi16(codes, 8)};
        }
        __m512i code = moved(quad.low[half], 4 * index);
        if constexpr (High > 0) {
            code = _mm512_ternarylogic_epi32(low_bits_, code, moved(quad.high[half], 4 * index - Low), kFirstWhereSet);
        }
        if constexpr (kReadsCodes) {
            const bool is_alone = kBits == 4 && index == kQuadSteps - 1;  // all other bits have been shifted out
            return {is_alone ? code : _mm512_and_si512(code, all_bits_)};
        }
        const __m512i found =
            kBits <= 5 ? _mm512_permutexvar_epi16(code, values_) : _mm512_permutex2var_epi16(values_, code, more_values_);
        if constexpr (std::is_same_v<Value, bf16>) return pairs_of(found);
        else return WordPairs{found};
    }

    [[gnu::always_inline]] static __m512i moved(__m512i words, int right) {
        return right > 0   ? _mm512_srli_epi16(words, static_cast<unsigned>(right))
               : right < 0 ? _mm512_slli_epi16(words, static_cast<unsigned>(-right))
                           : words;
    }

    __m512i values_, more_values_, low_bits_, all_bits_;
#elif defined(__AVX2__)
    explicit CodeReader(const Stored* values) {
        if constexpr (std::is_same_v<Value, bf16>) first_ = _mm256_set1_ps(widen(values[0]));
        int8_t bytes[2][16];  // of values that codes of up to four bits name; others count up from the first value
        for (int i = 0; i < 16; ++i) std::memcpy(&bytes[0][i], &values[i], 1), bytes[1][i] = static_cast<int8_t>(values[i] >> 8);
        low_bytes_ = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes[0])));
        high_bytes_ = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes[1])));
    }

    struct Quad {
        __m256i low[2][2], high[2][2];  // of each half of the outputs, eight by eight
    };

    [[gnu::always_inline]] static Quad quad(const uint8_t* unit, int index) {
        Quad found;
        for (int half = 0; half < 2; ++half) {
            for (int part = 0; part < 2; ++part) {
                found.low[half][part] = words_of<Low>(unit, index, half, part);
                if constexpr (High > 0) found.high[half][part] = words_of<High>(unit + unit_bytes(Low), index, half, part);
            }
        }
        return found;
    }

    [[gnu::always_inline]] auto step(const Quad& quad, int index) const {
        return StepOf<decltype(pairs(quad, index, 0))>{pairs(quad, index, 0), pairs(quad, index, 1)};
    }

    // A quad's words of eight outputs, in each nibble the whole code, of up to four bits, of one step.
    [[gnu::always_inline]] static __m256i codes_of_steps(const Quad& quad, int half, int part) {
        const auto bits_of = [](__m256i words, int width) {
            return width == 4 ? words : _mm256_and_si256(words, _mm256_set1_epi8(static_cast<int8_t>(((1 << width) - 1) * 17)));
        };
        const __m256i low = bits_of(quad.low[half][part], Low);
        if constexpr (High == 0) return low;
        return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(quad.high[half][part], High), Low));
    }

  private:
    template <int width>
    [[gnu::always_inline]] static __m256i words_of(const uint8_t* plane, int quad, int half, int part) {
        constexpr int quads = 4 / width;
        const auto* vectors = reinterpret_cast<const __m256i*>(plane + (quad / quads * 2 + half) * 64);
        const __m256i words = _mm256_loadu_si256(vectors + part);
        if constexpr (quads == 1) return words;
        return _mm256_srl_epi16(words, _mm_cvtsi32_si128(width * (quad % quads)));
    }

    [[gnu::always_inline]] auto pairs(const Quad& quad, int index, int half) const {
        if constexpr (kReadsCodes) {
            return WordPairs{code_words(quad, index, half, 0), code_words(quad, index, half, 1)};
        } else if constexpr (kBits <= 4) {
            return PairsOf<Value>{named(quad, index, half, 0), named(quad, index, half, 1)};
        } else {
            static_assert(std::is_same_v<Value, bf16>);  // no format names words by more bits
            const __m256i codes[2] = {code_words(quad, index, half, 0), code_words(quad, index, half, 1)};
            const __m256i low = _mm256_set1_epi32(0xffff);
            return WidePairs{{counted(_mm256_and_si256(codes[0], low)), counted(_mm256_and_si256(codes[1], low))},
                             {counted(_mm256_srli_epi32(codes[0], 16)), counted(_mm256_srli_epi32(codes[1], 16))}};
        }
    }

    // A step's values of eight outputs: both bytes of each are looked up. A word's low byte has the code of step 0 or 1, its high
    // byte that of 2 or 3, so that what is looked up for one step serves another, too.
    [[gnu::always_inline]] __m256i named(const Quad& quad, int index, int half, int part) const {
        const __m256i codes = codes_of_bytes(quad, index % 2, half, part), low_byte = _mm256_set1_epi16(0xff);
        const __m256i low = _mm256_shuffle_epi8(low_bytes_, codes), high = _mm256_shuffle_epi8(high_bytes_, codes);
        if (index < 2) return _mm256_or_si256(_mm256_and_si256(low, low_byte), _mm256_slli_epi16(high, 8));
        return _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(low_byte, high));
    }

    // Codes of up to four bits, two in a word: of step `odd` and of the next but one.
    [[gnu::always_inline]] static __m256i codes_of_bytes(const Quad& quad, int odd, int half, int part) {
        const auto bits_of = [&](__m256i words, int width) {
            return _mm256_and_si256(_mm256_srli_epi16(words, 4 * odd), _mm256_set1_epi8(static_cast<int8_t>((1 << width) - 1)));
        };
        const __m256i low = bits_of(quad.low[half][part], Low);
        if constexpr (High == 0) return low;
        return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(quad.high[half][part], High), Low));
    }

    [[gnu::always_inline]] static __m256i code_words(const Quad& quad, int index, int half, int part) {
        const auto bits_of = [&](__m256i words, int width) {
            return _mm256_and_si256(_mm256_srli_epi16(words, 4 * index), _mm256_set1_epi16(static_cast<int16_t>((1 << width) - 1)));
        };
        const __m256i low = bits_of(quad.low[half][part], Low);
        if constexpr (High == 0) return low;
        return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(quad.high[half][part], High), Low));
    }

    [[gnu::always_inline]] __m256 counted(__m256i codes) const { return _mm256_add_ps(_mm256_cvtepi32_ps(codes), first_); }

    __m256i low_bytes_, high_bytes_;
    __m256 first_;  // of bf16 the first value, in each lane
#else
    explicit CodeReader(const Stored* values) : values_(values) {}

    struct Quad {
        const uint8_t* unit;
        int index;
    };

    static Quad quad(const uint8_t* unit, int index) { return {unit, index}; }

    StepOf<PairsOf<Value>> step(const Quad& quad, int index) const {
        const int step = quad.index * kQuadSteps + index;
        return {pairs(quad.unit, step, 0), pairs(quad.unit, step, kLanes)};
    }

  private:
    // (A call: a register tile would hold it eight times over.)
    [[gnu::noinline]] PairsOf<Value> pairs(const uint8_t* unit, int step, int output) const {
        uint16_t codes[2 * kLanes] = {};
        add_bits<Low>(unit, step, output, 0, codes);
        if constexpr (High > 0) add_bits<High>(unit + unit_bytes(Low), step, output, Low, codes);
        Stored found[2 * kLanes];
        for (int i = 0; i < 2 * kLanes; ++i) found[i] = kReadsCodes ? static_cast<Stored>(codes[i]) : values_[codes[i]];
        return load_as_stored(found);
    }

    // Adds the bits that a plane has of a step's codes of sixteen outputs.
    template <int width>
    static void add_bits(const uint8_t* plane, int step, int output, int left, uint16_t* codes) {
        const PlaceInPlane place(width, step, output, 0);
        uint16_t words[2 * kLanes];
        std::memcpy(words, plane + place.byte, sizeof words);
        for (int i = 0; i < 2 * kLanes; ++i)
            codes[i] |= static_cast<uint16_t>((words[i] >> place.shift & ((1 << width) - 1)) << left);
    }

    const Stored* values_;
#endif
};

template <class Value>
class CodeReader<8, 0, Value> {
  public:
    using Stored = Value;
    static constexpr bool kReadsCodes = false;
    static constexpr int kBits = 8;
    static constexpr bool kReadsOnce = true;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);

    explicit CodeReader(const Value*) {}

    struct Quad {
        const int8_t* bytes;
    };

    [[gnu::always_inline]] static Quad quad(const uint8_t* unit, int index) {
        return {reinterpret_cast<const int8_t*>(unit) + index * kQuadSteps * kStepWeights};
    }

    [[gnu::always_inline]] auto step(const Quad& quad, int index) const {
        const int8_t* bytes = quad.bytes + index * kStepWeights;
        const auto load_half = [](const int8_t* half) __attribute__((always_inline)) {
            if constexpr (std::is_same_v<Value, bf16>) return load_pairs(half);
            else return load_words(half);
        };
        return StepOf<decltype(load_half(bytes))>{load_half(bytes), load_half(bytes + kStepWeights / 2)};
    }
};

// What a CodeReader has read before, step after step.
template <class Value>
class ValueReader {
  public:
    using Stored = StoredAs<Value>;
    static constexpr bool kReadsCodes = kAreCodes<Value>;
    static constexpr int kBits = 16;
    static constexpr bool kReadsOnce = false;
    static constexpr int64_t kUnitBytes = unit_bytes(kBits);

    struct Quad {
        const Stored* values;
    };

    [[gnu::always_inline]] static Quad quad(const uint8_t* unit, int index) {
        return {reinterpret_cast<const Stored*>(unit) + index * kQuadSteps * kStepWeights};
    }

    [[gnu::always_inline]] StepOf<PairsOf<Value>> step(const Quad& quad, int index) const {
        const Stored* values = quad.values + index * kStepWeights;
        return {load_as_stored(values), load_as_stored(values + kStepWeights / 2)};
    }
};

}  // namespace forerun
