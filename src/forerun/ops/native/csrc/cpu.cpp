// The C interface of the CPU kernels. Every function runs on the process's team and returns when it is done.
//
// Pointers are to contiguous rows unless a comment says otherwise; `storage` says what they hold: 0 fp32, 1 bf16.
#include <memory>
#include <numeric>

#include "layer.h"

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace forerun {
namespace {

struct Process {
    std::unique_ptr<Team> team;
    Workspace space;
    std::mutex mutex;  // calls of several threads take turns: they would share the workspace

    Process() { use_threads(1, {}); }

    void use_threads(int num_threads, std::vector<int> cpus) {
        team = std::make_unique<Team>(num_threads, std::move(cpus));
        space.attention.resize(num_threads);
    }
};

Process* process = new Process;

// A child has its parent's memory but none of its threads: it begins with a team of its own, of one.
void begin_anew() { process = new Process; }

template <class Stored>
const Stored* stored_rows(const float* rows, int64_t num_rows, int64_t width, int64_t padded, std::vector<uint8_t>& buffer) {
    Stored* stored = Workspace::grown<Stored>(buffer, num_rows * padded);
    for (int64_t row = 0; row < num_rows; ++row) {
        std::fill(stored + row * padded + width, stored + (row + 1) * padded, Stored{});
        store_row(rows + row * width, width, stored + row * padded);
    }
    return stored;
}

const void* rows_for(const Weight& weight, const float* rows, int64_t num_rows, int64_t width) {
    auto& buffer = process->space.inputs;
    if (weight.narrow_inputs()) return stored_rows<bf16>(rows, num_rows, width, weight.inputs, buffer);
    return stored_rows<float>(rows, num_rows, width, weight.inputs, buffer);
}

F16 finished(F16 sum, float factor, float cap) {
    if (factor != 1.0f) sum = sum * splat(factor);
    return soft_cap(sum, cap);
}

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
    plan_attention(pass, shape, process->team->size(), process->space.items);
    std::atomic<size_t> next{0};
    process->team->run([&](int member) {
        attend_items<Stored>(pass, shape, static_cast<const Stored*>(query), keys, values, process->space.items, next,
                             process->space.attention[member], static_cast<Stored*>(out));
    });
}

}  // namespace
}  // namespace forerun

using namespace forerun;

// Sets the number of threads; `cpus` [num_threads] are the cores to bind them to, or null.
EXPORT void forerun_set_threads(int32_t num_threads, const int32_t* cpus) {
#if defined(__linux__)
    static const int registered = pthread_atfork(nullptr, nullptr, begin_anew);
    (void)registered;
#endif
    const std::lock_guard<std::mutex> lock(process->mutex);
    process->use_threads(num_threads, cpus ? std::vector<int>(cpus, cpus + num_threads) : std::vector<int>{});
}

EXPORT int32_t forerun_num_threads() { return process->team->size(); }

// What this build was compiled for, and whether this CPU has it.
#if defined(__x86_64__) && defined(__AVX512BF16__)
#define LEVEL "avx512bf16"
#define RUNS_HERE \
    __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && \
        __builtin_cpu_supports("avx512dq")
#elif defined(__x86_64__) && defined(__AVX512F__)
#define LEVEL "avx512"
#define RUNS_HERE \
    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
#elif defined(__x86_64__) && defined(__AVX2__)
#define LEVEL "avx2"
#define RUNS_HERE __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
#else
#define LEVEL "portable"
#define RUNS_HERE true
#endif

// The name of this build's level.
EXPORT const char* forerun_level() { return LEVEL; }

// To be asked before anything that computes is called.
EXPORT int32_t forerun_runs_here() { return RUNS_HERE; }

// out [num_rows, num_outputs] fp32 = soft_cap(factor * (rows [num_rows, width] fp32 x weight)); soft_cap 0: none.
EXPORT void forerun_linear(const Weight* weight, const float* rows, int64_t num_rows, int64_t width, int64_t num_outputs,
                           float factor, float cap, float* out) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    const void* inputs = rows_for(*weight, rows, num_rows, width);
    Team& team = *process->team;
    team.run([&](int member) {
        multiply(*weight, inputs, num_rows, team.share(weight->tiles(), member), team.share(weight->tiles(), member + 1),
                 [&](int64_t row, int64_t output, F16 first, F16 second) {
                     for (int half = 0; half < 2; ++half, output += kLanes) {
                         const int64_t left = num_outputs - output;
                         if (left <= 0) return;
                         store_first(out + row * num_outputs + output, finished(half ? second : first, factor, cap),
                                     static_cast<int>(std::min<int64_t>(kLanes, left)));
                     }
                 });
    });
}

// ids [num_rows] = the output with the highest value of forerun_linear's, the first of equal ones.
EXPORT void forerun_linear_argmax(const Weight* weight, const float* rows, int64_t num_rows, int64_t width,
                                  int64_t num_outputs, float factor, float cap, int64_t* ids) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    const void* inputs = rows_for(*weight, rows, num_rows, width);
    Team& team = *process->team;
    struct Best {
        float value = -std::numeric_limits<float>::infinity();
        int64_t id = 0;
    };
    std::vector<Best> best(static_cast<size_t>(team.size()) * num_rows);
    team.run([&](int member) {
        multiply(*weight, inputs, num_rows, team.share(weight->tiles(), member), team.share(weight->tiles(), member + 1),
                 [&](int64_t row, int64_t output, F16 first, F16 second) {
                     Best& own = best[member * num_rows + row];
                     first = finished(first, factor, cap);
                     second = finished(second, factor, cap);
                     if (max_lanes(max(first, second)) <= own.value && output) return;
                     float lanes[kTile];
                     store(lanes, first);
                     store(lanes + kLanes, second);
                     for (int i = 0; i < kTile && output + i < num_outputs; ++i)
                         if (lanes[i] > own.value) own = {lanes[i], output + i};
                 });
    });
    for (int64_t row = 0; row < num_rows; ++row) {
        Best found = best[row];
        for (int member = 1; member < team.size(); ++member)
            if (best[member * num_rows + row].value > found.value) found = best[member * num_rows + row];
        ids[row] = found.id;
    }
}

// Tables [tiles, 64] for coding `rows` [num_rows, width] bf16, and where each tile's rare weights begin [tiles + 1].
EXPORT void forerun_choose_high_bytes(const bf16* rows, int64_t num_rows, int64_t width, uint8_t* tables, int64_t* first_rare) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    first_rare[0] = 0;
    const int64_t tiles = each_tile(rows, num_rows, width, [&](int64_t tile, const TileRows& part) {
        first_rare[tile + 1] = choose_high_bytes(part, tables + tile * kTableBytes);
    });
    std::partial_sum(first_rare, first_rare + tiles + 1, first_rare);
}

// The coded tiles of `rows`, with what forerun_choose_high_bytes found.
EXPORT void forerun_code_weight(const bf16* rows, int64_t num_rows, int64_t width, const uint8_t* tables,
                                const int64_t* first_rare, uint8_t* out, RareWeight* rare) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    each_tile(rows, num_rows, width, [&](int64_t tile, const TileRows& part) {
        code_tile(part, tables + tile * kTableBytes, out + tile * coded_tile_bytes(part.steps() * 2),
                  rare + first_rare[tile]);
    });
}

// out [num_ids, width] fp32 = the weight's rows for output neurons `ids`, times `factor`.
EXPORT void forerun_read_outputs(const Weight* weight, const int64_t* ids, int64_t num_ids, int64_t width, float factor,
                                 float* out) {
    std::vector<float> row(weight->inputs);
    for (int64_t i = 0; i < num_ids; ++i) {
        read_output(*weight, ids[i], row.data());
        scale_row(row.data(), factor, nullptr, width, out + i * width);
    }
}

constexpr int64_t kFewRows = 16;  // are done before the team has been called

// RMSNorm of each row; weight fp32 [width].
EXPORT void forerun_rms_norm(const float* rows, const float* weight, float eps, int64_t num_rows, int64_t width, float* out) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    Team& team = *process->team;
    const auto norm_rows = [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) norm_row(rows + row * width, weight, eps, width, out + row * width);
    };
    if (num_rows < kFewRows) return norm_rows(0, num_rows);
    team.run([&](int member) { norm_rows(team.share(num_rows, member), team.share(num_rows, member + 1)); });
}

// Rotates rows [num_rows, num_heads, head_dim] fp32 in place.
EXPORT void forerun_rotate(float* rows, const Rotation* rotation, int64_t num_rows, int64_t num_heads, int64_t head_dim) {
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t head = 0; head < num_heads; ++head)
            rotate_head(rows + (row * num_heads + head) * head_dim, rotation->cos + row * rotation->half,
                        rotation->sin + row * rotation->half, rotation->half);
}

// out = activation(gates) * ups, all [count] fp32.
EXPORT void forerun_gate(const float* gates, const float* ups, int64_t count, int32_t activation, float* out) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
        store_first(out + i, activate(load_first(gates + i, lanes), activation) * load_first(ups + i, lanes), lanes);
    }
}

// Writes the pass's keys and values to the cache, then attends; all tensors but the pass's hold `storage`.
EXPORT void forerun_attention(const Pass* pass, const AttentionShape* shape, int32_t storage, const void* query,
                              const void* new_key, const void* new_value, void* key, void* value, void* out) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    if (storage == kFloat32)
        attention<float>(*pass, *shape, query, new_key, new_value, key, value, out);
    else
        attention<bf16>(*pass, *shape, query, new_key, new_value, key, value, out);
}

// Decoder layers one after the other, on the rows of `hidden`, as wide as the first layer reads them, to `out` [rows, width];
// layer i writes its keys and values to keys[i] and values[i] and rotates by rotations[rotation_of[i]].
EXPORT void forerun_decoder_layers(const Layer* const* layers, int64_t num_layers, const Pass* pass, const Rotation* rotations,
                                   const int32_t* rotation_of, int32_t storage, void* const* keys, void* const* values,
                                   const float* hidden, float* out) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    for (int64_t i = 0; i < num_layers; ++i) {
        const Rotation& rotation = rotations[rotation_of[i]];
        const float* rows = i ? out : hidden;
        if (storage == kFloat32)
            LayerCall<float>(*process->team, process->space, *layers[i], *pass, rotation, static_cast<float*>(keys[i]),
                             static_cast<float*>(values[i]), rows, out)
                .run();
        else
            LayerCall<bf16>(*process->team, process->space, *layers[i], *pass, rotation, static_cast<bf16*>(keys[i]),
                            static_cast<bf16*>(values[i]), rows, out)
                .run();
    }
}

// Reads `count` 64-bit words once by all threads; the result keeps the compiler from leaving it out.
EXPORT uint64_t forerun_read(const uint64_t* words, int64_t count) {
    const std::lock_guard<std::mutex> lock(process->mutex);
    Team& team = *process->team;
    std::atomic<uint64_t> total{0};
    team.run([&](int member) {
        uint64_t sums[32] = {};
        const int64_t lines = count / 32, last = team.share(lines, member + 1);
        for (int64_t line = team.share(lines, member); line < last; ++line)
            for (int i = 0; i < 32; ++i) sums[i] ^= words[line * 32 + i];
        for (uint64_t sum : sums) total ^= sum;
    });
    return total;
}
