// Pages of many layers <-> contiguous records, with the records' checksums, in one pass.
//
// One CTA of 256 threads moves one leaf: 64 KiB of one record, in the order in which `leaves.h`
// sums it up.
//
// The checksum of a leaf is XXH3-64 (seed 0, default secret) of its bytes as they are in the
// record; the record's is that of its leaves', which the host computes: 8 bytes for each 64 KiB.
//
// The same source compiles as plain C++ (tests/kernels/on_host.cpp), where a loop over the threads
// takes the place of each phase.

#include "threads.h"
#include "leaves.h"

// A layer's page of one block: runs of `run` bytes, [count0][count1][count2] of them, by strides
// in bytes. It is the bytes [begin, begin + nbytes) of the record. Mirrored in layout.py.
struct Layer {
    u64 base;
    i64 block_stride, stride0, stride1, stride2;
    u32 count1, count2, run, nbytes;
    u64 begin;
};

// A record at `address`, of one block of the layers [first_layer, last_layer).
struct Record {
    u64 address;
    u64 nbytes;
    i64 block;
    u32 first_layer, last_layer;
    u64 first_leaf;  // where the checksums of its leaves go
};

// ---- pages ----------------------------------------------------------------------------------

// A place in the pages of a record, moving forward in the order of its bytes.
struct Cursor {
    const Layer* layer;
    i64 block;
    u32 i0, i1, i2, c;
    u8* run;  // the address of the run it is in

    INLINE void find_run() {
        run = (u8*)(layer->base + block * layer->block_stride + i0 * layer->stride0 +
                    i1 * layer->stride1 + i2 * layer->stride2);
    }

    // Go to byte `offset` of the record; it has one there.
    INLINE void seek(const Layer* layers, const Record& record, u64 offset) {
        u32 low = record.first_layer, high = record.last_layer;
        while (high - low > 1) {  // the last layer that begins at or before it
            u32 middle = (low + high) / 2;
            if (layers[middle].begin <= offset) low = middle; else high = middle;
        }
        layer = layers + low;
        block = record.block;
        u32 inside = (u32)(offset - layer->begin);
        c = inside % layer->run;
        inside /= layer->run;
        i2 = inside % layer->count2;
        inside /= layer->count2;
        i1 = inside % layer->count1;
        i0 = inside / layer->count1;
        find_run();
    }

    // Go `nbytes` forward. Past the record's last byte it must not be used any more.
    INLINE void advance(u32 nbytes, const Layer* end) {
        c += nbytes;
        if (c < layer->run) return;
        while (layer < end && c >= layer->run) {
            c -= layer->run;
            if (++i2 < layer->count2) continue;
            i2 = 0;
            if (++i1 < layer->count1) continue;
            i1 = 0;
            if (++i0 * (u64)layer->count1 * layer->count2 * layer->run < layer->nbytes) continue;
            i0 = 0;
            layer++;
        }
        if (layer < end) find_run();
    }
};

template <u32 N> struct WordOf;
template <> struct WordOf<1> { typedef u8 type; };
template <> struct WordOf<4> { typedef u32 type; };
template <> struct WordOf<16> { typedef Unit type; };

// Copy `nbytes` (at most 16) between a unit and the pages at `cursor`, WORD bytes at a time. The
// cursor stops at the last word.
template <u32 WORD, bool GATHER>
INLINE void copy_words(Unit& unit, u32 nbytes, Cursor& cursor, const Layer* end) {
    typedef typename WordOf<WORD>::type Word;
#pragma unroll
    for (u32 i = 0; i < 16 / WORD; i++) {
        if (i * WORD >= nbytes) return;
        if (i) cursor.advance(WORD, end);
        Word* page = (Word*)(cursor.run + cursor.c);
        Word* word = reinterpret_cast<Word*>(&unit) + i;
        if (GATHER) *word = *page; else *page = *word;
    }
}

// ---- the first phase of a CTA; the others are in leaves.h --------------------------------------

INLINE Leaf leaf_of(const Record& record, u32 index) {
    return Leaf(record.address, record.nbytes, index);
}

// Move one thread's units, and sum up what they add to the accumulators.
template <u32 WORD, bool GATHER>
INLINE void move(
    const Layer* layers, const Record& record, const Leaf& leaf, u32 thread, Shared& shared
) {
    const u32 BATCH = 4;  // units under way at once
    u32 at = thread / 4 * 1024 + thread % 4 * 16;
    if (at >= leaf.nbytes) return;
    const Layer* end = layers + record.last_layer;
    Cursor cursor;
    cursor.seek(layers, record, leaf.begin + at);
    Adds adds;
    for (u32 stripe = 0; stripe < 16 && at < leaf.nbytes; stripe += BATCH, at += 64 * BATCH) {
        Unit units[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            u32 here = at + 64 * i;
            if (here >= leaf.nbytes) break;
            u32 nbytes = leaf.nbytes - here < 16 ? leaf.nbytes - here : 16;
            if (GATHER) {
                copy_words<WORD, true>(units[i], nbytes, cursor, end);
            } else {
                if (nbytes == 16) units[i] = *(Unit*)(leaf.bytes + here);
                else for (u32 k = 0; k < nbytes; k++) ((u8*)&units[i])[k] = leaf.bytes[here + k];
                copy_words<WORD, false>(units[i], nbytes, cursor, end);
            }
            if (here + 64 < leaf.nbytes) cursor.advance(48 + WORD, end);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            u32 here = at + 64 * i;
            if (here >= leaf.nbytes) break;
            if (GATHER) {
                u32 nbytes = leaf.nbytes - here < 16 ? leaf.nbytes - here : 16;
                if (nbytes == 16) *(Unit*)(leaf.bytes + here) = units[i];
                else for (u32 k = 0; k < nbytes; k++) leaf.bytes[here + k] = ((u8*)&units[i])[k];
            }
            adds.add(leaf, here, units[i], thread);
        }
    }
    adds.share(thread, shared);
}

// ---- launches: grid (records, leaves of the longest), 256 threads ------------------------------

#ifdef __CUDACC__
template <u32 WORD, bool GATHER>
__device__ void run_leaf(const Layer* layers, const Record* records, u64* checksums) {
    __shared__ Shared shared;
    const Record record = records[blockIdx.x];
    u32 index = blockIdx.y;
    if ((u64)index * LEAF_NBYTES >= record.nbytes) return;
    const Leaf leaf = leaf_of(record, index);
    move<WORD, GATHER>(layers, record, leaf, threadIdx.x, shared);
    __syncthreads();
    if (threadIdx.x < 8) accumulate(leaf, threadIdx.x, shared);
    __syncthreads();
    if (!threadIdx.x) checksums[record.first_leaf + index] = finish(leaf, shared);
}

#define KERNEL(NAME, WORD, GATHER)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                    \
    NAME##_##WORD(const Layer* layers, const Record* records, u64* checksums) {                 \
        run_leaf<WORD, GATHER>(layers, records, checksums);                                     \
    }

KERNEL(gather, 1, true)
KERNEL(gather, 4, true)
KERNEL(gather, 16, true)
KERNEL(scatter, 1, false)
KERNEL(scatter, 4, false)
KERNEL(scatter, 16, false)
#endif
