// Attention of a pass's rows over the paged cache.
//
// A row's visible keys are taken in the order of their place in its text, in tiles of 256 places that begin
// at multiples of 256; softmax runs over the tiles one after the other (as in FlashAttention, arXiv
// 2205.14135), and all sums run in that order. Where the cache is bf16 the weights of values are rounded to it, too, and
// the values of places 2i and 2i + 1 enter a sum together (by AMX sixteen of them, see matrix_attention.h). Where the keys
// lie in memory, which rows share a tile, and how the text was cut into passes changes nothing: a node of a tree gets the
// bits that the same text gets as a chain, or token by token.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "amx.h"
#include "avx2.h"
#include "buffer.h"
#include "functions.h"

namespace forerun {

constexpr int kTileKeys = 256;
constexpr int kMaxKeyDim = 1024;
constexpr int kMaxMembers = 32;  // (row, head) pairs that share the keys they read
// Taken from each key's weight beside the heaviest, so that less is nothing: products with it may be below fp32's normal numbers,
// which are slow.
constexpr float kNoWeight = 1e-30f;
constexpr int64_t kRowBytesAhead = 8192;  // of keys or values that are fetched while others are read

// How many groups of sixteen keys, members and vectors of a value are computed together: as many sums as fit in registers,
// enough of them to hide the latency of each. (On AVX2 that many vectors of one member's value, fewer of several members'.)
#if defined(__AVX512F__)
constexpr int kKeyGroups = 4, kScoreMembers = 6, kValueMembers = 6, kValueVectors = 4;
#elif defined(__AVX2__)
constexpr int kKeyGroups = 1, kScoreMembers = kRowsOfHalfTiles, kValueMembers = kRowsOfHalfTiles, kValueVectors = 4;
#elif defined(FORERUN_NEON)
constexpr int kKeyGroups = 1, kScoreMembers = 5, kValueMembers = 2, kValueVectors = 2;
#else
constexpr int kKeyGroups = 1, kScoreMembers = 2, kValueMembers = 1, kValueVectors = 4;
#endif

// The rows of one sequence in a pass.
struct Sequence {
    int64_t first_row;
    int64_t num_context;
    int64_t num_rows;
    const int32_t* blocks;
    const uint8_t* tree_mask;  // [num_rows, mask_width], row sees column; null: causal
    int64_t mask_width;        // columns: the last places of the context, then the rows
    int64_t num_hidden;        // first places, which no row sees

    // Places of the context before those under the mask.
    int64_t num_unmasked() const { return num_context + num_rows - mask_width; }
};

struct Pass {
    int64_t num_rows;
    const int64_t* slots;  // where each row's key and value go
    int64_t num_sequences;
    const Sequence* sequences;
    int64_t block_size;
};

struct AttentionShape {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t key_dim;
    int32_t value_dim;
    float scale;
    float soft_cap;      // 0: none
    int64_t window;      // 0: a row sees all before it
    const float* sinks;  // per head, or null

    int group() const { return num_heads / num_kv_heads; }
};

// Work for one thread: some rows of a sequence and some query heads that share a key head.
struct AttentionItem {
    const Sequence* sequence;
    int64_t first_row, last_row;  // within the sequence
    int32_t kv_head;
    int32_t first_head, num_heads;
    bool reads_seen_only = false;  // a single row's: in place of what its tiles hold before what it sees it reads its own place
};

// Which items a process computes. Processes that have the same key head take turns with its items: of each `num_ranks` of them
// those before `first_part` of the first key head are others', and those from `end_part` on of the last one.
struct ItemShare {
    int64_t num_kv_heads;  // of all processes
    int64_t num_ranks;
    int64_t first_part;
    int64_t end_part;
    int64_t num_members;  // of each process's team, by which all of them list the same items
};

// The share of a process that computes alone.
inline ItemShare all_items(const AttentionShape& shape, size_t num_members) {
    return {shape.num_kv_heads, 1, 0, 1, static_cast<int64_t>(num_members)};
}

// Rows share the keys they read as far as there is work enough for every member of all teams.
inline int64_t rows_together(const Pass& pass, const AttentionShape& shape, const ItemShare& share) {
    const int64_t most = std::max(1, kMaxMembers / shape.group());
    const int64_t wanted_items = 2 * share.num_members * share.num_ranks, heads = pass.num_sequences * share.num_kv_heads;
    const int64_t parts = std::max<int64_t>(1, (wanted_items + heads - 1) / std::max<int64_t>(1, heads));
    const int64_t rows_each = pass.num_sequences ? (pass.num_rows + pass.num_sequences - 1) / pass.num_sequences : 1;
    return std::clamp<int64_t>((rows_each + parts - 1) / parts, 1, most);
}

// Dimensions of a value in whole vectors.
inline int64_t padded_dim(int64_t value_dim) { return (value_dim + kLanes - 1) / kLanes * kLanes; }

#if defined(__AMX_BF16__)

constexpr int kMostPlacesTogether = kMatrixRows;  // that enter a sum of values at once
constexpr int kMembersTogether = kMatrixRows;     // whose weights fill a register

// What attention by AMX (matrix_attention.h) needs beside.
struct MatrixScratch {
    alignas(64) uint32_t queries[kMaxMembers * kMaxKeyDim / 2];  // [sixteens of members, pairs of dimensions, 16 members]
    alignas(64) uint32_t weights[kLanes + kMembersTogether * kTileKeys];  // [members, places]
    alignas(64) float products[2][4][kMatrixRows * kLanes];
    alignas(64) bf16 rows[2][kMatrixRows * kMaxKeyDim];  // copies of keys or values that lie apart
};

#else

constexpr int kMostPlacesTogether = 2, kMembersTogether = 1;

#endif

struct AttentionScratch {
#if defined(__AMX_BF16__)
    MatrixScratch matrices;
#endif
    alignas(64) float keys[kKeyGroups * kLanes * kMaxKeyDim];  // groups of sixteen keys, transposed
    alignas(64) float scores[kMaxMembers * kTileKeys];           // then weights, as the cache's numbers are multiplied by
#if defined(FORERUN_WIDENS_ROWS)
    alignas(64) RowInput queries[kMaxMembers * kMaxKeyDim];  // [members, key_dim] of bf16
#endif
    int64_t slots[kTileKeys];
    float highest[kMaxMembers];
    F16 sums[kMaxMembers];
    F16 factors[kMaxMembers];        // of what was summed up before the tile
    Buffer<float> outputs;           // [members, padded value_dim]; by AMX even dimensions first
    std::vector<int64_t> own_slots;  // of the keys that a tree's rows do not share, one row's after the other's
    int64_t first_own[kMaxMembers + 1];  // where each row's begin

    // Takes all the memory that items of a pass need, so that none is taken, and refused, while they are computed.
    void reserve(int64_t value_dim, int64_t mask_width) {
        outputs.reserve(kMaxMembers * padded_dim(value_dim));
        own_slots.reserve(kMaxMembers * (mask_width + kMostPlacesTogether - 1));
    }
};

// The items of a pass. A member takes so many `together`: all that read the same places of a text, as the keys of one head lie
// between those of the others and come with them from memory; single ones where there is too little work for that.
struct AttentionPlan {
    std::vector<AttentionItem> items;
    size_t together;
};

constexpr size_t kTurnsOfMember = 4;  // that each member gets at least, so that none waits long for the others at the end

// Plans a pass and makes the scratch memory of each member of the team large enough for all its items.
inline void plan_attention(const Pass& pass, const AttentionShape& shape, const ItemShare& share,
                           std::vector<AttentionScratch>& members, AttentionPlan& plan) {
    std::vector<AttentionItem>& items = plan.items;
    items.clear();
    int64_t mask_width = 0, number = 0;
    const int64_t together = rows_together(pass, shape, share);
    const int32_t heads = std::min(shape.group(), kMaxMembers);
    for (int64_t s = 0; s < pass.num_sequences; ++s) {
        const Sequence& sequence = pass.sequences[s];
        mask_width = std::max(mask_width, sequence.mask_width);
        // The last rows see the most keys: begun first, they do not keep the others waiting at the end.
        for (int64_t last = sequence.num_rows; last > 0; last -= together) {
            const int64_t part = number++ % share.num_ranks;
            for (int32_t head = 0, count; head < shape.num_heads; head += count) {
                const int32_t kv_head = head / shape.group();
                count = std::min(heads, shape.group() - head % shape.group());
                if (kv_head == 0 && part < share.first_part) continue;
                if (kv_head == shape.num_kv_heads - 1 && part >= share.end_part) continue;
                items.push_back({&sequence, std::max<int64_t>(0, last - together), last, kv_head, head, count});
            }
        }
    }
    const auto heads_of_part = static_cast<size_t>((shape.num_heads + heads - 1) / heads);
    plan.together = items.size() >= kTurnsOfMember * members.size() * heads_of_part ? heads_of_part : 1;
    for (AttentionScratch& scratch : members) scratch.reserve(shape.value_dim, mask_width);
}

#if defined(__AVX512F__)

// Sixteen rows of sixteen words in place.
[[gnu::always_inline]] inline void transpose_words(__m512i (&a)[kLanes]) {
    __m512i b[kLanes];
    for (int i = 0; i < kLanes; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < kLanes; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
}

#endif

// out[i][lane] = word i of key `lane`; absent keys are zero.
inline void transpose_keys(const uint32_t* const (&keys)[kLanes], int num_keys, int num_words, uint32_t* out) {
    int word = 0;
#if defined(__AVX512F__)
    for (; word + kLanes <= num_words; word += kLanes) {
        __m512i a[kLanes];
        for (int i = 0; i < kLanes; ++i) a[i] = i < num_keys ? _mm512_loadu_si512(keys[i] + word) : _mm512_setzero_si512();
        transpose_words(a);
        for (int i = 0; i < kLanes; ++i) _mm512_store_si512(out + (word + i) * kLanes, a[i]);
    }
#elif defined(FORERUN_NEON)
    for (; word + 4 <= num_words; word += 4) {
        for (int lane = 0; lane < kLanes; lane += 4) {
            uint32x4_t a[4];
            for (int i = 0; i < 4; ++i) a[i] = lane + i < num_keys ? vld1q_u32(keys[lane + i] + word) : vdupq_n_u32(0);
            const uint64x2_t b[4] = {
                vreinterpretq_u64_u32(vtrn1q_u32(a[0], a[1])), vreinterpretq_u64_u32(vtrn2q_u32(a[0], a[1])),
                vreinterpretq_u64_u32(vtrn1q_u32(a[2], a[3])), vreinterpretq_u64_u32(vtrn2q_u32(a[2], a[3]))};
            uint32_t* place = out + word * kLanes + lane;
            vst1q_u32(place, vreinterpretq_u32_u64(vtrn1q_u64(b[0], b[2])));
            vst1q_u32(place + kLanes, vreinterpretq_u32_u64(vtrn1q_u64(b[1], b[3])));
            vst1q_u32(place + 2 * kLanes, vreinterpretq_u32_u64(vtrn2q_u64(b[0], b[2])));
            vst1q_u32(place + 3 * kLanes, vreinterpretq_u32_u64(vtrn2q_u64(b[1], b[3])));
        }
    }
#endif
    for (; word < num_words; ++word)
        for (int lane = 0; lane < kLanes; ++lane) out[word * kLanes + lane] = lane < num_keys ? keys[lane][word] : 0;
}

template <class Stored>
class AttentionBlock {
  public:
    AttentionBlock(const Pass& pass, const AttentionShape& shape, const Stored* query, const Stored* key,
                   const Stored* value, AttentionScratch& scratch, int64_t out_width)
        : pass_(pass), shape_(shape), query_(query), key_(key), value_(value), scratch_(scratch), out_width_(out_width),
          width_(static_cast<int>(padded_dim(shape.value_dim))),
          places_ahead_(static_cast<int>(kRowBytesAhead / (shape.key_dim * static_cast<int64_t>(sizeof(Stored))) + 1)) {}

    // Computes an item's rows into `out` [rows of the pass, out_width], whose first values are these heads'. The rows of a
    // chain share all keys up to the last row's, and each ignores those behind its own place. The nodes of a tree share what
    // lies before the tree; then come each one's ancestors and itself.
    void attend(const AttentionItem& item, Stored* out) {
        const TextPart part = begin(item, 2);
        for (int64_t start = part.first; start < part.end; start += kTileKeys) {
            const int count = num_shared_from(start);
            find_slots(start, count);
            for (int i = 0; i < places_ahead_; ++i) fetch_place(i, count);
            score_keys({0, num_members_, scratch_.slots, 0, count, count});
            for (int row = 0; row < num_own_; ++row) score_keys(own_keys(row, start, count));
            for (int member = 0; member < num_members_; ++member) find_highest(member, seen_by(member, start, count));
            for (int member = 0; member < num_members_; ++member) {
                // A member's weights lie where its scores did, of which none is read after the weight that takes its place
                // is written.
                Factor* weights = weights_of(member);
                weigh_keys(member, seen_by(member, start, count), [&](int place, F16 weight) { store(weights + place, weight); });
            }
            add_values({0, num_members_, scratch_.slots, 0, count, count});
            for (int row = 0; row < num_own_; ++row) add_values(own_keys(row, start, count));
        }
        for (int member = 0; member < num_members_; ++member) finish(member, out);
    }

  protected:
    static constexpr int kWordDims = sizeof(Stored) == 2 ? 2 : 1;  // dimensions in 32 bits, places that are added together

    // What keys and values are multiplied by.
    using Factor = std::conditional_t<std::is_same_v<Stored, bf16>, RowInput, Stored>;
    static constexpr bool kWidensFactors = !std::is_same_v<Factor, Stored>;
    static constexpr int kWeightsApart = kTileKeys * sizeof(float) / sizeof(Factor);  // of two members
    static constexpr int kLineDims = 64 / sizeof(Stored);          // in a line of the cache

    // Places of the text, from the beginning of a tile on.
    struct TextPart {
        int64_t first, end;
    };

    // Begins an item: the places that its rows see. No `places_together` places that enter a sum of values at once are shared by
    // half.
    TextPart begin(const AttentionItem& item, int places_together) {
        item_ = item;
        const Sequence& sequence = *item.sequence;
        const int num_rows = static_cast<int>(item.last_row - item.first_row);
        num_members_ = num_rows * item.num_heads;
        num_own_ = sequence.tree_mask ? num_rows : 0;
        num_shared_ = sequence.tree_mask ? sequence.num_unmasked() / places_together * places_together
                                         : sequence.num_context + item.last_row;
        if (sequence.tree_mask) list_own_slots(num_rows);
        hide_places(num_shared_, scratch_.own_slots.data(), static_cast<int64_t>(scratch_.own_slots.size()));
        int64_t first_key = first_of(0), num_keys = num_shared_;
        for (int row = 0; row < num_rows; ++row) {
            first_key = std::min(first_key, first_of(row * item.num_heads));
            num_keys = std::max(num_keys, end_of(row * item.num_heads));
        }
        begin_sums();
#if defined(FORERUN_WIDENS_ROWS)
        if constexpr (kWidensFactors)
            for (int member = 0; member < num_members_; ++member)
                widen_inputs(query_of(member), shape_.key_dim, scratch_.queries + member * shape_.key_dim);
#endif
        return {first_key / kTileKeys * kTileKeys, num_keys};
    }

    // How many keys of the tile that begins at `start` are shared.
    int num_shared_from(int64_t start) const {
        return static_cast<int>(std::clamp<int64_t>(num_shared_ - start, 0, kTileKeys));
    }

    // Keys of a tile that some members read together.
    struct Keys {
        int first_member, num_members;
        const int64_t* slots;
        int first, count;  // where their scores lie within the tile
        int num_fetched;   // the tile's keys, and after them their values, that are prefetched meanwhile
    };

    // Keys that the member's row sees end here.
    int64_t end_of(int member) const {
        const int64_t row = member / item_.num_heads;
        if (!item_.sequence->tree_mask) return item_.sequence->num_context + item_.first_row + row + 1;
        return num_shared_ + scratch_.first_own[row + 1] - scratch_.first_own[row];
    }
    // Keys that it sees begin here.
    int64_t first_of(int member) const {
        return std::max<int64_t>(item_.sequence->num_hidden, shape_.window ? end_of(member) - shape_.window : 0);
    }
    int head_of(int member) const { return item_.first_head + member % item_.num_heads; }
    int64_t row_of(int member) const { return item_.sequence->first_row + item_.first_row + member / item_.num_heads; }
    const Stored* query_of(int member) const {
        return query_ + (row_of(member) * shape_.num_heads + head_of(member)) * shape_.key_dim;
    }

    // As keys are multiplied by it.
    const Factor* query_factors(int member) const {
#if defined(FORERUN_WIDENS_ROWS)
        if constexpr (kWidensFactors) return scratch_.queries + member * shape_.key_dim;
        else
#endif
        return query_of(member);
    }

    int64_t slot_of(int64_t place) const {
        return item_.sequence->blocks[place / pass_.block_size] * pass_.block_size + place % pass_.block_size;
    }

    void list_own_slots(int num_rows) {
        const Sequence& sequence = *item_.sequence;
        const int64_t num_unmasked = sequence.num_unmasked(), num_before = sequence.mask_width - sequence.num_rows;
        scratch_.own_slots.clear();
        for (int row = 0; row < num_rows; ++row) {
            const uint8_t* sees = sequence.tree_mask + (item_.first_row + row) * sequence.mask_width;
            scratch_.first_own[row] = static_cast<int64_t>(scratch_.own_slots.size());
            for (int64_t place = num_shared_; place < num_unmasked; ++place) scratch_.own_slots.push_back(slot_of(place));
            for (int64_t i = 0; i < num_before; ++i)
                if (sees[i]) scratch_.own_slots.push_back(slot_of(num_unmasked + i));
            for (int64_t other = 0; other < sequence.num_rows; ++other)
                if (sees[num_before + other]) scratch_.own_slots.push_back(pass_.slots[sequence.first_row + other]);
        }
        scratch_.first_own[num_rows] = static_cast<int64_t>(scratch_.own_slots.size());
    }

    // Of a row's own keys those in the tile that begins with `num_shared` shared ones.
    Keys own_keys(int row, int64_t start, int num_shared) const {
        const int64_t end = scratch_.first_own[row + 1], earlier = std::max<int64_t>(0, start - num_shared_);
        const int64_t first = std::min(end, scratch_.first_own[row] + earlier);
        const int count = static_cast<int>(std::min<int64_t>(end - first, kTileKeys - num_shared));
        return {row * item_.num_heads, item_.num_heads, scratch_.own_slots.data() + first, num_shared, count, 0};
    }

    void begin_sums() {
        const int padded = (num_members_ + kMembersTogether - 1) / kMembersTogether * kMembersTogether;
        scratch_.outputs.assign(static_cast<size_t>(padded) * width_, 0.0f);
        for (int member = 0; member < num_members_; ++member) {
            scratch_.highest[member] = -std::numeric_limits<float>::infinity();
            scratch_.sums[member] = zero();
            if (!shape_.sinks) continue;
            scratch_.highest[member] = shape_.sinks[head_of(member)];
            scratch_.sums[member] = keep_first(splat(1.0f), 1, zero());
        }
    }

    void find_slots(int64_t start, int count) {
        const Sequence& sequence = *item_.sequence;
        int64_t block = start / pass_.block_size, offset = start % pass_.block_size;
        for (int i = 0; i < count; ++i) {
            scratch_.slots[i] = sequence.blocks[block] * pass_.block_size + offset;
            if (++offset == pass_.block_size) offset = 0, ++block;
        }
        hide_places(start, scratch_.slots, count);
    }

    // Of the slots of `count` places from `start` on, replaces those of places that a row which reads only what it sees does not.
    void hide_places(int64_t start, int64_t* slots, int64_t count) const {
        if (!item_.reads_seen_only) return;
        std::fill_n(slots, std::clamp<int64_t>(first_of(0) - start, 0, count), pass_.slots[row_of(0)]);
    }

    template <int Dims>
    static void fetch(const Stored* row) {
#pragma GCC unroll 4
        for (int dim = 0; dim < Dims; dim += kLineDims) fetch_line(row + dim, kCachesForSomeReadings);
    }

    // Prefetches the i-th row that is read for a tile: first its keys, then its values.
    void fetch_place(int i, int count) const {
        if (i >= 2 * count) return;
        const bool is_key = i < count;
        const int64_t dims = is_key ? shape_.key_dim : shape_.value_dim, slot = scratch_.slots[is_key ? i : i - count];
        const Stored* row = (is_key ? key_ : value_) + (slot * shape_.num_kv_heads + item_.kv_head) * dims;
        for (int64_t dim = 0; dim < dims; dim += kLineDims) fetch_line(row + dim, kCachesForSomeReadings);
    }

    void score_keys(const Keys& keys) {
        const int num_words = shape_.key_dim / kWordDims, end = keys.first_member + keys.num_members;
        auto* transposed = reinterpret_cast<uint32_t*>(scratch_.keys);
        for (int start = 0; start < keys.count; start += kKeyGroups * kLanes) {
            const int count = std::min(kKeyGroups * kLanes, keys.count - start), groups = (count + kLanes - 1) / kLanes;
            for (int i = start; i < start + count; ++i) fetch_place(i + places_ahead_, keys.num_fetched);
            for (int g = 0; g < groups; ++g)
                transpose_group(keys.slots + start + g * kLanes, std::min(kLanes, count - g * kLanes), num_words,
                                transposed + g * kLanes * num_words);
            for (int member = keys.first_member; member < end; member += kScoreMembers) {
                const int members = std::min(kScoreMembers, end - member);
                if (count == kKeyGroups * kLanes) {
                    score_some<kKeyGroups>(members, member, keys.first + start, kLanes, transposed, num_words);
                } else {
                    for (int g = 0; g < groups; ++g)
                        score_some<1>(members, member, keys.first + start + g * kLanes,
                                      std::min(kLanes, count - g * kLanes), transposed + g * kLanes * num_words, num_words);
                }
            }
        }
    }

    void transpose_group(const int64_t* slots, int num_keys, int num_words, uint32_t* out) {
        const int64_t stride = static_cast<int64_t>(shape_.num_kv_heads) * shape_.key_dim;
        const uint32_t* keys[kLanes] = {};
        for (int lane = 0; lane < num_keys; ++lane)
            keys[lane] = reinterpret_cast<const uint32_t*>(key_ + slots[lane] * stride + item_.kv_head * shape_.key_dim);
        transpose_keys(keys, num_keys, num_words, out);
    }

    // Writes the scores of `lanes` keys of each group.
    template <int Groups, int Members = kScoreMembers>
    void score_some(int members, int first, int start, int lanes, const uint32_t* transposed, int num_words) {
        if constexpr (Members > 1)
            if (members < Members) return score_some<Groups, Members - 1>(members, first, start, lanes, transposed, num_words);
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (kWidensFactors) return score_pairs<Members>(first, start, lanes, reinterpret_cast<const bf16*>(transposed), num_words);
#endif
        F16 sums[Members][Groups];
        const Factor* queries[Members];
#pragma GCC unroll 6
        for (int m = 0; m < Members; ++m) {
            queries[m] = query_factors(first + m);
#pragma GCC unroll 4
            for (int g = 0; g < Groups; ++g) sums[m][g] = zero();
        }
        const auto* keys = reinterpret_cast<const Stored*>(transposed);
        for (int word = 0; word < num_words; ++word) {
            decltype(load_pairs(keys)) key[Groups];
#pragma GCC unroll 4
            for (int g = 0; g < Groups; ++g) key[g] = load_pairs(keys + (g * num_words + word) * kLanes * kWordDims);
#pragma GCC unroll 6
            for (int m = 0; m < Members; ++m) {
                const auto query = splat_pair(queries[m] + word * kWordDims);
#pragma GCC unroll 4
                for (int g = 0; g < Groups; ++g) sums[m][g] = dot(sums[m][g], key[g], query);
            }
        }
#pragma GCC unroll 6
        for (int m = 0; m < Members; ++m)
#pragma GCC unroll 4
            for (int g = 0; g < Groups; ++g)
                store_score(first + m, start + g * kLanes, lanes, sums[m][g]);
    }

    void store_score(int member, int start, int lanes, F16 sum) {
        store_first(scratch_.scores + member * kTileKeys + start, soft_cap(sum * splat(shape_.scale), shape_.soft_cap), lanes);
    }

#if defined(__AVX2__) && !defined(__AVX512F__)

    template <int Members>
    [[gnu::noinline]] void score_pairs(int first, int start, int lanes, const bf16* keys, int num_words) {
        F16 sums[Members];
#pragma GCC unroll 6
        for (F16& sum : sums) sum = zero();
        add_half_steps<2 * kLanes>(keys, scratch_.queries + first * shape_.key_dim, shape_.key_dim, num_words, sums);
#pragma GCC unroll 6
        for (int m = 0; m < Members; ++m) store_score(first + m, start, lanes, sums[m]);
    }

#endif

    // Which of a tile's places a member sees.
    struct Seen {
        int first, end;
        int padded;  // places that have a score, in whole vectors

        F16 keep(F16 x, int i, F16 other) const {
            return first <= i && i + kLanes <= end ? x : keep_first(other, first - i, keep_first(x, end - i, other));
        }
    };

    // `num_shared` keys of the tile are shared.
    Seen seen_by(int member, int64_t start, int num_shared) const {
        const int end = static_cast<int>(std::clamp<int64_t>(end_of(member) - start, 0, kTileKeys));
        const int count = std::max(end, num_shared);
        const int first = static_cast<int>(std::clamp<int64_t>(first_of(member) - start, 0, count));
        return {first, end, (count + kLanes - 1) / kLanes * kLanes};
    }

    // Finds a member's highest score so far, and the factor, 1 if it was the highest before, that makes what was summed up relative
    // to it. (Apart from weights and without a branch on what is higher, so that the processor looks through several members'
    // scores at once.)
    void find_highest(int member, const Seen& seen) {
        const float* scores = scratch_.scores + member * kTileKeys;
        const F16 nothing = splat(-std::numeric_limits<float>::infinity());
        F16 best[4] = {nothing, nothing, nothing, nothing};
        for (int i = 0; i < seen.padded; i += 4 * kLanes)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) best[j] = max(best[j], seen.keep(load(scores + i + j * kLanes), i + j * kLanes, nothing));
        const F16 best_of_all = max(max(best[0], best[1]), max(best[2], best[3]));
        const float before = scratch_.highest[member], highest = std::max(before, max_lanes(best_of_all));
        scratch_.highest[member] = highest;
        const bool none_before = before == -std::numeric_limits<float>::infinity();
        scratch_.factors[member] = none_before ? splat(highest == before ? 1.0f : 0.0f) : exp(splat(before) - splat(highest));
    }

    // Turns a member's scores into weights relative to the highest score so far, sixteen of them at once: write(place, weights).
    template <class Write>
    void weigh_keys(int member, const Seen& seen, const Write& write) {
        if (seen.end <= seen.first) {
            for (int i = 0; i < seen.padded; i += kLanes) write(i, zero());
            return;
        }
        const float* scores = scratch_.scores + member * kTileKeys;
        const float highest = scratch_.highest[member];
        // Where no score is above -inf they are taken as they are: -inf - -inf would be NaN.
        const bool are_all_lowest = highest == -std::numeric_limits<float>::infinity();
        const F16 reference = splat(are_all_lowest ? 0.0f : highest), nothing = splat(are_all_lowest ? 0.0f : kNoWeight);
        const F16 factor = scratch_.factors[member];
        float* outputs = scratch_.outputs.data() + member * width_;
        for (int i = 0; i < width_; i += kLanes) store(outputs + i, load(outputs + i) * factor);
        F16 sum = scratch_.sums[member] * factor;
        for (int i = 0; i < seen.padded; i += kLanes) {
            const F16 weights = seen.keep(max(zero(), exp(load(scores + i) - reference) - nothing), i, zero());
            sum = sum + weights;
            write(i, weights);
        }
        scratch_.sums[member] = sum;
    }

    Factor* weights_of(int member) { return reinterpret_cast<Factor*>(scratch_.scores + member * kTileKeys); }

    void add_values(const Keys& keys) {
        const int end = keys.first_member + keys.num_members;
        for (int member = keys.first_member; member < end; member += kValueMembers) {
            const int members = std::min(kValueMembers, end - member);
            for (int dim = 0; dim < width_; dim += vectors_of(members) * kLanes) add_some(members, member, dim, keys);
        }
    }

    // Vectors of a value that are added up together for so many members.
    static constexpr int vectors_of([[maybe_unused]] int members) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        return members > 2 ? 1 : kValueVectors / members;
#else
        return kValueVectors;
#endif
    }

    template <int Members = kValueMembers>
    void add_some(int members, int first, int dim, const Keys& keys) {
        if constexpr (Members > 1)
            if (members < Members) return add_some<Members - 1>(members, first, dim, keys);
        constexpr int most = vectors_of(Members);
        const int vectors = std::min(most, (width_ - dim) / kLanes);
        if (vectors == most && dim + most * kLanes <= shape_.value_dim) return add_values_of<Members, most>(first, dim, keys);
        for (int v = 0; v < vectors; ++v) add_values_of<Members, 1>(first, dim + v * kLanes, keys);
    }

    template <int Members, int Vectors>
    void add_values_of(int first, int dim, const Keys& keys) {
        float* outputs = scratch_.outputs.data() + first * width_ + dim;
        const Factor* weights = weights_of(first) + keys.first;
        const int64_t* slots = keys.slots;
        const int count = keys.count;
        const int64_t stride = static_cast<int64_t>(shape_.num_kv_heads) * shape_.value_dim;
        const Stored* values = value_ + item_.kv_head * shape_.value_dim + dim;
        const int lanes = shape_.value_dim - dim;  // fewer than a vector's only where there is one vector
        F16 sums[Vectors][Members];
#pragma GCC unroll 6
        for (int m = 0; m < Members; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[v][m] = load(outputs + m * width_ + v * kLanes);
        for (int i = 0; i < count; i += kWordDims) {
            // Behind the last place the weight is 0, so that any value will do.
            const Stored* place = values + slots[i] * stride;
            const Stored* next = values + slots[std::min(i + kWordDims, count) - 1] * stride;
            for (int ahead = i + places_ahead_; ahead < std::min(i + places_ahead_ + kWordDims, count); ++ahead)
                fetch<Vectors * kLanes>(values + slots[ahead] * stride);
            decltype(join(place, next)) value[Vectors];
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v)
                value[v] = Vectors > 1 ? join(place + v * kLanes, next + v * kLanes) : join_first(place, next, lanes);
#if defined(__AVX2__) && !defined(__AVX512F__)
            if constexpr (kWidensFactors) {
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) add_step(value[v], weights + i, kWeightsApart, sums[v]);
                continue;
            }
#endif
#pragma GCC unroll 6
            for (int m = 0; m < Members; ++m) {
                const auto weight = splat_pair(weights + m * kWeightsApart + i);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) sums[v][m] = dot(sums[v][m], value[v], weight);
            }
        }
#pragma GCC unroll 6
        for (int m = 0; m < Members; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) store(outputs + m * width_ + v * kLanes, sums[v][m]);
    }

    void finish(int member, Stored* out) {
        Stored* place = out + row_of(member) * out_width_ + head_of(member) * shape_.value_dim;
        const float* outputs = scratch_.outputs.data() + member * width_;
        const F16 total = splat(sum_lanes(scratch_.sums[member]));
        for (int i = 0; i < shape_.value_dim; i += kLanes)
            store_first(place + i, load(outputs + i) / total, std::min(kLanes, shape_.value_dim - i));
    }

    const Pass& pass_;
    const AttentionShape& shape_;
    const Stored* query_;
    const Stored* key_;
    const Stored* value_;
    AttentionScratch& scratch_;
    const int64_t out_width_;
    const int width_;
    const int places_ahead_;
    AttentionItem item_{};
    int num_members_ = 0;
    int num_own_ = 0;         // rows that have keys of their own: a tree's
    int64_t num_shared_ = 0;  // keys that all rows of the item see, or that end with the last row's
};

}  // namespace forerun
