// A record's checksum, as kvstore/model/checksum.py defines it: XXH3-64 over the little-endian
// XXH3-64s of its leaves. And copies that are summed up while the processor's cache has them.
#pragma once
#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

#include "plan.h"

constexpr size_t LEAF = 64 << 10;

static void leaves_of(const uint8_t* data, size_t nbytes, uint64_t* leaves) {
    for (size_t at = 0; at < nbytes; at += LEAF)
        *leaves++ = XXH3_64bits(data + at, nbytes - at < LEAF ? nbytes - at : LEAF);
}

// Copies `from` to `to` unless that is null, and sums up one of them: of `to` what has arrived.
static uint64_t copy_sum(uint8_t* to, const uint8_t* from, size_t nbytes, bool arrived) {
    XXH3_state_t whole;
    XXH3_64bits_reset(&whole);
    for (size_t at = 0; at < nbytes; at += LEAF) {
        size_t size = nbytes - at < LEAF ? nbytes - at : LEAF;
        if (to) {
            memcpy(to + at, from + at, size);
            __asm__ volatile("" ::: "memory");  // what is summed up is read again
        }
        uint64_t leaf = XXH3_64bits((arrived ? to : from) + at, size);
        XXH3_64bits_update(&whole, &leaf, sizeof(leaf));
    }
    return XXH3_64bits_digest(&whole);
}
