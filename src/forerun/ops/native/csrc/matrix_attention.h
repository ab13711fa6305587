// Attention of rows of bf16 by AMX.
//
// Scores: sixteen keys are a register's rows as they lie in the cache, up to sixteen members' queries, transposed once, the
// steps that they are multiplied with; what comes out is transposed back.
//
// Values: they are steps as they lie in the cache, too: a step of a register is then one place, and holds pairs of dimensions,
// where products want pairs of places. So each weight is multiplied as a pair with zero: (weight, 0) gives the sums of even
// dimensions, (0, weight) those of odd ones. That multiplies twice as much as pairs of places would, but nothing is interleaved,
// and sixteen places enter a sum at once, as many as are usual in a block of the cache.
//
// An instruction adds up the products of sixteen places before it adds them to an output. So it is always the same sixteen, from
// a multiple of sixteen on; a place that a row does not see has the weight zero and any finite value. As the instructions take
// numbers below the smallest normal one for zero, and zeros of either sign come of it, each output gets a zero added at last.
// (A value that is not finite makes its pair of dimensions NaN; rows that do not see it are computed anew: layer.h.)
#pragma once

#if defined(__AMX_BF16__)

#include "attention.h"

namespace forerun {

class MatrixAttention : public AttentionBlock<bf16> {
  public:
    using AttentionBlock::AttentionBlock;

    // Sizes that are whole registers; others are computed in vectors.
    static bool fits(const AttentionShape& shape) {
        return shape.key_dim % kMatrixInputs == 0 && shape.value_dim % kMatrixInputs == 0 && shape.value_dim <= kMaxKeyDim;
    }

    // Like AttentionBlock's.
    void attend(const AttentionItem& item, bf16* out) {
        const TextPart part = begin(item, kMatrixRows);
        lies_in_groups_ = pass_.block_size % kMatrixRows == 0 && !item.reads_seen_only;
        Matrices::shape(kMatrixRows, kMatrixSteps);
        for (int i = 0; i < groups_ahead_; ++i) fetch_group(part.first, i);
        transpose_queries();
        for (int64_t start = part.first; start < part.end; start += kTileKeys) {
            const int count = num_shared_from(start);
            score_tile(start);
            for (int member = 0; member < num_members_; ++member) find_highest(member, seen_by(member, start, count));
            // Sixteen members at once, whose weights stay in the first cache.
            for (int first = 0; first < num_members_; first += kMembersTogether) {
                const int last = std::min(first + kMembersTogether, num_members_);
                for (int member = first; member < last; ++member) {
                    uint32_t* weights = weights_of(member - first);
                    weigh_keys(member, seen_by(member, start, count),
                               [weights](int place, F16 weight) { _mm512_store_si512(weights + place, rounded(weight)); });
                }
                add_tile(start, first, last);
            }
        }
        for (int member = 0; member < num_members_; ++member) finish(member, out);
    }

  private:
    static constexpr int kGroupsAtOnce = 4;
    static constexpr int64_t kWordRow = kLanes * sizeof(uint32_t);  // bytes

    // Up to four groups of sixteen keys or values, one after the other in the tile, and the members that read them.
    struct Groups {
        const bf16* rows[kGroupsAtOnce];
        int count;
        int64_t row_dims;  // from a row to the next
        int first_member, num_members;
        int place;  // within the tile
    };

    // Products of keys whose scores are not written yet.
    struct Products {
        int num_groups;
        int first_member, last_member;  // of one sixteen
        int place;
        const float (*sums)[kMatrixRows * kLanes];
    };

    // Lanes in bf16, each the low half of a word.
    static __m512i rounded(F16 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v)); }

    // Of the i-th member of those that are weighed; all high halves, and what is before the first, are zero.
    uint32_t* weights_of(int i) { return scratch_.matrices.weights + kLanes + i * kTileKeys; }
    // Of sixteen members.
    uint32_t* queries_of(int sixteen) { return scratch_.matrices.queries + sixteen * kLanes * shape_.key_dim / 2; }

    // Keys or values of this head.
    const bf16* keys() const { return key_ + static_cast<int64_t>(item_.kv_head) * shape_.key_dim; }
    const bf16* values() const { return value_ + static_cast<int64_t>(item_.kv_head) * shape_.value_dim; }
    int64_t stride(int dims) const { return static_cast<int64_t>(shape_.num_kv_heads) * dims; }

    // Where the cache has sixteen places of the text.
    const bf16* group_at(const bf16* rows, int dims, int64_t place) const { return rows + slot_of(place) * stride(dims); }

    // Prefetches the i-th group of those that are read from this tile on: its keys, its values, keys of the next one.
    void fetch_group(int64_t start, int i) const {
        const int num_groups = (num_shared_from(start) + kMatrixRows - 1) / kMatrixRows;
        const bool is_value = i >= num_groups && i < 2 * num_groups;
        const int64_t tile = i < 2 * num_groups ? start : start + kTileKeys;
        const int64_t place = tile + (i < num_groups ? i : is_value ? i - num_groups : i - 2 * num_groups) * kMatrixRows;
        if (!lies_in_groups_ || place >= num_shared_) return;
        const int dims = is_value ? shape_.value_dim : shape_.key_dim;
        const bf16* row = group_at(is_value ? values() : keys(), dims, place);
        for (int lane = 0; lane < kMatrixRows; ++lane, row += stride(dims))
            for (int dim = 0; dim < dims; dim += kLineDims) fetch_line(row + dim, kCachesForSomeReadings);
    }

    void transpose_queries() {
        for (int first = 0; first < num_members_; first += kLanes) {
            const int count = std::min(kLanes, num_members_ - first);
            const uint32_t* queries[kLanes] = {};
            for (int i = 0; i < count; ++i) queries[i] = reinterpret_cast<const uint32_t*>(query_of(first + i));
            transpose_keys(queries, count, shape_.key_dim / 2, queries_of(first / kLanes));
        }
    }

    // Calls use(groups) for single groups that some of the members [first_member, end) read, of rows that are copied side by side,
    // since they do not lie so, or not all of them may be read: shared ones from `first` on, then each row's own. (Each is used
    // when the next is copied: registers are filled from memory alone, not from what is on its way to it.)
    template <class Use>
    void each_copied_group(const bf16* source, int dims, int64_t start, int first, int first_member, int end, const Use& use) {
        const int num_shared = num_shared_from(start);
        Groups last{};
        int number = 0;
        const auto copy = [&](const Keys& keys) {
            for (int i = 0; i < keys.count; i += kMatrixRows) {
                bf16* rows = scratch_.matrices.rows[number++ % 2];
                for (int lane = 0; lane < kMatrixRows; ++lane) {
                    bf16* row = rows + lane * dims;
                    if (i + lane < keys.count)
                        std::copy_n(source + keys.slots[i + lane] * stride(dims), dims, row);
                    else
                        std::fill_n(row, dims, bf16{});
                }
                if (last.count) use(last);
                last = {{rows}, 1, dims, keys.first_member, keys.num_members, keys.first + i};
            }
        };
        if (first < num_shared) {
            find_slots(start + first, num_shared - first);
            copy({0, num_members_, scratch_.slots, first, num_shared - first, 0});
        }
        for (int row = first_member / item_.num_heads; row < num_own_ && row * item_.num_heads < end; ++row)
            copy(own_keys(row, start, num_shared));
        if (last.count) use(last);
    }

    void score_tile(int64_t start) {
        const int dims = shape_.key_dim, count = lies_in_groups_ ? num_shared_from(start) : 0;
        for (int place = 0; place < count; place += kGroupsAtOnce * kMatrixRows) {  // what lies behind the last key is ignored
            Groups groups{{}, 0, stride(dims), 0, num_members_, place};
            for (int i = place; i < count && groups.count < kGroupsAtOnce; i += kMatrixRows) {
                fetch_group(start, i / kMatrixRows + groups_ahead_);
                groups.rows[groups.count++] = group_at(keys(), dims, start + i);
            }
            multiply_keys(groups);
        }
        each_copied_group(keys(), dims, start, count, 0, num_members_, [&](const Groups& groups) { multiply_keys(groups); });
        write_scores();
    }

    // Multiplies keys with each sixteen members' queries, and meanwhile writes the scores of what was multiplied before.
    void multiply_keys(const Groups& groups) {
        const int end = groups.first_member + groups.num_members;
        for (int sixteen = groups.first_member / kLanes; sixteen * kLanes < end; ++sixteen) {
            float (*sums)[kMatrixRows * kLanes] = scratch_.matrices.products[num_multiplied_++ % 2];
            const auto* queries = reinterpret_cast<const bf16*>(queries_of(sixteen));
            const auto multiply = [&](int first, int second, auto has_second) {
                Matrices::begin_sums<has_second()>();
                for (int dim = 0; dim < shape_.key_dim; dim += kMatrixInputs)
                    Matrices::add_rows<has_second()>(groups.rows[first] + dim, groups.rows[second] + dim, groups.row_dims * 2,
                                                     queries + dim * kLanes, kWordRow);
                Matrices::store_sums<has_second()>(sums[first], sums[second], kWordRow);
            };
            for (int group = 0; group + 1 < groups.count; group += 2) multiply(group, group + 1, std::true_type{});
            if (groups.count % 2) multiply(groups.count - 1, groups.count - 1, std::false_type{});
            write_scores();
            begun_ = {groups.count, std::max(groups.first_member, sixteen * kLanes), std::min(end, (sixteen + 1) * kLanes),
                      groups.place, sums};
        }
    }

    // Of what was multiplied, transposed.
    void write_scores() {
        for (int group = 0; group < begun_.num_groups; ++group) {
            __m512i rows[kLanes];
            for (int key = 0; key < kLanes; ++key) rows[key] = _mm512_load_si512(begun_.sums[group] + key * kLanes);
            transpose_words(rows);
            const int first = begun_.first_member % kLanes, last = first + begun_.last_member - begun_.first_member;
            float* scores = scratch_.scores + (begun_.first_member - first) * kTileKeys + begun_.place + group * kMatrixRows;
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                if (first <= i && i < last) store(scores + i * kTileKeys, F16{_mm512_castsi512_ps(rows[i])} * splat(shape_.scale));
            for (int i = first; i < last && shape_.soft_cap > 0; ++i)
                store(scores + i * kTileKeys, soft_cap(load(scores + i * kTileKeys), shape_.soft_cap));
        }
        begun_.num_groups = 0;
    }

    // Adds values to the sums of members [first, last), whose weights are there.
    void add_tile(int64_t start, int first, int last) {
        const int dims = shape_.value_dim, num_shared = num_shared_from(start);
        const int whole = lies_in_groups_ ? num_shared / kMatrixRows : 0, all = (num_shared + kMatrixRows - 1) / kMatrixRows;
        const bf16* groups[kTileKeys / kMatrixRows];
        for (int i = 0; i < whole; ++i) groups[i] = group_at(values(), dims, start + i * kMatrixRows);
        for (int dim = 0; dim < dims && whole > 0; dim += kMatrixInputs)
            add_values<false>(first, dim, 0, groups, whole, stride(dims), first, last, [&](int i) {
                if (first == 0 && dim == 0) fetch_group(start, all + i + groups_ahead_);
            });
        each_copied_group(values(), dims, start, whole * kMatrixRows, first, last, [&](const Groups& group) {
            const int from = std::max(first, group.first_member), to = std::min(last, group.first_member + group.num_members);
            for (int dim = 0; dim < dims; dim += kMatrixInputs)
                add_values<true>(first, dim, group.place, group.rows, 1, dims, from, to, [](int) {});
        });
    }

    // Adds the values of groups that lie one after the other in the text, from `place` on, to 32 dimensions of the sums of
    // those members that are weighed, from `first` on, or of some of them.
    template <bool is_for_some, class Fetch>
    void add_values(int first, int dim, int place, const bf16* const* groups, int num_groups, int64_t row_dims, int from, int to,
                    const Fetch& fetch) {
        constexpr int64_t weight_bytes = kTileKeys * sizeof(uint32_t);
        const int half = width_ / 2, row_bytes = width_ * static_cast<int>(sizeof(float));
        const auto* even = reinterpret_cast<const bf16*>(weights_of(0) + place);
        const bf16* odd = even - 1;  // a weight is the second of a pair if pairs begin with the half before it
        float* even_sums = scratch_.outputs.data() + first * width_ + dim / 2;
        float* odd_sums = even_sums + half;
        Matrices::load_sums(even_sums, odd_sums, row_bytes);
        for (int g = 0; g < num_groups; ++g) {
            fetch(g);
            Matrices::add_rows(even + g * kMatrixInputs, odd + g * kMatrixInputs, weight_bytes, groups[g] + dim, row_dims * 2);
        }
        if (!is_for_some) return Matrices::store_sums(even_sums, odd_sums, row_bytes);
        float (*some)[kMatrixRows * kLanes] = scratch_.matrices.products[0];
        Matrices::store_sums(some[0], some[1], kWordRow);
        for (int row = from - first; row < to - first; ++row) {
            store(even_sums + row * width_, load(some[0] + row * kLanes));
            store(odd_sums + row * width_, load(some[1] + row * kLanes));
        }
    }

    void finish(int member, bf16* out) const {
        bf16* place = out + row_of(member) * out_width_ + head_of(member) * shape_.value_dim;
        const float* even = scratch_.outputs.data() + member * width_;
        const float* odd = even + width_ / 2;
        const F16 total = splat(sum_lanes(scratch_.sums[member]));
        const auto finished = [&](const float* sums) { return rounded((load(sums) + zero()) / total); };
        for (int i = 0; i < width_ / 2; i += kLanes)
            _mm512_storeu_si512(place + 2 * i, _mm512_or_si512(finished(even + i), _mm512_slli_epi32(finished(odd + i), 16)));
    }

    bool lies_in_groups_ = false;  // sixteen places that are multiplied together, side by side
    const int groups_ahead_ = (places_ahead_ + kMatrixRows - 1) / kMatrixRows;
    int num_multiplied_ = 0;
    Products begun_{};
};

}  // namespace forerun

#endif
