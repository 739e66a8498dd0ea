// Coded records on a device: the bytes that codec/reference.py and native/ write and read.
//
// A launch works on records of one shape: grid (CTAs of a record, records), 256 threads each.
// A warp takes 64 channels of a tile, or 8 tokens of EP's values; lanes are pairs of channels, so a
// row of a page is read in whole lines, and values stay in registers.
//
//     encoding: l3_encode, l3_tail or ep_encode; then sums, seal, fine_sums, fine_seal
//     decoding: record_sums, inspect, l3_decode, ep_decode
//
// Bytes of records are trusted nowhere: `inspect` compares headers with the plan's, counts of
// escapes are checked where they are used, and what is written is the tiles of the record's block,
// whatever it says. Stored sizes are those `Coder` would store.
//
// The same source compiles as plain C++ (tests/kernels/codec_on_host.cpp).

#include "threads.h"
#include "leaves.h"
#include "tiles.h"
#include "l3.h"
#include "ep.h"

struct Call {
    const Plan* plan;
    const Record* records;
    Result* results;
    u64* leaves;  // checksums
};

// ---- checksums ------------------------------------------------------------------------------

struct Part {
    u64 address, nbytes, first_leaf;
};

INLINE Part encoded_part(const Call& call, u32 y, bool fine) {
    const Record& record = call.records[y];
    const Result& result = call.results[y];
    if (!fine) return {record.base, result.wrong ? 0 : result.stored, record.first_leaf};
    const bool made = record.fine && !result.wrong;
    return {record.fine, made ? call.plan->fine_nbytes : 0, record.fine_leaf};
}

INLINE Part stored_part(const Call& call, u32 y, bool fine) {
    const Record& record = call.records[y];
    if (fine) return {record.fine, record.fine_nbytes, record.fine_leaf};
    return {record.base, record.nbytes, record.first_leaf};
}

// Return the checksum of a leaf, to thread 0.
INLINE u64 leaf_sum(const Leaf& leaf, Shared& shared) {
    FOR_THREADS(thread) read_leaf(leaf, thread, shared);
    barrier();
    FOR_THREADS(thread) if (thread < 8) accumulate(leaf, thread, shared);
    barrier();
    u64 sum = 0;
    FOR_THREADS(thread) if (!thread) sum = finish(leaf, shared);
    barrier();
    return sum;
}

INLINE void sum_part(const Call& call, const Part& part, u32 x, Shared& shared) {
    if ((u64)x * LEAF_NBYTES >= part.nbytes) return;
    u64 sum = leaf_sum(Leaf(part.address, part.nbytes, x), shared);
    FOR_THREADS(thread) if (!thread) call.leaves[part.first_leaf + x] = sum;
}

// Return a part's checksum, which is that of its leaves', to thread 0.
INLINE u64 part_sum(const Call& call, const Part& part, Shared& shared) {
    u64 count = (part.nbytes + LEAF_NBYTES - 1) / LEAF_NBYTES;
    return count ? leaf_sum(Leaf((u64)(call.leaves + part.first_leaf), 8 * count, 0), shared) : 0;
}

INLINE void cta_sums(const Call& call, u32 x, u32 y) {
    SHARED Shared shared;
    sum_part(call, encoded_part(call, y, false), x, shared);
}

INLINE void cta_fine_sums(const Call& call, u32 x, u32 y) {
    SHARED Shared shared;
    sum_part(call, encoded_part(call, y, true), x, shared);
}

// Base parts and fine ones, which lie behind them in the grid's first axis: one each.
INLINE void cta_record_sums(const Call& call, u32 x, u32 y) {
    SHARED Shared shared;
    sum_part(call, stored_part(call, y, x & 1), x / 2, shared);
}

// Write into a fine part the checksum of its base.
INLINE void cta_seal(const Call& call, u32, u32 y) {
    SHARED Shared shared;
    const u64 sum = part_sum(call, encoded_part(call, y, false), shared);
    const Record& record = call.records[y];
    Result& result = call.results[y];
    FOR_THREADS(thread) if (!thread) {
        result.sum = sum;
        if (record.fine && !result.wrong) *(u64*)(record.fine + 24) = sum;
    }
}

INLINE void cta_fine_seal(const Call& call, u32, u32 y) {
    SHARED Shared shared;
    const u64 sum = part_sum(call, encoded_part(call, y, true), shared);
    FOR_THREADS(thread) if (!thread) call.results[y].fine_sum = sum;
}

// ---- headers --------------------------------------------------------------------------------

// Return the form of a record of at least `size` bytes, WRONG if it is none of this plan's.
INLINE u32 form_of(const Plan& plan, u64 address, u64 size) {
    if (size < HEADER) return WRONG;
    const u32* words = (const u32*)address;
    const u32 form = words[1] & 255;
    const u64 nbytes = words[9];
    if (form < RAW || form > EP_FINE || !plan.headers[16 * form]) return WRONG;
    for (u32 i = 0; i < 16; i++) {
        bool varies = i == 9 || ((i == 6 || i == 7) && form == EP_FINE);
        if (!varies && words[i] != plan.headers[16 * form + i]) return WRONG;
    }
    if (nbytes > size) return WRONG;
    if (form == RAW && nbytes != plan.raw_nbytes) return WRONG;
    if (form == L3 && (nbytes < plan.tail_at || nbytes > plan.raw_nbytes)) return WRONG;
    if (form == EP_BASE && nbytes != plan.base_nbytes) return WRONG;
    if (form == EP_FINE && nbytes != plan.fine_nbytes) return WRONG;
    return form;
}

INLINE void cta_inspect(const Call& call, u32, u32 y) {
    SHARED Shared shared;
    const Record& record = call.records[y];
    Result& result = call.results[y];
    const u64 sum = part_sum(call, stored_part(call, y, false), shared);
    const u64 fine_sum = part_sum(call, stored_part(call, y, true), shared);
    FOR_THREADS(thread) if (!thread) {
        const Plan& plan = *call.plan;
        u32 form = form_of(plan, record.base, record.nbytes);
        if (form == EP_FINE) form = WRONG;
        result.sum = sum;
        result.fine_sum = fine_sum;
        result.form = form;
        result.nbytes = form == WRONG ? 0 : ((const u32*)record.base)[9];
        result.refined = form == EP_BASE && record.fine && fine_sum == record.fine_sum &&
                         form_of(plan, record.fine, record.fine_nbytes) == EP_FINE &&
                         *(const u64*)(record.fine + 24) == sum;
    }
}

// ---- coding ---------------------------------------------------------------------------------

template <u32 ITEM>
INLINE void cta_l3_encode(const Call& call, u32 x, u32 y) {
    const Plan plan = *call.plan;
    FOR_WARPS(warp) {
        const u32 index = x * WARPS + warp;
        if (index < plan.group_count) l3_encode<ITEM>(plan, call.records[y], index);
    }
}

INLINE void cta_l3_tail(const Call& call, u32 x, u32 y) {
    SHARED Starts starts;
    const Plan plan = *call.plan;
    l3_tail(plan, call.records[y], call.results[y], x, starts);
}

template <u32 ITEM>
INLINE void cta_l3_decode(const Call& call, u32 x, u32 y) {
    SHARED Starts starts;
    if (call.results[y].form != L3) return;
    const Plan plan = *call.plan;
    l3_decode<ITEM>(plan, call.records[y], call.results[y], x, starts);
}

template <u32 ITEM, u32 PAIRS>
INLINE void cta_ep_encode(const Call& call, u32 x, u32 y) {
    const Plan plan = *call.plan;
    FOR_WARPS(warp) {
        const u32 index = x * WARPS + warp;
        if (index < plan.part_count)
            ep_encode<ITEM, PAIRS>(plan, call.records[y], index, call.results[y]);
    }
}

template <u32 ITEM, u32 PAIRS>
INLINE void cta_ep_decode(const Call& call, u32 x, u32 y) {
    if (call.results[y].form != EP_BASE) return;
    const Plan plan = *call.plan;
    FOR_WARPS(warp) {
        const u32 index = x * WARPS + warp;
        if (index < plan.part_count)
            ep_decode<ITEM, PAIRS>(plan, call.records[y], index, call.results[y].refined);
    }
}

// ---- launches: CTAS of one SM at once bound the registers ------------------------------------

#ifdef __CUDACC__
#define KERNEL(NAME, CTAS, ...)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, CTAS)                                 \
    NAME(const Plan* plan, const Record* records, Result* results, u64* leaves) {               \
        __VA_ARGS__({plan, records, results, leaves}, blockIdx.x, blockIdx.y);                  \
    }
#else
#define KERNEL(NAME, CTAS, ...)                                                                 \
    extern "C" void NAME(const Plan* plan, const Record* records, Result* results,              \
                               u64* leaves, u32 width, u32 count) {                             \
        for (u32 y = 0; y < count; y++)                                                         \
            for (u32 x = 0; x < width; x++)                                                     \
                __VA_ARGS__({plan, records, results, leaves}, x, y);                            \
    }
#endif
#define L3_KERNELS(ITEM)                                                                        \
    KERNEL(l3_encode_##ITEM, ITEM == 4 ? 2 : 3, cta_l3_encode<ITEM>)                            \
    KERNEL(l3_decode_##ITEM, 3, cta_l3_decode<ITEM>)
#define EP_KERNELS(ITEM, PAIRS)                                                                 \
    KERNEL(ep_encode_##ITEM##_##PAIRS, PAIRS > 4 ? 1 : 2, cta_ep_encode<ITEM, PAIRS>)           \
    KERNEL(ep_decode_##ITEM##_##PAIRS, PAIRS > 4 ? 1 : 2, cta_ep_decode<ITEM, PAIRS>)
#define ALL_KERNELS(ITEM)                                                                       \
    EP_KERNELS(ITEM, 1)                                                                         \
    EP_KERNELS(ITEM, 2)                                                                         \
    EP_KERNELS(ITEM, 4)                                                                         \
    EP_KERNELS(ITEM, 8)                                                                         \
    EP_KERNELS(ITEM, 16)

KERNEL(sums, 4, cta_sums)
KERNEL(fine_sums, 4, cta_fine_sums)
KERNEL(record_sums, 4, cta_record_sums)
KERNEL(seal, 4, cta_seal)
KERNEL(fine_seal, 4, cta_fine_seal)
KERNEL(inspect, 4, cta_inspect)
KERNEL(l3_tail, 4, cta_l3_tail)
// launch.py compiles one kind of values and one width; `make check` and the tests, all of them.
#if !defined(ONLY_ITEM) || ONLY_ITEM == 1
L3_KERNELS(1)
#endif
#if !defined(ONLY_ITEM) || ONLY_ITEM == 4
L3_KERNELS(4)
#endif
#ifdef ONLY_ITEM
#define ONLY(ITEM, PAIRS) EP_KERNELS(ITEM, PAIRS)
ONLY(ONLY_ITEM, ONLY_PAIRS)
#else
ALL_KERNELS(1)
ALL_KERNELS(2)
ALL_KERNELS(4)
#endif
