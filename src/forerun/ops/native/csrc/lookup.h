// Drafts from look-ups: the compiled twin of drafters/lookup, where every name and rule is explained. Both work on the same
// flat arrays, and each sum and product of doubles has the same order in both, so that they agree to the bit.
//
// Nothing here is shared between calls: a call reads and writes what it is given.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "context_table.h"
#include "text_index.h"

namespace forerun::lookup {

// Where a copy goes on, 0 if there is none, and the length of the match before it.
struct Copy {
    int64_t place = 0, match = 0;
};

constexpr int64_t kMostComputed = 8;  // tokens of a computed chain that guesses are made of
constexpr int64_t kMostRunnersUp = 3;  // beside each of them
constexpr int64_t kMarginClasses = 9;  // of a computed token's margin; the last: it is not known
constexpr int64_t kDepthClasses = 3;   // of computed tokens
constexpr int64_t kLeft = -1;         // in place of the computed token that is next: the path has left them

struct LiveText {
    TextIndex own;
    const TextIndex* past;  // or null
    const SaltContexts* contexts;  // or null
    Copy copies[2];
    int64_t lost_place;  // where the last long copy of the own text went wrong; 0: none is looked for
    int64_t num_since;   // tokens written after the first other one
    double hits, expected;
    int32_t computed[kMostComputed];  // a chain that was computed for the text
    int32_t runners_up[kMostComputed][kMostRunnersUp];  // beside its tokens, kBreak where there are fewer
    int32_t margin_classes[kMostComputed];  // of its tokens
    int64_t num_computed;
    int64_t next_computed;  // which of it is next at the text's end; kLeft: none

    int32_t computed_at(int64_t next) const { return next >= 0 && next < num_computed ? computed[next] : kBreak; }
};

enum Source : int32_t { kOwnText = 0, kPastAnswers = 1, kTable = 2, kComputed = 3 };
enum Agreement : int32_t { kSame = 0, kAmong = 1, kOther = 2, kNone = 3 };
enum Before : int32_t { kNoGuess = 0, kAfterCopy = 1, kAfterComputed = 2 };
enum Copied : int32_t { kCopied = 0, kCopiedOther = 1, kNotCopied = 2 };

constexpr int64_t kMostFromTable = 4;  // candidates of the table that are guessed at one place
constexpr int64_t kMostGuesses = 3 + kMostRunnersUp + kMostFromTable;
constexpr int64_t kLeastLost = 4, kLongestEdit = 8, kLongestInsertion = 12;
constexpr int64_t kBuckets = 12, kShares = 10;
constexpr int64_t kCopyClasses = 2 * kBuckets * 4 * 2;
constexpr int64_t kLookUpClasses = kCopyClasses + 2 * kShares * 3;
constexpr int64_t kRunnerUpClasses = kLookUpClasses + kDepthClasses * kMarginClasses * 3 * 4;  // where they begin
constexpr int64_t kClasses = kRunnerUpClasses + kDepthClasses * kMarginClasses * kMostRunnersUp * 4;

// The rates of all classes of guesses.
struct HitRates {
    double (*counts)[4];        // [kClasses]: hits, trials, the prior, the rate
    const double* gap_weights;  // [256]: what a candidate weighs, by its gap

    double rate(int32_t guess_class) const { return counts[guess_class][3]; }

    void count(int32_t guess_class, bool is_hit) const {
        double* row = counts[guess_class];
        row[0] = row[0] * 0.999 + (is_hit ? 1.0 : 0.0);
        row[1] = row[1] * 0.999 + 1.0;
        row[3] = (row[0] + 4.0 * row[2]) / (row[1] + 4.0);
    }
};

struct Guess {
    int32_t token_id, guess_class, source;
};

struct Guesses {
    std::array<Guess, kMostGuesses> list;
    int64_t count = 0;

    void add(int32_t token_id, int64_t guess_class, int32_t source) {
        list[count++] = {token_id, static_cast<int32_t>(guess_class), source};
    }
    bool has(int32_t token_id) const {
        for (int64_t i = 0; i < count; ++i)
            if (list[i].token_id == token_id) return true;
        return false;
    }
};

inline int64_t bucket_of_length(int64_t length) {
    constexpr int64_t least[kBuckets] = {1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 25, 33};
    int64_t bucket = kBuckets - 1;
    while (bucket && least[bucket] > length) --bucket;
    return bucket;
}

// What the recycle table knows of a place.
struct Found {
    int64_t context_length = 0;  // 0: nothing
    int64_t num_candidates = 0;
    int32_t token_ids[kMostKept];
    const uint8_t* gaps = nullptr;

    Found(const SaltContexts* contexts, const int32_t* ending, int64_t count) {
        if (!contexts || !count) return;
        const uint64_t key = static_cast<uint64_t>(ending[count - 1]) + 1;
        const uint8_t* slot = nullptr;
        if (count > 1 && (slot = contexts->twos->find((static_cast<uint64_t>(ending[count - 2]) << 32) + key)))
            context_length = 2;
        else if ((slot = contexts->ones->find(key)))
            context_length = 1;
        else
            return;
        num_candidates = contexts->ones->num_candidates;
        std::memcpy(token_ids, slot + 8, 4 * num_candidates);
        gaps = slot + 8 + 4 * num_candidates;
    }

    Agreement agreement(int32_t token_id) const {
        if (!context_length) return kNone;
        for (int64_t i = 0; i < num_candidates; ++i)
            if (token_ids[i] == token_id) return i ? kAmong : kSame;
        return kOther;
    }

    // Adds the candidates that were not guessed before, each with its share of the probability that is left.
    void add_candidates(const double* gap_weights, Before before, Guesses& guesses) const {
        if (!context_length) return;
        double total = 0.0;
        for (int64_t i = 0; i < num_candidates; ++i) total += gap_weights[gaps[i]];
        const int64_t count = std::min(kMostFromTable, num_candidates);
        double probs[kMostFromTable], left = 1.0;
        bool is_guessed[kMostFromTable];
        for (int64_t i = 0; i < count; ++i) {
            probs[i] = gap_weights[gaps[i]] / total;
            is_guessed[i] = guesses.has(token_ids[i]);
            if (is_guessed[i]) left -= probs[i];
        }
        for (int64_t i = 0; i < count; ++i) {
            if (is_guessed[i]) continue;
            const double share = std::min(1.0, probs[i] / std::max(left, 1e-6));
            const int64_t decile = std::min(kShares - 1, static_cast<int64_t>(share * kShares));
            guesses.add(token_ids[i], kCopyClasses + ((context_length - 1) * kShares + decile) * 3 + before, kTable);
            left -= probs[i];
        }
    }
};

// A place in a text or after a drafted path: the tokens before it, and what is copied and computed there.
struct Place {
    const LiveText& text;
    const int32_t* ending;  // [count]: the last tokens of the text and then of the path
    int64_t count;
    int64_t next_computed;
    Copy copies[2];
    int32_t predicted[2];

    // `ending` [num_ending + depth] ends with the path's `depth` tokens; copies that are none are looked up.
    Place(const LiveText& text, const int32_t* ending, int64_t num_ending, int64_t depth, const Copy (&known)[2],
          int64_t next_computed)
        : text(text), ending(ending), count(num_ending + depth), next_computed(next_computed) {
        const TextIndex* indexes[2] = {&text.own, text.past};
        for (int32_t source : {kOwnText, kPastAnswers}) {
            predicted[source] = kBreak;
            const TextIndex* index = indexes[source];
            if (!index) continue;
            copies[source] = known[source].place ? known[source] : find_copy(*index, ending, count);
            const int64_t place = copies[source].place;
            if (!place) continue;
            const bool is_drafted = source == kOwnText && place >= text.own.end;
            predicted[source] = is_drafted ? ending[num_ending + place - text.own.end] : index->at(place);
        }
    }

    // The latest place behind the longest gram that ends the text.
    static Copy find_copy(const TextIndex& index, const int32_t* ending, int64_t count) {
        const int64_t place = index.look_up(ending, count);
        if (!place) return {};
        return {place, index.match_length(place, ending, count)};
    }

    // Sets `after` to the copies that predicted `token_id`, behind it.
    void behind(int32_t token_id, Copy (&after)[2]) const {
        for (int32_t source : {kOwnText, kPastAnswers})
            after[source] = predicted[source] == token_id
                                ? Copy{copies[source].place + 1, std::min(copies[source].match + 1, kLongestMatch)}
                                : Copy{};
    }

    int64_t computed_behind(int32_t token_id) const {
        return token_id == text.computed_at(next_computed) ? next_computed + 1 : kLeft;
    }

    // Of what is computed for this place.
    int64_t depth_and_margin() const {
        return std::min(next_computed, kDepthClasses - 1) * kMarginClasses + text.margin_classes[next_computed];
    }

    Copied copied(int32_t token_id) const {
        if (predicted[0] == token_id || predicted[1] == token_id) return kCopied;
        return predicted[0] == kBreak && predicted[1] == kBreak ? kNotCopied : kCopiedOther;
    }

    Guesses guesses(const HitRates& rates) const {
        const Found found(text.contexts, ending, count);
        Guesses guesses;
        const int32_t computed = text.computed_at(next_computed);
        const bool is_computed = computed != kBreak;
        if (is_computed) {
            const int64_t of_copies = depth_and_margin() * 3 + copied(computed);
            const int64_t guess_class = kLookUpClasses + of_copies * 4 + found.agreement(computed);
            guesses.add(computed, guess_class, kComputed);
        }
        const int32_t first = copies[kPastAnswers].match > copies[kOwnText].match ? kPastAnswers : kOwnText;
        for (int32_t source : {first, 1 - first}) {
            const int32_t token_id = predicted[source];
            if (token_id == kBreak || guesses.has(token_id)) continue;
            const int64_t bucket = bucket_of_length(copies[source].match);
            const int64_t guess_class = ((source * kBuckets + bucket) * 4 + found.agreement(token_id)) * 2 + is_computed;
            guesses.add(token_id, guess_class, source);
        }
        for (int64_t rank = 0; is_computed && rank < kMostRunnersUp; ++rank) {
            const int32_t token_id = text.runners_up[next_computed][rank];
            if (token_id == kBreak || guesses.has(token_id)) continue;
            const int64_t of_rank = depth_and_margin() * kMostRunnersUp + rank;
            const int64_t guess_class = kRunnerUpClasses + of_rank * 4 + found.agreement(token_id);
            guesses.add(token_id, guess_class, kComputed);
        }
        const Before before = is_computed ? kAfterComputed : guesses.count ? kAfterCopy : kNoGuess;
        found.add_candidates(rates.gap_weights, before, guesses);
        return guesses;
    }
};

// How many of a text's last tokens are compared.
inline int64_t ending_length(const TextIndex& own) { return std::min(own.end, kLongestMatch); }

// Remembers where a long copy of the own text went wrong, until another one goes right, or for a few tokens.
inline void note_edit(LiveText& text, const Place& place, int32_t token_id) {
    const Copy& copy = place.copies[kOwnText];
    const bool is_long = copy.match >= kLeastLost && copy.place < text.own.end;
    if (is_long && place.predicted[kOwnText] != token_id) {
        text.lost_place = copy.place;
        text.num_since = 0;
    } else if (is_long || text.num_since == kLongestInsertion) {
        text.lost_place = 0;
    } else {
        ++text.num_since;
    }
}

// Where the copy that went wrong goes on: behind the first of its next tokens that is the last one of the text.
inline Copy find_behind_edit(const LiveText& text, const int32_t* ending, int64_t count) {
    if (text.lost_place)
        for (int64_t place = text.lost_place; place < std::min(text.lost_place + kLongestEdit, text.own.end - 1); ++place)
            if (text.own.at(place) == ending[count - 1]) return {place + 1, text.own.match_length(place + 1, ending, count)};
    return {};
}

// Sets where the copies go on at the end of the text: where they did, unless a longer match is found. A copy of the own text
// that an edit broke off is preferred to a match elsewhere of the same length.
inline void settle(LiveText& text, const Copy (&kept)[2]) {
    const TextIndex* indexes[2] = {&text.own, text.past};
    const int64_t count = ending_length(text.own);
    const int32_t* ending = text.own.tokens + text.own.end - count;
    for (int32_t source : {kOwnText, kPastAnswers}) {
        text.copies[source] = kept[source];
        if (!indexes[source]) continue;
        const Copy found = Place::find_copy(*indexes[source], ending, count);
        if (found.match > kept[source].match) text.copies[source] = found;
    }
    const Copy behind_edit = find_behind_edit(text, ending, count);
    if (behind_edit.place && behind_edit.match >= text.copies[kOwnText].match) text.copies[kOwnText] = behind_edit;
}

// Counts the guesses up to the one that was right.
inline void learn(LiveText& text, const Guesses& guesses, int32_t token_id, const HitRates& rates) {
    double hits = 0.0, expected = 0.0;
    for (int64_t i = 0; i < guesses.count && hits == 0.0; ++i) {
        const Guess& guess = guesses.list[i];
        const bool is_hit = guess.token_id == token_id;
        expected += rates.rate(guess.guess_class);
        rates.count(guess.guess_class, is_hit);
        if (is_hit) hits = 1.0;
    }
    text.hits = text.hits * 0.95 + hits;
    text.expected = text.expected * 0.95 + expected;
}

// Learns from a newly committed token, and appends it.
inline void take(LiveText& text, int32_t token_id, const HitRates& rates) {
    const int64_t count = ending_length(text.own);
    const Place place(text, text.own.tokens + text.own.end - count, count, 0, text.copies, text.next_computed);
    learn(text, place.guesses(rates), token_id, rates);
    Copy kept[2];
    place.behind(token_id, kept);
    text.next_computed = place.computed_behind(token_id);
    note_edit(text, place, token_id);
    text.own.append(token_id);
    settle(text, kept);
}

struct DraftLimits {
    int64_t max_nodes, max_depth;
    double min_survival;
};

// Where a draft goes: the first `max_nodes` of each array are its own.
struct DraftNodes {
    int32_t* token_ids;
    int32_t* parents;
    int32_t* sources;
    double* survival;
};

// Grows drafts; keeps its memory from one to the next.
class Grower {
  public:
    // Returns the number of nodes.
    int64_t grow(const LiveText& text, const DraftLimits& limits, const HitRates& rates, const DraftNodes& draft) {
        found_.clear();
        frontier_.clear();
        taken_.clear();
        const int64_t count_before = ending_length(text.own);
        ending_.resize(count_before + std::min(limits.max_depth, limits.max_nodes));
        std::copy_n(text.own.tokens + text.own.end - count_before, count_before, ending_.begin());
        const double ratio = (text.hits + 4.0) / (text.expected + 4.0);
        if (limits.max_depth > 0)
            expand(Place(text, ending_.data(), count_before, 0, text.copies, text.next_computed), 1.0, -1, 0, limits, ratio,
                   rates);
        int64_t count = 0;
        while (!frontier_.empty() && count < limits.max_nodes) {
            std::pop_heap(frontier_.begin(), frontier_.end(), is_later);
            const int64_t serial = frontier_.back().serial;
            frontier_.pop_back();
            const Node node = found_[serial];
            taken_.push_back(serial);
            draft.token_ids[count] = node.token_id;
            draft.parents[count] = node.parent;
            draft.sources[count] = node.source;
            draft.survival[count] = node.chance;
            if (node.depth < limits.max_depth && count + 1 < limits.max_nodes) {
                write_path(node, ending_.data() + count_before);
                expand(Place(text, ending_.data(), count_before, node.depth, node.copies, node.next_computed), node.chance,
                       static_cast<int32_t>(count), node.depth, limits, ratio, rates);
            }
            ++count;
        }
        return count;
    }

  private:
    struct Node {
        double chance;
        Copy copies[2];
        int64_t depth, next_computed;
        int32_t token_id, parent, source;
    };
    struct Offer {
        double chance;
        int64_t serial;
    };

    std::vector<Node> found_;      // in the order in which they were found
    std::vector<Offer> frontier_;  // a heap
    std::vector<int64_t> taken_;   // the draft's nodes, as places of `found_`
    std::vector<int32_t> ending_;  // the last tokens of the text, and behind them those of a path

    static bool is_later(const Offer& one, const Offer& other) {
        return one.chance != other.chance ? one.chance < other.chance : one.serial > other.serial;
    }

    static double adjusted(double rate, double ratio) {
        const double scaled = rate * ratio;
        return std::min(0.995, ratio < 1.0 ? scaled : scaled / (1.0 - rate + scaled));
    }

    void expand(const Place& place, double survival, int32_t parent, int64_t depth, const DraftLimits& limits, double ratio,
                const HitRates& rates) {
        const Guesses guesses = place.guesses(rates);
        double left = survival;
        for (int64_t i = 0; i < guesses.count; ++i) {
            const Guess& guess = guesses.list[i];
            const double rate = adjusted(rates.rate(guess.guess_class), ratio), chance = left * rate;
            if (chance >= limits.min_survival) {
                Node node{chance, {}, depth + 1, place.computed_behind(guess.token_id), guess.token_id, parent, guess.source};
                place.behind(guess.token_id, node.copies);
                frontier_.push_back({chance, static_cast<int64_t>(found_.size())});
                std::push_heap(frontier_.begin(), frontier_.end(), is_later);
                found_.push_back(node);
            }
            left *= 1.0 - rate;
            if (left < limits.min_survival) break;
        }
    }

    // Writes the tokens from the root to `node`.
    void write_path(const Node& node, int32_t* path) const {
        path[node.depth - 1] = node.token_id;
        for (int32_t at = node.parent; at >= 0;) {
            const Node& above = found_[taken_[at]];
            path[above.depth - 1] = above.token_id;
            at = above.parent;
        }
    }
};

}  // namespace forerun::lookup
