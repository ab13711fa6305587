// The merges that BPE uses of a SentencePiece vocabulary: the compiled twin of `used_merges_one_by_one` in models/gguf/merges.py.
//
// Nothing here is shared between calls: a call reads and writes what it is given.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace forerun::merging {

// Words, one after the other: word i is codes [ends[i - 1], ends[i]), and the best are those with the highest scores.
struct Words {
    const uint32_t* codes;
    const int64_t* ends;
    const double* scores;
    int64_t count;

    int64_t begin(int64_t word) const { return word ? ends[word - 1] : 0; }
    int64_t length(int64_t word) const { return ends[word] - begin(word); }
};

// Finds words by what they spell.
class WordTable {
  public:
    explicit WordTable(const Words& words) : words_(words), characters_(kCharacters, -1) {
        uint64_t size = 2;
        for (shift_ = 63; size < 2 * static_cast<uint64_t>(words.count); size *= 2) --shift_;
        slots_.assign(size, {0, -1});
        for (int32_t word = 0; word < words.count; ++word) {
            const uint32_t* codes = words.codes + words.begin(word);
            const uint64_t hash = hash_of(codes, words.length(word));
            uint64_t slot = hash >> shift_;
            while (slots_[slot].word >= 0) slot = next(slot);
            slots_[slot] = {static_cast<uint32_t>(hash), word};
            if (words.length(word) == 1 && *codes < kCharacters) characters_[*codes] = word;
        }
    }

    // The word that these codes spell, or -1.
    int32_t find(const uint32_t* codes, int64_t length) const {
        if (length == 1 && *codes < kCharacters) return characters_[*codes];
        const uint64_t hash = hash_of(codes, length);
        for (uint64_t slot = hash >> shift_; slots_[slot].word >= 0; slot = next(slot)) {
            const auto [low_bits, word] = slots_[slot];
            if (low_bits == static_cast<uint32_t>(hash) && words_.length(word) == length &&
                std::equal(codes, codes + length, words_.codes + words_.begin(word)))
                return word;
        }
        return -1;
    }

  private:
    static constexpr uint32_t kCharacters = 1 << 16;  // that are found without a search

    struct Slot {
        uint32_t low_bits;  // of the hash
        int32_t word;       // -1: the slot is free
    };

    static uint64_t hash_of(const uint32_t* codes, int64_t length) {
        uint64_t mixed = static_cast<uint64_t>(length);
        for (int64_t i = 0; i < length; ++i) mixed = ((mixed ^ codes[i]) * 0x9e3779b97f4a7c15u) ^ mixed >> 29;
        return (mixed ^ mixed >> 32) * 0x9e3779b97f4a7c15u;
    }
    uint64_t next(uint64_t slot) const { return (slot + 1) & (slots_.size() - 1); }

    Words words_;
    int shift_;
    std::vector<Slot> slots_;
    std::vector<int32_t> characters_;  // the word of each character
};

// A word while it is put together: its parts in order, and what each and the next one make.
class Parts {
  public:
    Parts(const Words& words, const WordTable& table, int64_t longest) : words_(words), table_(table) {
        parts_.reserve(static_cast<size_t>(longest) + 1);  // now, since a worker never asks for memory
    }

    // The parts that are merged last into a word, as {first, second}, or {-1, -1} if BPE does not arrive at it.
    std::pair<int32_t, int32_t> last_of(int64_t word) {
        parts_.clear();
        const uint32_t* codes = words_.codes + words_.begin(word);
        for (int64_t i = 0; i < words_.length(word); ++i) parts_.push_back({i, table_.find(codes + i, 1), -1});
        parts_.push_back({words_.length(word), -1, -1});
        for (size_t i = 0; i + 2 < parts_.size(); ++i) pair_up(codes, i);
        std::pair<int32_t, int32_t> last{-1, -1};
        while (parts_.size() > 2) {
            const size_t best = best_pair();
            if (parts_[best].with_next < 0) return {-1, -1};
            last = {parts_[best].word, parts_[best + 1].word};
            parts_[best].word = parts_[best].with_next;
            parts_.erase(parts_.begin() + static_cast<std::ptrdiff_t>(best) + 1);
            pair_up(codes, best);
            if (best) pair_up(codes, best - 1);
        }
        return last;
    }

  private:
    struct Part {
        int64_t begin;
        int32_t word, with_next;  // -1: none
    };

    void pair_up(const uint32_t* codes, size_t i) {
        parts_[i].with_next = -1;
        if (i + 2 >= parts_.size() || parts_[i].word < 0 || parts_[i + 1].word < 0) return;
        parts_[i].with_next = table_.find(codes + parts_[i].begin, parts_[i + 2].begin - parts_[i].begin);
    }

    // The first of the pairs that are merged next.
    size_t best_pair() const {
        size_t best = 0;
        for (size_t i = 1; i + 2 < parts_.size(); ++i)
            if (parts_[i].with_next >= 0 && (parts_[best].with_next < 0 || comes_before(i, best))) best = i;
        return best;
    }

    bool comes_before(size_t i, size_t other) const {
        const int32_t word = parts_[i].with_next, than = parts_[other].with_next;
        if (words_.scores[word] != words_.scores[than]) return words_.scores[word] > words_.scores[than];
        for (size_t part : {0u, 1u}) {
            const int64_t length = words_.length(parts_[i + part].word), other_length = words_.length(parts_[other + part].word);
            if (length != other_length) return length > other_length;
        }
        return word < than;
    }

    const Words& words_;
    const WordTable& table_;
    std::vector<Part> parts_;
};

// parts [count, 2]: of each word from `first` up to `last` the two that are merged last into it, -1 where there are none.
inline void find_last_merges(const Words& words, Parts& of_word, int64_t first, int64_t last, int32_t* parts) {
    for (int64_t word = first; word < last; ++word) {
        const auto [begin, rest] = words.length(word) > 1 ? of_word.last_of(word) : std::pair{-1, -1};
        parts[2 * word] = begin;
        parts[2 * word + 1] = rest;
    }
}

}  // namespace forerun::merging
