// The operations of simd.h for 64-bit Arm: sixteen fp32 lanes are four vectors.
//
// Every operation but the product of pairs of bf16 gives the bits of the portable build. That one has two kinds: two fused
// multiplications and additions in fp32, which give them, too; or, where the build may use it, one bf16 dot product
// (BFDOT), which adds both products of a pair to the sum without the portable build's roundings between them.
#pragma once

#include <arm_neon.h>

#include "half.h"

namespace forerun {

constexpr int kMaxRows = 2;  // rows of a register tile: 2 x 2 x 4 accumulators of 32 registers; the weights take the rest

struct F16 {
    float32x4_t a, b, c, d;
};

inline F16 splat(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {all, all, all, all};
}
inline F16 zero() { return splat(0.0f); }
inline F16 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F16 x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}

// op(vector of x, vector of y) for each of the four.
template <class Op>
inline F16 each(F16 x, F16 y, Op op) {
    return {op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)};
}

inline F16 operator+(F16 x, F16 y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline F16 operator-(F16 x, F16 y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
inline F16 operator*(F16 x, F16 y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline F16 operator/(F16 x, F16 y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
inline F16 fma(F16 x, F16 y, F16 z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// The larger and the smaller; the second operand where either is NaN, as the instructions of this name do not have it.
inline F16 max(F16 x, F16 y) {
    return each(x, y, [](float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); });
}
inline F16 min(F16 x, F16 y) {
    return each(x, y, [](float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); });
}
inline F16 round_even(F16 x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }
// a * 2^n for whole n in [-126, 127]
inline F16 scale_by_power(F16 x, F16 n) {
    return each(x, n, [](float32x4_t a, float32x4_t exponent) {
        const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(exponent), vdupq_n_s32(127)), 23);
        return vmulq_f32(a, vreinterpretq_f32_s32(power));
    });
}
inline F16 load(const bf16* p) {
    const uint16x8_t first = vld1q_u16(p), second = vld1q_u16(p + 8);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(first, 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(second), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(second, 16))};
}

// Bit i: lane i is set, of sixteen lanes that are all ones or all zeros.
inline uint32_t bits_of_lanes(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
    const uint8x8_t first = vmovn_u16(vcombine_u16(vmovn_u32(a), vmovn_u32(b)));
    const uint8x8_t second = vmovn_u16(vcombine_u16(vmovn_u32(c), vmovn_u32(d)));
    const uint8x8_t places = vcreate_u8(0x8040201008040201u);
    return vaddv_u8(vand_u8(first, places)) | static_cast<uint32_t>(vaddv_u8(vand_u8(second, places))) << 8;
}
// Bit i: lane i of `x` is above that of `y`, or either is NaN.
inline uint32_t lanes_above(F16 x, F16 y) {
    return bits_of_lanes(vcleq_f32(x.a, y.a), vcleq_f32(x.b, y.b), vcleq_f32(x.c, y.c), vcleq_f32(x.d, y.d)) ^ 0xffff;
}
// Where lane i of `x` is below that of `y`, it; elsewhere 0.
inline F16 where_below(F16 x, F16 y) {
    const auto part = [](float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, vdupq_n_f32(0.0f)); };
    return {part(x.a, y.a), part(x.b, y.b), part(x.c, y.c), part(x.d, y.d)};
}
// Lanes below `count` of `x`, `other` elsewhere.
inline F16 keep_first(F16 x, int count, F16 other) {
    constexpr int32_t first_lanes[] = {0, 1, 2, 3};
    const int32x4_t lanes = vld1q_s32(first_lanes);
    const auto part = [&](float32x4_t a, float32x4_t b, int first) {
        return vbslq_f32(vcltq_s32(lanes, vdupq_n_s32(count - first)), a, b);
    };
    return {part(x.a, other.a, 0), part(x.b, other.b, 4), part(x.c, other.c, 8), part(x.d, other.d, 12)};
}

// The even and the odd ones of eight int8, widened to 16 bits, as fp32: each is the high half of its lane, 2^16 times as large.
inline float32x4_t even_values(int16x8_t words) {
    return vcvtq_n_f32_s32(vshlq_n_s32(vreinterpretq_s32_s16(words), 16), 16);
}
inline float32x4_t odd_values(int16x8_t words) {
    return vcvtq_n_f32_s32(vandq_s32(vreinterpretq_s32_s16(words), vdupq_n_s32(-65536)), 16);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

inline void store(bf16* p, F16 x) {
    const bfloat16x8_t first = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.a), x.b);
    const bfloat16x8_t second = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.c), x.d);
    vst1q_u16(p, vreinterpretq_u16_bf16(first));
    vst1q_u16(p + 8, vreinterpretq_u16_bf16(second));
}

// Sixteen pairs of bf16.
struct Pairs {
    bfloat16x8_t a, b, c, d;
};

inline Pairs pairs_of(uint16x8_t a, uint16x8_t b, uint16x8_t c, uint16x8_t d) {
    return {vreinterpretq_bf16_u16(a), vreinterpretq_bf16_u16(b), vreinterpretq_bf16_u16(c), vreinterpretq_bf16_u16(d)};
}
inline Pairs splat_pair(const bf16* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    const bfloat16x8_t all = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
    return {all, all, all, all};
}
inline void store_pairs(bf16* p, Pairs x) {
    vst1q_u16(p, vreinterpretq_u16_bf16(x.a));
    vst1q_u16(p + 8, vreinterpretq_u16_bf16(x.b));
    vst1q_u16(p + 16, vreinterpretq_u16_bf16(x.c));
    vst1q_u16(p + 24, vreinterpretq_u16_bf16(x.d));
}
inline F16 dot(F16 sum, Pairs x, Pairs y) {
    return {vbfdotq_f32(sum.a, x.a, y.a), vbfdotq_f32(sum.b, x.b, y.b), vbfdotq_f32(sum.c, x.c, y.c),
            vbfdotq_f32(sum.d, x.d, y.d)};
}
// The pairs (a[i], b[i]).
inline Pairs join(const bf16* a, const bf16* b) {
    const uint16x8_t first_a = vld1q_u16(a), second_a = vld1q_u16(a + 8), first_b = vld1q_u16(b), second_b = vld1q_u16(b + 8);
    return pairs_of(vzip1q_u16(first_a, first_b), vzip2q_u16(first_a, first_b), vzip1q_u16(second_a, second_b),
                    vzip2q_u16(second_a, second_b));
}
// The high halves of fp32 that bf16 holds exactly.
inline uint16x8_t pairs_of_values(int16x8_t words) {
    return vtrn2q_u16(vreinterpretq_u16_f32(even_values(words)), vreinterpretq_u16_f32(odd_values(words)));
}
inline Pairs load_pairs(const int8_t* p) {
    const int8x16_t first = vld1q_s8(p), second = vld1q_s8(p + 16);
    return pairs_of(pairs_of_values(vmovl_s8(vget_low_s8(first))), pairs_of_values(vmovl_high_s8(first)),
                    pairs_of_values(vmovl_s8(vget_low_s8(second))), pairs_of_values(vmovl_high_s8(second)));
}

#else

inline uint16x4_t rounded_bits(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}
inline void store(bf16* p, F16 x) {
    vst1q_u16(p, vcombine_u16(rounded_bits(x.a), rounded_bits(x.b)));
    vst1q_u16(p + 8, vcombine_u16(rounded_bits(x.c), rounded_bits(x.d)));
}

// Sixteen pairs of bf16, widened.
struct Pairs {
    F16 even, odd;
};

inline float32x4_t even_values(uint16x8_t pairs) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(pairs), 16));
}
inline float32x4_t odd_values(uint16x8_t pairs) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(pairs), vdupq_n_u32(0xffff0000u)));
}
inline Pairs pairs_of(uint16x8_t a, uint16x8_t b, uint16x8_t c, uint16x8_t d) {
    return {{even_values(a), even_values(b), even_values(c), even_values(d)},
            {odd_values(a), odd_values(b), odd_values(c), odd_values(d)}};
}
inline Pairs splat_pair(const bf16* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    const uint16x8_t all = vreinterpretq_u16_u32(vdupq_n_u32(pair));
    return pairs_of(all, all, all, all);
}
inline void store_pairs(bf16* p, Pairs x) {  // of values that bf16 holds exactly
    const auto store_four = [](bf16* at, float32x4_t even, float32x4_t odd) {
        vst1q_u16(at, vtrn2q_u16(vreinterpretq_u16_f32(even), vreinterpretq_u16_f32(odd)));
    };
    store_four(p, x.even.a, x.odd.a);
    store_four(p + 8, x.even.b, x.odd.b);
    store_four(p + 16, x.even.c, x.odd.c);
    store_four(p + 24, x.even.d, x.odd.d);
}
inline F16 dot(F16 sum, Pairs x, Pairs y) { return fma(x.odd, y.odd, fma(x.even, y.even, sum)); }
inline Pairs join(const bf16* a, const bf16* b) { return {load(a), load(b)}; }
inline Pairs load_pairs(const int8_t* p) {
    const int8x16_t first = vld1q_s8(p), second = vld1q_s8(p + 16);
    const int16x8_t a = vmovl_s8(vget_low_s8(first)), b = vmovl_high_s8(first);
    const int16x8_t c = vmovl_s8(vget_low_s8(second)), d = vmovl_high_s8(second);
    return {{even_values(a), even_values(b), even_values(c), even_values(d)},
            {odd_values(a), odd_values(b), odd_values(c), odd_values(d)}};
}

#endif

inline Pairs load_pairs(const bf16* p) {
    return pairs_of(vld1q_u16(p), vld1q_u16(p + 8), vld1q_u16(p + 16), vld1q_u16(p + 24));
}

}  // namespace forerun
