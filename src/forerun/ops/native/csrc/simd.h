// Sixteen fp32 lanes and the few operations that the kernels need, for each instruction set.
//
// Whatever the instruction set, an operation is the same function of its operands in every kernel that
// uses it: nothing is contracted, reordered or approximated by the compiler (-ffp-contract=off), so two
// kernels that apply the same operations in the same order give the same bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
// GCC 12's own header initialises vectors with themselves and warns of it wherever it is inlined (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(FORERUN_NEON)
#include "neon.h"
#endif

#include "buffer.h"
#include "half.h"

namespace forerun {

constexpr int kLanes = 16;

// How often the compiler repeats what multiplies a few steps of a tile, one after the other, so that registers need no copies.
// Where vectors are short and registers few, there is too much of it for the compiler, and nothing to be gained.
#if defined(__AVX2__) || defined(FORERUN_NEON)
constexpr int kRepeatedSteps = 4;
#else
constexpr int kRepeatedSteps = 1;
#endif

// Which caches a line is fetched into: all, all but the first one, which is full of what is read again and again, or all but the
// second one, which lines that are read but once would push other data out of.
enum class Caches { kAll, kPastFirst, kPastSecond };

[[gnu::always_inline]] inline void fetch_line(const void* line, Caches caches) {
    switch (caches) {
        case Caches::kAll: __builtin_prefetch(line, 0, 3); break;
        case Caches::kPastFirst: __builtin_prefetch(line, 0, 2); break;
        case Caches::kPastSecond: __builtin_prefetch(line, 0, 0); break;
    }
}

// Where lines that are read once, and soon, are best fetched to, and those that are read some times. Processors differ, as
// measured: Intel's lose many lines that are fetched past the second cache before they are read, so that codes of four bits take
// twice as long; on Zen 5 lines come late that are fetched past the first one; on Zen 4 they come sooner than all others.
#if defined(__x86_64__)
inline const bool kIsIntel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
inline const bool kIsZen4 = (__builtin_cpu_init(), __builtin_cpu_is("amdfam19h") && __builtin_cpu_supports("avx512f"));
inline const Caches kCachesForOneReading = kIsIntel ? Caches::kAll : kIsZen4 ? Caches::kPastFirst : Caches::kPastSecond;
inline const Caches kCachesForSomeReadings = kIsZen4 ? Caches::kPastFirst : Caches::kAll;
#else
constexpr Caches kCachesForOneReading = Caches::kPastSecond, kCachesForSomeReadings = Caches::kAll;
#endif

// Without an instruction for bf16, rows of it are widened to fp32 before they are multiplied: a register is then filled with a
// number while it is read, for nothing.
#if defined(__AVX2__) && !defined(__AVX512BF16__)
#define FORERUN_WIDENS_ROWS
#endif

// A number of bf16, in fp32.
struct WideInput {
    float value;
};

#if defined(__AVX512F__)

constexpr int kMaxRows = 12;  // rows of a register tile: 12 x 2 accumulators of 32 registers

struct F16 {
    __m512 v;
};

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The larger and the smaller; the second operand where either is NaN.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for whole n in [-126, 127]
inline F16 scale_by_power(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline F16 load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline F16 load(const fp16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline F16 load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// The low halves of sixteen bytes, or the high ones.
inline F16 load_nibbles(const uint8_t* p, int high) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(high ? _mm512_srli_epi32(wide, 4) : wide, _mm512_set1_epi32(15)))};
}
// Bit i: lane i of `a` is above that of `b`, or either is NaN.
inline uint32_t lanes_above(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ); }
// Where lane i of `a` is below that of `b`, it; elsewhere 0.
inline F16 where_below(F16 a, F16 b) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), a.v)}; }
// Lanes below `count` of `a`, `other` elsewhere.
inline F16 keep_first(F16 a, int count, F16 other) {
    const __mmask16 mask = count >= kLanes ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
    return {_mm512_mask_blend_ps(mask, other.v, a.v)};
}

#if defined(__AVX512BF16__)

inline void store(bf16* p, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x.v));
}

// Sixteen pairs of bf16.
struct Pairs {
    __m512bh v;
};

inline Pairs pairs_of(__m512i bits) { return {(__m512bh)bits}; }
inline Pairs load_pairs(const bf16* p) { return pairs_of(_mm512_loadu_si512(p)); }
inline Pairs splat_pair(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return {(__m512bh)_mm512_set1_epi32(pair)};
}
inline void store_pairs(bf16* p, Pairs x) { _mm512_storeu_si512(p, (__m512i)x.v); }
inline F16 dot(F16 sum, Pairs a, Pairs b) { return {_mm512_dpbf16_ps(sum.v, a.v, b.v)}; }
// The pairs (a[i], b[i]).
inline Pairs join(const bf16* a, const bf16* b) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m512i in_turn = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                             36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return pairs_of(_mm512_permutex2var_epi16(_mm512_castsi256_si512(first), in_turn, _mm512_castsi256_si512(second)));
}
inline Pairs load_pairs(const int8_t* p) {  // whole numbers that small are bf16 as fp32: the high halves
    const __m512i low = _mm512_castps_si512(load(p).v), high = _mm512_castps_si512(load(p + kLanes).v);
    const __m512i pairs_order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                                 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return pairs_of(_mm512_permutex2var_epi16(low, pairs_order, high));
}

#else

// The bf16 nearest to each lane, in the low half of its word.
inline __m512i rounded_bits(F16 x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_srli_epi32(rounded, 16);
}
inline void store(bf16* p, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded_bits(x)));
}

using RowInput = WideInput;  // as rows are multiplied
inline void store(RowInput* p, F16 x) {  // rounded to bf16
    store(&p->value, {_mm512_castsi512_ps(_mm512_slli_epi32(rounded_bits(x), 16))});
}

struct Pairs {
    __m512 even, odd;
};

inline Pairs pairs_of(__m512i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Pairs load_pairs(const bf16* p) { return pairs_of(_mm512_loadu_si512(p)); }
inline Pairs splat_pair(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return pairs_of(_mm512_set1_epi32(pair));
}
inline Pairs splat_pair(const RowInput* p) { return {_mm512_set1_ps(p[0].value), _mm512_set1_ps(p[1].value)}; }
inline void store_pairs(bf16* p, Pairs x) {  // of values that bf16 holds exactly
    const __m512i high = _mm512_castps_si512(x.odd), low = _mm512_srli_epi32(_mm512_castps_si512(x.even), 16);
    _mm512_storeu_si512(p, _mm512_or_si512(high, low));
}
inline F16 dot(F16 sum, Pairs a, Pairs b) {
    return {_mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, sum.v))};
}
inline Pairs join(const bf16* a, const bf16* b) { return {load(a).v, load(b).v}; }
inline Pairs load_pairs(const int8_t* p) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16)),
            _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16))};
}

#endif

#elif defined(__AVX2__)

constexpr int kMaxRows = 3;  // 3 x 2 x 2 accumulators of 16 registers

struct F16 {
    __m256 a, b;
};

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 round_even(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(power));
}
inline F16 scale_by_power(F16 x, F16 n) { return {scale_by_power(x.a, n.a), scale_by_power(x.b, n.b)}; }
inline __m256 widen8(const bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline F16 load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
inline __m256 widen8(const fp16* p) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13);
    const __m256 rebias = _mm256_set1_ps(5.192296858534828e33f);  // 2^112, between the exponents' biases
    const __m256 finite = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), rebias);
    const __m256i is_special = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32((0x7c00 << 13) - 1));
    const __m256i special = _mm256_and_si256(is_special, _mm256_set1_epi32(0x7f800000));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
    return _mm256_or_ps(finite, _mm256_castsi256_ps(_mm256_or_si256(special, sign)));
}
inline F16 load(const fp16* p) { return {widen8(p), widen8(p + 8)}; }
inline __m256 widen8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline F16 load(const int8_t* p) { return {widen8(p), widen8(p + 8)}; }
inline F16 load_nibbles(const uint8_t* p, int high) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i nibbles = _mm_and_si128(high ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(nibbles)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(nibbles, 8)))};
}
inline uint32_t lanes_above(F16 x, F16 y) {
    const int first = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLE_UQ));
    const int second = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLE_UQ));
    return static_cast<uint32_t>(first | second << 8);
}
inline F16 where_below(F16 x, F16 y) {
    return {_mm256_and_ps(x.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)), _mm256_and_ps(x.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline F16 keep_first(F16 x, int count, F16 other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 first = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
    const __m256 second = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane));
    return {_mm256_blendv_ps(other.a, x.a, first), _mm256_blendv_ps(other.b, x.b, second)};
}
inline __m256i rounded_bits(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
inline void store(bf16* p, F16 x) {
    const __m256i packed = _mm256_packus_epi32(rounded_bits(x.a), rounded_bits(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Sixteen pairs of bf16: as they lie in memory, eight and eight, or as fp32.
struct Pairs {
    __m256i a, b;
};
struct WidePairs {
    F16 even, odd;
};

inline Pairs pairs_of(__m256i first, __m256i second) { return {first, second}; }
inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_of(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline F16 even_of(Pairs x) { return {even_of(x.a), even_of(x.b)}; }
inline F16 odd_of(Pairs x) { return {odd_of(x.a), odd_of(x.b)}; }
inline F16 even_of(WidePairs x) { return x.even; }
inline F16 odd_of(WidePairs x) { return x.odd; }
inline Pairs load_pairs(const bf16* p) {
    const __m256i* parts = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(parts), _mm256_loadu_si256(parts + 1)};
}
inline WidePairs splat_pair(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    const __m256i pairs = _mm256_set1_epi32(pair);
    return {{even_of(pairs), even_of(pairs)}, {odd_of(pairs), odd_of(pairs)}};
}
using RowInput = WideInput;  // as rows are multiplied
inline void store(RowInput* p, F16 x) {  // rounded to bf16
    store(&p->value, {_mm256_castsi256_ps(_mm256_slli_epi32(rounded_bits(x.a), 16)),
                      _mm256_castsi256_ps(_mm256_slli_epi32(rounded_bits(x.b), 16))});
}
inline WidePairs splat_pair(const RowInput* p) { return {splat(p[0].value), splat(p[1].value)}; }
inline void store_pairs(bf16* p, Pairs x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), x.b);
}
inline __m256i pair_bits(__m256 even, __m256 odd) {
    return _mm256_or_si256(_mm256_castps_si256(odd), _mm256_srli_epi32(_mm256_castps_si256(even), 16));
}
inline void store_pairs(bf16* p, WidePairs x) {  // of values that bf16 holds exactly
    store_pairs(p, Pairs{pair_bits(x.even.a, x.odd.a), pair_bits(x.even.b, x.odd.b)});
}
template <class SomePairs>
inline F16 dot(F16 sum, SomePairs x, WidePairs y) {
    return fma(odd_of(x), y.odd, fma(even_of(x), y.even, sum));
}
inline WidePairs join(const bf16* a, const bf16* b) { return {load(a), load(b)}; }
inline __m256i words8(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 even_words(__m256i words) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16));
}
inline __m256 odd_words(__m256i words) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16)); }
inline WidePairs load_pairs(const int8_t* p) {
    const __m256i first = words8(p), second = words8(p + 16);
    return {{even_words(first), even_words(second)}, {odd_words(first), odd_words(second)}};
}

#elif !defined(FORERUN_NEON)

constexpr int kMaxRows = 4;

// Vectors of GCC and clang, which any machine computes with: four of them take the compiler a fraction of what sixteen numbers do.
using Four = float __attribute__((vector_size(16)));
using FourWords = uint32_t __attribute__((vector_size(16)));
using FourWhole = int32_t __attribute__((vector_size(16)));
using FourHalves = uint16_t __attribute__((vector_size(8)));

struct F16 {
    Four v[4];
};

// op(number of a vector) for each of the four.
template <class Op>
inline F16 each(Op op) {
    F16 out;
    for (int i = 0; i < 4; ++i) out.v[i] = op(i);
    return out;
}

inline F16 splat(float x) {
    return each([&](int) { return Four{x, x, x, x}; });
}
inline F16 zero() { return splat(0.0f); }
inline F16 load(const float* p) {
    F16 out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline void store(float* p, F16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F16 operator+(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 operator-(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 operator*(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 operator/(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
#if defined(__ARM_FEATURE_FMA)
inline F16 fma(F16 a, F16 b, F16 c) {
    return each([&](int i) {
        Four out;
        for (int lane = 0; lane < 4; ++lane) out[lane] = __builtin_fmaf(a.v[i][lane], b.v[i][lane], c.v[i][lane]);
        return out;
    });
}
#else  // a call of libm's fma would cost more than the rounding is worth
inline F16 fma(F16 a, F16 b, F16 c) { return a * b + c; }
#endif
inline F16 max(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 min(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// For |a| < 2^22.
inline F16 round_even(F16 a) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
    return each([&](int i) {
        volatile Four shifted = a.v[i] + magic;
        return shifted - magic;
    });
}
inline F16 scale_by_power(F16 a, F16 n) {
    constexpr float magic = 8388608.0f + 4194304.0f;  // adding it leaves n in the low bits, of a NaN anything
    constexpr uint32_t magic_bits = 0x4b400000u;
    return each([&](int i) {
        const auto bits = reinterpret_cast<FourWords>(n.v[i] + magic);
        return a.v[i] * reinterpret_cast<Four>((bits - magic_bits + 127u) << 23);
    });
}
inline F16 load(const bf16* p) {
    return each([&](int i) {
        FourHalves halves;
        std::memcpy(&halves, p + 4 * i, sizeof halves);
        return reinterpret_cast<Four>(__builtin_convertvector(halves, FourWords) << 16);
    });
}
inline uint32_t lanes_above(F16 a, F16 b) {
    uint32_t above = 0;
    for (int i = 0; i < kLanes; ++i) above |= static_cast<uint32_t>(!(a.v[i / 4][i % 4] <= b.v[i / 4][i % 4])) << i;
    return above;
}
inline F16 where_below(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : Four{}; });
}
inline F16 keep_first(F16 a, int count, F16 other) {
    return each([&](int i) { return FourWhole{0, 1, 2, 3} + 4 * i < count ? a.v[i] : other.v[i]; });
}
inline void store(bf16* p, F16 x) {
    for (int i = 0; i < 4; ++i) {  // `narrow`
        const auto bits = reinterpret_cast<FourWords>(x.v[i]);
        const auto is_nan = reinterpret_cast<FourWhole>(bits & 0x7fffffffu) > 0x7f800000;
        const FourWords narrow = (is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        const auto halves = __builtin_convertvector(narrow, FourHalves);
        std::memcpy(p + 4 * i, &halves, sizeof halves);
    }
}

struct Pairs {
    F16 even, odd;
};

// Of two halves in a word, the one that is first in memory and the other, as a word's high half.
constexpr bool kLowFirst = std::endian::native == std::endian::little;
inline FourWords first_half(FourWords x) { return kLowFirst ? x << 16 : x & 0xffff0000u; }
inline FourWords second_half(FourWords x) { return kLowFirst ? x & 0xffff0000u : x << 16; }

// Pairs of which each word holds one; `number` is of a word whose high half it is.
template <class Number>
inline Pairs pairs_of(const FourWords (&words)[4], Number number) {
    return {each([&](int i) { return number(first_half(words[i])); }), each([&](int i) { return number(second_half(words[i])); })};
}
inline Pairs load_pairs(const bf16* p) {
    FourWords words[4];
    std::memcpy(words, p, sizeof words);
    return pairs_of(words, [](FourWords x) { return reinterpret_cast<Four>(x); });
}
inline Pairs load_pairs(const int8_t* p) {
    using Bytes = int8_t __attribute__((vector_size(8)));
    using Halves = int16_t __attribute__((vector_size(16)));
    FourWords words[4];
    for (int i = 0; i < 4; ++i) {
        Bytes bytes;
        std::memcpy(&bytes, p + 8 * i, sizeof bytes);
        words[i] = reinterpret_cast<FourWords>(__builtin_convertvector(bytes, Halves));
    }
    return pairs_of(words, [](FourWords x) { return __builtin_convertvector(reinterpret_cast<FourWhole>(x) >> 16, Four); });
}
inline Pairs splat_pair(const bf16* p) { return {splat(widen(p[0])), splat(widen(p[1]))}; }
inline void store_pairs(bf16* p, Pairs x) {  // of values that bf16 holds exactly
    for (int i = 0; i < 4; ++i) {
        const auto even = reinterpret_cast<FourWords>(x.even.v[i]), odd = reinterpret_cast<FourWords>(x.odd.v[i]);
        const FourWords words = kLowFirst ? even >> 16 | (odd & 0xffff0000u) : odd >> 16 | (even & 0xffff0000u);
        std::memcpy(p + 8 * i, &words, sizeof words);
    }
}
inline F16 dot(F16 sum, Pairs a, Pairs b) { return fma(a.odd, b.odd, fma(a.even, b.even, sum)); }
inline Pairs join(const bf16* a, const bf16* b) { return {load(a), load(b)}; }

#endif

#if !defined(__AVX2__)

// Sixteen numbers of other kinds, one by one.
template <class Number>
inline F16 load_each(Number number) {
    float wide[kLanes];
    for (int i = 0; i < kLanes; ++i) wide[i] = number(i);
    return load(wide);
}
inline F16 load(const fp16* p) {
    return load_each([&](int i) { return widen(p[i]); });
}
inline F16 load(const int8_t* p) {
    return load_each([&](int i) { return static_cast<float>(p[i]); });
}
inline F16 load_nibbles(const uint8_t* p, int high) {
    return load_each([&](int i) { return static_cast<float>(high ? p[i] >> 4 : p[i] & 15); });
}

#endif

inline void widen_inputs(const bf16* rows, int64_t count, WideInput* out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(&out[i].value, load(rows + i));
    for (; i < count; ++i) out[i].value = widen(rows[i]);
}

// How far apart rows of so many values lie: `inputs`, but for more rows than the first cache holds lines of a set never a multiple of
// kBytesOfSets, after which lines fall into the same one: rows would push one another out of it. (AMX reads whole lines, once.)
template <class Value>
inline int64_t row_stride(int64_t num_rows, int64_t inputs) {
#if defined(__AMX_BF16__)
    constexpr bool reads_lines_again = false;
#else
    constexpr bool reads_lines_again = true;
#endif
    constexpr int64_t kBytesOfSets = 4096, kRowsOfOneSet = 8, size = sizeof(Value);
    const bool share_a_set = num_rows > kRowsOfOneSet && inputs * size % kBytesOfSets == 0;
    return reads_lines_again && share_a_set ? inputs + kCacheLine / size : inputs;
}

// Rows as they are multiplied, so many values apart.
template <class Value>
struct InputRows {
    const Value* values;
    int64_t stride;

    const Value* at(int64_t row) const { return values + row * stride; }
    InputRows from(int64_t row) const { return {at(row), stride}; }
};

// `row_inputs` gives rows of bf16 [num_rows, inputs] as they are multiplied: they themselves, or what it writes to memory, of which
// it needs `row_input_bytes`.
#if defined(FORERUN_WIDENS_ROWS)

inline int64_t row_input_bytes(int64_t num_rows, int64_t inputs) {
    const int64_t count = num_rows * row_stride<RowInput>(num_rows, inputs);
    return (count + kLanes - 1) / kLanes * kLanes * static_cast<int64_t>(sizeof(RowInput));
}

inline InputRows<RowInput> row_inputs(const bf16* rows, int64_t num_rows, int64_t inputs, uint8_t* memory) {
    auto* values = reinterpret_cast<RowInput*>(memory);
    const int64_t stride = row_stride<RowInput>(num_rows, inputs);
    for (int64_t row = 0; row < num_rows; ++row) widen_inputs(rows + row * inputs, inputs, values + row * stride);
    return {values, stride};
}

#else

using RowInput = bf16;

inline int64_t row_input_bytes(int64_t num_rows, int64_t inputs) {
    const int64_t stride = row_stride<RowInput>(num_rows, inputs);
    return stride == inputs ? 0 : num_rows * stride * static_cast<int64_t>(sizeof(RowInput));
}

inline InputRows<RowInput> row_inputs(const bf16* rows, int64_t num_rows, int64_t inputs, uint8_t* memory) {
    const int64_t stride = row_stride<RowInput>(num_rows, inputs);
    if (stride == inputs) return {rows, inputs};
    auto* values = reinterpret_cast<RowInput*>(memory);
    for (int64_t row = 0; row < num_rows; ++row) std::copy_n(rows + row * inputs, inputs, values + row * stride);
    return {values, stride};
}

#endif

inline F16 splat_pair(const float* p) { return splat(*p); }
inline F16 load_pairs(const float* p) { return load(p); }
inline F16 load_pairs(const fp16* p) { return load(p); }
inline F16 dot(F16 sum, F16 a, F16 b) { return fma(a, b, sum); }
inline F16 join(const float* a, const float*) { return load(a); }

// Keeps the compiler from knowing that this points where it did: from computing addresses behind it ahead of their use, more than
// there are registers, and from keeping in them what was read there before.
template <class T>
[[gnu::always_inline]] inline void forget(const T*& address) {
#if defined(__GNUC__)
    asm("" : "+r"(address));
#else
    (void)address;
#endif
}

// Calls visit with `count`, which is from 1 to Most, as a constant.
template <int Most = kMaxRows, class Visit>
inline void with_count(int64_t count, const Visit& visit) {
    if constexpr (Most > 1)
        if (count < Most) return with_count<Most - 1>(count, visit);
    visit(std::integral_constant<int, Most>{});
}

// Sum and maximum of all lanes, halves onto halves: one fixed order.
inline float sum_lanes(F16 x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

inline float max_lanes(F16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x.v);
#else
    float lanes[kLanes];
    store(lanes, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
#endif
}

// A prefix of sixteen values; the other lanes are zero.
template <class T>
inline F16 load_first(const T* p, int count) {
    if (count >= kLanes) return load(p);
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, count * sizeof(T));
    return load(lanes);
}

// `join` of a prefix of sixteen.
template <class T>
inline auto join_first(const T* a, const T* b, int count) {
    if (count >= kLanes) return join(a, b);
    T lanes[2][kLanes] = {};
    std::memcpy(lanes[0], a, count * sizeof(T));
    std::memcpy(lanes[1], b, count * sizeof(T));
    return join(lanes[0], lanes[1]);
}

template <class T>
inline void store_first(T* p, F16 x, int count) {
    if (count >= kLanes) return store(p, x);
    T lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, count * sizeof(T));
}

}  // namespace forerun
