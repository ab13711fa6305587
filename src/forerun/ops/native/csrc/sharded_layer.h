// One process's part of a decoder layer. It computes some outputs of each product, over all inputs in order, and gets the
// other ranks' outputs through the exchange: so each output has the bits that `LayerCall` gives it alone.
#pragma once

#include "exchange.h"
#include "layer.h"

namespace forerun {

// Where a rank's outputs lie among those of all ranks; the same in all layers. The `Layer` beside it holds this rank's
// outputs only: its own heads in qkv and in `attention`, tiles of the others; norms over all heads are whole.
struct LayerShard {
    int64_t first_head;     // query head
    int64_t first_kv_head;
    int64_t num_kv_heads;   // of all ranks
    int64_t first_part;     // see `ItemShare`
    int64_t end_part;
    int64_t first_output;   // of the products that add to the residual stream
    int64_t first_gate;     // of the gated values
};

template <class Stored>
class ShardedLayerCall {
  public:
    // stream [rows, width]: the residual stream, which each rank keeps a copy of
    ShardedLayerCall(Team& team, Workspace& space, const Exchange& exchange, const LayerShard& shard, const Layer& layer,
                     const Pass& pass, const Rotation& rotation, Stored* key, Stored* value, float* stream)
        : team_(team), exchange_(exchange), shard_(shard), layer_(layer), pass_(pass), rotation_(rotation), key_(key),
          value_(value), stream_(stream), space_(space), turn_(exchange.num_arrived()) {
        const int64_t rows = pass.num_rows;
        inputs_ = Workspace::grown<Stored>(space.inputs, rows * layer.qkv.inputs);
        queries_ = Workspace::grown<Stored>(space.queries, rows * query_width());
        qkv_ = Workspace::grown(space.qkv, rows * layer.qkv.outputs);
        update_ = Workspace::grown(space.update, rows * (layer.width + all_query_width() + all_key_width()));
        attended_ = static_cast<Stored*>(exchange.attended);
        activated_ = static_cast<Stored*>(exchange.activated);
        for (const Weight* weight : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) space.grow_scratch(*weight, rows);
        const ItemShare share{shard.num_kv_heads, exchange.num_ranks, shard.first_part, shard.end_part, exchange.num_threads};
        plan_attention(pass, layer.attention, share, space.attention, space.attention_plan);
    }

    void run() {
        team_.run([this](int member) { compute(member); });
    }

    static bool norms_all_heads(const Layer& layer) {
        return layer.query_norm && layer.query_norm_width != layer.attention.key_dim;
    }

  private:
    void compute(int member) {
        uint32_t turn = turn_;
        const Outputs update{exchange_.update, layer_.width, shard_.first_output};
        if (layer_.beside_width)
            normalise_both(member);
        else
            normalise(member, layer_.attention_in);
        project(member, layer_.qkv, inputs_, {qkv_, layer_.qkv.outputs, 0});
        team_.barrier();
        if (norms_all_heads(layer_)) {
            publish_heads(member);
            exchange(member, ++turn);
        }
        write_heads(member);
        team_.barrier();
        attend_items<Stored>(pass_, layer_.attention, queries_, key_, value_, space_.attention_plan, next_item_,
                             space_.attention[member], attended_ + shard_.first_head * layer_.attention.value_dim,
                             layer_.output.inputs);
        exchange(member, ++turn);
        project(member, layer_.output, attended_, update);
        exchange(member, ++turn);
        add_update(member, layer_.attention_out);
        normalise(member, layer_.mlp_in);
        project(member, layer_.gate_up, inputs_, {nullptr, layer_.down.inputs, shard_.first_gate});
        exchange(member, ++turn);
        project(member, layer_.down, activated_, update);
        exchange(member, ++turn);
        add_update(member, layer_.mlp_out);
    }

    // What this rank's members have written is everyone's afterwards, and all ranks' is this one's.
    void exchange(int member, uint32_t turn) {
        team_.barrier();
        if (member == 0) exchange_.arrive();
        exchange_.wait(turn);
    }

    int64_t query_width() const { return static_cast<int64_t>(layer_.attention.num_heads) * layer_.attention.key_dim; }
    int64_t key_width() const { return static_cast<int64_t>(layer_.attention.num_kv_heads) * layer_.attention.key_dim; }
    int64_t all_query_width() const { return layer_.output.inputs / layer_.attention.value_dim * layer_.attention.key_dim; }
    int64_t all_key_width() const { return shard_.num_kv_heads * layer_.attention.key_dim; }
    int64_t first_row(int member) const { return team_.share(pass_.num_rows, member); }

    // inputs = norm(stream)
    void normalise(int member, const float* weight) {
        const int64_t width = layer_.width;
        for (int64_t row = first_row(member); row < first_row(member + 1); ++row)
            norm_row(stream_ + row * width, weight, layer_.norm_eps, width, inputs_ + row * width);
        team_.barrier();
    }

    // inputs = [norm(beside), norm(stream)] of each row of the pass's input; the residual stream starts from that, too
    void normalise_both(int member) {
        const int64_t beside = layer_.beside_width, width = layer_.width, both = beside + width;
        for (int64_t row = first_row(member); row < first_row(member + 1); ++row) {
            const float* input = exchange_.update + row * both;
            norm_row(input, layer_.beside_in, layer_.norm_eps, beside, inputs_ + row * both);
            norm_row(input + beside, layer_.attention_in, layer_.norm_eps, width, inputs_ + row * both + beside);
            norm_row(input + beside, layer_.starts_normed ? layer_.attention_in : nullptr, layer_.norm_eps, width,
                     stream_ + row * width);
        }
        team_.barrier();
    }

    // Where a product's outputs go: to `sums` [rows, width], from `first` on; null: in pairs of gate and up to what is activated.
    struct Outputs {
        float* sums;
        int64_t width;
        int64_t first;
    };

    // One function for all products, which are compiled for each format of weights.
    void project(int member, const Weight& weight, const Stored* rows, const Outputs& to) {
        const auto finish = [&](int64_t row, int64_t output, F16 first, F16 second) {
            if (!to.sums) {
                return store_part(activated_, row, to.width, to.first + output / 2, gated(first, second, layer_.gating));
            }
            store_part(to.sums, row, to.width, to.first + output, first);
            store_part(to.sums, row, to.width, to.first + output + kLanes, second);
        };
        multiply(weight, rows, pass_.num_rows, team_.share(weight.tiles(), member), team_.share(weight.tiles(), member + 1),
                 space_.scratch_of(member), finish);
    }

    // stream += norm(update); the update itself is everyone's, so its norm goes to memory of this rank
    void add_update(int member, const float* norm) {
        const int64_t width = layer_.width;
        const F16 scale = splat(layer_.residual_scale);
        for (int64_t row = first_row(member); row < first_row(member + 1); ++row) {
            const float* update = exchange_.update + row * width;
            float *own = update_ + row * width, *stream = stream_ + row * width;
            if (norm) {
                std::memcpy(own, update, static_cast<size_t>(width) * sizeof(float));
                norm_row(own, norm, layer_.norm_eps, width, own);
                update = own;
            }
            for (int64_t i = 0; i < width; i += kLanes) {
                const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - i));
                store_first(stream + i, load_first(stream + i, lanes) + load_first(update + i, lanes) * scale, lanes);
            }
        }
    }

    // A key head that ranks share is published, with its query heads, by the first of them.
    void publish_heads(int member) {
        const AttentionShape& shape = layer_.attention;
        const int64_t dim = shape.key_dim, all = all_query_width() + all_key_width();
        const int64_t key = shard_.first_part ? dim : 0, query = key * shape.group();
        for (int64_t row = first_row(member); row < first_row(member + 1); ++row) {
            const float* own = qkv_ + row * layer_.qkv.outputs;
            float* place = exchange_.heads + row * all;
            std::memcpy(place + shard_.first_head * dim + query, own + query,
                        static_cast<size_t>(query_width() - query) * sizeof(float));
            std::memcpy(place + all_query_width() + shard_.first_kv_head * dim + key, own + query_width() + key,
                        static_cast<size_t>(key_width() - key) * sizeof(float));
        }
    }

    // Queries go to a buffer, keys and values to this rank's cache.
    void write_heads(int member) {
        const AttentionShape& shape = layer_.attention;
        const bool together = norms_all_heads(layer_);
        const int64_t last = team_.share(2 * pass_.num_rows, member + 1);
        const int64_t values = static_cast<int64_t>(shape.num_kv_heads) * shape.value_dim;
        for (int64_t unit = team_.share(2 * pass_.num_rows, member); unit < last; ++unit) {
            const int64_t row = unit / 2;
            float* query = qkv_ + row * layer_.qkv.outputs;
            float* key = query + query_width();
            if (unit % 2 == 0) {
                if (together) query = normed_heads(row, 0, all_query_width(), layer_.query_norm, shard_.first_head);
                finish_heads(query, shape.num_heads, shape.key_dim, together ? nullptr : layer_.query_norm,
                             layer_.query_norm_width, layer_.norm_eps, rotation_, row, queries_ + row * query_width());
            } else {
                store_row(key + key_width(), values, value_ + pass_.slots[row] * values);
                if (together)
                    key = normed_heads(row, all_query_width(), all_key_width(), layer_.key_norm, shard_.first_kv_head);
                finish_heads(key, shape.num_kv_heads, shape.key_dim, together ? nullptr : layer_.key_norm,
                             layer_.key_norm_width, layer_.norm_eps, rotation_, row, key_ + pass_.slots[row] * key_width());
            }
        }
    }

    // All ranks' heads of a row, from `first` on, under one norm, in memory of this rank; returns where its own begin.
    float* normed_heads(int64_t row, int64_t first, int64_t width, const float* norm, int64_t first_head) {
        const int64_t all = all_query_width() + all_key_width();
        float* own = update_ + pass_.num_rows * layer_.width + row * all + first;
        std::memcpy(own, exchange_.heads + row * all + first, static_cast<size_t>(width) * sizeof(float));
        norm_row(own, norm, layer_.norm_eps, width, own);
        return own + first_head * layer_.attention.key_dim;
    }

    template <class T>
    static void store_part(T* out, int64_t row, int64_t width, int64_t first, F16 values) {
        const int64_t lanes = std::min<int64_t>(kLanes, width - first);
        if (lanes > 0) store_first(out + row * width + first, values, static_cast<int>(lanes));
    }

    Team& team_;
    const Exchange& exchange_;
    const LayerShard& shard_;
    const Layer& layer_;
    const Pass& pass_;
    const Rotation& rotation_;
    Stored* key_;
    Stored* value_;
    float* stream_;
    Workspace& space_;
    const uint32_t turn_;
    Stored *inputs_, *queries_, *attended_, *activated_;
    float *qkv_, *update_;
    std::atomic<size_t> next_item_{0};
};

}  // namespace forerun
