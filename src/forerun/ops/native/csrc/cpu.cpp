// The C interface of the CPU kernels. Every function runs on the process's team and returns when it is done: 0, or a code of
// `Status`, and then `forerun_message` says what was wrong. No exception leaves it.
//
// Pointers are to contiguous rows unless a comment says otherwise; `storage` says what they hold: 0 fp32, 1 bf16.
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <system_error>

#include "attention_gradients.h"
#include "checks.h"
#include "draft_loss.h"
#include "lookup.h"
#include "merges.h"
#include "sharded_head.h"
#include "sharded_layer.h"

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace forerun {
namespace {

// To be raised, here and in structs.py, with every change of an exported function or of a structure that it reads.
constexpr int32_t kInterfaceVersion = 20;

#if defined(__AMX_BF16__)
constexpr char kLevel[] = "amx";
#elif defined(__AVX512BF16__)
constexpr char kLevel[] = "avx512bf16";
#elif defined(__AVX512VNNI__)
constexpr char kLevel[] = "avx512vnni";
#elif defined(__AVX512F__)
constexpr char kLevel[] = "avx512";
#elif defined(__AVXVNNI__)
constexpr char kLevel[] = "avxvnni";
#elif defined(__AVX2__)
constexpr char kLevel[] = "avx2";
#elif defined(FORERUN_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr char kLevel[] = "neonbf16";
#elif defined(FORERUN_NEON)
constexpr char kLevel[] = "neon";
#else
constexpr char kLevel[] = "portable";
#endif

enum Status : int32_t { kDone = 0, kNoMemory = 1, kNoThreads = 2, kBadArgument = 3, kFailed = 4, kGroupEnded = 5 };

constexpr int64_t kMostThreads = 4096;

thread_local char last_message[160] = "";

Status fail(Status status, const char* message) noexcept {
    std::strncpy(last_message, message, sizeof last_message - 1);
    return status;
}

// The work cannot be finished: another process that shares it is gone.
struct GroupEnded {};

void require_running(const Exchange& exchange) {
    if (exchange.has_ended()) throw GroupEnded();
}

// The border to C: does the work and returns what came of it.
template <class Work>
int32_t guarded(const Work& work) noexcept {
    try {
        work();
        return kDone;
    } catch (const BadArgument& error) {
        return fail(kBadArgument, error.what());
    } catch (const GroupEnded&) {
        return fail(kGroupEnded, "a process of the tensor-parallel group has ended");
    } catch (const std::bad_alloc&) {
        return fail(kNoMemory, "there is not memory enough");
    } catch (const std::length_error&) {
        return fail(kNoMemory, "there is not memory enough");
    } catch (const std::system_error&) {
        return fail(kNoThreads, "the system starts no more threads; lower OMP_NUM_THREADS");
    } catch (...) {
        return fail(kFailed, "the kernels failed");
    }
}

struct Process {
    std::unique_ptr<Team> team;
    Workspace space;
    DecoderSpace decoder;
    ChainSpace chains;
    std::vector<SamplingScratch> sampling;  // of each member of the team
    std::vector<LossScratch> losses;        // likewise
    std::vector<CausalGradients> gradients;
    std::mutex mutex;  // calls of several threads take turns: they would share the workspace
    std::atomic<int> num_threads{1};

    Process() { use_threads(1, {}); }

    void use_threads(int count, std::vector<int> cpus) {
        auto next = std::make_unique<Team>(count, std::move(cpus));
        space.begin_for(count);
        sampling.resize(count);
        losses.resize(count);
        gradients.resize(count);
        team = std::move(next);
        num_threads = count;
    }
};

Process* process = new Process;

// A child has its parent's memory but none of its threads: it begins with a team of its own, of one.
void begin_anew() { process = new Process; }

#if defined(__linux__) || defined(__APPLE__)
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, begin_anew);
#endif

// Shares out the tiles that rows [num_rows, width] make; returns how many there are.
template <class Work>
int64_t each_tile(const bf16* rows, int64_t num_rows, int64_t width, const Work& work) {
    Team& team = *process->team;
    const int64_t tiles = (num_rows + kTile - 1) / kTile;
    team.run([&](int member) {
        for (int64_t tile = team.share(tiles, member); tile < team.share(tiles, member + 1); ++tile)
            work(tile, TileRows{rows + tile * kTile * width, std::min<int64_t>(kTile, num_rows - tile * kTile), width});
    });
    return tiles;
}

// compute(a number of the type that keys and values are stored in).
template <class Compute>
void with_stored(int32_t storage, const Compute& compute) {
    if (storage == kFloat32)
        compute(float{});
    else
        compute(bf16{});
}

void write_candidates(const CandidateList* lists, int64_t num_rows, int32_t count, int32_t* ids, float* values) {
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int place = 0; place < count; ++place) {
            ids[row * count + place] = lists[row].id(place);
            values[row * count + place] = lists[row].value(place);
        }
    }
}

template <class Stored>
void attention(const Pass& pass, const AttentionShape& shape, const void* query, const void* new_key,
               const void* new_value, void* key, void* value, void* out) {
    const int64_t key_width = static_cast<int64_t>(shape.num_kv_heads) * shape.key_dim;
    const int64_t value_width = static_cast<int64_t>(shape.num_kv_heads) * shape.value_dim;
    auto* keys = static_cast<Stored*>(key);
    auto* values = static_cast<Stored*>(value);
    for (int64_t row = 0; row < pass.num_rows; ++row) {
        std::memcpy(keys + pass.slots[row] * key_width, static_cast<const Stored*>(new_key) + row * key_width,
                    key_width * sizeof(Stored));
        std::memcpy(values + pass.slots[row] * value_width, static_cast<const Stored*>(new_value) + row * value_width,
                    value_width * sizeof(Stored));
    }
    auto& members = process->space.attention;
    plan_attention(pass, shape, all_items(shape, members.size()), members, process->space.attention_plan);
    std::atomic<size_t> next{0};
    process->team->run([&](int member) {
        attend_items<Stored>(pass, shape, static_cast<const Stored*>(query), keys, values, process->space.attention_plan, next,
                             process->space.attention[member], static_cast<Stored*>(out),
                             static_cast<int64_t>(shape.num_heads) * shape.value_dim);
    });
}

}  // namespace
}  // namespace forerun

using namespace forerun;

// The version of this interface; of a library that has none, or another, nothing else may be called.
EXPORT int32_t forerun_interface_version() { return kInterfaceVersion; }

// Bytes of the structure of that name, as the caller must lay it out; -1: there is none.
EXPORT int64_t forerun_size_of(const char* name) {
    constexpr struct {
        const char* name;
        int64_t size;
    } structures[] = {{"Weight", sizeof(Weight)},     {"AttentionShape", sizeof(AttentionShape)},
                      {"Sequence", sizeof(Sequence)}, {"Pass", sizeof(Pass)},
                      {"Rotation", sizeof(Rotation)}, {"Layer", sizeof(Layer)},
                      {"Experts", sizeof(Experts)}, {"RareWeight", sizeof(RareWeight)}, {"DraftHead", sizeof(DraftHead)}, {"Decoder", sizeof(Decoder)},
                      {"CacheStack", sizeof(CacheStack)},
                      {"RotationTable", sizeof(RotationTable)}, {"DraftText", sizeof(DraftText)},
                      {"TextIndex", sizeof(lookup::TextIndex)}, {"LiveText", sizeof(lookup::LiveText)},
                      {"ContextTable", sizeof(lookup::ContextTable)}, {"SaltContexts", sizeof(lookup::SaltContexts)},
                      {"SamplingSettings", sizeof(SamplingSettings)}, {"RowEdits", sizeof(RowEdits)},
                      {"Draw", sizeof(Draw)}, {"GroupFlags", sizeof(GroupFlags)},
                      {"Exchange", sizeof(Exchange)}, {"LayerShard", sizeof(LayerShard)}};
    for (const auto& structure : structures)
        if (!std::strcmp(structure.name, name)) return structure.size;
    return -1;
}

// What was wrong in this thread's last call that returned anything but 0.
EXPORT const char* forerun_message() { return last_message; }

// Sets the number of threads; `cpus` [num_threads] are the cores to bind them to, or null.
EXPORT int32_t forerun_set_threads(int32_t num_threads, const int32_t* cpus) {
    return guarded([&] {
        require(num_threads >= 1 && num_threads <= kMostThreads, "the number of threads must be from 1 to 4096");
        const std::lock_guard<std::mutex> lock(process->mutex);
        process->use_threads(num_threads, cpus ? std::vector<int>(cpus, cpus + num_threads) : std::vector<int>{});
    });
}

EXPORT int32_t forerun_num_threads() { return process->num_threads; }

// The name of this build's level.
EXPORT const char* forerun_level() { return kLevel; }

// out [num_rows, num_outputs] fp32 = soft_cap(factor * (rows [num_rows, width] fp32 x weight)); cap 0: none. out null:
// it is not stored. Of each row the `num_candidates` (16 at most) highest outputs go to ids and values [num_rows,
// num_candidates]: the highest first, of equal ones the lowest id first; NaN counts as higher than any number.
EXPORT int32_t forerun_linear(const Weight* weight, const float* rows, int64_t num_rows, int64_t width, int64_t num_outputs,
                              float factor, float cap, float* out, int32_t num_candidates, int32_t* ids, float* values) {
    return guarded([&] {
        check_product(*weight, num_rows, width, num_outputs);
        check_candidates(num_candidates, num_outputs);
        require(out || num_candidates || !num_rows, "neither outputs nor candidates are asked for");
        const std::lock_guard<std::mutex> lock(process->mutex);
        const void* inputs = rows_for(process->space, *weight, rows, num_rows, width);
        const Finishing finished{factor, cap};
        if (!num_candidates) {
            multiply_shared(*process->team, process->space, *weight, inputs, num_rows,
                            [&](int, int64_t row, int64_t output, F16 first, F16 second) {
                                store_outputs(out + row * num_outputs, output, num_outputs, finished(first), finished(second));
                            });
            return;
        }
        const CandidateList* lists = multiply_and_choose(*process->team, process->space, *weight, inputs, num_rows, num_outputs,
                                                         finished, num_candidates, out);
        write_candidates(lists, num_rows, num_candidates, ids, values);
    });
}

// Tables [tiles, 64] for coding `rows` [num_rows, width] bf16, and where each tile's rare weights begin [tiles + 1].
EXPORT int32_t forerun_choose_high_bytes(const bf16* rows, int64_t num_rows, int64_t width, uint8_t* tables,
                                         int64_t* first_rare) {
    return guarded([&] {
        check_rows(num_rows, width);
        const std::lock_guard<std::mutex> lock(process->mutex);
        first_rare[0] = 0;
        const int64_t tiles = each_tile(rows, num_rows, width, [&](int64_t tile, const TileRows& part) {
            first_rare[tile + 1] = choose_high_bytes(part, tables + tile * kTableBytes);
        });
        std::partial_sum(first_rare, first_rare + tiles + 1, first_rare);
    });
}

// The coded tiles of `rows`, with what forerun_choose_high_bytes found.
EXPORT int32_t forerun_code_weight(const bf16* rows, int64_t num_rows, int64_t width, const uint8_t* tables,
                                   const int64_t* first_rare, uint8_t* out, RareWeight* rare) {
    return guarded([&] {
        check_rows(num_rows, width);
        const std::lock_guard<std::mutex> lock(process->mutex);
        each_tile(rows, num_rows, width, [&](int64_t tile, const TileRows& part) {
            code_tile(part, tables + tile * kTableBytes, out + tile * coded_tile_bytes(part.steps() * 2),
                      rare + first_rare[tile]);
        });
    });
}

// out [tiles, tile_bytes] = the tiles of a weight [outputs, inputs] in blocks of that format; where there are `ups` [outputs,
// inputs], too, each tile has 16 outputs of either.
EXPORT int32_t forerun_pack_blocks(int32_t storage, const uint8_t* blocks, const uint8_t* ups, int64_t outputs, int64_t inputs,
                                   int64_t tile_bytes, uint8_t* out) {
    return guarded([&] {
        check_blocks(storage, outputs, inputs);
        require(tile_bytes == block_tile_bytes(block_layout(storage), inputs), "a tile has another size");
        const std::lock_guard<std::mutex> lock(process->mutex);
        Team& team = *process->team;
        const BlockTiles packed{out, inputs, storage};
        const BlockSize size = block_size(storage);
        const int64_t output_bytes = inputs / size.weights * size.bytes;
        const int64_t each = ups ? kLanes : kTile, tiles = (outputs + each - 1) / each;
        std::atomic<int64_t> next{0};  // not shared out evenly: a tokenizer may be built on one of the cores
        team.run([&](int) {
            for (int64_t tile; (tile = next++) < tiles;) {
                const int64_t first = tile * each;
                const HalfTile halves[2] = {{blocks, outputs, output_bytes, first},
                                            {ups ? ups : blocks, outputs, output_bytes, ups ? first : first + kLanes}};
                pack_block_tile(packed, halves, out + tile * tile_bytes);
            }
        });
    });
}

// out [outputs, inputs / 32, 20] = weights [outputs, inputs] fp32, rounded to blocks of Q4_1; `shares` [inputs]: of each input
// in the error of its block.
EXPORT int32_t forerun_round_blocks(const float* weights, const float* shares, int64_t outputs, int64_t inputs, uint8_t* out) {
    return guarded([&] {
        require(is_size(outputs) && is_size(inputs), "the weights' sizes are out of range");
        require(inputs % kRoundedBlock == 0, "the inputs are not whole blocks");
        const std::lock_guard<std::mutex> lock(process->mutex);
        Team& team = *process->team;
        const int64_t parts = (outputs + kLanes - 1) / kLanes;
        team.run([&](int member) {
            for (int64_t part = team.share(parts, member); part < team.share(parts, member + 1); ++part) {
                const int64_t first = part * kLanes;
                round_outputs(weights + first * inputs, inputs, static_cast<int>(std::min<int64_t>(kLanes, outputs - first)),
                              shares, out + first * (inputs / kRoundedBlock) * kRoundedBytes);
            }
        });
    });
}

// out [num_ids, width] fp32 = the weight's rows for output neurons `ids`, times `factor`.
EXPORT int32_t forerun_read_outputs(const Weight* weight, const int64_t* ids, int64_t num_ids, int64_t width, float factor,
                                    float* out) {
    return guarded([&] {
        check_product(*weight, num_ids, width, 0);
        for (int64_t i = 0; i < num_ids; ++i)
            require(ids[i] >= 0 && ids[i] < weight->outputs, "an output is asked for that the weight does not have");
        std::vector<float> row(weight->inputs);
        for (int64_t i = 0; i < num_ids; ++i) {
            read_output(*weight, ids[i], row.data());
            scale_row(row.data(), factor, nullptr, width, out + i * width);
        }
    });
}

// RMSNorm of each row; weight fp32 [width].
EXPORT int32_t forerun_rms_norm(const float* rows, const float* weight, float eps, int64_t num_rows, int64_t width,
                                float* out) {
    return guarded([&] {
        check_rows(num_rows, width);
        const std::lock_guard<std::mutex> lock(process->mutex);
        norm_rows(*process->team, rows, weight, eps, num_rows, width, out);
    });
}

// Rotates rows [num_rows, num_heads, head_dim] fp32 in place.
EXPORT int32_t forerun_rotate(float* rows, const Rotation* rotation, int64_t num_rows, int64_t num_heads, int64_t head_dim) {
    return guarded([&] {
        check_rows(num_rows, num_heads);
        check_rotation(*rotation, head_dim);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t head = 0; head < num_heads; ++head)
                rotate_head(rows + (row * num_heads + head) * head_dim, rotation->cos + row * rotation->half,
                            rotation->sin + row * rotation->half, rotation->half);
    });
}

// out = gated(gates, ups), all [count] fp32.
EXPORT int32_t forerun_gate(const float* gates, const float* ups, int64_t count, int32_t gating, float* out) {
    return guarded([&] {
        check_gating(gating);
        for (int64_t i = 0; i < count; i += kLanes) {
            const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
            store_first(out + i, gated(load_first(gates + i, lanes), load_first(ups + i, lanes), gating), lanes);
        }
    });
}

// Writes the pass's keys and values to the cache, then attends; all tensors but the pass's hold `storage`.
EXPORT int32_t forerun_attention(const Pass* pass, const AttentionShape* shape, int32_t storage, const void* query,
                                 const void* new_key, const void* new_value, void* key, void* value, void* out) {
    return guarded([&] {
        check_storage(storage);
        check_pass(*pass);
        check_attention(*shape);
        const std::lock_guard<std::mutex> lock(process->mutex);
        with_stored(storage, [&]<class Stored>(Stored) {
            attention<Stored>(*pass, *shape, query, new_key, new_value, key, value, out);
        });
    });
}

// Decoder layers one after the other, on the rows of `hidden`, as wide as the first layer reads them, to `out` [rows, width];
// layer i writes its keys and values to keys[i] and values[i] and rotates by rotations[rotation_of[i]]. kept: null, or for each
// layer, and for what follows the last, where the residual stream before it goes, [slots, width] in `storage`, or null.
EXPORT int32_t forerun_decoder_layers(const Layer* const* layers, int64_t num_layers, const Pass* pass,
                                      const Rotation* rotations, const int32_t* rotation_of, int32_t storage,
                                      void* const* keys, void* const* values, void* const* kept, const float* hidden,
                                      float* out) {
    return guarded([&] {
        check_storage(storage);
        check_pass(*pass);
        check_layers(layers, num_layers, storage);
        for (int64_t i = 0; i < num_layers; ++i) check_rotation(rotations[rotation_of[i]], layers[i]->attention.key_dim);
        require(!kept || !num_layers || !kept[0] || !layers[0]->beside_width, "the first layer reads no residual stream alone");
        const LayerStack stack{layers, rotation_of, num_layers, keys, values, kept};
        const std::lock_guard<std::mutex> lock(process->mutex);
        with_stored(storage, [&]<class Stored>(Stored) {
            stack.run<Stored>(*process->team, process->space, *pass, rotations, hidden, out);
        });
    });
}

// All of a decoder's pass, as its parts one by one compute it: logits [num_judged, num_outputs] fp32 at the rows `judged`, and as
// forerun_linear gives them ids and values [num_judged, num_candidates] of the highest, one at least. Rotations are looked up by
// positions [rows]; keys, values and kept are those of forerun_decoder_layers.
EXPORT int32_t forerun_decode(const Decoder* decoder, const RotationTable* tables, int64_t num_tables, const Pass* pass,
                              const int64_t* token_ids, const int64_t* positions, int32_t storage, void* const* keys,
                              void* const* values, void* const* kept, const int64_t* judged, int64_t num_judged,
                              int32_t num_candidates, float* logits, int32_t* ids, float* candidate_logits) {
    return guarded([&] {
        check_storage(storage);
        check_pass(*pass);
        check_decoder(*decoder, storage, tables, num_tables);
        check_candidates(num_candidates, decoder->num_outputs);
        require(num_candidates > 0, "no candidates are asked for");
        const DecoderRows rows{token_ids, positions, judged, num_judged};
        check_decoder_rows(*decoder, *pass, rows, tables, num_tables);
        const LayerStack stack{decoder->layers, decoder->rotation_of, decoder->num_layers, keys, values, kept};
        const std::lock_guard<std::mutex> lock(process->mutex);
        with_stored(storage, [&]<class Stored>(Stored) {
            const CandidateList* lists =
                decode<Stored>(*process->team, process->space, process->decoder, *decoder, stack, tables, num_tables, *pass,
                               rows, num_candidates, logits);
            write_candidates(lists, num_judged, num_candidates, ids, candidate_logits);
        });
    });
}

// Copies what lies at slots `sources` to slots `destinations`, [count] both, in each of the stacks.
EXPORT int32_t forerun_move_slots(const CacheStack* stacks, int64_t num_stacks, const int64_t* sources,
                                  const int64_t* destinations, int64_t count) {
    return guarded([&] {
        require(is_size(count) && is_size(num_stacks), "the number of slots is out of range");
        Buffer<uint8_t> buffer;
        for (int64_t s = 0; s < num_stacks; ++s) {
            for (int64_t i = 0; i < count; ++i)
                for (const int64_t slot : {sources[i], destinations[i]})
                    require(slot >= 0 && slot < stacks[s].num_slots, "a slot is none of the cache");
            stacks[s].move(sources, destinations, count, buffer);
        }
    });
}

// Rank 0 of a group hands a message to the other ranks, and `num_values` of rows to the exchange.
EXPORT int32_t forerun_post(const Exchange* exchange, const uint8_t* message, int64_t num_bytes, const float* rows,
                            int64_t num_values) {
    return guarded([&] {
        check_exchange(*exchange);
        require(num_bytes >= 0 && num_bytes <= exchange->message_room, "the message is larger than its room");
        require(num_values >= 0 && num_values <= exchange->update_room, "the pass has more rows than the exchange has room for");
        if (!exchange->post(message, num_bytes, rows, num_values)) throw GroupEnded();
    });
}

// The next message of rank 0: its bytes, or 0 where none came in time. It stays where it is until forerun_finish.
EXPORT int32_t forerun_receive(const Exchange* exchange, int64_t timeout_ms, int64_t* num_bytes) {
    return guarded([&] {
        check_exchange(*exchange);
        *num_bytes = exchange->receive(timeout_ms);
        if (*num_bytes < 0) throw GroupEnded();
    });
}

// This rank has carried out the message.
EXPORT int32_t forerun_finish(const Exchange* exchange) {
    return guarded([&] { exchange->finish(); });
}

// Ends the group, since `rank` is gone: whoever waits for it stops.
EXPORT int32_t forerun_end_group(const Exchange* exchange, int32_t rank) {
    return guarded([&] { exchange->end(rank); });
}

// The twin of forerun_decoder_layers for one rank of a group; all ranks call it with the same pass, and `layers`, keys and
// values of their own. The pass's rows are in the exchange's `update`; each rank gets the residual stream in `out`.
EXPORT int32_t forerun_sharded_layers(const Exchange* exchange, const LayerShard* shard, const Layer* const* layers,
                                      int64_t num_layers, const Pass* pass, const Rotation* rotations,
                                      const int32_t* rotation_of, int32_t storage, void* const* keys, void* const* values,
                                      void* const* kept, float* out) {
    return guarded([&] {
        check_storage(storage);
        check_pass(*pass);
        check_exchange(*exchange);
        require(pass->num_rows <= exchange->max_rows, "the pass has more rows than the exchange has room for");
        for (int64_t i = 0; i < num_layers; ++i) {
            check_shard(*layers[i], *shard, exchange->num_ranks, storage);
            require(!i || !layers[i]->beside_width, "only the first layer reads rows beside the residual stream");
            check_rotation(rotations[rotation_of[i]], layers[i]->attention.key_dim);
        }
        if (!num_layers) return;
        const int64_t width = layers[0]->width;
        const std::lock_guard<std::mutex> lock(process->mutex);
        if (!layers[0]->beside_width)
            std::memcpy(out, exchange->update, static_cast<size_t>(pass->num_rows * width) * sizeof(float));
        with_stored(storage, [&]<class Stored>(Stored) {
            for (int64_t i = 0; i <= num_layers; ++i) {
                if (kept && kept[i]) keep_rows(*process->team, *pass, out, width, static_cast<Stored*>(kept[i]));
                if (i == num_layers) break;
                ShardedLayerCall<Stored>(*process->team, process->space, *exchange, *shard, *layers[i], *pass,
                                         rotations[rotation_of[i]], static_cast<Stored*>(keys[i]),
                                         static_cast<Stored*>(values[i]), out)
                    .run();
            }
        });
        require_running(*exchange);
    });
}

// The twin of forerun_linear for one rank of a group, over the rows [num_rows, width] in the exchange's `update`: this rank has
// the outputs from `first_output` on. out, ids and values are rank 0's, else null.
EXPORT int32_t forerun_sharded_head(const Exchange* exchange, const Weight* weight, int64_t first_output, int64_t num_rows,
                                    int64_t width, int64_t num_outputs, float factor, float cap, float* out,
                                    int32_t num_candidates, int32_t* ids, float* values) {
    return guarded([&] {
        check_exchange(*exchange);
        check_product(*weight, num_rows, width, 0);
        check_candidates(num_candidates, num_outputs);
        require(num_rows <= exchange->max_rows, "there are more rows than the exchange has room for");
        require(exchange->rank || (out && !first_output), "rank 0 has the first outputs, and gets all of them");
        const std::lock_guard<std::mutex> lock(process->mutex);
        ShardedHead{weight, first_output, num_outputs, {factor, cap}, num_candidates}.run(
            *process->team, process->space, *exchange, num_rows, width, out, ids, values);
        require_running(*exchange);
    });
}

// Drafts a chain after each text, all passes of the head in one call, to drafted [num_texts, most_drafted, num_places]: at each
// depth the chain's token and then its runners-up, -1 where there are none, and margins [num_texts, most_drafted], see
// `ChainCall::run`; layer i of the head writes to keys[i] and values[i], features[i] [slots, feature_width] holds `storage` as they do.
EXPORT int32_t forerun_draft_chains(const DraftHead* head, const RotationTable* tables, int64_t num_tables,
                                    const DraftText* texts, int64_t num_texts, int64_t block_size, const int64_t* token_ids,
                                    const void* const* features, int32_t storage, void* const* keys, void* const* values,
                                    int64_t most_drafted, int64_t num_places, int64_t* drafted, float* margins) {
    return guarded([&] {
        check_storage(storage);
        check_head(*head, storage);
        require(num_places > 0 && num_places <= kMostCandidates, "the number of tokens at a place is out of range");
        check_texts(texts, num_texts, block_size, token_ids, head->embedding.num_tokens, tables, num_tables, most_drafted);
        check_rotations(head->layers, head->rotation_of, head->num_layers, tables, num_tables);
        const std::lock_guard<std::mutex> lock(process->mutex);
        with_stored(storage, [&]<class Stored>(Stored) {
            ChainCall<Stored>(*process->team, process->space, process->chains, *head, tables, num_tables, texts, block_size,
                              features, keys, values)
                .run(num_texts, token_ids, drafted, margins, most_drafted, static_cast<int>(num_places));
        });
    });
}

// Draws from rows of `logits` [num_rows, vocab_size] fp32: ids [num_draws, count] of each race's first tokens, -1 where there
// are fewer; largest [num_draws]: each row's largest logit after its edits. Where that is not finite there are no tokens.
// candidates [num_rows, num_candidates]: what forerun_linear found in the same logits, or null.
EXPORT int32_t forerun_sample(const float* logits, int64_t num_rows, int64_t vocab_size, const float* candidates,
                              int64_t num_candidates, const Draw* draws, int64_t num_draws, int64_t count, int64_t* ids,
                              float* largest) {
    return guarded([&] {
        check_rows(num_rows, vocab_size);
        require(vocab_size > 0, "the vocabulary is empty");
        require(is_size(num_draws) && is_size(count) && count > 0, "the number of draws is out of range");
        bool edits = false, truncates = false;
        for (int64_t i = 0; i < num_draws; ++i) {
            check_draw(draws[i], num_rows, vocab_size);
            edits |= draws[i].edits != nullptr;
            truncates |= draws[i].settings->truncates();
        }
        const std::lock_guard<std::mutex> lock(process->mutex);
        for (SamplingScratch& scratch : process->sampling) scratch.grow(vocab_size, count, edits, truncates);
        std::atomic<int64_t> next{0};
        const auto draw_rows = [&](int member) {
            for (int64_t i = next++; i < num_draws; i = next++)
                largest[i] = draw_from_row(logits, vocab_size, draws[i], count,
                                           candidates ? candidates + draws[i].row * num_candidates : nullptr,
                                           process->sampling[member], ids + i * count);
        };
        if (num_draws == 1) return draw_rows(0);
        process->team->run(draw_rows);
    });
}

// Turns logits [num_rows, count] into the gradient of a head's loss by them. wanted: the target's probabilities, [num_rows, count];
// losses [num_rows]; measured: [num_rows, 2], or null: the chance that a row's draft is accepted, and 1 where both first choices
// are the same. logits and wanted hold `storage`.
EXPORT int32_t forerun_draft_loss(void* logits, const void* wanted, int64_t num_rows, int64_t count, int32_t storage,
                                  int32_t is_hybrid, float* losses, float* measured) {
    return guarded([&] {
        check_storage(storage);
        check_rows(num_rows, count);
        const std::lock_guard<std::mutex> lock(process->mutex);
        for (LossScratch& scratch : process->losses) scratch.grow(count);
        with_stored(storage, [&]<class Stored>(Stored) {
            std::atomic<int64_t> next{0};
            process->team->run([&](int member) {
                for (int64_t row = next++; row < num_rows; row = next++) {
                    const Drafted drafted =
                        loss_row(static_cast<Stored*>(logits) + row * count, static_cast<const Stored*>(wanted) + row * count,
                                 count, is_hybrid != 0, measured != nullptr, process->losses[member]);
                    losses[row] = drafted.loss;
                    if (!measured) continue;
                    measured[2 * row] = drafted.accepted;
                    measured[2 * row + 1] = drafted.is_equal;
                }
            });
        });
    });
}

// probs [num_rows, num_ids] in `storage`: of the softmax of logits [num_rows, count] fp32 the values at `ids`.
EXPORT int32_t forerun_drafted_probs(const float* logits, int64_t num_rows, int64_t count, const int64_t* ids, int64_t num_ids,
                                     int32_t storage, void* probs) {
    return guarded([&] {
        check_storage(storage);
        check_rows(num_rows, count);
        check_rows(num_rows, num_ids);
        require(std::all_of(ids, ids + num_ids, [&](int64_t id) { return id >= 0 && id < count; }), "an id is no place of the rows");
        const std::lock_guard<std::mutex> lock(process->mutex);
        with_stored(storage, [&]<class Stored>(Stored) {
            std::atomic<int64_t> next{0};
            process->team->run([&](int) {
                for (int64_t row = next++; row < num_rows; row = next++)
                    drafted_probs_row(logits + row * count, count, ids, num_ids, static_cast<Stored*>(probs) + row * num_ids);
            });
        });
    });
}

// Gradients of causal attention: all [num_heads, num_rows, dim] bf16, but log_sums [num_heads, num_rows]; see CausalHead.
EXPORT int32_t forerun_attention_gradients(const bf16* query, const bf16* key, const bf16* value, const bf16* out,
                                           const float* log_sums, const bf16* of_out, int64_t num_heads, int64_t num_rows,
                                           int64_t dim, float scale, bf16* of_query, bf16* of_key, bf16* of_value) {
    return guarded([&] {
        check_rows(num_heads, num_rows);
        check_rows(num_heads * num_rows, dim);
        require(dim > 0 && dim % kSide == 0, "the dimensions of a head are not whole blocks");
        const std::lock_guard<std::mutex> lock(process->mutex);
        for (CausalGradients& gradients : process->gradients) gradients.begin(num_rows, dim);
        std::atomic<int64_t> next{0};
        process->team->run([&](int member) {
#if defined(__AMX_BF16__)
            const Matrices matrices;
            Matrices::shape(kMatrixRows, kMatrixSteps);
#endif
            for (int64_t i = next++; i < num_heads; i = next++) {
                const int64_t first = i * num_rows * dim;
                const CausalHead head{query + first, key + first,     value + first,
                                      out + first,   of_out + first,  log_sums + i * num_rows,
                                      of_query + first, of_key + first, of_value + first};
                process->gradients[member].compute(head, scale);
            }
        });
    });
}

// Reads `count` 64-bit words once by all threads, fetched as weights are; `total`, their exclusive or, keeps the compiler from leaving it out.
EXPORT int32_t forerun_read(const uint64_t* words, int64_t count, uint64_t* total) {
    return guarded([&] {
        require(count >= 0, "the number of words is negative");
        const std::lock_guard<std::mutex> lock(process->mutex);
        Team& team = *process->team;
        std::atomic<uint64_t> all{0};
        team.run([&](int member) {
            uint64_t sums[32] = {};
            const int64_t lines = count / 32, last = team.share(lines, member + 1);
            for (int64_t line = team.share(lines, member); line < last; ++line) {
                const char* ahead = reinterpret_cast<const char*>(words + line * 32) + kBytesAhead;
                for (int i = 0; i < 256; i += kCacheLine) fetch_line(ahead + i, kCachesForOneReading);
                for (int i = 0; i < 32; ++i) sums[i] ^= words[line * 32 + i];
            }
            if (member == 0)
                for (int64_t i = lines * 32; i < count; ++i) sums[0] ^= words[i];
            for (uint64_t sum : sums) all ^= sum;
        });
        *total = all;
    });
}

// parts [count, 2] = the two words that BPE merges last into each word, or -1; see merges.h.
EXPORT int32_t forerun_find_merges(const uint32_t* codes, const int64_t* ends, const double* scores, int64_t count, int32_t* parts) {
    return guarded([&] {
        require(is_size(count) && count < std::numeric_limits<int32_t>::max(), "the number of words is out of range");
        int64_t longest = 0;
        for (int64_t word = 0; word < count; ++word) {
            const int64_t length = ends[word] - (word ? ends[word - 1] : 0);
            require(length >= 0, "the words are not one after the other");
            longest = std::max(longest, length);
        }
        const std::lock_guard<std::mutex> lock(process->mutex);
        Team& team = *process->team;
        const merging::Words words{codes, ends, scores, count};
        const merging::WordTable table(words);
        std::vector<merging::Parts> of_member;
        for (int member = 0; member < team.size(); ++member) of_member.emplace_back(words, table, longest);
        constexpr int64_t at_once = 1 << 10;
        std::atomic<int64_t> next{0};  // not shared out evenly: weights may be packed on one of the cores
        team.run([&](int member) {
            for (int64_t first; (first = next.fetch_add(at_once)) < count;)
                merging::find_last_merges(words, of_member[member], first, std::min(count, first + at_once), parts);
        });
    });
}

// Appends tokens to an index; none of the functions of look-ups computes on the team, so calls may overlap.
EXPORT int32_t forerun_extend_text(lookup::TextIndex* index, const int32_t* token_ids, int64_t count) {
    return guarded([&] {
        check_index(*index);
        require(is_size(count), "the number of tokens is out of range");
        for (int64_t i = 0; i < count; ++i) index->append(token_ids[i]);
    });
}

// Looks up where a text's copies go on.
EXPORT int32_t forerun_settle_text(lookup::LiveText* text) {
    return guarded([&] {
        check_text(*text);
        lookup::settle(*text, {});
    });
}

// Text i learns from its new tokens, token_ids [first[i] .. first[i + 1]), and appends them.
EXPORT int32_t forerun_take_tokens(lookup::LiveText* const* texts, int64_t num_texts, const int32_t* token_ids,
                                   const int64_t* first, double (*counts)[4], const double* gap_weights) {
    return guarded([&] {
        const lookup::HitRates rates{counts, gap_weights};
        for (int64_t i = 0; i < num_texts; ++i) {
            check_text(*texts[i]);
            require(first[i] <= first[i + 1] && texts[i]->own.end + first[i + 1] - first[i] <= texts[i]->own.mask,
                    "a text has no room for its new tokens");
            for (int64_t at = first[i]; at < first[i + 1]; ++at) lookup::take(*texts[i], token_ids[at], rates);
        }
    });
}

// The best draft after each text, within limits [2, num_texts] (nodes, depths) and min_survival [num_texts]. Drafts lie one
// behind the other in arrays with `room` for nodes: num_nodes[i] are the i-th one's.
EXPORT int32_t forerun_grow_drafts(const lookup::LiveText* const* texts, int64_t num_texts, const int64_t* limits,
                                   const double* min_survival, double (*counts)[4], const double* gap_weights, int64_t room,
                                   int32_t* token_ids, int32_t* parents, int32_t* sources, double* survival,
                                   int64_t* num_nodes) {
    return guarded([&] {
        const lookup::HitRates rates{counts, gap_weights};
        lookup::Grower grower;
        int64_t first = 0;
        for (int64_t i = 0; i < num_texts; ++i) {
            check_text(*texts[i]);
            const lookup::DraftLimits limit{limits[i], limits[num_texts + i], min_survival[i]};
            require(limit.max_nodes >= 0 && limit.max_nodes <= room - first && limit.max_depth >= 0,
                    "a draft may have more nodes than there is room for");
            const lookup::DraftNodes draft{token_ids + first, parents + first, sources + first, survival + first};
            num_nodes[i] = grower.grow(*texts[i], limit, rates, draft);
            first += num_nodes[i];
        }
    });
}

// Stores each row's candidates, of whose likeliest ones the tables keep the first, under its token and under its last two;
// num_used [2] grows by the slots that were empty.
EXPORT int32_t forerun_learn_rows(const lookup::SaltContexts* contexts, const int64_t* token_ids, const int64_t* previous_ids,
                                  int64_t num_rows, const int32_t* candidate_ids, const float* candidate_logits,
                                  int64_t num_candidates, int64_t* num_used) {
    return guarded([&] {
        check_contexts(*contexts);
        check_rows(num_rows, num_candidates);
        require(contexts->ones->num_candidates <= num_candidates, "there are fewer candidates than the table keeps");
        for (int64_t row = 0; row < num_rows; ++row) {
            const int32_t* ids = candidate_ids + row * num_candidates;
            const float* logits = candidate_logits + row * num_candidates;
            const uint64_t key = static_cast<uint64_t>(token_ids[row]) + 1;
            num_used[0] += contexts->ones->store(key, ids, logits);
            if (previous_ids[row] >= 0)
                num_used[1] += contexts->twos->store((static_cast<uint64_t>(previous_ids[row]) << 32) + key, ids, logits);
        }
    });
}
