// What the C functions check before they compute: sizes that do not fit each other are refused, not read past.
#pragma once

#include <bit>
#include <stdexcept>

#include "block_packing.h"
#include "block_rounding.h"
#include "chain.h"
#include "decoder.h"
#include "layer.h"
#include "lookup.h"
#include "sampling.h"
#include "sharded_layer.h"

namespace forerun {

// A caller's mistake; `what` says which.
struct BadArgument : std::logic_error {
    using std::logic_error::logic_error;
};

inline void require(bool holds, const char* message) {
    if (!holds) throw BadArgument(message);
}

constexpr int64_t kMostExperts = 1024;
constexpr int64_t kLargest = int64_t{1} << 28;  // of any size: the product of two, in bytes, fits in 64 bits

inline bool is_size(int64_t size) { return size >= 0 && size <= kLargest; }

inline void check_rows(int64_t num_rows, int64_t width) {
    require(is_size(num_rows), "the number of rows is out of range");
    require(is_size(width), "the width of a row is out of range");
}

inline void check_blocks(int32_t storage, int64_t outputs, int64_t inputs) {
    require(is_blocks(storage), "the blocks' format is unknown");
    require(is_size(outputs) && is_size(inputs), "the blocks' sizes are out of range");
    require(inputs % block_size(storage).weights == 0 && inputs % kUnitInputs == 0, "the inputs are not whole blocks");
}

inline void check_weight(const Weight& weight) {
    require((weight.storage >= kFloat32 && weight.storage <= kExactFloat32) || is_blocks(weight.storage),
            "the weight's storage is unknown");
    require(is_size(weight.outputs) && weight.outputs % kTile == 0, "the weight's outputs are not whole tiles");
    require(is_size(weight.inputs) && weight.inputs % 2 == 0, "the weight's inputs are not even");
    require(weight.inputs > 0, "the weight has no inputs");
    if (weight.storage == kJoined) {
        require(weight.parts && weight.num_parts > 0, "the joined weight has no parts");
        int64_t outputs = 0;
        for (int32_t i = 0; i < weight.num_parts; ++i) {
            const Weight& part = *weight.parts[i];
            require(part.storage != kJoined, "a joined weight is part of another");
            check_weight(part);
            require(part.narrow_inputs() == weight.parts[0]->narrow_inputs(), "a joined weight's parts take different rows");
            require(part.inputs == weight.inputs, "a joined weight's parts differ in inputs");
            outputs += part.outputs;
        }
        require(outputs == weight.outputs, "a joined weight has more or fewer outputs than its parts");
        return;
    }
    require(weight.data || !weight.outputs, "the weight has no data");
    require(weight.scale || !weight.outputs || weight.storage != kInt8, "the int8 weight has no scale");
    require(weight.first_rare || weight.storage != kCoded, "the coded weight has no list of rare weights");
    require(weight.row_bits == 0 || weight.row_bits == 8 || weight.row_bits == 16, "rows are rounded to neither 8 nor 16 bits");
    require(weight.row_bits == 0 || is_blocks(weight.storage), "rows are rounded for a weight that is not in blocks");
    if (is_blocks(weight.storage)) check_blocks(weight.storage, weight.outputs, weight.inputs);
}

// A product of rows [num_rows, width] whose first `num_outputs` outputs are kept.
inline void check_product(const Weight& weight, int64_t num_rows, int64_t width, int64_t num_outputs) {
    check_weight(weight);
    check_rows(num_rows, width);
    require(width <= weight.inputs, "the rows are wider than the weight's inputs");
    require(num_outputs >= 0 && num_outputs <= weight.outputs, "more outputs are asked for than the weight has");
}

inline void check_candidates(int64_t count, int64_t num_outputs) {
    require(count >= 0 && count <= kMostCandidates, "the number of candidates must be from 0 to 16");
    require(count <= num_outputs, "more candidates are asked for than there are outputs");
}

inline void check_storage(int32_t storage) {
    require(storage == kFloat32 || storage == kBFloat16, "keys and values must be fp32 or bf16");
}

inline void check_pass(const Pass& pass) {
    require(is_size(pass.num_rows), "the number of rows is out of range");
    require(is_size(pass.num_sequences), "the number of sequences is out of range");
    require(pass.block_size > 0, "the block size is not above 0");
    for (int64_t i = 0; i < pass.num_sequences; ++i) {
        const Sequence& sequence = pass.sequences[i];
        require(sequence.first_row >= 0 && sequence.num_rows >= 0 && sequence.first_row <= pass.num_rows - sequence.num_rows,
                "a sequence's rows are not rows of the pass");
        require(is_size(sequence.num_context) && sequence.num_hidden >= 0, "a sequence's context is out of range");
        require(!sequence.tree_mask || (sequence.mask_width >= sequence.num_rows && sequence.num_unmasked() >= 0),
                "a tree's mask is not as wide as its rows, or wider than its sequence");
    }
}

inline void check_attention(const AttentionShape& shape) {
    require(shape.num_kv_heads > 0 && shape.num_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
            "the query heads are not a multiple of the key heads");
    require(shape.key_dim > 0 && shape.key_dim % 2 == 0 && shape.key_dim <= kMaxKeyDim,
            "the keys' dimension is not an even number up to 1024");
    require(shape.value_dim > 0 && shape.value_dim <= kLargest, "the values' dimension is out of range");
    require(shape.window >= 0, "the window is negative");
}

inline void check_rotation(const Rotation& rotation, int64_t head_dim) {
    require(rotation.half >= 0 && 2 * rotation.half <= head_dim, "more dimensions are rotated than a head has");
}

inline void check_norm(const float* weight, int64_t norm_width, int64_t width) {
    require(!weight || (norm_width > 0 && width % norm_width == 0), "a norm's width does not divide its heads");
}

inline void check_gating(int32_t gating) {
    require(gating >= kSilu && gating <= kSwigluOai, "the gating is unknown");
}

inline void check_layer_weight(const Weight& weight, int32_t storage) {
    check_weight(weight);
    require(weight.narrow_inputs() == (storage == kBFloat16), "a weight does not take rows as keys are stored");
}

inline void check_mlp(const Weight& gate_up, const Weight& down, int64_t width) {
    require(gate_up.outputs >= 2 * down.inputs, "there are fewer gates than the last product takes");
    require(down.outputs >= width, "the last product is not as wide as the layer");
}

inline void check_experts(const Experts& experts, int64_t width, int32_t storage) {
    require(experts.num_chosen > 0 && experts.num_chosen <= experts.num_experts && experts.num_experts <= kMostExperts,
            "a row chooses more experts than there are, or none");
    check_layer_weight(experts.router, storage);
    require(experts.router.inputs == width, "the router does not take the layer's rows");
    require(experts.router.outputs >= experts.num_experts, "the router has fewer outputs than there are experts");
    for (int64_t i = 0; i < experts.num_experts; ++i) {
        for (const Weight* weight : {experts.gate_up[i], experts.down[i]}) check_layer_weight(*weight, storage);
        require(experts.gate_up[i]->inputs == width, "the gates do not take the layer's rows");
        require(experts.down[i]->inputs == experts.inner(), "the experts differ in size");
        check_mlp(*experts.gate_up[i], *experts.down[i], width);
    }
}

// What holds for a layer, whole or a rank's part.
inline void check_part(const Layer& layer, int32_t storage) {
    const AttentionShape& shape = layer.attention;
    for (const Weight* weight : {&layer.qkv, &layer.output}) check_layer_weight(*weight, storage);
    check_attention(shape);
    check_gating(layer.gating);
    require(is_size(layer.width) && is_size(layer.beside_width), "a layer's width is out of range");
    require(layer.qkv.inputs == layer.beside_width + layer.width, "the first product does not take the layer's rows");
    require(layer.qkv.outputs >= (static_cast<int64_t>(shape.num_heads) + shape.num_kv_heads) * shape.key_dim +
                                     static_cast<int64_t>(shape.num_kv_heads) * shape.value_dim,
            "the first product has fewer outputs than the heads");
    if (layer.experts) return check_experts(*layer.experts, layer.width, storage);
    for (const Weight* weight : {&layer.gate_up, &layer.down}) check_layer_weight(*weight, storage);
    require(layer.gate_up.inputs == layer.width, "the gates do not take the layer's rows");
}

inline void check_layer(const Layer& layer, int32_t storage) {
    check_part(layer, storage);
    const AttentionShape& shape = layer.attention;
    check_norm(layer.query_norm, layer.query_norm_width, static_cast<int64_t>(shape.num_heads) * shape.key_dim);
    check_norm(layer.key_norm, layer.key_norm_width, static_cast<int64_t>(shape.num_kv_heads) * shape.key_dim);
    require(layer.output.inputs == static_cast<int64_t>(shape.num_heads) * shape.value_dim,
            "the product after attention does not take its heads");
    require(layer.output.outputs >= layer.width, "the product after attention is not as wide as the layer");
    if (!layer.experts) check_mlp(layer.gate_up, layer.down, layer.width);
}

// Layers one after the other.
inline void check_layers(const Layer* const* layers, int64_t num_layers, int32_t storage) {
    for (int64_t i = 0; i < num_layers; ++i) {
        check_layer(*layers[i], storage);
        require(layers[i]->width == layers[0]->width, "the layers differ in width");
        require(!i || !layers[i]->beside_width, "only the first layer reads rows beside the residual stream");
    }
}

inline void check_rotations(const Layer* const* layers, const int32_t* rotation_of, int64_t num_layers,
                            const RotationTable* tables, int64_t num_tables) {
    for (int64_t i = 0; i < num_layers; ++i) {
        require(rotation_of[i] >= 0 && rotation_of[i] < num_tables, "a layer's rotation is not there");
        check_rotation({nullptr, nullptr, tables[rotation_of[i]].half}, layers[i]->attention.key_dim);
    }
}

inline void check_embedding(const TokenTable& embedding, int64_t width) {
    require(embedding.packed || embedding.rows, "there are no embeddings");
    if (embedding.packed) check_product(*embedding.packed, 0, width, embedding.num_tokens);
    check_storage(embedding.storage);
}

inline void check_exchange(const Exchange& exchange) {
    require(exchange.num_ranks > 0 && exchange.num_ranks <= kMostRanks, "a group has from 1 to 64 ranks");
    require(exchange.rank >= 0 && exchange.rank < exchange.num_ranks, "the rank is none of the group");
    require(exchange.flags && exchange.message, "the exchange has no memory");
    require(is_size(exchange.max_rows) && exchange.head_rows > 0, "the exchange's rows are out of range");
    require(exchange.num_threads > 0, "the ranks have no threads");
}

// A rank's part of a layer; sizes of the whole are those of the products' inputs.
inline void check_shard(const Layer& layer, const LayerShard& shard, int32_t num_ranks, int32_t storage) {
    require(!layer.experts, "experts are computed in one process");
    check_part(layer, storage);
    const AttentionShape& shape = layer.attention;
    const int64_t all_heads = layer.output.inputs / shape.value_dim;
    require(shard.first_head >= 0 && shard.first_head + shape.num_heads <= all_heads, "the shard's query heads are out of range");
    require(shard.first_kv_head >= 0 && shard.first_kv_head + shape.num_kv_heads <= shard.num_kv_heads,
            "the shard's key heads are out of range");
    require(shard.first_head == shard.first_kv_head * shape.group(), "the shard's key heads are not those of its query heads");
    require(shard.first_part >= 0 && shard.first_part < num_ranks && shard.end_part > 0 && shard.end_part <= num_ranks,
            "the shard's part of a key head is out of range");
    check_norm(layer.query_norm, layer.query_norm_width, all_heads * shape.key_dim);
    check_norm(layer.key_norm, layer.key_norm_width, shard.num_kv_heads * shape.key_dim);
    require(shard.first_output >= 0 && shard.first_gate >= 0, "the shard's outputs are out of range");
}

inline bool is_power_of_two(int64_t size) { return size > 0 && (size & (size - 1)) == 0; }

inline void check_index(const lookup::TextIndex& index) {
    require(index.tokens && index.places, "an index has no arrays");
    require(is_power_of_two(index.mask + 1) && is_size(index.mask), "an index's capacity is not a power of two");
    require(index.shift == std::countl_zero(static_cast<uint64_t>(2 * index.mask + 1)),
            "an index's shift does not fit its capacity");
    require(index.first_size > 0 && index.second_size >= 0 && index.second_size < index.first_size &&
                index.first_size <= lookup::kLongestMatch,
            "the sizes of an index's grams do not fall");
}

inline void check_contexts(const lookup::SaltContexts& contexts) {
    for (const lookup::ContextTable* table : {contexts.ones, contexts.twos}) {
        require(table && table->slots, "a table has no slots");
        require(is_power_of_two(table->num_slots), "a table's slots are not a power of two");
        require(table->num_candidates > 0 && table->num_candidates <= lookup::kMostKept, "a table keeps too many candidates");
    }
    require(contexts.ones->num_candidates == contexts.twos->num_candidates, "two tables of a salt differ in candidates");
}

inline void check_text(const lookup::LiveText& text) {
    check_index(text.own);
    require(text.own.end <= text.own.mask, "a text is longer than its index");
    const int64_t place = text.copies[lookup::kOwnText].place;
    require(place >= 0 && (!place || place < text.own.end), "a text is copied from behind its end");
    if (text.past) check_index(*text.past);
    if (text.contexts) check_contexts(*text.contexts);
}

inline void check_head(const DraftHead& head, int32_t storage) {
    require(head.num_layers > 0, "the head has no layers");
    check_layers(head.layers, head.num_layers, storage);
    require(head.layers[0]->beside_width > 0, "the head's first layer reads no embeddings");
    require(is_size(head.num_features) && is_size(head.feature_width), "the head's features are out of range");
    const int64_t width = head.layers[0]->width, features = head.num_features * head.feature_width;
    require(features > 0, "the head reads no features");
    if (head.fusion) {
        check_product(*head.fusion, 0, features, width);
        require(head.fusion->narrow_inputs() == (storage == kBFloat16), "the fusion does not take rows as keys are stored");
    }
    require(head.fusion || features == width, "without a fusion the head's state must be its only feature");
    check_norm(head.feature_norm, head.feature_norm_width, features);
    check_product(*head.vocabulary, 0, width, head.num_outputs);
    require(head.num_outputs > 0, "the head predicts no tokens");
    check_embedding(head.embedding, head.layers[0]->beside_width);
    const int64_t num_tokens = head.embedding.num_tokens;
    if (head.target_ids)
        for (int64_t i = 0; i < head.num_outputs; ++i) {
            require(head.target_ids[i] >= 0 && head.target_ids[i] < num_tokens, "the head predicts a token that has no embedding");
            require(i == 0 || head.target_ids[i] > head.target_ids[i - 1], "the head's tokens are not in ascending order");
        }
    else
        require(head.num_outputs <= num_tokens, "the head predicts a token that has no embedding");
}

inline void check_decoder(const Decoder& decoder, int32_t storage, const RotationTable* tables, int64_t num_tables) {
    require(decoder.num_layers > 0, "the decoder has no layers");
    check_layers(decoder.layers, decoder.num_layers, storage);
    const int64_t width = decoder.layers[0]->width;
    require(!decoder.layers[0]->beside_width, "the decoder's first layer reads more than embeddings");
    check_rotations(decoder.layers, decoder.rotation_of, decoder.num_layers, tables, num_tables);
    check_embedding(decoder.embedding, width);
    check_product(*decoder.vocabulary, 0, width, decoder.num_outputs);
}

inline void check_decoder_rows(const Decoder& decoder, const Pass& pass, const DecoderRows& rows, const RotationTable* tables,
                               int64_t num_tables) {
    require(is_size(rows.num_judged), "the number of rows with logits is out of range");
    int64_t end = 0;
    for (int64_t i = 0; i < pass.num_sequences; end += pass.sequences[i++].num_rows)
        require(pass.sequences[i].first_row == end, "the sequences' rows do not lie one after the other");
    require(end == pass.num_rows, "a row is no sequence's");
    for (int64_t row = 0; row < pass.num_rows; ++row) {
        require(rows.token_ids[row] >= 0 && rows.token_ids[row] < decoder.embedding.num_tokens, "a token has no embedding");
        for (int64_t t = 0; t < num_tables; ++t)
            require(!tables[t].half || (rows.positions[row] >= 0 && rows.positions[row] < tables[t].num_positions),
                    "a position has no rotation");
    }
    for (int64_t i = 0; i < rows.num_judged; ++i)
        require(rows.judged[i] >= 0 && rows.judged[i] < pass.num_rows, "a row with logits is none of the pass");
}

inline void check_ids(const int32_t* ids, int64_t count, int64_t vocab_size) {
    require(is_size(count), "the number of token ids is out of range");
    for (int64_t i = 0; i < count; ++i)
        require(ids[i] >= 0 && ids[i] < vocab_size, "a token id is not one of the vocabulary");
}

inline void check_settings(const SamplingSettings& settings) {
    require(settings.temperature >= 0.0f, "the temperature is below 0");
    require(settings.top_p > 0.0, "top_p is not above 0");
}

inline void check_draw(const Draw& draw, int64_t num_rows, int64_t vocab_size) {
    require(draw.row >= 0 && draw.row < num_rows, "a draw's row is not one of the logits");
    check_settings(*draw.settings);
    if (!draw.edits) return;
    const RowEdits& edits = *draw.edits;
    check_ids(edits.allowed, edits.num_allowed, vocab_size);
    check_ids(edits.forbidden, edits.num_forbidden, vocab_size);
    check_ids(edits.biased, edits.num_biased, vocab_size);
    check_ids(edits.penalised, edits.num_penalised, vocab_size);
}

// Texts whose tokens, and what is drafted after them, have places in their blocks and positions in the tables.
inline void check_texts(const DraftText* texts, int64_t num_texts, int64_t block_size, const int64_t* token_ids,
                        int64_t num_tokens, const RotationTable* tables, int64_t num_tables, int64_t most_drafted) {
    require(is_size(num_texts) && is_size(num_tables) && is_size(most_drafted), "the number of texts is out of range");
    require(block_size > 0, "the block size is not above 0");
    for (int64_t i = 0; i < num_texts; token_ids += texts[i++].num_unread) {
        const DraftText& text = texts[i];
        require(is_size(text.num_read) && text.num_read >= 1, "a text's first unread place is out of range");
        require(is_size(text.num_unread) && text.num_unread >= 1, "a text has no unread token");
        require(text.num_drafted >= 0 && text.num_drafted <= most_drafted, "more tokens are asked for than there is room for");
        if (text.settings) check_settings(*text.settings);
        const int64_t last = text.end() + std::max<int64_t>(text.num_drafted - 1, 0);  // the newest token is never read
        require(is_size(text.num_blocks) && last <= text.num_blocks * block_size, "a text's blocks do not hold its draft");
        for (int64_t t = 0; t < num_tables; ++t)
            require(!tables[t].half || last - 1 <= tables[t].num_positions, "a position has no rotation");
        for (int64_t j = 0; j < text.num_unread; ++j)
            require(token_ids[j] >= 0 && token_ids[j] < num_tokens, "a token has no embedding");
    }
}

}  // namespace forerun
