// Pages of many layers <-> contiguous records, with the records' checksums, in one pass.
//
// One CTA of 256 threads moves one leaf: 64 KiB of one record. Thread t moves the 16-byte units
// t / 4 * 1024 + t % 4 * 16 + s * 64, s = 0..15 of it: the t % 4-th quarter of the 16 stripes of
// block t / 4, in the words of XXH3, whose accumulators are sums over the stripes of a block. So
// every thread sums up by itself, and only the 63 scrambles between blocks are done one after the
// other, by 8 threads, one per accumulator. A warp's access is 8 pieces of 64 bytes: whole sectors.
//
// The checksum of a leaf is XXH3-64 (seed 0, default secret) of its bytes as they are in the
// record; the record's is that of its leaves', which the host computes: 8 bytes for each 64 KiB.
//
// The same source compiles as plain C++ (tests/kernels/on_host.cpp), where a loop over the threads
// takes the place of each phase. No headers: NVRTC has none.

#ifdef __CUDACC__
#define INLINE __device__ __forceinline__
#define TABLE static __device__ const
#else
#define INLINE inline
#define TABLE static const
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

const u32 LEAF_NBYTES = 64 * 1024;
const u32 THREADS = 256;

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

struct alignas(16) Unit {
    u64 low, high;
};

// What the threads of a CTA share.
struct Shared {
    u64 sums[LEAF_NBYTES / 1024][8];
    u64 accumulators[8];
};

// ---- XXH3-64 --------------------------------------------------------------------------------

const u64 PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
const u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full;
const u64 PRIME64_3 = 0x165667B19E3779F9ull, PRIME64_4 = 0x85EBCA77C2B2AE63ull;
const u64 PRIME64_5 = 0x27D4EB2F165667C5ull;

TABLE u64 INITIAL[8] = {
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
};

alignas(8) TABLE u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

INLINE u64 read32(const u8* p) {
    return p[0] | (u64)p[1] << 8 | (u64)p[2] << 16 | (u64)p[3] << 24;
}

INLINE u64 read64(const u8* p) { return read32(p) | read32(p + 4) << 32; }

// The secret's i-th aligned word: both kinds of machine are little-endian.
INLINE u64 secret_word(u32 i) { return reinterpret_cast<const u64*>(SECRET)[i]; }

INLINE u64 rotated(u64 x, int bits) { return x << bits | x >> (64 - bits); }

INLINE u64 swapped(u64 x) {
    x = (x & 0x00ff00ff00ff00ffull) << 8 | (x >> 8 & 0x00ff00ff00ff00ffull);
    x = (x & 0x0000ffff0000ffffull) << 16 | (x >> 16 & 0x0000ffff0000ffffull);
    return x << 32 | x >> 32;
}

INLINE u64 folded_product(u64 a, u64 b) {
#ifdef __CUDACC__
    return a * b ^ __umul64hi(a, b);
#else
    unsigned __int128 product = (unsigned __int128)a * b;
    return (u64)product ^ (u64)(product >> 64);
#endif
}

INLINE u64 avalanche(u64 h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9ull;
    return h ^ h >> 32;
}

INLINE u64 mixed(const u8* p, u32 secret) {
    return folded_product(
        read64(p) ^ read64(SECRET + secret), read64(p + 8) ^ read64(SECRET + secret + 8)
    );
}

// What a word of the input adds to its accumulator; to its neighbour's it adds itself.
INLINE u64 keyed_product(u64 word, u64 key) {
    u64 x = word ^ key;
    return (x & 0xffffffffu) * (x >> 32);
}

// Up to 240 bytes: only at the end of a record.
INLINE u64 short_checksum(const u8* p, u32 n) {
    if (n <= 3) {
        u64 h = (u64)p[0] << 16 | (u64)p[n / 2] << 24 | p[n - 1] | (u64)n << 8;
        h ^= read32(SECRET) ^ read32(SECRET + 4);
        h = (h ^ h >> 33) * PRIME64_2;
        h = (h ^ h >> 29) * PRIME64_3;
        return h ^ h >> 32;
    }
    if (n <= 8) {
        u64 h = (read32(p + n - 4) | read32(p) << 32) ^ read64(SECRET + 8) ^ read64(SECRET + 16);
        h = (h ^ rotated(h, 49) ^ rotated(h, 24)) * 0x9FB21C651E98DF25ull;
        h = (h ^ ((h >> 35) + n)) * 0x9FB21C651E98DF25ull;
        return h ^ h >> 28;
    }
    if (n <= 16) {
        u64 low = read64(p) ^ read64(SECRET + 24) ^ read64(SECRET + 32);
        u64 high = read64(p + n - 8) ^ read64(SECRET + 40) ^ read64(SECRET + 48);
        return avalanche(n + swapped(low) + high + folded_product(low, high));
    }
    u64 h = n * PRIME64_1;
    if (n <= 128) {
        for (u32 i = 0; i < (n + 31) / 32; i++)
            h += mixed(p + 16 * i, 32 * i) + mixed(p + n - 16 * (i + 1), 32 * i + 16);
        return avalanche(h);
    }
    for (u32 i = 0; i < 8; i++) h += mixed(p + 16 * i, 16 * i);
    h = avalanche(h) + mixed(p + n - 16, 136 - 17);
    for (u32 i = 8; i < n / 16; i++) h += mixed(p + 16 * i, 16 * (i - 8) + 3);
    return avalanche(h);
}

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

// ---- the three phases of a CTA, with a barrier after each -------------------------------------

struct Leaf {
    u8* bytes;
    u32 nbytes;
    u64 begin;  // in the record

    INLINE Leaf(const Record& record, u32 index) {
        begin = (u64)index * LEAF_NBYTES;
        u64 rest = record.nbytes - begin;
        nbytes = rest < LEAF_NBYTES ? (u32)rest : LEAF_NBYTES;
        bytes = (u8*)record.address + begin;
    }

    // Whole stripes before the last one, which ends with the leaf and may overlap them.
    INLINE u32 stripes() const { return (nbytes - 1) / 64; }
};

// Move one thread's units, and sum up what they add to the accumulators.
template <u32 WORD, bool GATHER>
INLINE void move(const Layer* layers, const Record& record, u32 index, u32 thread, Shared& shared) {
    const u32 BATCH = 4;  // units under way at once
    Leaf leaf(record, index);
    u32 at = thread / 4 * 1024 + thread % 4 * 16;
    if (at >= leaf.nbytes) return;
    const Layer* end = layers + record.last_layer;
    Cursor cursor;
    cursor.seek(layers, record, leaf.begin + at);
    u64 even = 0, odd = 0;
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
            if (here / 64 < leaf.stripes()) {
                u32 word = stripe + i + thread % 4 * 2;
                even += units[i].high + keyed_product(units[i].low, secret_word(word));
                odd += units[i].low + keyed_product(units[i].high, secret_word(word + 1));
            }
        }
    }
    shared.sums[thread / 4][thread % 4 * 2] = even;
    shared.sums[thread / 4][thread % 4 * 2 + 1] = odd;
}

// Bring one of the eight accumulators through all blocks of the leaf.
INLINE void accumulate(const Record& record, u32 index, u32 lane, Shared& shared) {
    Leaf leaf(record, index);
    if (leaf.nbytes <= 240) return;
    u32 blocks = (leaf.nbytes - 1) / 1024;
    u64 sum = INITIAL[lane];
    for (u32 block = 0; block < blocks; block++) {
        sum += shared.sums[block][lane];
        sum = (sum ^ sum >> 47 ^ secret_word(16 + lane)) * PRIME32_1;
    }
    if (leaf.stripes() % 16) sum += shared.sums[blocks][lane];
    const u8* last = leaf.bytes + leaf.nbytes - 64;
    sum += read64(last + 8 * (lane ^ 1));
    sum += keyed_product(read64(last + 8 * lane), read64(SECRET + 121 + 8 * lane));
    shared.accumulators[lane] = sum;
}

// Return the checksum of the leaf.
INLINE u64 finish(const Record& record, u32 index, const Shared& shared) {
    Leaf leaf(record, index);
    if (leaf.nbytes <= 240) return short_checksum(leaf.bytes, leaf.nbytes);
    u64 h = leaf.nbytes * PRIME64_1;
    for (u32 i = 0; i < 4; i++)
        h += folded_product(
            shared.accumulators[2 * i] ^ read64(SECRET + 11 + 16 * i),
            shared.accumulators[2 * i + 1] ^ read64(SECRET + 19 + 16 * i)
        );
    return avalanche(h);
}

// ---- launches: grid (records, leaves of the longest), 256 threads ------------------------------

#ifdef __CUDACC__
template <u32 WORD, bool GATHER>
__device__ void run_leaf(const Layer* layers, const Record* records, u64* checksums) {
    __shared__ Shared shared;
    const Record record = records[blockIdx.x];
    u32 index = blockIdx.y;
    if ((u64)index * LEAF_NBYTES >= record.nbytes) return;
    move<WORD, GATHER>(layers, record, index, threadIdx.x, shared);
    __syncthreads();
    if (threadIdx.x < 8) accumulate(record, index, threadIdx.x, shared);
    __syncthreads();
    if (!threadIdx.x) checksums[record.first_leaf + index] = finish(record, index, shared);
}

#define KERNEL(NAME, WORD, GATHER)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                       \
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
