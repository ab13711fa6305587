// The level that a library is built for, and whether this processor has its instructions.
#pragma once

#if defined(__AMX_BF16__)
#include <cpuid.h>

#include "amx.h"
#elif defined(__AVXVNNI__)
#include <cpuid.h>
#elif defined(FORERUN_NEON) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(FORERUN_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace forerun {

#if defined(__AMX_BF16__)
constexpr char kLevel[] = "amx";
#elif defined(__AVX512BF16__)
constexpr char kLevel[] = "avx512bf16";
#elif defined(__AVX512F__)
constexpr char kLevel[] = "avx512";
#elif defined(__AVXVNNI__)
constexpr char kLevel[] = "avxvnni";
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

// Whether an Arm processor has the dot products of bf16 (FEAT_BF16) and of bytes (FEAT_DotProd, which no processor with the
// first lacks); NEON itself all 64-bit ones have.
inline bool has_dot_products() {
#if defined(__linux__)
    constexpr unsigned long bf16 = 1ul << 14, bytes = 1ul << 20;  // HWCAP2_BF16, HWCAP_ASIMDDP: older headers lack them
    return (getauxval(AT_HWCAP2) & bf16) && (getauxval(AT_HWCAP) & bytes);
#elif defined(__APPLE__)
    const auto has = [](const char* feature) {
        int found = 0;
        size_t size = sizeof found;
        return sysctlbyname(feature, &found, &size, nullptr, 0) == 0 && found;
    };
    return has("hw.optional.arm.FEAT_BF16") && has("hw.optional.arm.FEAT_DotProd");
#else
    return false;
#endif
}

#endif

#if defined(__AVX512BF16__)

inline bool has_bf16_vectors() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

#endif

inline bool runs_here() {
#if defined(__AMX_BF16__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned amx = 1u << 22 | 1u << 24;  // of leaf 7: bf16, tiles; not every compiler has names for them
    return has_bf16_vectors() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & amx) == amx && may_use_matrices();
#elif defined(__AVX512BF16__)
    return has_bf16_vectors();
#elif defined(__AVX512F__)
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVXVNNI__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned avx_vnni = 1u << 4;  // of leaf 7.1, which not every compiler has a name for
    const bool has_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & avx_vnni);
    return has_vnni && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(FORERUN_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return has_dot_products();
#else
    return true;
#endif
}

}  // namespace forerun
