// L3, exact: signs and mantissas as they are, exponents as distances below a channel's maximum.
#pragma once
#include "rows.h"

// How many of the strip's bytes a group of `width` channels has.
INLINE size_t part_of(int width, int strip) {
    int left = width - strip * LANES;
    return size_t(left <= 0 ? 0 : left < LANES ? left : LANES);
}

// One group of a tile. WHOLE: it has 64 channels; else `width`, and rows are padded by their first
// channel, whose distance is known. TOKENS: T where it is the usual one, so that the group stays in
// registers; else 0. Returns the end of the escapes.
template <bool WHOLE, int TOKENS>
static uint8_t* encode_group(const uint16_t* x, ptrdiff_t stride, int tokens, int D, int width, uint8_t* rest,
                             uint8_t* below, uint8_t* planes, uint8_t* escapes, uint8_t* top) {
    const int T = TOKENS ? TOKENS : tokens;
    const Shuffles by = shuffles();
    Bytes exponents[TOKENS ? TOKENS : TOKENS_MAX][STRIPS], base[STRIPS] = {};
    for (int t = 0; t < T; t++) {
        uint16_t padded[GROUP];
        const uint16_t* row = x + t * stride;
        if (!WHOLE) {
            for (int c = 0; c < GROUP; c++) padded[c] = row[c < width ? c : 0];
            row = padded;
        }
        for (int s = 0; s < STRIPS; s++) {
            Bytes other;
            split(by, row + s * LANES, exponents[t][s], other);
            base[s] = most(base[s], exponents[t][s]);
            if (WHOLE) put(rest + size_t(t) * D + s * LANES, other);
            else memcpy(rest + size_t(t) * D + s * LANES, &other, part_of(width, s));
        }
    }
    Bytes all = base[0];
    for (int s = 1; s < STRIPS; s++) all = most(all, base[s]);
    *top = largest(all);
    uint8_t under[GROUP];
    for (int s = 0; s < STRIPS; s++) {
        Bytes distance = least(every(*top) - base[s], every(15));
        put(under + s * LANES, distance);
        base[s] = every(*top) - distance;
    }
    for (int i = 0; i < width / 2; i++) below[i] = uint8_t(under[i] | under[i + width / 2] << 4);
    uint64_t wanted = WHOLE ? ~uint64_t(0) : (uint64_t(1) << width) - 1;
    for (int t = 0; t < T; t += 8) {
        Bytes v[STRIPS][8];
        for (int i = 0; i < 8; i++)
            for (int s = 0; s < STRIPS; s++) {
                Bytes distance = base[s] - exponents[t + i][s];
                escapes = put_escapes(escapes, distance, wanted >> (s * LANES));
                v[s][i] = least(distance, every(7));
            }
        for (int s = 0; s < STRIPS; s++) {
            planes_of(v[s]);
            for (int p = 0; p < 3; p++) {
                uint8_t* to = planes + (size_t(p) * (T / 8) + t / 8) * D + s * LANES;
                if (WHOLE) put(to, v[s][p]);
                else memcpy(to, &v[s][p], part_of(width, s));
            }
        }
    }
    return escapes;
}

// 32 bytes -> the 64 values of their low halves, then of their high halves.
INLINE void unpack_nibbles(const uint8_t* from, Bytes to[STRIPS]) {
    if (STRIPS == 1) {
        Bytes32 packed = at<Bytes32>(from);
        to[0] = both(packed & 15, packed >> 4);
        return;
    }
    for (int s = 0; s < STRIPS / 2; s++) {
        Bytes packed = at<Bytes>(from + s * LANES);
        to[s] = packed & 15, to[s + STRIPS / 2] = shifted_down(packed, 4) & 15;
    }
}

// PAST: as of `put_line`; rows begin at lines.
template <bool WHOLE, int TOKENS, bool PAST>
static const uint8_t* decode_group(uint16_t* x, ptrdiff_t stride, int tokens, int D, int width, const uint8_t* rest,
                                   const uint8_t* below, const uint8_t* planes, const uint8_t* escapes, uint8_t top) {
    const int T = TOKENS ? TOKENS : tokens;
    const Shuffles by = shuffles();
    Bytes base[STRIPS];
    if (WHOLE) {
        unpack_nibbles(below, base);
    } else {
        uint8_t under[GROUP] = {};
        for (int i = 0; i < width / 2; i++) under[i] = below[i] & 15, under[i + width / 2] = below[i] >> 4;
        for (int s = 0; s < STRIPS; s++) base[s] = at<Bytes>(under + s * LANES);
    }
    for (int s = 0; s < STRIPS; s++) base[s] = every(top) - base[s];
    uint64_t wanted = WHOLE ? ~uint64_t(0) : (uint64_t(1) << width) - 1;
    for (int t = 0; t < T; t += 8) {
        Bytes v[STRIPS][8];
        for (int s = 0; s < STRIPS; s++) {
            for (int p = 0; p < 3; p++) {
                const uint8_t* from = planes + (size_t(p) * (T / 8) + t / 8) * D + s * LANES;
                if (WHOLE) v[s][p] = at<Bytes>(from);
                else {
                    v[s][p] = Bytes{};
                    memcpy(&v[s][p], from, part_of(width, s));
                }
            }
            values_of(v[s]);
        }
        for (int i = 0; i < 8; i++) {
            uint16_t padded[GROUP];
            uint16_t* row = x + (t + i) * stride;
            for (int s = 0; s < STRIPS; s++) {
                escapes = take_escapes(escapes, v[s][i], wanted >> (s * LANES));
                Bytes other{};
                const uint8_t* from = rest + size_t(t + i) * D + s * LANES;
                if (WHOLE) other = at<Bytes>(from);
                else memcpy(&other, from, part_of(width, s));
                join<PAST>(by, (WHOLE ? row : padded) + s * LANES, base[s] - v[s][i], other);
            }
            if (!WHOLE) memcpy(row, padded, size_t(width) * 2);
        }
    }
    return escapes;
}

// Writes at most `room` escapes; null: there were more.
static uint8_t* encode_group_within(const uint16_t* x, ptrdiff_t stride, int T, int D, int width, uint8_t* rest,
                                    uint8_t* below, uint8_t* planes, uint8_t* escapes, size_t room, uint8_t* top) {
    uint8_t own[TOKENS_MAX * GROUP + 64];
    bool far = room >= size_t(T) * GROUP + 64;  // vectors are written whole
    uint8_t* to = far ? escapes : own;
    auto encode = width != GROUP ? encode_group<false, 0> : T == 16 ? encode_group<true, 16> : encode_group<true, 0>;
    const uint8_t* end = encode(x, stride, T, D, width, rest, below, planes, to, top);
    size_t count = size_t(end - to);
    if (count > room) return nullptr;
    if (!far) memcpy(escapes, own, count);
    return escapes + count;
}

static size_t l3_encode(const Plan* plan, int64_t block, uint8_t* record, size_t capacity) {
    if (plan->tail_at > capacity) return 0;
    uint8_t *table = record + plan->table_at, *to = record + plan->body_at;
    uint8_t *escapes = record + plan->tail_at, *end = record + capacity;
    for (uint32_t n = 0; n < plan->tiles_count; n++) {
        const Tile& tile = plan->tiles[n];
        const int T = tile.tokens, D = tile.channels;
        uint8_t* page = page_of(*plan, tile, block);
        Rows<uint16_t> rows;
        size_t values = size_t(T) * D, size = l3_nbytes(tile, int(plan->item));
        uint8_t *below = to + values, *planes = below + D / 2, *used = planes + values / 8 * 3;
        if (plan->item == FP32) {
            Rows<uint32_t> wide = rows32(tile, page, true);
            rows = {scratch().halves, D};
            for (int t = 0; t < T; t++)
                for (int c = 0; c < D; c++) {
                    uint32_t value = wide.first[t * wide.stride + c];
                    uint16_t low = uint16_t(value);
                    rows.first[size_t(t) * D + c] = uint16_t(value >> 16);
                    memcpy(used + (size_t(t) * D + c) * 2, &low, 2);
                }
            used += values * 2;
        } else {
            rows = rows16(tile, page, true);
        }
        memset(used, 0, size_t(to + size - used));
        for (int c = 0; c < D; c += GROUP) {
            int width = D - c < GROUP ? D - c : GROUP;
            uint8_t top;
            ask_for_group<false>(*plan, n + 1, block, c, GROUP);
            ask_for<true>(to + size + size * c / D, 0, 1, int(size * GROUP / D));
            uint8_t* past = encode_group_within(rows.first + c, rows.stride, T, D, width, to + c, below + c / 2, planes + c,
                                                escapes, size_t(end - escapes), &top);
            if (!past) return 0;
            uint32_t entry = uint32_t(past - escapes) | uint32_t(top) << 16;
            memcpy(table, &entry, 4);
            table += 4;
            escapes = past;
        }
        to += size;
    }
    memset(table, 0, size_t(record + plan->body_at - table));
    return size_t(escapes - record);
}

typedef const uint8_t* DecodeGroup(uint16_t*, ptrdiff_t, int, int, int, const uint8_t*, const uint8_t*, const uint8_t*,
                                   const uint8_t*, uint8_t);
template <bool PAST>
INLINE DecodeGroup* decode_group_of(int width, int T) {
    if (width != GROUP) return decode_group<false, 0, false>;
    return T == 16 ? decode_group<true, 16, PAST> : decode_group<true, 0, PAST>;
}

static int l3_decode(const Plan* plan, int64_t block, const uint8_t* record, size_t nbytes, bool past) {
    if (plan->tail_at > nbytes) return 1;
    const uint8_t *table = record + plan->table_at, *from = record + plan->body_at;
    const uint8_t *escapes = record + plan->tail_at, *end = record + nbytes;
    for (uint32_t n = 0; n < plan->tiles_count; n++) {
        const Tile& tile = plan->tiles[n];
        const int T = tile.tokens, D = tile.channels;
        uint8_t* page = page_of(*plan, tile, block);
        const bool wide = plan->item == FP32;
        const size_t values = size_t(T) * D, size = l3_nbytes(tile, int(plan->item));
        const uint8_t *below = from + values, *planes = below + D / 2, *lows = planes + values / 8 * 3;
        const bool lines = past && !wide && begins_at_lines(tile, page);
        const bool direct = lines && in_rows(tile, 2);
        Rows<uint16_t> rows = wide ? Rows<uint16_t>{scratch().halves, D} : rows16(tile, page, false);
        for (int c = 0; c < D; c += GROUP, table += 4) {
            int width = D - c < GROUP ? D - c : GROUP;
            uint32_t entry;
            memcpy(&entry, table, 4);
            if (!lines) ask_for_group<true>(*plan, n + 1, block, c, GROUP);
            ask_for<false>(from + size + size * c / D, 0, 1, int(size * GROUP / D));
            size_t count = entry & 0xffff, left = size_t(end - escapes);
            if (count > left || count > size_t(T) * width) return 1;
            uint8_t own[TOKENS_MAX * GROUP + 64];
            const uint8_t* in = escapes;
            if (left < size_t(T) * GROUP + 64) {  // as many may be read, whatever the table says
                memcpy(own, escapes, count);
                memset(own + count, 0, size_t(T) * GROUP + 64 - count);
                in = own;
            }
            DecodeGroup* decode = direct ? decode_group_of<true>(width, T) : decode_group_of<false>(width, T);
            const uint8_t* used = decode(rows.first + c, rows.stride, T, D, width, from + c, below + c / 2, planes + c, in,
                                         uint8_t(entry >> 16));
            if (size_t(used - in) != count) return 1;
            escapes += count;
        }
        if (wide) {
            Rows<uint32_t> to = rows32(tile, page, false);
            for (int t = 0; t < T; t++)
                for (int c = 0; c < D; c++) {
                    uint16_t low;
                    memcpy(&low, lows + (size_t(t) * D + c) * 2, 2);
                    to.first[t * to.stride + c] = uint32_t(rows.first[size_t(t) * D + c]) << 16 | low;
                }
            write_back(tile, page, to);
        } else {
            if (lines) write_back<true>(tile, page, rows);
            else write_back<false>(tile, page, rows);
        }
        from += size;
    }
    return escapes == end ? 0 : 1;
}
