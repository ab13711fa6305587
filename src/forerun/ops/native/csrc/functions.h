// Elementwise functions and the RMS norm, sixteen lanes at a time; a lane's result never depends on its place.
#pragma once

#include "simd.h"

namespace forerun {

// e^x by x = n ln 2 + r and a polynomial of degree 6 in r (coefficients of Cephes' expf); x is held to [-87.3, 88.3].
// NaN stays NaN: it is the second operand of max and min.
inline F16 exp(F16 x) {
    const F16 clamped = min(splat(88.3f), max(splat(-87.3f), x));
    const F16 n = round_even(clamped * splat(1.44269504088896341f));
    const F16 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
    F16 y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    y = fma(y * r, r, r + splat(1.0f));
    return scale_by_power(y, n);
}

inline F16 sigmoid(F16 x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

// tanh(x) = 1 - 2 / (e^2x + 1); near 0 the series x - x^3/3 + 2x^5/15, where the other form cancels.
inline F16 tanh(F16 x) {
    float in[kLanes], far[kLanes];
    store(in, x);
    store(far, splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)));
    for (int i = 0; i < kLanes; ++i) {
        const float square = in[i] * in[i];
        if (square < 0.0025f) far[i] = in[i] * (1.0f - square * (0.33333333f - square * 0.13333333f));
    }
    return load(far);
}

enum Gating : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kSwigluOai = 3 };

inline F16 activate(F16 x, int32_t activation) {
    if (activation == kSilu) return x * sigmoid(x);
    if (activation == kGeluTanh) {
        const F16 inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
        return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
    }
    float lanes[kLanes];
    store(lanes, x);
    for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678f));
    return load(lanes);
}

// What the last product of a gated MLP reads; NaN stays NaN. gpt-oss's: arXiv 2508.10925.
inline F16 gated(F16 gate, F16 up, int32_t gating) {
    if (gating != kSwigluOai) return activate(gate, gating) * up;
    const F16 limit = splat(7.0f), below = min(limit, gate), between = min(limit, max(splat(-7.0f), up));
    return below * sigmoid(splat(1.702f) * below) * (between + splat(1.0f));
}

inline F16 soft_cap(F16 x, float cap) { return cap > 0.0f ? splat(cap) * tanh(x / splat(cap)) : x; }

// 1 / rms of `count` values.
inline float inverse_rms(const float* x, int64_t count, float eps) {
    F16 squares = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
        const F16 part = load_first(x + i, static_cast<int>(count - i < kLanes ? count - i : kLanes));
        squares = fma(part, part, squares);
    }
    return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(count) + eps);
}

// y = x * factor * weight over a part of what the factor was computed from; weight null: ones. y may be x.
template <class Out>
inline void scale_row(const float* x, float factor, const float* weight, int64_t count, Out* y) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const int lanes = static_cast<int>(count - i < kLanes ? count - i : kLanes);
        F16 part = load_first(x + i, lanes) * splat(factor);
        if (weight) part = part * load_first(weight + i, lanes);
        store_first(y + i, part, lanes);
    }
}

// RMSNorm (arXiv 1910.07467) of one row; weight null: the row as it is.
template <class Out>
inline void norm_row(const float* x, const float* weight, float eps, int64_t count, Out* y) {
    scale_row(x, weight ? inverse_rms(x, count, eps) : 1.0f, weight, count, y);
}

}  // namespace forerun
