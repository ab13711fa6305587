// The slots of the recycle table: the compiled twin of drafters/recycle_table.py, which says what they mean.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace forerun::lookup {

constexpr int64_t kMostKept = 64;  // candidates of a context

// One table of drafters/recycle_table.py: slots of a key (uint64), k token ids (int32) and k gaps (uint8).
struct ContextTable {
    uint8_t* slots;
    int64_t num_slots;  // a power of two
    uint64_t multiplier;
    int64_t num_candidates;

    int64_t slot_bytes() const { return 8 + 5 * num_candidates; }

    uint8_t* slot(uint64_t key) const {
        return slots + slot_bytes() * static_cast<int64_t>((key * multiplier >> 38) & static_cast<uint64_t>(num_slots - 1));
    }

    static uint64_t key_of(const uint8_t* slot) {
        uint64_t key;
        std::memcpy(&key, slot, sizeof key);
        return key;
    }

    // The slot with the candidates of `key`, or null.
    const uint8_t* find(uint64_t key) const {
        const uint8_t* found = slot(key);
        return key_of(found) == key ? found : nullptr;
    }

    // Stores a row's candidates, whose logits fall; returns whether the slot was empty.
    bool store(uint64_t key, const int32_t* token_ids, const float* logits) const {
        uint8_t* place = slot(key);
        const bool was_empty = key_of(place) == 0;
        std::memcpy(place, &key, sizeof key);
        std::memcpy(place + 8, token_ids, 4 * num_candidates);
        uint8_t* gaps = place + 8 + 4 * num_candidates;
        for (int64_t i = 0; i < num_candidates; ++i)
            gaps[i] = static_cast<uint8_t>(std::nearbyint(std::fmin((logits[0] - logits[i]) * 16.0f, 255.0f)));
        return was_empty;
    }
};

// What was learnt from sequences of one salt.
struct SaltContexts {
    const ContextTable *ones, *twos;
};

}  // namespace forerun::lookup
