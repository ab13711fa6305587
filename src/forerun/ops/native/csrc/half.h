// Floats of 16 bits: bf16 is the high half of an fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace forerun {

using bf16 = uint16_t;

inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// A number of IEEE 754's 16 bits.
struct fp16 {
    uint16_t bits;
};

inline float widen(fp16 value) {
    constexpr float rebias = 5.192296858534828e33f;  // 2^112, between the exponents' biases
    uint32_t bits = (value.bits & 0x7fffu) << 13;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    wide *= rebias;
    std::memcpy(&bits, &wide, sizeof bits);
    if ((value.bits & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;  // infinity, NaN
    bits |= (value.bits & 0x8000u) << 16;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Round to nearest, ties to even; what is too large becomes infinity.
inline fp16 narrow_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) {
        bits = 0x7e00u;  // NaN
    } else if (bits >= 0x47800000u) {
        bits = 0x7c00u;  // 2^16 and more
    } else if (bits < 0x38800000u) {  // subnormal: a multiple of 2^-24, which is the last bit of 0.5
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, sizeof bits);
        bits -= 0x3f000000u;
    } else {
        bits = (bits + 0xfffu + (bits >> 13 & 1u) - 0x38000000u) >> 13;
    }
    return {static_cast<uint16_t>(sign | bits)};
}

// Round to nearest, ties to even.
inline bf16 narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// By the largest magnitude's bits, whose order is that of magnitudes: compilers find it in whole vectors.
inline bool are_finite(const bf16* values, int64_t count) {
    bf16 largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max<bf16>(largest, values[i] & 0x7fff);
    return largest < 0x7f80;
}
inline bool are_finite(const float* values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffffu);
    }
    return largest < 0x7f800000u;
}

}  // namespace forerun
