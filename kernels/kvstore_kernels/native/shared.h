// Copies that several threads share. Each takes some leaves at a time until there are none left: so
// they end together, whatever the records' sizes are, and however late a thread begins.
#pragma once
#include "plan.h"

constexpr uint64_t LEAVES_OF_TURN = 4;

// first_leaves: of each record, then the number of all. leaves, sums: room for their checksums. taken:
// leaves that a thread has begun with; copied: those that are done. Both begin with 0.
struct Shared {
    uint64_t count;
    const uint8_t* const* sources;
    uint8_t* const* targets;
    const uint64_t* sizes;
    const uint64_t* first_leaves;
    uint64_t* leaves;
    uint64_t* sums;
    uint64_t past;  // whether it goes past the caches
    uint64_t taken, copied;
};

static size_t record_of(const Shared& shared, uint64_t leaf) {
    size_t low = 0, high = shared.count;  // the last record that begins at `leaf` or before it
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        (shared.first_leaves[middle] <= leaf ? low : high) = middle;
    }
    return low;
}

// Returns when no leaf is left to begin with. Whoever ends last sums up the records.
static void take_part(const Codec& codec, Shared& shared, void (*fence)()) {
    const uint64_t all = shared.first_leaves[shared.count];
    while (all) {
        const uint64_t begin = __atomic_fetch_add(&shared.taken, LEAVES_OF_TURN, __ATOMIC_RELAXED);
        if (begin >= all) return;
        const uint64_t end = all - begin < LEAVES_OF_TURN ? all : begin + LEAVES_OF_TURN;
        size_t record = record_of(shared, begin);
        for (uint64_t leaf = begin; leaf < end; leaf++) {
            while (shared.first_leaves[record + 1] <= leaf) record++;
            const uint64_t at = (leaf - shared.first_leaves[record]) * LEAF_NBYTES, left = shared.sizes[record] - at;
            shared.leaves[leaf] = codec.copied(shared.targets[record] + at, shared.sources[record] + at,
                                               left < LEAF_NBYTES ? left : LEAF_NBYTES, shared.past != 0);
        }
        if (shared.past) fence();
        if (__atomic_add_fetch(&shared.copied, end - begin, __ATOMIC_ACQ_REL) == all) break;
    }
    for (size_t record = 0; record < shared.count; record++) {
        const uint64_t* leaves = shared.leaves + shared.first_leaves[record];
        shared.sums[record] = codec.sum_of(leaves, shared.first_leaves[record + 1] - shared.first_leaves[record]);
    }
}
