// What the codec is told about a record, and what it offers. Little-endian hosts only.
//
// A record holds one block of one group: tiles of T tokens by D channels, one after another. Every
// number here was checked by the caller (codec/places.py); bytes of records were not.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Item { BF16 = 1, FP16 = 2, FP32 = 4 };
enum Kind { KEYS = 0, VALUES = 1 };

constexpr int TOKENS_MAX = 64;      // of a tile; a multiple of 8
constexpr int CHANNELS_MAX = 1024;  // of a tile; a multiple of 16
constexpr int GROUP = 64;           // channels that share a maximum in L3
constexpr size_t HEADER = 64;
constexpr size_t LEAF_NBYTES = 64 << 10;  // what of a record is summed up by itself

struct Layer {
    uint64_t address;  // of block 0
    int64_t stride;    // bytes from a block to the next one
};

// Token t of channel c lies at first + (t / token_run) * token_far + t % token_run * token + the
// same of the channel, in bytes from the layer's part of the block.
struct Tile {
    int64_t first;
    int64_t token, token_far;
    int64_t channel, channel_far;
    uint32_t layer;
    uint16_t tokens, channels;
    uint16_t token_run, channel_run;
    uint16_t kind;
    uint16_t unused[5];
};

struct Plan {
    const Layer* layers;
    const Tile* tiles;
    const float* signs;  // of EP's rotation, a channel each; CHANNELS_MAX of them
    uint32_t tiles_count;
    uint32_t item;
    uint64_t table_at;  // L3: group table
    uint64_t body_at;   // L3: first tile
    uint64_t tail_at;   // L3: escapes
};

static_assert(sizeof(Tile) == 64, "TILE in places.py");

static inline size_t whole(size_t nbytes) { return (nbytes + 15) & ~size_t(15); }
static inline size_t l3_nbytes(const Tile& tile, int item) {
    size_t values = size_t(tile.tokens) * tile.channels;
    return whole(values + tile.channels / 2 + values / 8 * 3 + (item == FP32 ? values * 2 : 0));
}
static inline size_t stripes_of(const Tile& tile) { return tile.kind == KEYS ? tile.channels : tile.tokens; }
static inline size_t ep_nbytes(const Tile& tile, int planes, bool with_stripes) {
    size_t values = size_t(tile.tokens) * tile.channels;
    return whole(values / 8 * planes + (with_stripes ? stripes_of(tile) * 3 : 0));
}

static inline size_t raw_nbytes(const Plan& plan) {
    size_t values = 0;
    for (const Tile* tile = plan.tiles; tile < plan.tiles + plan.tiles_count; tile++)
        values += size_t(tile->tokens) * tile->channels;
    return values * (plan.item == FP32 ? 4 : 2);
}

// A layer's pages: of block b at address + b * stride, nbytes of it.
struct Pages {
    uint64_t address;
    int64_t stride;
    uint64_t nbytes;
};

// One table of these for every instruction set that the library was compiled for.
struct Codec {
    // Each works on one record; `block` says where its values are. The first 64 bytes of a record,
    // its header, belong to the caller.
    //
    // Bytes of the record; 0: more than `capacity`.
    size_t (*l3_encode)(const Plan*, int64_t block, uint8_t* record, size_t capacity);
    // 0: decoded. Else the escapes do not add up, and the block holds anything. past: the caches, which
    // the caller ends with a fence.
    int (*l3_decode)(const Plan*, int64_t block, const uint8_t* record, size_t nbytes, bool past);
    // Writes base and fine parts. 1: the block has infinities, NaN or magnitudes above 65504, and
    // nothing was written that means anything. planes: of K and V in the base; the rest is fine.
    int (*ep_encode)(const Plan*, int64_t block, uint8_t* base, uint8_t* fine, const uint8_t planes[2],
                     const uint8_t fine_planes[2]);
    // fine: null for the base alone.
    void (*ep_decode)(const Plan*, int64_t block, const uint8_t* base, const uint8_t* fine,
                      const uint8_t planes[2], const uint8_t fine_planes[2]);
    // The checksum of each leaf of 64 KiB.
    void (*leaves_of)(const uint8_t* data, size_t nbytes, uint64_t* leaves);
    // Copies a record unless `to` is null; the checksum of what was copied. past: the caches, which
    // the caller ends with a fence.
    uint64_t (*copy_sum)(uint8_t* to, const uint8_t* from, size_t nbytes, bool past);
    // The same of one leaf, or of the rest of a record; and the checksum of a record with these leaves.
    uint64_t (*copied)(uint8_t* to, const uint8_t* from, size_t nbytes, bool past);
    uint64_t (*sum_of)(const uint64_t* leaves, size_t count);
};
