// One decoder layer over a pass's rows, computed by the whole team in one call.
#pragma once

#include "attention.h"
#include "candidates.h"
#include "experts.h"
#include "matmul.h"
#include "matrix_attention.h"
#include "team.h"

namespace forerun {

// Attention, and a gated MLP or experts, each between two norms, on an fp32 residual stream; null norms are absent.
struct Layer {
    Weight qkv;      // query heads, key heads, value heads
    Weight output;
    Weight gate_up;  // tiles of 16 gates and their 16 ups; with experts neither is set
    Weight down;
    const Experts* experts;  // null: there is one MLP
    const float* attention_in;
    const float* attention_out;
    const float* mlp_in;
    const float* mlp_out;
    const float* query_norm;  // [num_heads * head_dim], or null
    const float* key_norm;
    const float* beside_in;  // norm of what a row holds before the stream's part, if it does
    AttentionShape attention;
    int64_t width;             // of the residual stream
    int64_t beside_width;      // of what a row holds before the stream's part; qkv reads both. 0: nothing
    int64_t query_norm_width;  // how many values share a norm: a head's, or all heads'
    int64_t key_norm_width;
    float norm_eps;
    float residual_scale;
    int32_t gating;
    int32_t starts_normed;  // a layer with a part beside: its residual stream starts from the normed rows
};

// Cosines and sines of each row's angles, [rows, half] each; half 0: the layer knows no positions.
struct Rotation {
    const float* cos;
    const float* sin;
    int64_t half;
};

// Buffers that a call fills and the next may overwrite; they grow to the largest pass seen, and only before the team is
// called: a worker never asks for memory, which it might not get.
struct Workspace {
    Buffer<uint8_t> inputs, queries, attended, activated, gathered;
    Buffer<float> qkv, update, router;
    Assignments assignments;
    std::vector<AttentionScratch> attention;  // of each member of the team
    std::vector<Buffer<uint8_t>> scratch;  // of each member, for products
    AttentionPlan attention_plan;
    std::vector<CandidateList> candidates;  // of each member and row

    void begin_for(int num_members) {
        attention.resize(num_members);
        scratch.resize(num_members);
    }

    // Empty lists of `count` candidates, [num_members, num_rows].
    CandidateList* begin_candidates(int64_t num_rows, int count) {
        const size_t needed = scratch.size() * static_cast<size_t>(num_rows);
        if (candidates.size() < needed) candidates.resize(needed);
        for (size_t i = 0; i < needed; ++i) candidates[i].begin(count);
        return candidates.data();
    }

    void grow_scratch(const Weight& weight, int64_t num_rows) {
        const auto needed = static_cast<size_t>(scratch_bytes(weight, num_rows));
        for (auto& buffer : scratch)
            if (buffer.size() < needed) buffer.resize(needed);
    }
    uint8_t* scratch_of(int member) { return scratch[member].data(); }

    template <class T>
    static T* grown(Buffer<uint8_t>& buffer, int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        if (buffer.size() < bytes) buffer.resize(bytes);
        return reinterpret_cast<T*>(buffer.data());
    }
    static float* grown(Buffer<float>& buffer, int64_t count) {
        if (buffer.size() < static_cast<size_t>(count)) buffer.resize(count);
        return buffer.data();
    }
};

// Dimension i pairs with i + half (RoPE, arXiv 2104.09864).
inline void rotate_head(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, half - i));
        const F16 c = load_first(cos + i, lanes), s = load_first(sin + i, lanes);
        const F16 first = load_first(head + i, lanes), second = load_first(head + half + i, lanes);
        store_first(head + i, first * c - second * s, lanes);
        store_first(head + half + i, second * c + first * s, lanes);
    }
}

template <class Stored>
void store_row(const float* row, int64_t count, Stored* out) {
    scale_row(row, 1.0f, nullptr, count, out);
}

// Norms (weight null: none) and rotates heads [num_heads, head_dim] in place and stores them.
template <class Stored>
void finish_heads(float* heads, int num_heads, int head_dim, const float* weight, int64_t norm_width, float eps,
                  const Rotation& rotation, int64_t row, Stored* out) {
    const int64_t count = static_cast<int64_t>(num_heads) * head_dim;
    if (weight)
        for (int64_t i = 0; i < count; i += norm_width) norm_row(heads + i, weight + i, eps, norm_width, heads + i);
    if (rotation.half)
        for (int head = 0; head < num_heads; ++head)
            rotate_head(heads + head * head_dim, rotation.cos + row * rotation.half, rotation.sin + row * rotation.half,
                        rotation.half);
    store_row(heads, count, out);
}

// Computes the rows of an item. The weight of a place that a row does not see is zero, but zero times a value that is no finite
// number is none: rows with an output that is none are computed once more, each alone from nothing but what it sees.
template <class Block, class Stored>
void attend_item(Block& block, const AttentionItem& item, const AttentionShape& shape, Stored* out, int64_t out_width) {
    block.attend(item, out);
    const int64_t dim = shape.value_dim;
    AttentionItem alone = item;
    alone.reads_seen_only = true;
    for (int64_t row = item.first_row; row < item.last_row; ++row) {
        const Stored* found = out + (item.sequence->first_row + row) * out_width + item.first_head * dim;
        if (are_finite(found, item.num_heads * dim)) continue;
        alone.first_row = row;
        alone.last_row = row + 1;
        block.attend(alone, out);
    }
}

// Shares out attention's items and computes them into rows of `out_width`; to be called by every member.
template <class Stored>
void attend_items(const Pass& pass, const AttentionShape& shape, const Stored* query, const Stored* key,
                  const Stored* value, const AttentionPlan& plan, std::atomic<size_t>& next,
                  AttentionScratch& scratch, Stored* out, int64_t out_width) {
    const auto attend_by = [&](auto block) {
        for (size_t first; (first = next.fetch_add(plan.together, std::memory_order_relaxed)) < plan.items.size();)
            for (size_t i = first; i < std::min(first + plan.together, plan.items.size()); ++i)
                attend_item(block, plan.items[i], shape, out, out_width);
    };
#if defined(__AMX_BF16__)
    const Matrices until_all_are_done;
    if constexpr (std::is_same_v<Stored, bf16>)
        if (MatrixAttention::fits(shape)) return attend_by(MatrixAttention(pass, shape, query, key, value, scratch, out_width));
#endif
    attend_by(AttentionBlock<Stored>(pass, shape, query, key, value, scratch, out_width));
}

// The rows of a pass whose residual stream is wanted behind a layer, as a pass of their own: of all others the layer computes
// nothing behind its keys and values.
struct WantedRows {
    Pass pass;
    const int64_t* places;  // of each row of the whole pass among these, or -1; null: all are wanted

    int64_t place_of(int64_t row) const { return places ? places[row] : row; }

    static WantedRows all(const Pass& pass) { return {pass, nullptr}; }
};

// Finds the rows that are wanted behind a pass's last layer: of each sequence those from the first judged one on, be it a prompt's
// last or the root of a tree.
class JudgedRows {
  public:
    // What it returns refers to this object and to the pass.
    WantedRows find(const Pass& pass, const int64_t* judged, int64_t num_judged) {
        places_.assign(pass.num_rows, kNone);
        for (int64_t i = 0; i < num_judged; ++i) places_[judged[i]] = kJudged;
        sequences_.clear();
        slots_.clear();
        for (int64_t s = 0; s < pass.num_sequences; ++s) {
            Sequence rest = pass.sequences[s];
            const int64_t end = rest.first_row + rest.num_rows;
            int64_t first = rest.first_row;
            while (first < end && places_[first] == kNone) ++first;
            if (first == end) continue;
            const int64_t num_before = first - rest.first_row;
            rest.first_row = num_rows();
            rest.num_context += num_before;
            rest.num_rows -= num_before;
            if (rest.tree_mask) rest.tree_mask += num_before * rest.mask_width;
            sequences_.push_back(rest);
            for (int64_t row = first; row < end; ++row) {
                places_[row] = num_rows();
                slots_.push_back(pass.slots[row]);
            }
        }
        if (num_rows() == pass.num_rows) return WantedRows::all(pass);
        const auto num_sequences = static_cast<int64_t>(sequences_.size());
        return {{num_rows(), slots_.data(), num_sequences, sequences_.data(), pass.block_size}, places_.data()};
    }

  private:
    static constexpr int64_t kNone = -1, kJudged = -2;  // until each judged row has its place

    int64_t num_rows() const { return static_cast<int64_t>(slots_.size()); }

    std::vector<int64_t> places_, slots_;
    std::vector<Sequence> sequences_;
};

template <class Stored>
class LayerCall {
  public:
    // hidden [rows, beside_width + width], out [wanted rows, width], which may be the same where nothing is beside and all rows
    // are wanted
    LayerCall(Team& team, Workspace& space, const Layer& layer, const Pass& pass, const WantedRows& wanted,
              const Rotation& rotation, Stored* key, Stored* value, const float* hidden, float* out)
        : team_(team), layer_(layer), pass_(pass), wanted_(wanted), rotation_(rotation), key_(key), value_(value),
          hidden_(hidden), out_(out), space_(space) {
        const int64_t rows = pass.num_rows, last_rows = wanted.pass.num_rows;
        inputs_ = Workspace::grown<Stored>(space.inputs, rows * layer.qkv.inputs);
        queries_ = Workspace::grown<Stored>(space.queries, last_rows * query_width());
        attended_ = Workspace::grown<Stored>(space.attended, last_rows * layer.output.inputs);
        qkv_ = Workspace::grown(space.qkv, rows * layer.qkv.outputs);
        for (const Weight* weight : {&layer.qkv, &layer.output}) space.grow_scratch(*weight, rows);
        if (layer.experts) {
            begin_experts(*layer.experts);
        } else {
            activated_ = Workspace::grown<Stored>(space.activated, last_rows * layer.down.inputs);
            if (layer.attention_out || layer.mlp_out) update_ = Workspace::grown(space.update, last_rows * layer.width);
            for (const Weight* weight : {&layer.gate_up, &layer.down}) space.grow_scratch(*weight, last_rows);
        }
        plan_attention(wanted.pass, layer.attention, all_items(layer.attention, space.attention.size()), space.attention,
                       space.attention_plan);
    }

    void run() {
        team_.run([this](int member) { compute(member); });
    }

  private:
    void compute(int member) {
        const int64_t last_rows = wanted_.pass.num_rows;
        if (layer_.beside_width)
            normalise_both(member);
        else
            normalise(member, hidden_, pass_.num_rows, layer_.attention_in);
        project(member, layer_.qkv, inputs_, pass_.num_rows, [&](int64_t row, int64_t output, F16 first, F16 second) {
            store(qkv_ + row * layer_.qkv.outputs + output, first);
            store(qkv_ + row * layer_.qkv.outputs + output + kLanes, second);
        });
        write_heads(member);
        if (!last_rows) return;
        attend_items<Stored>(wanted_.pass, layer_.attention, queries_, key_, value_, space_.attention_plan, next_item_,
                             space_.attention[member], attended_, layer_.output.inputs);
        team_.barrier();
        add_projection(member, layer_.output, attended_, starts_in_out() ? out_ : hidden_, layer_.attention_out);
        normalise(member, out_, last_rows, layer_.mlp_in);
        if (layer_.experts) return add_experts(member, *layer_.experts);
        project(member, layer_.gate_up, inputs_, last_rows, [&](int64_t row, int64_t output, F16 gate, F16 up) {
            store_part(activated_, row, layer_.down.inputs, output / 2, gated(gate, up, layer_.gating));
        });
        add_projection(member, layer_.down, activated_, out_, layer_.mlp_out);
    }

    void begin_experts(const Experts& experts) {
        const int64_t num_rows = wanted_.pass.num_rows;
        space_.assignments.begin(experts, num_rows);
        const int64_t num_assignments = space_.assignments.size();
        router_ = Workspace::grown(space_.router, num_rows * experts.router.outputs);
        gathered_ = Workspace::grown<Stored>(space_.gathered, num_assignments * layer_.width);
        activated_ = Workspace::grown<Stored>(space_.activated, num_assignments * experts.inner());
        update_ = Workspace::grown(space_.update, num_assignments * layer_.width);
        space_.grow_scratch(experts.router, num_rows);
        for (int64_t i = 0; i < experts.num_experts; ++i)
            for (const Weight* weight : {experts.gate_up[i], experts.down[i]}) space_.grow_scratch(*weight, num_rows);
    }

    // out += norm(what each row's experts give, each times its weight)
    void add_experts(int member, const Experts& experts) {
        const int64_t width = layer_.width, inner = experts.inner(), num_rows = wanted_.pass.num_rows;
        const int64_t first_row = team_.share(num_rows, member), last_row = team_.share(num_rows, member + 1);
        Assignments& assignments = space_.assignments;
        project(member, experts.router, inputs_, num_rows, [&](int64_t row, int64_t output, F16 first, F16 second) {
            store(router_ + row * experts.router.outputs + output, first);
            store(router_ + row * experts.router.outputs + output + kLanes, second);
        });
        for (int64_t row = first_row; row < last_row; ++row)
            assignments.choose(row, router_ + row * experts.router.outputs, experts.sums_to_one);
        team_.barrier();
        if (member == 0) assignments.sort();
        team_.barrier();
        const int64_t last_assignment = team_.share(assignments.size(), member + 1);
        for (int64_t assignment = team_.share(assignments.size(), member); assignment < last_assignment; ++assignment)
            std::copy_n(inputs_ + assignments.row_of(assignment) * width, width, gathered_ + assignment * width);
        team_.barrier();
        project_assigned(member, experts.gate_up, gathered_, [&](int64_t assignment, int64_t output, F16 gate, F16 up) {
            store_part(activated_, assignment, inner, output / 2, gated(gate, up, layer_.gating));
        });
        project_assigned(member, experts.down, activated_, [&](int64_t assignment, int64_t output, F16 first, F16 second) {
            store_part(update_, assignment, width, output, first);
            store_part(update_, assignment, width, output + kLanes, second);
        });
        const F16 scale = splat(layer_.residual_scale);
        for (int64_t row = first_row; row < last_row; ++row) {
            float* mixed = assignments.add_up(row, update_, width);
            norm_row(mixed, layer_.mlp_out, layer_.norm_eps, width, mixed);
            for (int64_t i = 0; i < width; i += kLanes) add_part(out_, row, i, load_first(mixed + i, lanes_from(i, width)) * scale);
        }
        team_.barrier();
    }

    // Every expert's product with its rows. Members take turns with the parts of its outputs, which may differ in size.
    template <class Finish>
    void project_assigned(int member, const Weight* const* weights, const Stored* rows, const Finish& finish) {
        const Assignments& assignments = space_.assignments;
        for (int64_t expert = 0, turn = member; expert < assignments.num_experts(); ++expert) {
            const int64_t begin = assignments.begin_of(expert), num_rows = assignments.end_of(expert) - begin;
            if (!num_rows) continue;
            const Weight& weight = *weights[expert];
            const int part = static_cast<int>(turn++ % team_.num_taking_part());
            multiply(weight, rows + begin * weight.inputs, num_rows, team_.share(weight.tiles(), part),
                     team_.share(weight.tiles(), part + 1), space_.scratch_of(member),
                     [&](int64_t row, int64_t output, F16 first, F16 second) { finish(begin + row, output, first, second); });
        }
        team_.barrier();
    }

    int64_t query_width() const { return static_cast<int64_t>(layer_.attention.num_heads) * layer_.attention.key_dim; }

    // Whether the residual stream of the wanted rows is in `out` before attention adds to it, not in `hidden`.
    bool starts_in_out() const { return layer_.beside_width || wanted_.places; }

    // inputs = norm(rows)
    void normalise(int member, const float* rows, int64_t num_rows, const float* weight) {
        const int64_t width = layer_.width, last = team_.share(num_rows, member + 1);
        for (int64_t row = team_.share(num_rows, member); row < last; ++row)
            norm_row(rows + row * width, weight, layer_.norm_eps, width, inputs_ + row * width);
        team_.barrier();
    }

    // inputs = [norm(beside), norm(stream)] of each row; out is what the residual stream of those that are wanted starts from
    void normalise_both(int member) {
        const int64_t beside = layer_.beside_width, width = layer_.width, both = beside + width;
        const int64_t last = team_.share(pass_.num_rows, member + 1);
        for (int64_t row = team_.share(pass_.num_rows, member); row < last; ++row) {
            const float* stream = hidden_ + row * both + beside;
            norm_row(hidden_ + row * both, layer_.beside_in, layer_.norm_eps, beside, inputs_ + row * both);
            norm_row(stream, layer_.attention_in, layer_.norm_eps, width, inputs_ + row * both + beside);
            const int64_t place = wanted_.place_of(row);
            if (place < 0) continue;
            norm_row(stream, layer_.starts_normed ? layer_.attention_in : nullptr, layer_.norm_eps, width, out_ + place * width);
        }
        team_.barrier();
    }

    template <class Finish>
    void project(int member, const Weight& weight, const Stored* rows, int64_t num_rows, const Finish& finish) {
        multiply(weight, rows, num_rows, team_.share(weight.tiles(), member), team_.share(weight.tiles(), member + 1),
                 space_.scratch_of(member), finish);
        team_.barrier();
    }

    // out = base + norm(weight x rows); `base` may be out itself.
    void add_projection(int member, const Weight& weight, const Stored* rows, const float* base, const float* norm) {
        const int64_t width = layer_.width, num_rows = wanted_.pass.num_rows;
        const F16 scale = splat(layer_.residual_scale);
        if (!norm) {
            project(member, weight, rows, num_rows, [&](int64_t row, int64_t output, F16 first, F16 second) {
                add_part(base, row, output, first * scale);
                add_part(base, row, output + kLanes, second * scale);
            });
            return;
        }
        project(member, weight, rows, num_rows, [&](int64_t row, int64_t output, F16 first, F16 second) {
            store_part(update_, row, width, output, first);
            store_part(update_, row, width, output + kLanes, second);
        });
        const int64_t last = team_.share(num_rows, member + 1);
        for (int64_t row = team_.share(num_rows, member); row < last; ++row) {
            float* update = update_ + row * width;
            norm_row(update, norm, layer_.norm_eps, width, update);
            for (int64_t i = 0; i < width; i += kLanes)
                add_part(base, row, i, load_first(update + i, lanes_from(i, width)) * scale);
        }
        team_.barrier();
    }

    static int lanes_from(int64_t first, int64_t width) {
        return static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(kLanes, width - first)));
    }

    template <class T>
    static void store_part(T* out, int64_t row, int64_t width, int64_t first, F16 values) {
        const int lanes = lanes_from(first, width);
        if (lanes) store_first(out + row * width + first, values, lanes);
    }

    void add_part(const float* base, int64_t row, int64_t first, F16 values) {
        const int lanes = lanes_from(first, layer_.width);
        const int64_t place = row * layer_.width + first;
        if (lanes) store_first(out_ + place, load_first(base + place, lanes) + values, lanes);
    }

    // Queries go to a buffer, keys and values to the cache; where not all rows are wanted, the residual stream of those that are
    // goes to `out`.
    void write_heads(int member) {
        const AttentionShape& shape = layer_.attention;
        const int64_t last = team_.share(2 * pass_.num_rows, member + 1);
        for (int64_t unit = team_.share(2 * pass_.num_rows, member); unit < last; ++unit) {
            const int64_t row = unit / 2;
            float* query = qkv_ + row * layer_.qkv.outputs;
            float* key = query + query_width();
            const int64_t key_width = static_cast<int64_t>(shape.num_kv_heads) * shape.key_dim;
            const int64_t value_width = static_cast<int64_t>(shape.num_kv_heads) * shape.value_dim;
            if (unit % 2 == 0) {
                const int64_t place = wanted_.place_of(row), width = layer_.width;
                if (place < 0) continue;
                if (wanted_.places && !layer_.beside_width) std::copy_n(hidden_ + row * width, width, out_ + place * width);
                finish_heads(query, shape.num_heads, shape.key_dim, layer_.query_norm, layer_.query_norm_width,
                             layer_.norm_eps, rotation_, row, queries_ + place * query_width());
            } else {
                finish_heads(key, shape.num_kv_heads, shape.key_dim, layer_.key_norm, layer_.key_norm_width,
                             layer_.norm_eps, rotation_, row, key_ + pass_.slots[row] * key_width);
                store_row(key + key_width, value_width, value_ + pass_.slots[row] * value_width);
            }
        }
        team_.barrier();
    }

    Team& team_;
    const Layer& layer_;
    const Pass& pass_;
    const WantedRows& wanted_;
    const Rotation& rotation_;
    Stored* key_;
    Stored* value_;
    const float* hidden_;
    float* out_;
    Workspace& space_;
    Stored *inputs_, *queries_, *attended_, *activated_, *gathered_ = nullptr;
    float *qkv_, *update_ = nullptr, *router_ = nullptr;
    std::atomic<size_t> next_item_{0};
};

}  // namespace forerun
