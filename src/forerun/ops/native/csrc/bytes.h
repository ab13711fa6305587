// Small whole numbers, four of one output side by side, and their products with a row's: the operations of rounded_blocks.h.
//
// Sums are whole numbers and exact, so every instruction set gives the same ones.
#pragma once

#include <algorithm>
#include <array>

#include "simd.h"

namespace forerun {

constexpr int kBytesOfLane = 4;

using InputOrder = std::array<int, 8>;  // places of eight inputs

// Whether products of bytes that have all eight bits take longer than of smaller ones.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
constexpr bool kAllBitsCostMore = false;
#else
constexpr bool kAllBitsCostMore = true;
#endif

// What a code's byte lacks to its value. Where instructions multiply unsigned by signed bytes, signed values are kept 128 higher,
// but on AVX2 without AVX-VNNI, where the sum of two such products would not fit: there the row takes their signs.
#if defined(__AVX512F__) || defined(__AVXVNNI__)
constexpr int kSignedBias = -128;
#else
constexpr int kSignedBias = 0;
#endif

#if defined(__AVX512F__)

struct I16 {
    __m512i v;
};
struct Bytes {
    __m512i v;
};

inline I16 splat_whole(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F16 to_float(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x.v); }
inline Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
// The bytes' high bits are then not their own.
inline Bytes shifted_right(Bytes x, int count) { return {_mm512_srl_epi16(x.v, _mm_cvtsi32_si128(count))}; }
// `width` bits of each byte from bit `from` on.
template <int from, int width>
inline Bytes bits_of(Bytes x) {
    return {_mm512_and_si512(_mm512_srli_epi16(x.v, from), _mm512_set1_epi8((1 << width) - 1))};
}
template <int left>
inline Bytes shifted_left(Bytes x) {  // of bytes that lose no bits
    return {_mm512_slli_epi16(x.v, left)};
}
inline Bytes flip_sign(Bytes x) { return {_mm512_xor_si512(x.v, _mm512_set1_epi8(-128))}; }

// Sixteen values that a byte names.
struct NamedBytes {
    explicit NamedBytes(const uint8_t* values)
        : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)))) {}
    Bytes operator()(Bytes names) const { return {_mm512_shuffle_epi8(table, names.v)}; }
    __m512i table;
};

// Words [2 x 32] as they lie in two steps -> of outputs 0 to 15, or 16 to 31, the word of the first, then of the second.
inline Bytes words_in_turn(Bytes first, Bytes second, int half) {
    const __m512i in_turn = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                             36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i places = half ? _mm512_add_epi16(in_turn, _mm512_set1_epi16(16)) : in_turn;
    return {_mm512_permutex2var_epi16(first.v, places, second.v)};
}

// sum + the products of each lane's four bytes with four of a row. Bytes are without sign unless kSignedBias is 0; `all_bits`: all eight
// are used.
template <bool all_bits>
inline I16 dot_bytes(I16 sum, Bytes x, const int8_t* four) {
    int32_t packed;
    std::memcpy(&packed, four, sizeof packed);
    const __m512i row = _mm512_set1_epi32(packed);
#if defined(__AVX512VNNI__)
    return {_mm512_dpbusd_epi32(sum.v, x.v, row)};
#else
    const auto product = [&](__m512i part, int factor) {
        return _mm512_madd_epi16(_mm512_maddubs_epi16(part, row), _mm512_set1_epi16(static_cast<int16_t>(factor)));
    };
    if constexpr (!all_bits) return {_mm512_add_epi32(sum.v, product(x.v, 1))};
    const __m512i sixteens = product(bits_of<4, 4>(x).v, 16), ones = product(bits_of<0, 4>(x).v, 1);
    return {_mm512_add_epi32(sum.v, _mm512_add_epi32(sixteens, ones))};
#endif
}

// Rounds sixteen numbers of at most 127 to whole ones.
inline void store_rounded(int8_t* p, F16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

#elif defined(__AVX2__)

struct I16 {
    __m256i a, b;
};
struct Bytes {
    __m256i a, b;
};

inline I16 splat_whole(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Bytes load_bytes(const uint8_t* p) {
    const auto* parts = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(parts), _mm256_loadu_si256(parts + 1)};
}
inline void store_bytes(uint8_t* p, Bytes x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
inline Bytes operator|(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Bytes shifted_right(Bytes x, int count) {
    const __m128i bits = _mm_cvtsi32_si128(count);
    return {_mm256_srl_epi16(x.a, bits), _mm256_srl_epi16(x.b, bits)};
}
template <int from, int width>
inline Bytes bits_of(Bytes x) {
    const __m256i mask = _mm256_set1_epi8((1 << width) - 1);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, from), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, from), mask)};
}
template <int left>
inline Bytes shifted_left(Bytes x) {
    return {_mm256_slli_epi16(x.a, left), _mm256_slli_epi16(x.b, left)};
}
inline Bytes flip_sign(Bytes x) {
    if constexpr (kSignedBias == 0) return x;
    const __m256i sign = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(x.a, sign), _mm256_xor_si256(x.b, sign)};
}

struct NamedBytes {
    explicit NamedBytes(const uint8_t* values)
        : table(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)))) {}
    Bytes operator()(Bytes names) const { return {_mm256_shuffle_epi8(table, names.a), _mm256_shuffle_epi8(table, names.b)}; }
    __m256i table;
};

inline Bytes words_in_turn(Bytes first, Bytes second, int half) {
    const auto in_turn = [](__m256i x, __m256i y) {  // of eight outputs each, whose lanes unpacking crosses
        const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
        return Bytes{_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
    };
    return half ? in_turn(first.b, second.b) : in_turn(first.a, second.a);
}

template <bool all_bits>
inline __m256i dot_bytes(__m256i sum, __m256i x, __m256i row) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, x, row);
#else
    const __m256i pairs = all_bits ? _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(row, x))
                                   : _mm256_maddubs_epi16(x, row);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

template <bool all_bits>
inline I16 dot_bytes(I16 sum, Bytes x, const int8_t* four) {
    int32_t packed;
    std::memcpy(&packed, four, sizeof packed);
    const __m256i row = _mm256_set1_epi32(packed);
    return {dot_bytes<all_bits>(sum.a, x.a, row), dot_bytes<all_bits>(sum.b, x.b, row)};
}

inline void store_rounded(int8_t* p, F16 x) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

#endif

#if defined(__AVX2__)

// The largest of 32 magnitudes, as bits, whose order is that of the numbers: NaN above infinity.
inline bf16 largest_magnitude(const bf16* p) {
    const auto* parts = reinterpret_cast<const __m256i*>(p);
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    const __m256i sixteen = _mm256_max_epu16(_mm256_and_si256(_mm256_loadu_si256(parts), magnitude),
                                             _mm256_and_si256(_mm256_loadu_si256(parts + 1), magnitude));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(sixteen), _mm256_extracti128_si256(sixteen, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
    return static_cast<bf16>(~_mm_cvtsi128_si32(least) & 0xffff);
}

// The sum of sixteen.
inline int32_t sum_of_bytes(const int8_t* p) {
    const __m128i positive = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
    const __m128i halves = _mm_sad_epu8(positive, _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
}

// Puts each eight of sixteen inputs in an order.
template <InputOrder order>
inline void put_in_order(int8_t* p) {
    const __m128i places = _mm_setr_epi8(order[0], order[1], order[2], order[3], order[4], order[5], order[6], order[7],
                                         8 + order[0], 8 + order[1], 8 + order[2], 8 + order[3], 8 + order[4], 8 + order[5],
                                         8 + order[6], 8 + order[7]);
    auto* vector = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(vector, _mm_shuffle_epi8(_mm_loadu_si128(vector), places));
}

#else

#if defined(FORERUN_NEON)

// Loops over bytes, which compilers turn into vectors; products have instructions of their own.
struct I16 {
    int32_t v[kLanes];
};
struct Bytes {
    uint8_t v[kLanes * kBytesOfLane];
};

template <class Op>
inline Bytes each_byte(Op op) {
    Bytes out;
    for (int i = 0; i < kLanes * kBytesOfLane; ++i) out.v[i] = static_cast<uint8_t>(op(i));
    return out;
}

inline I16 splat_whole(int32_t x) {
    I16 out;
    for (int32_t& lane : out.v) lane = x;
    return out;
}
inline F16 to_float(I16 x) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(x.v[i]);
    return load(lanes);
}
inline Bytes load_bytes(const uint8_t* p) {
    Bytes out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, x.v, sizeof x.v); }
inline Bytes operator|(Bytes x, Bytes y) {
    return each_byte([&](int i) { return x.v[i] | y.v[i]; });
}
inline Bytes shifted_right(Bytes x, int count) {
    return each_byte([&](int i) { return x.v[i] >> count; });
}
template <int from, int width>
inline Bytes bits_of(Bytes x) {
    return each_byte([&](int i) { return x.v[i] >> from & ((1 << width) - 1); });
}
template <int left>
inline Bytes shifted_left(Bytes x) {
    return each_byte([&](int i) { return x.v[i] << left; });
}
inline Bytes flip_sign(Bytes x) { return x; }  // signed bytes are multiplied as they are

struct NamedBytes {
    explicit NamedBytes(const uint8_t* values) { std::memcpy(table, values, sizeof table); }
    Bytes operator()(Bytes names) const {
        return each_byte([&](int i) { return table[names.v[i]]; });
    }
    uint8_t table[16];
};

inline Bytes words_in_turn(Bytes first, Bytes second, int half) {
    Bytes out;
    for (int lane = 0; lane < kLanes; ++lane) {
        std::memcpy(out.v + 4 * lane, first.v + 2 * (half * kLanes + lane), 2);
        std::memcpy(out.v + 4 * lane + 2, second.v + 2 * (half * kLanes + lane), 2);
    }
    return out;
}

template <bool>
inline I16 dot_bytes(I16 sum, Bytes x, const int8_t* four) {
    int32_t packed;
    std::memcpy(&packed, four, sizeof packed);
    const int8x16_t row = vreinterpretq_s8_s32(vdupq_n_s32(packed));
    for (int i = 0; i < kLanes; i += 4) {
        const int8x16_t part = vreinterpretq_s8_u8(vld1q_u8(x.v + 4 * i));
        const int32x4_t own = vld1q_s32(sum.v + i);
#if defined(__ARM_FEATURE_DOTPROD)
        vst1q_s32(sum.v + i, vdotq_s32(own, part, row));
#else
        const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(part), vget_low_s8(row)));
        const int32x4_t high = vpaddlq_s16(vmull_high_s8(part, row));
        vst1q_s32(sum.v + i, vaddq_s32(own, vpaddq_s32(low, high)));
#endif
    }
    return sum;
}

#else

// Vectors as in simd.h, of two bytes in a word.
using EightWords = uint16_t __attribute__((vector_size(16)));
using EightWhole = int16_t __attribute__((vector_size(16)));

struct I16 {
    FourWhole v[4];
};
struct Bytes {
    EightWords v[4];
};

template <class Op>
inline Bytes each_vector(Op op) {
    Bytes out;
    for (int i = 0; i < 4; ++i) out.v[i] = op(i);
    return out;
}

inline I16 splat_whole(int32_t x) {
    I16 out;
    for (FourWhole& lanes : out.v) lanes = FourWhole{x, x, x, x};
    return out;
}
inline F16 to_float(I16 x) {
    return each([&](int i) { return __builtin_convertvector(x.v[i], Four); });
}
inline Bytes load_bytes(const uint8_t* p) {
    Bytes out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, x.v, sizeof x.v); }
inline Bytes operator|(Bytes x, Bytes y) {
    return each_vector([&](int i) { return x.v[i] | y.v[i]; });
}
inline Bytes shifted_right(Bytes x, int count) {
    return each_vector([&](int i) { return x.v[i] >> count; });
}
template <int from, int width>
inline Bytes bits_of(Bytes x) {
    constexpr uint16_t mask = 0x101 * ((1 << width) - 1);
    return each_vector([&](int i) { return x.v[i] >> from & mask; });
}
template <int left>
inline Bytes shifted_left(Bytes x) {
    return each_vector([&](int i) { return x.v[i] << left; });
}
inline Bytes flip_sign(Bytes x) { return x; }  // signed bytes are multiplied as they are

struct NamedBytes {
    explicit NamedBytes(const uint8_t* values) { std::memcpy(table, values, sizeof table); }
    Bytes operator()(Bytes names) const {
        uint8_t bytes[kLanes * kBytesOfLane];
        store_bytes(bytes, names);
        for (uint8_t& byte : bytes) byte = table[byte];
        return load_bytes(bytes);
    }
    uint8_t table[16];
};

inline Bytes words_in_turn(Bytes first, Bytes second, int half) {
    uint16_t words[2][2 * kLanes], in_turn[2 * kLanes];
    std::memcpy(words[0], first.v, sizeof first.v);
    std::memcpy(words[1], second.v, sizeof second.v);
    for (int i = 0; i < 2 * kLanes; ++i) in_turn[i] = words[i % 2][half * kLanes + i / 2];
    Bytes out;
    std::memcpy(out.v, in_turn, sizeof in_turn);
    return out;
}

// (Two products of a byte and one from -127 to 127 are a whole number of 16 bits.)
template <bool>
inline I16 dot_bytes(I16 sum, Bytes x, const int8_t* four) {
    const auto in_turn = [&](int first) {
        const int16_t a = four[first], b = four[first + 2];
        return EightWhole{a, b, a, b, a, b, a, b};
    };
    const EightWhole of_low = in_turn(kLowFirst ? 0 : 1), of_high = in_turn(kLowFirst ? 1 : 0);
    for (int i = 0; i < 4; ++i) {
        const EightWhole low = reinterpret_cast<EightWhole>(x.v[i] << 8) >> 8, high = reinterpret_cast<EightWhole>(x.v[i]) >> 8;
        const auto products = reinterpret_cast<FourWords>(low * of_low + high * of_high);
        sum.v[i] += (reinterpret_cast<FourWhole>(products << 16) >> 16) + (reinterpret_cast<FourWhole>(products) >> 16);
    }
    return sum;
}

#endif

inline bf16 largest_magnitude(const bf16* p) {
    bf16 largest = 0;
    for (int i = 0; i < 2 * kLanes; ++i) largest = std::max<bf16>(largest, p[i] & 0x7fff);
    return largest;
}

inline int32_t sum_of_bytes(const int8_t* p) {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += p[i];
    return sum;
}

template <InputOrder order>
inline void put_in_order(int8_t* p) {
    int8_t given[kLanes];
    std::memcpy(given, p, sizeof given);
    for (int i = 0; i < kLanes; ++i) p[i] = given[i / 8 * 8 + order[i % 8]];
}

inline void store_rounded(int8_t* p, F16 x) {
    float lanes[kLanes];
    store(lanes, round_even(x));
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}

#endif

}  // namespace forerun
