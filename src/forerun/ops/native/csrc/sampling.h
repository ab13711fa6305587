// Drawing tokens from rows of logits: a request's rules, and the race that its noise decides (the Gumbel-max trick).
//
// The twins in NumPy are ops/edits.py, ops/truncation.py and ops/race.py. Whatever a token hangs on is the same single IEEE
// operations in the same order there and here (see core/exact_math.py) or a sum of whole numbers, which no order changes: so
// the tokens are the same, with every instruction set and any number of threads. All else only rules out what cannot matter.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace forerun {

constexpr float kOut = -std::numeric_limits<float>::infinity();  // the logit of a token that is out

// One request's numbers.
struct SamplingSettings {
    double top_p;       // 1: off
    int64_t top_k;      // 0: off
    float temperature;  // 0: the most likely token is taken
    float floor;        // of logits whose largest is 0, by min-p; -inf: off

    bool truncates() const { return top_p < 1.0 || top_k > 0 || floor > kOut; }
};

// Changes of a row, in this order.
struct RowEdits {
    const int32_t* allowed;  // [num_allowed] all others are out; null: none is
    int64_t num_allowed;
    const uint8_t* mask;  // [vocab_size] 0 where a token is out, or null
    const int32_t* forbidden;
    int64_t num_forbidden;
    const int32_t* biased;  // each once
    const float* bias;
    int64_t num_biased;
    const int32_t* penalised;  // each once
    const float* counts;       // of each in the output
    int64_t num_penalised;
    float repetition, frequency, presence;
    int32_t reserved;
};

struct Draw {
    int64_t row;  // of the logits
    uint64_t seed;
    uint64_t position;
    const SamplingSettings* settings;
    const RowEdits* edits;  // or null
};

struct Kept {
    float logit;
    int32_t id;
    int64_t weight;
};

struct Runner {
    double score;
    int64_t id;
    float logit;
};

constexpr int64_t kChunk = 512;  // tokens whose intermediate values stay in the first cache
constexpr int64_t kBlock = 64;   // tokens whose largest logit is remembered

// What drawing from one row takes.
struct SamplingScratch {
    Buffer<float> edited, maxima;
    std::vector<Kept> kept, ranked;
    std::vector<Runner> runners;

    void grow(int64_t vocab_size, int64_t count, bool edits, bool truncates) {
        if (edits && edited.size() < static_cast<size_t>(vocab_size)) edited.resize(vocab_size);
        if (truncates) kept.reserve(vocab_size);
        maxima.resize(2 * (vocab_size / kBlock + 1));
        runners.reserve(count + 1);
        ranked.reserve(count);
    }
};

// --- Noise, as in core/random_bits.py ---------------------------------------------------------------------------------

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
constexpr uint64_t kTargetStream = 1;

inline uint64_t mix_leading(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    return (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
}

inline uint64_t mix(uint64_t bits) {
    bits = mix_leading(bits);
    return bits ^ (bits >> 31);
}

inline uint64_t row_key(uint64_t seed, uint64_t position) {
    uint64_t key = 0;
    for (uint64_t value : {seed, position, kTargetStream, uint64_t{0}}) key = mix(key + kGamma * (value + 1));
    return key;
}

inline uint64_t noise_bits(uint64_t key, uint64_t id) { return mix(key + kGamma * (id + 1)); }

// The first 31 bits are those of `noise_bits`.
inline uint64_t leading_bits(uint64_t key, uint64_t id) { return mix_leading(key + kGamma * (id + 1)); }

// --- Functions of core/exact_math.py ----------------------------------------------------------------------------------

inline double exact_log(double value) {
    constexpr int terms = 10;
    constexpr double ln2 = 0.693147180559945309417;
    int exponent;
    double mantissa = std::frexp(value, &exponent);
    if (mantissa < 0.707106781186547524401) {
        mantissa = mantissa + mantissa;
        exponent -= 1;
    }
    const double above_one = mantissa - 1.0;
    const double ratio = above_one / (above_one + 2.0);
    const double square = ratio * ratio;
    double series = 1.0 / (2 * terms + 1);
    for (int n = terms - 1; n > 0; --n) series = series * square + 1.0 / (2 * n + 1);
    series = series * square;
    const double twice = ratio + ratio;
    return exponent * ln2 + (twice + twice * series);
}

// Logit + gumbel.
inline double race_score(float logit, uint64_t bits) {
    const double uniform = (static_cast<double>(static_cast<int64_t>(bits >> 12)) + 0.5) * 0x1p-52;
    return static_cast<double>(logit) - exact_log(-exact_log(1.0 - uniform));
}

// exp of sixteen logits of 0 or less.
inline F16 exact_exp(F16 logits) {
    const F16 clamped = max(logits, splat(-60.0f)), magic = splat(12582912.0f);
    const F16 whole = (clamped * splat(1.44269504088896341f) + magic) - magic;
    const F16 rest = clamped - whole * splat(0.69314718055994531f);
    F16 series = splat(static_cast<float>(1.0 / 120.0));
    for (double term : {1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0})
        series = series * rest + splat(static_cast<float>(term));
    return scale_by_power(series, whole);
}

// The whole number of 2^-40 that is nearest to `value`, from 0 to 1: what adding 1.5 * 2^12 leaves in the lowest bits.
inline int64_t weight_of(float value) {
    constexpr double magic = 6144.0;
    return std::bit_cast<int64_t>(static_cast<double>(value) + magic) - std::bit_cast<int64_t>(magic);
}

// The sum of the weights of `kChunk` values. Adding 12 leaves the part of a value above 2^-20 in the lowest bits of a float,
// rounded, and adding 1.5 * 2^-17 the rest.
inline int64_t sum_of_weights(const float* values) {
    constexpr float coarse = 12.0f, fine = 0x1.8p-17f;
    uint32_t high = 0, low = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
        const float rounded = values[i] + coarse;
        high += std::bit_cast<uint32_t>(rounded);
        low += std::bit_cast<uint32_t>((values[i] - (rounded - coarse)) + fine);
    }
    high -= kChunk * std::bit_cast<uint32_t>(coarse);
    low -= kChunk * std::bit_cast<uint32_t>(fine);
    return (static_cast<int64_t>(high) << 20) + static_cast<int32_t>(low);
}

// What the weights of a nucleus must reach together.
inline int64_t nucleus_weight(int64_t total, double top_p) {
    const double wanted = std::ceil(static_cast<double>(total) * top_p);
    return wanted >= static_cast<double>(total) ? total : std::max<int64_t>(static_cast<int64_t>(wanted), 1);
}

// --- One row ----------------------------------------------------------------------------------------------------------

inline void edit_row(const float* row, int64_t vocab_size, const RowEdits& edits, float* out) {
    if (edits.allowed) {
        std::fill(out, out + vocab_size, kOut);
        for (int64_t i = 0; i < edits.num_allowed; ++i) out[edits.allowed[i]] = row[edits.allowed[i]];
    } else {
        std::memcpy(out, row, vocab_size * sizeof(float));
    }
    if (edits.mask)
        for (int64_t i = 0; i < vocab_size; ++i) out[i] = edits.mask[i] ? out[i] : kOut;
    for (int64_t i = 0; i < edits.num_forbidden; ++i) out[edits.forbidden[i]] = kOut;
    for (int64_t i = 0; i < edits.num_biased; ++i) out[edits.biased[i]] += edits.bias[i];
    for (int64_t i = 0; i < edits.num_penalised; ++i) {
        float& logit = out[edits.penalised[i]];
        const float scaled = logit > 0.0f ? logit / edits.repetition : logit * edits.repetition;
        logit = (scaled - edits.frequency * edits.counts[i]) - (edits.counts[i] > 0.0f ? edits.presence : 0.0f);
    }
}

// Draws from one row after its edits.
class RowSampler {
  public:
    // token_ids [vocab_size]: those of the row's logits, ascending, where it holds a part of a vocabulary; or null.
    RowSampler(const float* row, int64_t vocab_size, const SamplingSettings& settings, uint64_t key, SamplingScratch& scratch,
               const int64_t* token_ids = nullptr)
        : row_(row), vocab_size_(vocab_size), settings_(settings), key_(key), scratch_(scratch), token_ids_(token_ids) {}

    // The first `count` tokens of the race to `ids`, -1 where there are fewer. Returns the largest logit; if it is not finite,
    // NaN where there is any, nothing is drawn. `known_largest`: it, if the caller knows, or null.
    float draw(int64_t count, int64_t* ids, const float* known_largest) {
        std::fill(ids, ids + count, -1);
        if (known_largest && !needs_maxima())
            largest_ = *known_largest;
        else
            find_largest();
        if (!std::isfinite(largest_)) return largest_;
        if (settings_.temperature == 0.0f) {
            ids[0] = token_at(first_of_largest());
            return largest_;
        }
        count_ = static_cast<size_t>(count);
        truncate();
        race();
        for (size_t i = 0; i < scratch_.runners.size(); ++i) ids[i] = token_at(scratch_.runners[i].id);
        return largest_;
    }

  private:
    // --- the row ---

    int64_t token_at(int64_t place) const { return token_ids_ ? token_ids_[place] : place; }
    uint64_t leading_bits_at(int64_t place) const { return leading_bits(key_, static_cast<uint64_t>(token_at(place))); }

    int64_t num_blocks() const { return (vocab_size_ + kBlock - 1) / kBlock; }

    F16 load_logits(int64_t first) const {
        const int64_t count = vocab_size_ - first;
        if (count >= kLanes) return load(row_ + first);
        return keep_first(load_first(row_ + first, static_cast<int>(count)), static_cast<int>(count), splat(kOut));
    }

    // Logits after temperature, the largest 0.
    F16 load_scaled(int64_t first) const { return scaled(load_logits(first)); }
    float scaled(float logit) const { return (logit - largest_) / settings_.temperature; }
    F16 scaled(F16 logits) const {
        const F16 below = logits - splat(largest_);
        return settings_.temperature == 1.0f ? below : below / splat(settings_.temperature);
    }

    // work(first token) of each sixteen in a block.
    template <class Work>
    void each_part(int64_t block, const Work& work) const {
        const int64_t end = std::min(vocab_size_, (block + 1) * kBlock);
        for (int64_t first = block * kBlock; first < end; first += kLanes) work(first);
    }

    // Whether the largest logit of each block is asked for, too.
    bool needs_maxima() const { return settings_.temperature == 0.0f || settings_.top_k > 0 || settings_.floor > kOut; }

    void find_largest() {
        largest_ = kOut;
        uint32_t broken = 0;
        for (int64_t block = 0; block < num_blocks(); ++block) {
            F16 largest = splat(kOut);
            each_part(block, [&](int64_t first) {
                const F16 part = load_logits(first);
                largest = max(part, largest);
                broken |= lanes_above(part, splat(std::numeric_limits<float>::max()));
            });
            scratch_.maxima[block] = max_lanes(largest);
            largest_ = std::max(largest_, scratch_.maxima[block]);
        }
        if (!broken) return;
        largest_ = std::numeric_limits<float>::infinity();
        for (int64_t i = 0; i < vocab_size_; ++i)
            if (std::isnan(row_[i])) largest_ = row_[i];
    }

    int64_t first_of_largest() const {
        int64_t block = 0;
        while (scratch_.maxima[block] != largest_) ++block;
        int64_t id = block * kBlock;
        while (row_[id] != largest_) ++id;
        return id;
    }

    // --- truncation: ops/truncation.py ---

    // Gathers the tokens that min-p and top-k leave, and finds what a nucleus of them weighs: its tokens are known when the
    // race asks for them.
    void truncate() {
        if (settings_.top_k > 0 && settings_.top_k < vocab_size_) {
            keep_from(std::max(settings_.floor, least_of_top_blocks()));
            keep_top_k();
        } else if (settings_.floor > kOut) {
            keep_from(settings_.floor);
        }
        if (settings_.top_p < 1.0) nucleus_ = is_gathered_ ? weigh_kept() : weigh_all();
    }

    // Gathers the tokens whose scaled logit is at least `floor`, but none that is out.
    void keep_from(float floor) {
        const F16 least = splat(std::max(floor, std::numeric_limits<float>::lowest()));
        is_gathered_ = true;
        scratch_.kept.clear();
        for (int64_t block = 0; block < num_blocks(); ++block) {
            if (scaled(scratch_.maxima[block]) < floor) continue;
            each_part(block, [&](int64_t first) {
                float lanes[kLanes];
                const F16 part = load_scaled(first);
                store(lanes, part);
                for (uint32_t found = ~lanes_above(least, part) & 0xffff; found; found &= found - 1) {
                    const int lane = std::countr_zero(found);
                    scratch_.kept.push_back({lanes[lane], static_cast<int32_t>(first + lane), 0});
                }
            });
        }
    }

    // A scaled logit that at least top_k tokens reach: as many blocks hold one.
    float least_of_top_blocks() {
        const int64_t k = settings_.top_k;
        if (k > num_blocks()) return kOut;
        float* maxima = scratch_.maxima.data() + num_blocks();
        std::copy_n(scratch_.maxima.data(), num_blocks(), maxima);
        std::nth_element(maxima, maxima + (k - 1), maxima + num_blocks(), std::greater<float>());
        return scaled(maxima[k - 1]);
    }

    void keep_top_k() {
        auto& kept = scratch_.kept;
        if (settings_.top_k >= static_cast<int64_t>(kept.size())) return;
        const auto last = kept.begin() + (settings_.top_k - 1);
        std::nth_element(kept.begin(), last, kept.end(), is_likelier);
        const float floor = last->logit;
        kept.erase(std::remove_if(last + 1, kept.end(), [&](const Kept& one) { return one.logit < floor; }), kept.end());
    }

    static bool is_likelier(const Kept& one, const Kept& other) {
        return (one.logit > other.logit) | ((one.logit == other.logit) & (one.id < other.id));
    }

    // Weighs the tokens that were gathered; returns what a nucleus of them weighs.
    int64_t weigh_kept() {
        auto& kept = scratch_.kept;
        int64_t total = 0;
        for (size_t first = 0; first < kept.size(); first += kLanes) {
            const size_t count = std::min<size_t>(kLanes, kept.size() - first);
            float lanes[kLanes] = {};
            for (size_t i = 0; i < count; ++i) lanes[i] = kept[first + i].logit;
            store(lanes, exact_exp(load(lanes)));
            for (size_t i = 0; i < count; ++i) total += kept[first + i].weight = weight_of(lanes[i]);
        }
        return nucleus_weight(total, settings_.top_p);
    }

    // Weighs the whole vocabulary; returns what a nucleus weighs. Where the likely tokens are few and hold it, they are gathered.
    int64_t weigh_all() {
        constexpr float likely = -9.0f;  // mostly enough
        constexpr size_t few = 4096;
        auto& kept = scratch_.kept;
        kept.clear();
        int64_t total = 0, weight_kept = 0;
        each_chunk([&](int64_t chunk, const float* logits, const float* values) {
            total += sum_of_weights(values);
            for (int64_t i = 0; i < kChunk && kept.size() <= few; i += kLanes) {
                for (uint32_t found = lanes_above(load(logits + i), splat(likely)); found; found &= found - 1) {
                    const int64_t one = i + std::countr_zero(found);
                    kept.push_back({logits[one], static_cast<int32_t>(chunk + one), weight_of(values[one])});
                    weight_kept += kept.back().weight;
                }
            }
        });
        const int64_t nucleus = nucleus_weight(total, settings_.top_p);
        is_gathered_ = kept.size() <= few && weight_kept >= nucleus;
        return nucleus;
    }

    // work(first token, scaled logits, exact_exp of them) of `kChunk` tokens at a time; beyond the vocabulary -inf and 0.
    template <class Work>
    void each_chunk(Work work) const {
        float logits[kChunk], values[kChunk];
        for (int64_t first = 0; first < vocab_size_; first += kChunk) {
            int64_t i = 0;
            for (; i < kChunk && first + i < vocab_size_; i += kLanes) {
                const F16 part = load_scaled(first + i);
                store(logits + i, part);
                store(values + i, exact_exp(part));
            }
            std::fill(logits + i, logits + kChunk, kOut);
            std::fill(values + i, values + kChunk, 0.0f);
            work(first, logits, values);
        }
    }

    // The weight of all tokens that are likelier than this one, which is in the nucleus if they do not fill it.
    int64_t weight_before(const Kept& token) const {
        int64_t weight = 0;
        if (is_gathered_) {
            for (const Kept& one : scratch_.kept) weight += is_likelier(one, token) ? one.weight : 0;
            return weight;
        }
        each_chunk([&](int64_t chunk, const float* logits, float* values) {
            const int32_t id = static_cast<int32_t>(std::clamp<int64_t>(token.id - chunk, 0, kChunk));
            for (int32_t i = 0; i < kChunk; ++i) {
                const bool is_before = (logits[i] > token.logit) | ((logits[i] == token.logit) & (i < id));
                values[i] = is_before ? values[i] : 0.0f;
            }
            weight += sum_of_weights(values);
        });
        return weight;
    }

    // --- the race: ops/race.py ---

    // Runs the race again without the tokens from the likeliest on that won a place and is outside the nucleus, if one did.
    // Most races need no second run, and nobody has to sort for the nucleus.
    void race() {
        auto& runners = scratch_.runners;
        auto& ranked = scratch_.ranked;
        for (;;) {
            runners.clear();
            set_bound();
            is_gathered_ ? race_kept() : race_all();
            if (settings_.top_p >= 1.0) return;
            ranked.clear();
            for (const Runner& one : runners) ranked.push_back({one.logit, static_cast<int32_t>(one.id), 0});
            std::sort(ranked.begin(), ranked.end(), is_likelier);
            const auto outside = std::partition_point(ranked.begin(), ranked.end(),
                                                      [&](const Kept& one) { return weight_before(one) < nucleus_; });
            if (outside == ranked.end()) return;
            end_ = *outside;
        }
    }

    // A token's level is at most this: 2^23 (158 + log2 u), where u is the uniform number of its noise. It is read off the
    // bits of a float, whose exponent and mantissa together are nearly a logarithm, and never above it.
    static float level_of(uint64_t bits) {
        const float leading = static_cast<float>(static_cast<int32_t>(bits >> 33));
        return static_cast<float>(std::bit_cast<int32_t>(leading));
    }

    static constexpr float kLevels = 12102203.0f;  // 2^23 log2 e: levels of a factor e
    static constexpr double kMargin = 4096.0;      // more than rounding makes of the largest level, 2^23 158,
    static constexpr double kShare = 0x1p-21;      // and of a level of that size or larger, as temperatures near 0 give

    bool is_full() const { return scratch_.runners.size() == count_; }

    // From which level on a token whose scaled logit is 0 can no longer come in. The noise is never below u.
    void set_bound() {
        constexpr double least_best = -3.61;  // the most likely token has this score at least: noise is below 37
        if (!is_full() && count_ > 1) return;
        const double score = is_full() ? scratch_.runners.back().score : least_best;
        const double level = 0x1p23 * (158.0 - score * 1.4426950408889634);
        bound_ = static_cast<float>(level + kMargin + std::abs(level) * kShare);
    }

    void race_all() {
        const F16 slope = splat(kLevels / settings_.temperature), largest = splat(largest_);
        float levels[kChunk];
        for (int64_t first = 0; first < vocab_size_; first += kChunk) {
            const int64_t end = std::min(vocab_size_, first + kChunk);
            find_levels(first, end, levels);
            for (int64_t id = first; id < end; id += kLanes) {
                const F16 logits = load_logits(id);
                // A token that is out has the limit -inf or NaN.
                const F16 limits = (logits - largest) * slope + splat(bound_);
                uint32_t found = is_full() || count_ == 1 ? ~lanes_above(load(levels + (id - first)), limits) & 0xffff
                                                          : lanes_above(logits, splat(kOut));
                for (; found; found &= found - 1) {
                    const int64_t one = id + std::countr_zero(found);
                    run({scaled(row_[one]), static_cast<int32_t>(one), 0});
                }
            }
        }
    }

    // Of the tokens from `first` to `end`; what lies behind these is out, whatever its level.
    void find_levels(int64_t first, int64_t end, float (&levels)[kChunk]) const {
        if (!token_ids_) {
            for (int64_t i = 0; i < kChunk; ++i) levels[i] = level_of(leading_bits(key_, static_cast<uint64_t>(first + i)));
            return;
        }
        for (int64_t i = 0; i < end - first; ++i)
            levels[i] = level_of(leading_bits(key_, static_cast<uint64_t>(token_ids_[first + i])));
        std::fill(levels + (end - first), levels + kChunk, 0.0f);
    }

    void race_kept() {
        for (const Kept& one : scratch_.kept) {
            const bool is_late = level_of(leading_bits_at(one.id)) > one.logit * kLevels + bound_;
            if (!is_late || !(is_full() || count_ == 1)) run(one);
        }
    }

    // Puts a token among the first `count` where its score is high enough; of equal ones the lowest id comes first.
    void run(const Kept& token) {
        if (!is_likelier(token, end_)) return;
        const uint64_t noise = noise_bits(key_, static_cast<uint64_t>(token_at(token.id)));
        const Runner runner{race_score(token.logit, noise), token.id, token.logit};
        const auto is_ahead = [](const Runner& one, const Runner& other) {
            return one.score > other.score || (one.score == other.score && one.id < other.id);
        };
        auto& runners = scratch_.runners;
        if (runner.score == -std::numeric_limits<double>::infinity()) return;
        if (is_full() && !is_ahead(runner, runners.back())) return;
        if (is_full()) runners.pop_back();
        runners.insert(std::upper_bound(runners.begin(), runners.end(), runner, is_ahead), runner);
        set_bound();
    }

    const float* row_;
    const int64_t vocab_size_;
    const SamplingSettings& settings_;
    const uint64_t key_;
    SamplingScratch& scratch_;
    const int64_t* const token_ids_;
    size_t count_ = 1;
    bool is_gathered_ = false;  // whether all tokens that may be drawn are in scratch_.kept
    int64_t nucleus_ = 0;       // what a nucleus weighs
    Kept end_{kOut, 0, 0};      // only likelier tokens run
    float largest_ = kOut;
    float bound_ = 0.0f;
};

// `largest`: the row's largest logit before its edits, or null where nobody knows it.
inline float draw_from_row(const float* logits, int64_t vocab_size, const Draw& draw, int64_t count, const float* largest,
                           SamplingScratch& scratch, int64_t* ids) {
    const float* row = logits + draw.row * vocab_size;
    if (draw.edits) {
        edit_row(row, vocab_size, *draw.edits, scratch.edited.data());
        row = scratch.edited.data();
        largest = nullptr;
    }
    return RowSampler(row, vocab_size, *draw.settings, row_key(draw.seed, draw.position), scratch).draw(count, ids, largest);
}

}  // namespace forerun
