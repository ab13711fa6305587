// Cuts a weight in GGUF's blocks into tiles: the same codes and scales in another order.
#pragma once

#include "blocks.h"

namespace forerun {

constexpr int kMostBlockWeights = 256;

// What a block of one output holds.
struct Block {
    uint8_t codes[kMostBlockWeights];
    uint16_t whole[2];        // scale and offset (of a block of many groups: minimum), as bits of fp16 or bf16
    uint8_t steps[2][16];     // of each group
    float scale, offset;      // of formats that have them in fp32
};

struct BlockSize {
    int weights, bytes;
};

inline BlockSize block_size(int32_t storage) {
    static constexpr BlockSize sizes[] = {{32, 34},   {32, 18},   {32, 20},   {32, 22},  {32, 24},   {256, 84}, {256, 110},
                                          {256, 144}, {256, 176}, {256, 210}, {32, 18}, {256, 136}, {32, 17},  {16, 24}};
    return sizes[storage - kQ8_0];
}

inline uint16_t read16(const uint8_t* bytes) { return static_cast<uint16_t>(bytes[0] | bytes[1] << 8); }

// Low halves of `count` bytes, then their high halves.
inline void split_nibbles(const uint8_t* packed, int count, uint8_t* codes) {
    for (int i = 0; i < count; ++i) {
        codes[i] = packed[i] & 15;
        codes[count + i] = packed[i] >> 4;
    }
}

// Ors bits [width * i, width * (i + 1)) of `count` bytes into codes i * count and so on, shifted left by `to`.
inline void or_bits(const uint8_t* packed, int count, int width, int to, uint8_t* codes) {
    for (int part = 0; part < 8 / width; ++part)
        for (int i = 0; i < count; ++i)
            codes[part * count + i] |= static_cast<uint8_t>((packed[i] >> part * width & ((1 << width) - 1)) << to);
}

// A bit for each of 32 codes, eight to a byte: their fifth.
inline void or_fifth_bits(const uint8_t* packed, uint8_t* codes) {
    for (int byte = 0; byte < 4; ++byte)
        for (int i = 0; i < 8; ++i) codes[8 * byte + i] |= static_cast<uint8_t>((packed[byte] >> i & 1) << 4);
}

// Eight 6-bit steps of scales and eight of minima in 12 bytes.
inline void split_steps(const uint8_t* packed, uint8_t (&steps)[2][16]) {
    for (int i = 0; i < 4; ++i) {
        for (int set = 0; set < 2; ++set) {
            const uint8_t byte = packed[4 * set + i];
            steps[set][i] = byte & 63;
            steps[set][4 + i] = static_cast<uint8_t>((packed[8 + i] >> 4 * set & 15) | byte >> 6 << 4);
        }
    }
}

// The twin in torch is the `split` of each row of BLOCK_FORMATS.
inline void split_block(int32_t storage, const uint8_t* bytes, Block& block) {
    uint8_t* codes = block.codes;
    switch (storage) {
        case kQ8_0:
            block.whole[0] = read16(bytes);
            std::copy(bytes + 2, bytes + 34, codes);
            break;
        case kQ4_0:
        case kIQ4_NL:
            block.whole[0] = read16(bytes);
            split_nibbles(bytes + 2, 16, codes);
            break;
        case kQ4_1:
            block.whole[0] = read16(bytes);
            block.whole[1] = read16(bytes + 2);
            split_nibbles(bytes + 4, 16, codes);
            break;
        case kQ5_0:
            block.whole[0] = read16(bytes);
            split_nibbles(bytes + 6, 16, codes);
            or_fifth_bits(bytes + 2, codes);
            break;
        case kQ5_1:
            block.whole[0] = read16(bytes);
            block.whole[1] = read16(bytes + 2);
            split_nibbles(bytes + 8, 16, codes);
            or_fifth_bits(bytes + 4, codes);
            break;
        case kQ2_K:
            std::copy(bytes, bytes + 16, block.steps[0]);
            std::fill(codes, codes + 256, 0);
            for (int part = 0; part < 2; ++part) or_bits(bytes + 16 + 32 * part, 32, 2, 0, codes + 128 * part);
            block.whole[0] = read16(bytes + 80);
            block.whole[1] = read16(bytes + 82);
            break;
        case kQ3_K:
            std::fill(codes, codes + 256, 0);
            or_bits(bytes, 32, 1, 2, codes);
            for (int part = 0; part < 2; ++part) or_bits(bytes + 32 + 32 * part, 32, 2, 0, codes + 128 * part);
            split_nibbles(bytes + 96, 8, block.steps[0]);
            or_bits(bytes + 104, 4, 2, 4, block.steps[0]);
            for (uint8_t& step : block.steps[0]) step = static_cast<uint8_t>(step - 32);
            block.whole[0] = read16(bytes + 108);
            break;
        case kQ4_K:
        case kQ5_K: {
            const uint8_t* nibbles = bytes + (storage == kQ4_K ? 16 : 48);
            block.whole[0] = read16(bytes);
            block.whole[1] = read16(bytes + 2);
            split_steps(bytes + 4, block.steps);
            for (int part = 0; part < 4; ++part) split_nibbles(nibbles + 32 * part, 32, codes + 64 * part);
            if (storage == kQ5_K) or_bits(bytes + 16, 32, 1, 4, codes);
            break;
        }
        case kQ6_K:
            for (int part = 0; part < 2; ++part) {
                split_nibbles(bytes + 64 * part, 64, codes + 128 * part);
                or_bits(bytes + 128 + 32 * part, 32, 2, 4, codes + 128 * part);
            }
            std::copy(bytes + 192, bytes + 208, block.steps[0]);
            block.whole[0] = read16(bytes + 208);
            break;
        case kIQ4_XS:
            block.whole[0] = read16(bytes);
            for (int i = 0; i < 8; ++i) {
                const int low = bytes[4 + i / 2] >> 4 * (i % 2) & 15, high = read16(bytes + 2) >> 2 * i & 3;
                block.steps[0][i] = static_cast<uint8_t>((low | high << 4) - 32);
                split_nibbles(bytes + 8 + 16 * i, 16, codes + 32 * i);
            }
            break;
        case kMXFP4:  // a power of two, one less than E8M0 has it, since the codes' values are doubled
            block.whole[0] = static_cast<uint16_t>(bytes[0] > 1 ? (bytes[0] - 1) << 7 : 0x20 << bytes[0]);
            split_nibbles(bytes + 1, 16, codes);
            break;
        default:
            std::memcpy(&block.scale, bytes, 4);
            std::memcpy(&block.offset, bytes + 4, 4);
            std::copy(bytes + 8, bytes + 24, codes);
    }
}

// Writes what the header has of an output's block, the `index`-th along the inputs.
inline void put_scales(const BlockLayout& layout, const Block& block, int64_t inputs, int64_t index, int lane, uint8_t* header) {
    const int sets = layout.per_group();
    if (layout.scales == Scales::kFloat) {
        std::memcpy(header + (index * sets * kTile + lane) * 4, &block.scale, 4);
        std::memcpy(header + ((index * sets + 1) * kTile + lane) * 4, &block.offset, 4);
        return;
    }
    for (int set = 0; set < sets; ++set) std::memcpy(header + ((index * sets + set) * kTile + lane) * 2, &block.whole[set], 2);
    if (layout.scales == Scales::kHalf || layout.scales == Scales::kBrain) return;
    const int64_t groups = kStepsInputs / layout.group;
    const int step_sets = layout.scales == Scales::kSharedSteps ? 1 : sets;
    header += inputs / kStepsInputs * sets * kTile * 2;
    for (int64_t group = 0; group < groups; ++group)
        for (int set = 0; set < step_sets; ++set)
            header[((index * groups + group) * step_sets + set) * kTile + lane] = block.steps[set][group];
}

// Where half of a tile's outputs lie: [count, bytes of an output]; the rest of its 16 are zeros.
struct HalfTile {
    const uint8_t* blocks;
    int64_t count;

    // Of those of a weight [outputs, bytes of an output] from one on.
    HalfTile(const uint8_t* weight, int64_t outputs, int64_t output_bytes, int64_t first)
        : blocks(weight + std::min(first, outputs) * output_bytes),
          count(std::clamp<int64_t>(outputs - first, 0, kLanes)) {}
};

// Writes a tile of outputs.
inline void pack_block_tile(const BlockTiles& tiles, const HalfTile (&halves)[2], uint8_t* out) {
    const BlockLayout& layout = tiles.layout();
    const BlockSize size = block_size(tiles.storage);
    const int64_t num_blocks = tiles.inputs / size.weights;
    const int64_t output_bytes = num_blocks * size.bytes;
    const int width = std::max(size.weights, kUnitInputs);  // inputs that are packed at once
    uint8_t* unit = out + header_bytes(layout, tiles.inputs);
    uint8_t codes[kMostBlockWeights * kTile] = {};
    std::fill(out, unit, 0);
    Block block{};
    for (int64_t index = 0; index < num_blocks;) {
        for (int first = 0; first < width; first += size.weights, ++index) {
            for (int half = 0; half < 2; ++half) {
                const uint8_t* blocks = halves[half].blocks + index * size.bytes;
                for (int i = 0, lane = half * kLanes; i < halves[half].count; ++i, ++lane, blocks += output_bytes) {
                    split_block(tiles.storage, blocks, block);
                    put_scales(layout, block, tiles.inputs, index, lane, out);
                    for (int weight = 0; weight < size.weights; weight += 2)
                        std::memcpy(codes + (first + weight) / 2 * kStepWeights + 2 * lane, block.codes + weight, 2);
                }
            }
        }
        for (int i = 0; i < width; i += kUnitInputs, unit += unit_bytes(layout.bits()))
            pack_unit(codes + i * kTile, layout.low_bits, layout.high_bits, unit);
    }
}

}  // namespace forerun
