// Floats of 16 bits: bf16 is the high half of an fp32.
#pragma once

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

// Round to nearest, ties to even.
inline bf16 narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace forerun
