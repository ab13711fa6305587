// The level that a library is built for, and whether this processor has its instructions.
#pragma once

#if defined(FORERUN_NEON) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(FORERUN_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace forerun {

#if defined(__AVX512BF16__)
constexpr char kLevel[] = "avx512bf16";
#elif defined(__AVX512F__)
constexpr char kLevel[] = "avx512";
#elif defined(__AVX2__)
constexpr char kLevel[] = "avx2";
#elif defined(FORERUN_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr char kLevel[] = "neonbf16";
#elif defined(FORERUN_NEON)
constexpr char kLevel[] = "neon";
#else
constexpr char kLevel[] = "portable";
#endif

#if defined(FORERUN_NEON)

// Whether an Arm processor has the bf16 dot product (FEAT_BF16); NEON itself all 64-bit ones have.
inline bool has_bf16_dot() {
#if defined(__linux__)
    constexpr unsigned long bf16 = 1ul << 14;  // HWCAP2_BF16, which older headers do not name
    return getauxval(AT_HWCAP2) & bf16;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found;
#else
    return false;
#endif
}

#endif

inline bool runs_here() {
#if defined(__AVX512BF16__)
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX512F__)
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(FORERUN_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return has_bf16_dot();
#else
    return true;
#endif
}

}  // namespace forerun
