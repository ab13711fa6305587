// AMX in C++, for tests on machines that have AVX-512 BF16 alone: scripts/test_amx.sh builds the level `amx` with it. Registers
// hold what the instructions define; what a processor would refuse ends the process.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd.h"

namespace forerun::emulated {

struct Register {
    int rows, row_bytes;
    alignas(64) unsigned char data[16][64];
};

inline thread_local Register registers[8];

inline void require(bool is_defined) {
    if (!is_defined) std::abort();
}

inline void load_config(const void* config) {
    const auto* bytes = static_cast<const unsigned char*>(config);
    require(bytes[0] == 1);  // the palette
    for (int i = 0; i < 8; ++i) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
        registers[i] = {bytes[48 + i], row_bytes, {}};
        require(registers[i].rows <= 16 && row_bytes <= 64 && (registers[i].rows == 0) == (row_bytes == 0));
    }
}

inline void release() {
    for (Register& one : registers) one = {};
}

inline void set_zero(int number) {
    require(registers[number].rows > 0);
    std::memset(registers[number].data, 0, sizeof registers[number].data);
}

inline void load(int number, const void* rows, int64_t distance) {
    Register& to = registers[number];
    set_zero(number);
    for (int row = 0; row < to.rows; ++row) std::memcpy(to.data[row], static_cast<const char*>(rows) + row * distance, to.row_bytes);
}

inline void store(int number, void* rows, int64_t distance) {
    const Register& from = registers[number];
    require(from.rows > 0);
    for (int row = 0; row < from.rows; ++row) std::memcpy(static_cast<char*>(rows) + row * distance, from.data[row], from.row_bytes);
}

// Numbers below fp32's normal ones count as zeros of their sign. (The processor looks at a result after rounding, as here, with
// as many exponents as it likes: one that rounds up to the least normal number would be zero there.)
inline __m512 flushed(__m512 x) {
    constexpr int denormal = 0x20;
    const __m512i bits = _mm512_castps_si512(x), sign = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, _mm512_fpclass_ps_mask(x, denormal), bits, sign));
}

inline __m512 even_inputs(__m512i pairs) { return flushed(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))); }
inline __m512 odd_inputs(__m512i pairs) {
    return flushed(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))));
}

// Adds to each sum the products of even inputs, in order from zero, and those of odd ones.
inline void dot_products(int sums, int rows, int pairs) {
    Register& to = registers[sums];
    const Register &left = registers[rows], &right = registers[pairs];
    require(to.rows > 0 && to.rows == left.rows && to.row_bytes == right.row_bytes && left.row_bytes == 4 * right.rows);
    const auto columns = static_cast<__mmask16>((1u << to.row_bytes / 4) - 1);
    for (int row = 0; row < to.rows; ++row) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int step = 0; step < right.rows; ++step) {
            int32_t pair;
            std::memcpy(&pair, left.data[row] + 4 * step, sizeof pair);
            const __m512i inputs = _mm512_set1_epi32(pair), weights = _mm512_load_si512(right.data[step]);
            even = flushed(_mm512_fmadd_ps(even_inputs(inputs), even_inputs(weights), even));
            odd = flushed(_mm512_fmadd_ps(odd_inputs(inputs), odd_inputs(weights), odd));
        }
        const __m512 before = flushed(_mm512_load_ps(to.data[row]));
        _mm512_mask_store_ps(to.data[row], columns, flushed(_mm512_add_ps(before, flushed(_mm512_add_ps(even, odd)))));
    }
}

}  // namespace forerun::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) forerun::emulated::load_config(config)
#define _tile_release() forerun::emulated::release()
#define _tile_zero(number) forerun::emulated::set_zero(number)
#define _tile_loadd(number, rows, distance) forerun::emulated::load(number, rows, distance)
#define _tile_stream_loadd(number, rows, distance) forerun::emulated::load(number, rows, distance)
#define _tile_stored(number, rows, distance) forerun::emulated::store(number, rows, distance)
#define _tile_dpbf16ps(sums, rows, pairs) forerun::emulated::dot_products(sums, rows, pairs)
