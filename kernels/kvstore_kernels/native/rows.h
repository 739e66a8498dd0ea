// Tiles in and out of pages: as rows of contiguous channels, whatever order the engine keeps.
#pragma once
#include "vectors.h"

struct Scratch {
    alignas(64) uint32_t values[TOKENS_MAX * CHANNELS_MAX];
    alignas(64) uint16_t halves[TOKENS_MAX * CHANNELS_MAX];
    alignas(64) uint8_t codes[TOKENS_MAX * CHANNELS_MAX];
    alignas(64) float row[CHANNELS_MAX];
};
static inline Scratch& scratch() {
    static thread_local Scratch each;
    return each;
}

INLINE uint8_t* page_of(const Plan& plan, const Tile& tile, int64_t block) {
    const Layer& layer = plan.layers[tile.layer];
    return (uint8_t*)layer.address + block * layer.stride + tile.first;
}
// Whether every token's channels lie side by side, and tokens are evenly apart.
INLINE bool in_rows(const Tile& tile, int item) {
    return tile.channel == item && tile.channel_run == tile.channels && tile.token_run == tile.tokens;
}
INLINE int64_t token_at(const Tile& tile, int t) {
    return t / tile.token_run * tile.token_far + t % tile.token_run * tile.token;
}
INLINE int64_t channel_at(const Tile& tile, int c) {
    return c / tile.channel_run * tile.channel_far + c % tile.channel_run * tile.channel;
}

// 8 x 8 values of V's lanes, transposed. 16-bit values by 128 bits, 32-bit values by 256.
typedef uint16_t Eight16 __attribute__((vector_size(16), may_alias));
typedef uint32_t Eight32 __attribute__((vector_size(32), may_alias));
INLINE void transpose(Eight16 v[8]) {
    const Eight16 low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
    for (int round = 0; round < 3; round++) {
        Eight16 next[8];
        for (int i = 0; i < 4; i++) {
            next[2 * i] = __builtin_shuffle(v[i], v[i + 4], low);
            next[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], high);
        }
        for (int i = 0; i < 8; i++) v[i] = next[i];
    }
}
INLINE void transpose(Eight32 v[8]) {
    const Eight32 low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
    for (int round = 0; round < 3; round++) {
        Eight32 next[8];
        for (int i = 0; i < 4; i++) {
            next[2 * i] = __builtin_shuffle(v[i], v[i + 4], low);
            next[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], high);
        }
        for (int i = 0; i < 8; i++) v[i] = next[i];
    }
}

// Value: uint16_t or uint32_t; Eight: eight of them.
template <typename Value, typename Eight, bool OUT>
static void copy_tile(const Tile& tile, uint8_t* page, Value* rows) {
    const int T = tile.tokens, D = tile.channels;
    if (tile.token == int64_t(sizeof(Value)) && tile.token_run % 8 == 0) {  // channels of tokens side by side
        for (int c = 0; c < D; c += 8)
            for (int t = 0; t < T; t += 8) {
                Eight v[8];
                if (OUT) {
                    for (int i = 0; i < 8; i++) v[i] = at<Eight>(page + token_at(tile, t) + channel_at(tile, c + i));
                    transpose(v);
                    for (int i = 0; i < 8; i++) put(rows + (t + i) * D + c, v[i]);
                } else {
                    for (int i = 0; i < 8; i++) v[i] = at<Eight>(rows + (t + i) * D + c);
                    transpose(v);
                    for (int i = 0; i < 8; i++) put(page + token_at(tile, t) + channel_at(tile, c + i), v[i]);
                }
            }
        return;
    }
    for (int t = 0; t < T; t++) {
        uint8_t* token = page + token_at(tile, t);
        Value* row = rows + size_t(t) * D;
        for (int c = 0; c < D; c++)
            if (OUT) memcpy(row + c, token + channel_at(tile, c), sizeof(Value));
            else memcpy(token + channel_at(tile, c), row + c, sizeof(Value));
    }
}

// Pairs of 16-bit values side by side, as AMX and dot products want them: two channels of a token
// in keys, whose tokens follow each other; two tokens of a channel in values, whose channels do.
INLINE bool in_channel_pairs(const Tile& tile) {
    return tile.channel == 2 && tile.channel_run == 2 && tile.token == 4 && tile.token_run % 8 == 0;
}
INLINE bool in_token_pairs(const Tile& tile) {
    return tile.token == 2 && tile.token_run == 2 && tile.channel == 4 && tile.channel_run % 8 == 0;
}
// Whether 16 tokens of a channel, 16 channels of a token or as many pairs of them are whole lines.
INLINE bool begins_at_lines(const Tile& tile, const uint8_t* page) {
    if (in_rows(tile, 2)) return !((tile.token | (int64_t)page) % 64);
    if ((tile.token_far | tile.channel_far | (int64_t)page) % 64) return false;
    if (in_channel_pairs(tile)) return !(tile.token_run % 16) && !(tile.tokens % 16);
    return in_token_pairs(tile) && !(tile.channel_run % 16);
}
// Past the caches; the caller ends with a fence.
static void lines_of_channel_pairs(const Tile& tile, uint8_t* page, const uint16_t* rows) {
    const int T = tile.tokens, D = tile.channels;
    for (int t = 0; t < T; t += 16) {
        uint8_t* tokens = page + token_at(tile, t);
        for (int c = 0; c < D; c += 16) {  // 8 pairs of 16 tokens
            const uint16_t* row = rows + size_t(t) * D + c;
            uint8_t* pair = tokens + c / 2 * tile.channel_far;
            Eight32 v[8], w[8];
            for (int i = 0; i < 8; i++) v[i] = at<Eight32>(row + i * D), w[i] = at<Eight32>(row + (i + 8) * D);
            transpose(v);
            transpose(w);
            for (int i = 0; i < 8; i++) put_line<true>(pair + i * tile.channel_far, v[i], w[i]);
        }
    }
}
typedef uint16_t Sixteen16 __attribute__((vector_size(32), may_alias));
static void lines_of_token_pairs(const Tile& tile, uint8_t* page, const uint16_t* rows) {
    const int T = tile.tokens, D = tile.channels;
    const Sixteen16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const Sixteen16 high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    for (int t = 0; t < T; t += 2) {
        uint8_t* tokens = page + token_at(tile, t);
        const uint16_t *one = rows + size_t(t) * D, *other = one + D;
        for (int c = 0; c < D; c += 16) {
            const Sixteen16 first = at<Sixteen16>(one + c), second = at<Sixteen16>(other + c);
            const Sixteen16 begin = __builtin_shuffle(first, second, low), end = __builtin_shuffle(first, second, high);
            put_line<true>(tokens + channel_at(tile, c), begin, end);
        }
    }
}
template <bool OUT>
static void copy_channel_pairs(const Tile& tile, uint8_t* page, uint16_t* rows) {
    const int T = tile.tokens, D = tile.channels;
    for (int t = 0; t < T; t += 8) {
        uint8_t* tokens = page + token_at(tile, t);
        for (int c = 0; c < D; c += 16) {  // 8 pairs of 8 tokens
            uint16_t* row = rows + size_t(t) * D + c;
            uint8_t* pair = tokens + c / 2 * tile.channel_far;
            Eight32 v[8];
            for (int i = 0; i < 8; i++) v[i] = OUT ? at<Eight32>(pair + i * tile.channel_far) : at<Eight32>(row + i * D);
            transpose(v);
            for (int i = 0; i < 8; i++)
                if (OUT) put(row + i * D, v[i]);
                else put(pair + i * tile.channel_far, v[i]);
        }
    }
}
template <bool OUT>
static void copy_token_pairs(const Tile& tile, uint8_t* page, uint16_t* rows) {
    const int T = tile.tokens, D = tile.channels;
    const Eight16 low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
    const Eight16 even = {0, 2, 4, 6, 8, 10, 12, 14}, odd = {1, 3, 5, 7, 9, 11, 13, 15};
    for (int t = 0; t < T; t += 2) {
        uint8_t* tokens = page + token_at(tile, t);
        uint16_t *one = rows + size_t(t) * D, *other = one + D;
        for (int c = 0; c < D; c += 8) {
            uint8_t* channels = tokens + channel_at(tile, c);
            if (OUT) {
                Eight16 first = at<Eight16>(channels), second = at<Eight16>(channels + 16);
                put(one + c, __builtin_shuffle(first, second, even));
                put(other + c, __builtin_shuffle(first, second, odd));
            } else {
                Eight16 first = at<Eight16>(one + c), second = at<Eight16>(other + c);
                put(channels, __builtin_shuffle(first, second, low));
                put(channels + 16, __builtin_shuffle(first, second, high));
            }
        }
    }
}
template <bool OUT>
static void copy_halves(const Tile& tile, uint8_t* page, uint16_t* rows) {
    if (in_channel_pairs(tile)) copy_channel_pairs<OUT>(tile, page, rows);
    else if (in_token_pairs(tile)) copy_token_pairs<OUT>(tile, page, rows);
    else copy_tile<uint16_t, Eight16, OUT>(tile, page, rows);
}

// Values of a tile as rows `stride` values apart: in place, or in `room`.
template <typename Value>
struct Rows {
    Value* first;
    ptrdiff_t stride;
};
INLINE Rows<uint16_t> rows16(const Tile& tile, uint8_t* page, bool read) {
    if (in_rows(tile, 2)) return {(uint16_t*)page, ptrdiff_t(tile.token / 2)};
    uint16_t* room = scratch().halves;
    if (read) copy_halves<true>(tile, page, room);
    return {room, tile.channels};
}
INLINE Rows<uint32_t> rows32(const Tile& tile, uint8_t* page, bool read) {
    if (in_rows(tile, 4)) return {(uint32_t*)page, ptrdiff_t(tile.token / 4)};
    uint32_t* room = scratch().values;
    if (read) copy_tile<uint32_t, Eight32, true>(tile, page, room);
    return {room, tile.channels};
}
// LINES: they go past the caches, a line at once.
template <bool LINES = false>
INLINE void write_back(const Tile& tile, uint8_t* page, const Rows<uint16_t>& rows) {
    if (in_rows(tile, 2)) return;
    if (!LINES) copy_halves<false>(tile, page, rows.first);
    else if (in_channel_pairs(tile)) lines_of_channel_pairs(tile, page, rows.first);
    else lines_of_token_pairs(tile, page, rows.first);
}
INLINE void write_back(const Tile& tile, uint8_t* page, const Rows<uint32_t>& rows) {
    if (!in_rows(tile, 4)) copy_tile<uint32_t, Eight32, false>(tile, page, rows.first);
}

// Asks for lines of memory ahead of their use: a group of channels reads a little of many rows, which
// the processor does not foresee. FOR_WRITING: they will be written to.
template <bool FOR_WRITING>
INLINE void ask_for(const uint8_t* first, ptrdiff_t stride, int rows, int nbytes) {
    for (int row = 0; row < rows; row++)
        for (int at = 0; at < nbytes; at += 64) __builtin_prefetch(first + row * stride + at, FOR_WRITING, 2);
}
// The same of `width` channels of a tile from `c` on; of pairs, that share of its memory.
template <bool FOR_WRITING>
INLINE void ask_for_group(const Plan& plan, uint32_t n, int64_t block, int c, int width) {
    if (n >= plan.tiles_count) return;
    const Tile& tile = plan.tiles[n];
    const int item = plan.item == FP32 ? 4 : 2;
    if (c >= tile.channels) return;
    const uint8_t* page = page_of(plan, tile, block);
    if (in_rows(tile, item)) ask_for<FOR_WRITING>(page + c * item, tile.token, tile.tokens, width * item);
    else if (item == 2 && (in_channel_pairs(tile) || in_token_pairs(tile)))
        ask_for<FOR_WRITING>(page + c * tile.tokens * item, 0, 1, width * tile.tokens * item);
}
