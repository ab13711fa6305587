// Chains of tokens that a small head drafts after texts: all its passes in one call. Its tokens are the likeliest ones, or those
// that win the race which the target will run there; each may have runners-up beside it, which nothing is drafted after.
//
// The head's entry at place j of a text is made of token j and of a state of token j - 1: of the target's features there while
// token j is the text's, of the head's own output once it is drafted. Place 0 has no entry, and place j the position j - 1.
#pragma once

#include <limits>

#include "inputs.h"
#include "product.h"
#include "sampling.h"

namespace forerun {

// An EAGLE-3 head (arXiv 2503.01840): the first layer reads each token's embedding beside its state.
struct DraftHead {
    TokenTable embedding;
    const Weight* fusion;             // makes a state of a token's features; null: its only feature is its state
    const float* feature_norm;        // before it, [num_features * feature_width], or null
    int64_t feature_norm_width;       // how many values share a norm: a feature's, or all
    int64_t num_features;
    int64_t feature_width;
    const Layer* const* layers;
    const int32_t* rotation_of;  // which rotation each layer takes
    int64_t num_layers;
    const float* output_norm;
    const Weight* vocabulary;
    const int64_t* target_ids;  // the target's token of each output, ascending, or null: the same
    int64_t num_outputs;
    float norm_eps;
    Finishing finished;
    int32_t feeds_normed;  // the next state is the output after the norm
};

// How far a token is ahead of its first runner-up, in logits or in scores of the race, tells how likely it stands: a margin's
// class is how many of these limits it reaches. The twin is drafters/margins.py.
constexpr float kMarginLimits[] = {0.25f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.5f};

inline int margin_class(float margin) {
    int reached = 0;
    for (const float limit : kMarginLimits) reached += margin >= limit;
    return reached;
}

// A text with entries of its places below `num_read`, and its tokens at the `num_unread` places that follow.
struct DraftText {
    const int32_t* blocks;  // of all places that are read or drafted
    int64_t num_blocks;
    int64_t num_read;    // 1 or more
    int64_t num_unread;  // 1 or more
    int64_t num_drafted;
    uint64_t seed;                     // of the race
    const SamplingSettings* settings;  // of the race, or null: the likeliest tokens are drafted
    double least_chance;               // of a chain, for more to be drafted behind it
    const double* chances;             // of a token behind one that stands, by the class of its margin; null: no chain ends early

    int64_t end() const { return num_read + num_unread; }
    int64_t slot(int64_t place, int64_t block_size) const {
        return blocks[place / block_size] * block_size + place % block_size;
    }
};

// What a call of `ChainCall` keeps between its passes.
struct ChainSpace {
    Buffer<float> hidden, between, normed, logits;
    Buffer<float> outputs;  // of each chain's last row
    SamplingScratch sampling;
    RotatedRows rotated;
    JudgedRows judged;
    std::vector<int64_t> last_rows;  // of each chain
    std::vector<int64_t> slots, token_ids, positions;
    std::vector<Sequence> sequences;
    std::vector<int64_t> growing;  // texts whose chains go on
    std::vector<double> chances;   // of each text's chain
};

// Drafts chains; `Stored` is what keys, values, features and a product's rows are stored in.
template <class Stored>
class ChainCall {
  public:
    ChainCall(Team& team, Workspace& space, ChainSpace& own, const DraftHead& head, const RotationTable* tables,
              int64_t num_tables, const DraftText* texts, int64_t block_size, const void* const* features,
              void* const* keys, void* const* values)
        : team_(team), space_(space), own_(own), head_(head), tables_(tables), num_tables_(num_tables), texts_(texts),
          block_size_(block_size), features_(features), keys_(keys), values_(values),
          width_(head.layers[0]->width), beside_(head.layers[0]->beside_width) {}

    // drafted [num_texts, most_drafted, num_places]: at each depth the chain's token and its runners-up, -1 where there are fewer;
    // as many depths as a text asks for, or up to the first whose token is -1. That stands where nothing can be drafted, and
    // behind a chain that is not likely enough to go on. margins [num_texts, most_drafted]: how far the token is ahead of its
    // first runner-up, NaN where none is asked for, infinite where there is none.
    void run(int64_t num_texts, const int64_t* token_ids, int64_t* drafted, float* margins, int64_t most_drafted,
             int num_places) {
        num_places_ = num_places;
        std::fill_n(drafted, num_texts * most_drafted * num_places, -1);
        own_.chances.assign(num_texts, 1.0);
        const int64_t stride = most_drafted * num_places;
        own_.growing.clear();
        for (int64_t i = 0; i < num_texts; ++i)
            if (texts_[i].num_drafted > 0) own_.growing.push_back(i);
        for (int64_t depth = 0; !own_.growing.empty(); ++depth) {
            begin_pass();
            if (depth == 0)
                add_texts(num_texts, token_ids);
            else
                add_drafted(depth, drafted, stride);
            compute();
            choose(depth, drafted, stride, margins + depth, most_drafted);
            keep_growing(depth + 1, drafted, stride);
        }
    }

  private:
    void begin_pass() {
        own_.slots.clear();
        own_.positions.clear();
        own_.token_ids.clear();
        own_.sequences.clear();
    }

    // Adds rows of a text from place `first` on.
    void add_rows(const DraftText& text, int64_t first, int64_t count, const int64_t* token_ids) {
        own_.sequences.push_back({num_rows(), first, count, text.blocks, nullptr, 0, 1});
        for (int64_t i = 0; i < count; ++i) {
            own_.slots.push_back(text.slot(first + i, block_size_));
            own_.positions.push_back(first + i - 1);
            own_.token_ids.push_back(token_ids[i]);
        }
    }

    // The rows of all unread tokens, each with the state that is made of the features of the token before it.
    void add_texts(int64_t num_texts, const int64_t* token_ids) {
        for (int64_t i = 0, first = 0; i < num_texts; first += texts_[i++].num_unread)
            if (texts_[i].num_drafted > 0) add_rows(texts_[i], texts_[i].num_read, texts_[i].num_unread, token_ids + first);
        float* hidden = Workspace::grown(own_.hidden, num_rows() * both());
        embed(hidden);
        const int64_t features = head_.num_features * head_.feature_width;
        float* wide = Workspace::grown(own_.normed, num_rows() * features);
        int64_t row = 0;
        for (const int64_t i : own_.growing)
            for (int64_t place = texts_[i].num_read; place < texts_[i].end(); ++place, ++row)
                read_features(texts_[i].slot(place - 1, block_size_), wide + row * features);
        if (!head_.fusion) {
            for (row = 0; row < num_rows(); ++row)
                std::copy_n(wide + row * features, width_, hidden + row * both() + beside_);
            return;
        }
        const void* inputs = rows_for(space_, *head_.fusion, wide, num_rows(), features);
        multiply_shared(team_, space_, *head_.fusion, inputs, num_rows(),
                        [&](int, int64_t r, int64_t output, F16 first, F16 second) {
                            store_outputs(hidden + r * both() + beside_, output, width_, first, second);
                        });
    }

    void read_features(int64_t slot, float* out) const {
        const int64_t width = head_.feature_width;
        for (int64_t i = 0; i < head_.num_features; ++i) {
            const Stored* feature = static_cast<const Stored*>(features_[i]) + slot * width;
            for (int64_t j = 0; j < width; j += kLanes) {
                const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - j));
                store_first(out + i * width + j, load_first(feature + j, lanes), lanes);
            }
        }
        if (!head_.feature_norm) return;
        for (int64_t j = 0; j < head_.num_features * width; j += head_.feature_norm_width)
            norm_row(out + j, head_.feature_norm + j, head_.norm_eps, head_.feature_norm_width, out + j);
    }

    // A row for the newest token of each growing chain, with the state of the row that it was drafted from.
    void add_drafted(int64_t depth, const int64_t* drafted, int64_t stride) {
        for (const int64_t i : own_.growing) add_rows(texts_[i], texts_[i].end() + depth - 1, 1, drafted + i * stride + (depth - 1) * num_places_);
        float* hidden = Workspace::grown(own_.hidden, num_rows() * both());
        embed(hidden);
        const Buffer<float>& states = head_.feeds_normed ? own_.normed : own_.outputs;
        for (int64_t row = 0; row < num_rows(); ++row)
            std::copy_n(states.data() + state_rows_[row] * width_, width_, hidden + row * both() + beside_);
    }

    void embed(float* hidden) {
        for (int64_t row = 0; row < num_rows(); ++row)
            head_.embedding.read(own_.token_ids[row], beside_, embedded_, hidden + row * both());
    }

    // Of a text's unread tokens only the last one's output is needed, of those before it keys and values.
    void compute() {
        const Pass pass{num_rows(), own_.slots.data(), static_cast<int64_t>(own_.sequences.size()), own_.sequences.data(),
                        block_size_};
        const Rotation* rotations = own_.rotated.look_up(tables_, num_tables_, own_.positions.data(), num_rows());
        own_.last_rows.clear();
        for (const Sequence& sequence : own_.sequences) own_.last_rows.push_back(sequence.first_row + sequence.num_rows - 1);
        const auto num_chains = static_cast<int64_t>(own_.last_rows.size());
        const WantedRows all = WantedRows::all(pass), last = own_.judged.find(pass, own_.last_rows.data(), num_chains);
        float* between = Workspace::grown(own_.between, head_.num_layers > 1 ? num_rows() * width_ : 0);
        float* out = Workspace::grown(own_.outputs, num_chains * width_);
        for (int64_t i = 0; i < head_.num_layers; ++i) {
            const bool is_last = i + 1 == head_.num_layers;
            LayerCall<Stored>(team_, space_, *head_.layers[i], pass, is_last ? last : all, rotations[head_.rotation_of[i]],
                              static_cast<Stored*>(keys_[i]), static_cast<Stored*>(values_[i]),
                              i ? between : own_.hidden.data(), is_last ? out : between)
                .run();
        }
    }

    // The next token of each growing chain, its runners-up and its margin, by the output of its last row.
    void choose(int64_t depth, int64_t* drafted, int64_t stride, float* margins, int64_t most_drafted) {
        const auto num_chains = static_cast<int64_t>(own_.growing.size());
        float* normed = Workspace::grown(own_.normed, num_chains * width_);
        bool is_race = false;
        for (int64_t chain = 0; chain < num_chains; ++chain) {
            norm_row(own_.outputs.data() + chain * width_, head_.output_norm, head_.norm_eps, width_,
                     normed + chain * width_);
            is_race |= texts_[own_.growing[chain]].settings != nullptr;
        }
        const void* inputs = rows_for(space_, *head_.vocabulary, normed, num_chains, width_);
        float* logits = is_race ? Workspace::grown(own_.logits, num_chains * head_.num_outputs) : nullptr;
        const CandidateList* lists = multiply_and_choose(team_, space_, *head_.vocabulary, inputs, num_chains,
                                                         head_.num_outputs, head_.finished, num_places_, logits);
        for (int64_t chain = 0; chain < num_chains; ++chain) {
            const DraftText& text = texts_[own_.growing[chain]];
            const int64_t number = own_.growing[chain];
            int64_t* ids = drafted + number * stride + depth * num_places_;
            float& margin = margins[number * most_drafted];
            if (text.settings) {
                race(text, depth, logits + chain * head_.num_outputs, lists[chain].value(0), ids);
                const auto& runners = own_.sampling.runners;
                margin = margin_of(ids, [&] { return static_cast<float>(runners[0].score - runners[1].score); });
            } else {
                const CandidateList& list = lists[chain];
                for (int place = 0; place < num_places_; ++place)
                    ids[place] = place < list.size() ? target_id(list.id(place)) : -1;
                margin = margin_of(ids, [&] { return list.value(0) - list.value(1); });
            }
            if (text.chances && !std::isnan(margin)) own_.chances[number] *= text.chances[margin_class(margin)];
        }
    }

    // Between the first two tokens of a place, where there are two.
    template <class Between>
    float margin_of(const int64_t* ids, const Between& between) const {
        if (num_places_ == 1 || ids[0] < 0) return std::numeric_limits<float>::quiet_NaN();
        return ids[1] < 0 ? std::numeric_limits<float>::infinity() : between();
    }

    int64_t target_id(int64_t output) const { return head_.target_ids ? head_.target_ids[output] : output; }

    // The first tokens of the race that the target will run at this place, -1 where there are fewer or the logits are no numbers.
    void race(const DraftText& text, int64_t depth, const float* logits, float largest, int64_t* ids) {
        const auto position = static_cast<uint64_t>(text.end() + depth);
        own_.sampling.grow(head_.num_outputs, num_places_, false, text.settings->truncates());
        RowSampler(logits, head_.num_outputs, *text.settings, row_key(text.seed, position), own_.sampling, head_.target_ids)
            .draw(num_places_, ids, &largest);
    }

    // Leaves out the chains that have ended, and notes whose state each other one goes on from.
    void keep_growing(int64_t length, const int64_t* drafted, int64_t stride) {
        state_rows_.clear();
        size_t kept = 0;
        for (size_t chain = 0; chain < own_.growing.size(); ++chain) {
            const int64_t text = own_.growing[chain];
            if (texts_[text].num_drafted <= length || drafted[text * stride + (length - 1) * num_places_] < 0) continue;
            if (own_.chances[text] < texts_[text].least_chance) continue;
            state_rows_.push_back(static_cast<int64_t>(chain));
            own_.growing[kept++] = text;
        }
        own_.growing.resize(kept);
    }

    int64_t num_rows() const { return static_cast<int64_t>(own_.slots.size()); }
    int64_t both() const { return beside_ + width_; }

    Team& team_;
    Workspace& space_;
    ChainSpace& own_;
    const DraftHead& head_;
    const RotationTable* tables_;
    const int64_t num_tables_;
    const DraftText* texts_;
    const int64_t block_size_;
    const void* const* features_;
    void* const* keys_;
    void* const* values_;
    const int64_t width_, beside_;
    int num_places_ = 1;
    std::vector<int64_t> state_rows_;  // of each growing chain: where its state is among those of the pass before
    Buffer<float> embedded_;
};

}  // namespace forerun
