// Pairs of whole numbers of sixteen bits, and their products with a row's: the operations of word_blocks.h.
//
// Sums are whole numbers and exact, so every instruction set gives the same ones.
#pragma once

#include "bytes.h"

namespace forerun {

// A row's number, as word_blocks.h rounds it.
struct WordInput {
    int16_t value;
};

// What a group's products are summed up in.
inline I16 sum_for(const WordInput*) { return splat_whole(0); }
inline F16 total_of(I16 sum) { return to_float(sum); }

#if defined(__AVX2__)

inline int32_t sum_of_eight(__m256i x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

#endif

#if defined(__AVX512F__)

struct WordPairs {
    __m512i v;
};

inline WordPairs load_words(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline WordPairs load_words(const int8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_pairs(int16_t* p, WordPairs x) { _mm512_storeu_si512(p, x.v); }
inline WordPairs splat_pair(const WordInput* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return {_mm512_set1_epi32(pair)};
}
inline I16 dot(I16 sum, WordPairs a, WordPairs b) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
#else
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}

inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }

// Rounds sixteen numbers to whole ones of 16 bits, and returns them.
inline I16 store_words(WordInput* p, F16 x) {
    const __m512i whole = _mm512_cvtps_epi32(x.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(whole));
    return {whole};
}
inline int32_t sum_lanes(I16 x) {
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1));
    return sum_of_eight(eight);
}

#elif defined(__AVX2__)

struct WordPairs {
    __m256i a, b;
};

inline WordPairs load_words(const int16_t* p) {
    const auto* parts = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(parts), _mm256_loadu_si256(parts + 1)};
}
inline WordPairs load_words(const int8_t* p) { return {words8(p), words8(p + 16)}; }
inline void store_pairs(int16_t* p, WordPairs x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), x.b);
}
inline WordPairs splat_pair(const WordInput* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline __m256i dot_words(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
inline I16 dot(I16 sum, WordPairs a, WordPairs b) { return {dot_words(sum.a, a.a, b.a), dot_words(sum.b, a.b, b.b)}; }

inline I16 operator+(I16 a, I16 b) { return {_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)}; }

inline I16 store_words(WordInput* p, F16 x) {
    const __m256i first = _mm256_cvtps_epi32(x.a), second = _mm256_cvtps_epi32(x.b);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
    return {first, second};
}
inline int32_t sum_lanes(I16 x) {
    return sum_of_eight(_mm256_add_epi32(x.a, x.b));
}

#else

struct WordPairs {
    int16_t v[2 * kLanes];
};

inline WordPairs load_words(const int16_t* p) {
    WordPairs out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline WordPairs load_words(const int8_t* p) {
    WordPairs out;
    for (int i = 0; i < 2 * kLanes; ++i) out.v[i] = p[i];
    return out;
}
inline void store_pairs(int16_t* p, WordPairs x) { std::memcpy(p, x.v, sizeof x.v); }
inline WordPairs splat_pair(const WordInput* p) {
    WordPairs out;
    for (int i = 0; i < 2 * kLanes; ++i) out.v[i] = p[i % 2].value;
    return out;
}
inline I16 dot(I16 sum, WordPairs a, WordPairs b) {
    int32_t lanes[kLanes];
    std::memcpy(lanes, sum.v, sizeof lanes);
    for (int i = 0; i < kLanes; ++i) lanes[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
    std::memcpy(sum.v, lanes, sizeof lanes);
    return sum;
}

inline I16 operator+(I16 a, I16 b) {
    int32_t sums[kLanes], others[kLanes];
    std::memcpy(sums, a.v, sizeof sums);
    std::memcpy(others, b.v, sizeof others);
    for (int i = 0; i < kLanes; ++i) sums[i] += others[i];
    std::memcpy(a.v, sums, sizeof sums);
    return a;
}

inline I16 store_words(WordInput* p, F16 x) {
    constexpr float most = 32767.0f;
    float lanes[kLanes];
    int32_t whole[kLanes];
    store(lanes, round_even(x));
    for (int i = 0; i < kLanes; ++i) {
        whole[i] = static_cast<int32_t>(lanes[i] > -most ? std::min(lanes[i], most) : -most);  // whatever NaN becomes
        p[i].value = static_cast<int16_t>(whole[i]);
    }
    I16 out;
    std::memcpy(out.v, whole, sizeof whole);
    return out;
}
inline int32_t sum_lanes(I16 x) {
    int32_t lanes[kLanes], sum = 0;
    std::memcpy(lanes, x.v, sizeof lanes);
    for (const int32_t lane : lanes) sum += lane;
    return sum;
}

#endif

inline Pairs load_as_stored(const bf16* p) { return load_pairs(p); }
inline WordPairs load_as_stored(const int16_t* p) { return load_words(p); }

}  // namespace forerun
