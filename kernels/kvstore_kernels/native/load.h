// Records from slots into an engine's memory: copied, summed up and decoded, one after another.
//
// A slot may change at any moment, so nothing of it is read twice: a record is copied to private
// memory, and summed up, judged and decoded there. What a record says is bounded by its header,
// which has to be the one that every record of this form and shape has.
#pragma once
#include <string.h>

#include "plan.h"

// What became of a record.
enum State : uint8_t {
    BASE_ONLY = 0,  // decoded, without a fine part
    REFINED = 1,    // decoded, with its fine part
    WRONG = 2,      // no record of this shape
    LEFT = 3,       // the caller decodes it: it has another form
};

struct Load {
    const Plan* plan;
    const uint8_t* headers;  // 64 bytes each: L3, EP base, EP fine; pair and size aside
    const uint8_t* planes;   // of K and V in the base, then in the fine part
    uint8_t* room;           // private: a base record and a fine one, each a multiple of 64 bytes
    uint64_t record_nbytes;  // the most a base part has
    uint64_t base_nbytes;    // of EP's base part
    uint64_t fine_nbytes;
};

// A record in a slot; of a fine part also what its checksum has to be. address 0: there is none.
struct Stored {
    uint64_t address, nbytes, checksum;
};

constexpr size_t PAIR_AT = 24, TAIL_AT = 32, NBYTES_AT = 36, ZEROS_AT = 40;

// Whether a record has this header; its pair and its size are for the caller.
static bool has_header(const uint8_t* record, size_t stored, const uint8_t* header, uint64_t* pair, uint32_t* nbytes) {
    if (stored < HEADER || memcmp(record, header, PAIR_AT) || memcmp(record + TAIL_AT, header + TAIL_AT, 4) ||
        memcmp(record + ZEROS_AT, header + ZEROS_AT, HEADER - ZEROS_AT))
        return false;
    memcpy(pair, record + PAIR_AT, 8);
    memcpy(nbytes, record + NBYTES_AT, 4);
    return *nbytes >= HEADER && *nbytes <= stored;
}

static uint8_t load_one(const Codec& codec, const Load& load, int64_t block, const Stored& base, const Stored& fine,
                        bool past, uint64_t* sum) {
    if (base.nbytes > load.record_nbytes) return WRONG;  // larger than any record of this memory
    uint8_t *first = load.room, *second = first + ((load.record_nbytes + 63) & ~uint64_t(63));
    *sum = codec.copy_sum(first, (const uint8_t*)base.address, base.nbytes, false);
    uint64_t pair;
    uint32_t nbytes;
    bool refines = false;
    if (fine.address && fine.nbytes <= load.fine_nbytes &&
        codec.copy_sum(second, (const uint8_t*)fine.address, fine.nbytes, false) == fine.checksum)
        refines = has_header(second, fine.nbytes, load.headers + 2 * HEADER, &pair, &nbytes) &&
                  nbytes == load.fine_nbytes && pair == *sum;
    if (has_header(first, base.nbytes, load.headers, &pair, &nbytes)) {
        if (pair || refines) return WRONG;
        return codec.l3_decode(load.plan, block, first, nbytes, past) ? WRONG : BASE_ONLY;
    }
    if (has_header(first, base.nbytes, load.headers + HEADER, &pair, &nbytes)) {
        if (pair || nbytes != load.base_nbytes) return WRONG;
        codec.ep_decode(load.plan, block, first, refines ? second : nullptr, load.planes, load.planes + 2);
        return refines ? REFINED : BASE_ONLY;
    }
    return LEFT;
}
