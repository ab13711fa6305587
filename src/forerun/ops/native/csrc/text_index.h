// An index of one text, or of many: the compiled twin of drafters/lookup/text_index.py, which says what it means.
#pragma once

#include <algorithm>
#include <cstdint>

namespace forerun::lookup {

constexpr int32_t kBreak = -1;  // ends a text
constexpr int64_t kLongestMatch = 33;

struct TextIndex {
    int32_t* tokens;  // [mask + 1], a ring
    int32_t* places;  // [2 * (mask + 1)]: the latest place behind the gram of a slot; 0: none
    int64_t mask, shift;
    int64_t end;         // tokens so far
    int64_t text_start;  // of the text that is growing
    int64_t first_size, second_size;  // of grams, the longer one first; 0: there is no second

    int32_t at(int64_t place) const { return tokens[place & mask]; }

    // The slot of the gram that ends before `gram_end`.
    int64_t slot(const int32_t* gram_end, int64_t size) const {
        uint64_t mixed = kMixer * static_cast<uint64_t>(size);
        for (int64_t i = -size; i < 0; ++i) mixed = mix(mixed, gram_end[i]);
        return static_cast<int64_t>(mixed >> shift);
    }

    void append(int32_t token_id) {
        if (token_id != kBreak)
            for (int64_t size : {first_size, second_size})
                if (size && end - text_start >= size) {
                    uint64_t mixed = kMixer * static_cast<uint64_t>(size);
                    for (int64_t i = end - size; i < end; ++i) mixed = mix(mixed, at(i));
                    places[mixed >> shift] = static_cast<int32_t>(end & mask);
                }
        tokens[end & mask] = token_id;
        ++end;
        tokens[end & mask] = kBreak;
        if (token_id == kBreak) text_start = end;
    }

    // The latest place behind the longest gram that is the end of `ending` [count]; 0 if there is none.
    int64_t look_up(const int32_t* ending, int64_t count) const {
        for (int64_t size : {first_size, second_size}) {
            if (!size || count < size) continue;
            const int64_t place = places[slot(ending + count, size)];
            if (place && match_length(place, ending, count, size) == size) return place;
        }
        return 0;
    }

    // The number of tokens before `place`, at most `most`, that equal the last ones of `ending` [count].
    int64_t match_length(int64_t place, const int32_t* ending, int64_t count, int64_t most = kLongestMatch) const {
        int64_t length = 0;
        while (length < std::min(most, count) && at(place - 1 - length) == ending[count - 1 - length]) ++length;
        return length;
    }

  private:
    static constexpr uint64_t kMixer = 0x9E3779B97F4A7C15u;

    static uint64_t mix(uint64_t mixed, int32_t token_id) {
        mixed = (mixed ^ static_cast<uint64_t>(token_id)) * kMixer;
        return mixed ^ mixed >> 32;
    }
};

}  // namespace forerun::lookup
