// Which levels this processor runs. A library of its own, compiled for any processor: those of the levels hold their
// instructions everywhere, even in what runs when they are loaded, so this is asked before.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__APPLE__) && defined(__aarch64__)
#include <sys/sysctl.h>
#endif

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

struct Level {
    const char* name;
    bool (*runs_here)();
    bool (*is_slow_here)() = [] { return false; };  // slower than a later one that runs here, too
};

#if defined(__x86_64__)

// A leaf of what the processor says of itself, zeros where it has none: for instructions that not every compiler has names for.
struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;
    Leaf(unsigned number, unsigned part) { __get_cpuid_count(number, part, &a, &b, &c, &d); }
};

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx_vnni() { return has_avx2() && Leaf(7, 1).a & 1u << 4; }

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Intel's dot product of bf16 takes four times as long as a fused multiplication and addition, which does half of its work.
bool has_slow_bf16() { return __builtin_cpu_is("intel"); }

#if defined(FORERUN_EMULATED_AMX)  // see emulated_amx.h

bool has_amx() { return has_avx512_bf16(); }

#else

// Whether the system lets this process use the registers of matrices; on Linux it must be asked.
bool may_use_matrices() {
#if defined(__linux__)
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

bool has_amx() {
    constexpr unsigned amx = 1u << 22 | 1u << 24;  // bf16, tiles
    return has_avx512_bf16() && (Leaf(7, 0).d & amx) == amx && may_use_matrices();
}

#endif

constexpr Level kLevels[] = {
    {"amx", has_amx},
    {"avx512bf16", has_avx512_bf16, has_slow_bf16},
    {"avx512vnni", has_avx512_vnni},
    {"avx512", has_avx512},
    {"avxvnni", has_avx_vnni},
    {"avx2", has_avx2},
    {"portable", [] { return true; }},
};

#elif defined(__aarch64__)

// Whether it has the dot products of bf16 (FEAT_BF16) and of bytes (FEAT_DotProd, which no processor with the first lacks).
bool has_dot_products() {
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

constexpr Level kLevels[] = {
    {"neonbf16", has_dot_products},
    {"neon", [] { return true; }},  // which all 64-bit ones have
    {"portable", [] { return true; }},
};

#else

constexpr Level kLevels[] = {{"portable", [] { return true; }}};

#endif

const Level* level_of(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (const Level& level : kLevels)
        if (std::strcmp(level.name, name) == 0) return &level;
    return nullptr;
}

}  // namespace

// Whether this processor, and its system, run the level of a name.
EXPORT int32_t forerun_runs_here(const char* name) {
    const Level* level = level_of(name);
    return level && level->runs_here();
}

// Whether another level does the same sooner here.
EXPORT int32_t forerun_is_slow_here(const char* name) {
    const Level* level = level_of(name);
    return level && level->is_slow_here();
}
