// A decoder's pass over its rows: its layers one after the other, or all of it, from token ids to logits.
#pragma once

#include <cstring>

#include "inputs.h"
#include "product.h"

namespace forerun {

constexpr int64_t kFewRowsAlone = 16;  // fewer are normed or stored before the team has been called

// work(first row, row behind the last), by the whole team where there are many rows.
template <class Work>
void share_rows(Team& team, int64_t num_rows, const Work& work) {
    if (num_rows < kFewRowsAlone) return work(0, num_rows);
    team.run([&](int member) { work(team.share(num_rows, member), team.share(num_rows, member + 1)); });
}

// Stores a pass's rows [num_rows, width] at their slots.
template <class Stored>
void keep_rows(Team& team, const Pass& pass, const float* rows, int64_t width, Stored* kept) {
    share_rows(team, pass.num_rows, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) store_row(rows + row * width, width, kept + pass.slots[row] * width);
    });
}

// out [num_rows, width] = RMSNorm of each row.
inline void norm_rows(Team& team, const float* rows, const float* weight, float eps, int64_t num_rows, int64_t width,
                      float* out) {
    share_rows(team, num_rows, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) norm_row(rows + row * width, weight, eps, width, out + row * width);
    });
}

// Layers with their rotations, keys and values; layer i rotates by rotations[rotation_of[i]]. kept: null, or for each layer,
// and for what follows the last, where the residual stream before it goes, or null.
struct LayerStack {
    const Layer* const* layers;
    const int32_t* rotation_of;
    int64_t num_layers;
    void* const* keys;
    void* const* values;
    void* const* kept;

    // Computes them on the rows of `hidden`, as wide as the first layer reads them, to `out` [rows, width].
    template <class Stored>
    void run(Team& team, Workspace& space, const Pass& pass, const Rotation* rotations, const float* hidden, float* out) const {
        run_first<Stored>(num_layers, team, space, pass, rotations, hidden, out);
        if (num_layers) keep<Stored>(num_layers, team, pass, out);
    }

    // The same, but of the last layer only the wanted rows, to `last` [wanted rows, width], another memory than `out`, which is only
    // scratch then. Nothing is kept behind the last layer.
    template <class Stored>
    void run_until_wanted(Team& team, Workspace& space, const Pass& pass, const WantedRows& wanted, const Rotation* rotations,
                          const float* hidden, float* out, float* last) const {
        run_first<Stored>(num_layers - 1, team, space, pass, rotations, hidden, out);
        run_layer<Stored>(num_layers - 1, team, space, pass, wanted, rotations, num_layers > 1 ? out : hidden, last);
    }

    bool keeps_last() const { return kept && kept[num_layers]; }

  private:
    template <class Stored>
    void run_first(int64_t count, Team& team, Workspace& space, const Pass& pass, const Rotation* rotations,
                   const float* hidden, float* out) const {
        for (int64_t i = 0; i < count; ++i)
            run_layer<Stored>(i, team, space, pass, WantedRows::all(pass), rotations, i ? out : hidden, out);
    }

    template <class Stored>
    void run_layer(int64_t i, Team& team, Workspace& space, const Pass& pass, const WantedRows& wanted,
                   const Rotation* rotations, const float* rows, float* out) const {
        keep<Stored>(i, team, pass, rows);
        LayerCall<Stored>(team, space, *layers[i], pass, wanted, rotations[rotation_of[i]], static_cast<Stored*>(keys[i]),
                          static_cast<Stored*>(values[i]), rows, out)
            .run();
    }

    // Keeps the residual stream before layer i, where that is wanted.
    template <class Stored>
    void keep(int64_t i, Team& team, const Pass& pass, const float* rows) const {
        if (kept && kept[i]) keep_rows(team, pass, rows, layers[0]->width, static_cast<Stored*>(kept[i]));
    }
};

// Memory of a cache: [num_entries, num_slots, slot_bytes].
struct CacheStack {
    uint8_t* data;
    int64_t num_entries;
    int64_t num_slots;
    int64_t slot_bytes;

    // Copies what lies at `sources` to `destinations`, [count] slots both; all sources are read before a destination is written.
    void move(const int64_t* sources, const int64_t* destinations, int64_t count, Buffer<uint8_t>& buffer) const {
        uint8_t* moved = Workspace::grown<uint8_t>(buffer, count * slot_bytes);
        for (int64_t entry = 0; entry < num_entries; ++entry) {
            uint8_t* slots = data + entry * num_slots * slot_bytes;
            for (int64_t i = 0; i < count; ++i) std::memcpy(moved + i * slot_bytes, slots + sources[i] * slot_bytes, slot_bytes);
            for (int64_t i = 0; i < count; ++i)
                std::memcpy(slots + destinations[i] * slot_bytes, moved + i * slot_bytes, slot_bytes);
        }
    }
};

struct Decoder {
    TokenTable embedding;
    const Layer* const* layers;
    const int32_t* rotation_of;  // which rotation each layer takes
    int64_t num_layers;
    const float* output_norm;
    const Weight* vocabulary;
    int64_t num_outputs;
    float norm_eps;
    Finishing finished;
    int32_t reserved;
};

// What a decoder's pass keeps until it ends.
struct DecoderSpace {
    Buffer<float> embedded, hidden, outputs, last, normed;
    RotatedRows rotated;
    JudgedRows judged;
};

// The rows of a pass: their tokens and positions, and those whose logits are wanted.
struct DecoderRows {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* judged;
    int64_t num_judged;
};

// Logits [num_judged, num_outputs], and the candidates of each row, `num_candidates` or more than none.
template <class Stored>
const CandidateList* decode(Team& team, Workspace& space, DecoderSpace& own, const Decoder& decoder, const LayerStack& stack,
                            const RotationTable* tables, int64_t num_tables, const Pass& pass, const DecoderRows& rows,
                            int num_candidates, float* logits) {
    const int64_t width = decoder.layers[0]->width;
    float* hidden = Workspace::grown(own.hidden, pass.num_rows * width);
    for (int64_t row = 0; row < pass.num_rows; ++row)
        decoder.embedding.read(rows.token_ids[row], width, own.embedded, hidden + row * width);
    const Rotation* rotations = own.rotated.look_up(tables, num_tables, rows.positions, pass.num_rows);
    float* out = Workspace::grown(own.outputs, pass.num_rows * width);
    // Of a prompt's rows most have no logits: behind the last layer's keys and values nothing of them is needed.
    const WantedRows wanted =
        stack.keeps_last() ? WantedRows::all(pass) : own.judged.find(pass, rows.judged, rows.num_judged);
    if (wanted.places) {
        float* last = Workspace::grown(own.last, wanted.pass.num_rows * width);
        stack.run_until_wanted<Stored>(team, space, pass, wanted, rotations, hidden, out, last);
        out = last;
    } else {
        stack.run<Stored>(team, space, pass, rotations, hidden, out);
    }
    float* normed = Workspace::grown(own.normed, rows.num_judged * width);
    share_rows(team, rows.num_judged, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i)
            norm_row(out + wanted.place_of(rows.judged[i]) * width, decoder.output_norm, decoder.norm_eps, width,
                     normed + i * width);
    });
    const void* inputs = rows_for(space, *decoder.vocabulary, normed, rows.num_judged, width);
    return multiply_and_choose(team, space, *decoder.vocabulary, inputs, rows.num_judged, decoder.num_outputs, decoder.finished,
                               num_candidates, logits);
}

}  // namespace forerun
