// A hash table of row numbers, for `kvstore/events/table.py`, which has the same in Python and says what it is for.
// Slots come in buckets of 8. tags: a byte for each slot, 0: never used, 1: its row has left, else of the row's hash.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace slots {

constexpr size_t BUCKET = 8, AHEAD = 8;
constexpr uint8_t FREE = 0, DEAD = 1, TAG_MIN = 2;

static inline uint8_t tag_of(uint64_t hash) {
    uint8_t low = uint8_t(hash);
    return low < TAG_MIN ? TAG_MIN : low;
}
static inline size_t bucket_of(uint64_t hash, size_t buckets) { return (hash >> 16) & (buckets - 1); }

// rows[i], places[i]: the row of wanted[i] and its slot, -1 where there is none. hashes: of each row.
static void find(size_t buckets, const int32_t* slots, const uint8_t* tags, const uint64_t* hashes, size_t count,
                 const uint64_t* wanted, int64_t* rows, int64_t* places) {
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(tags + BUCKET * bucket_of(wanted[i + AHEAD], buckets));
        const uint8_t tag = tag_of(wanted[i]);
        size_t at = bucket_of(wanted[i], buckets);
        rows[i] = places[i] = -1;
        for (size_t looked = 0; looked < buckets && rows[i] < 0; looked++, at = (at + 1) & (buckets - 1)) {
            bool ends = false;
            for (size_t slot = at * BUCKET; slot < (at + 1) * BUCKET; slot++) {
                ends |= tags[slot] == FREE;
                if (tags[slot] == tag && hashes[slots[slot]] == wanted[i]) {
                    rows[i] = slots[slot];
                    places[i] = int64_t(slot);
                    break;
                }
            }
            if (ends) break;
        }
    }
}

// Give each hash, which is not there yet, a slot. Returns how many of these were those of rows that left; a table
// without room would be looked through once for each.
static int64_t place(size_t buckets, int32_t* slots, uint8_t* tags, size_t count, const uint64_t* hashes,
                     const int64_t* rows) {
    int64_t dead = 0;
    for (size_t i = 0; i < count; i++) {
        size_t at = bucket_of(hashes[i], buckets) * BUCKET;
        for (size_t looked = 0; looked < buckets * BUCKET; looked++, at = (at + 1) & (buckets * BUCKET - 1))
            if (tags[at] < TAG_MIN) {
                dead += tags[at] == DEAD;
                tags[at] = tag_of(hashes[i]);
                slots[at] = int32_t(rows[i]);
                break;
            }
    }
    return dead;
}

}  // namespace slots
