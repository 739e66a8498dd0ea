// The checksum of a leaf: XXH3-64 (seed 0, default secret) of up to 64 KiB, by one CTA.
//
// Thread t reads the 16-byte units t / 4 * 1024 + t % 4 * 16 + s * 64, s = 0..15: the t % 4-th
// quarter of the 16 stripes of block t / 4, in the words of XXH3, whose accumulators are sums over
// the stripes of a block. So every thread sums up by itself, and only the 63 scrambles between
// blocks are done one after the other, by 8 threads, one per accumulator. A warp's access is 8
// pieces of 64 bytes: whole sectors.

const u32 LEAF_NBYTES = 64 * 1024;

struct alignas(16) Unit {
    u64 low, high;
};

// What the threads of a CTA share.
struct Shared {
    u64 sums[LEAF_NBYTES / 1024][8];
    u64 accumulators[8];
};

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

// ---- the phases of a CTA, with a barrier after each -------------------------------------------

struct Leaf {
    u8* bytes;
    u32 nbytes;
    u64 begin;  // in the record

    INLINE Leaf(u64 address, u64 record_nbytes, u32 index) {
        begin = (u64)index * LEAF_NBYTES;
        u64 rest = record_nbytes - begin;
        nbytes = rest < LEAF_NBYTES ? (u32)rest : LEAF_NBYTES;
        bytes = (u8*)address + begin;
    }

    // Whole stripes before the last one, which ends with the leaf and may overlap them.
    INLINE u32 stripes() const { return (nbytes - 1) / 64; }
};

// What one thread's units add to the accumulators.
struct Adds {
    u64 even = 0, odd = 0;

    INLINE void add(const Leaf& leaf, u32 at, const Unit& unit, u32 thread) {
        if (at / 64 >= leaf.stripes()) return;
        u32 word = at / 64 % 16 + thread % 4 * 2;
        even += unit.high + keyed_product(unit.low, secret_word(word));
        odd += unit.low + keyed_product(unit.high, secret_word(word + 1));
    }
    INLINE void share(u32 thread, Shared& shared) const {
        shared.sums[thread / 4][thread % 4 * 2] = even;
        shared.sums[thread / 4][thread % 4 * 2 + 1] = odd;
    }
};

// Sum up one thread's units of a leaf that lies in memory, at a multiple of 16.
INLINE void read_leaf(const Leaf& leaf, u32 thread, Shared& shared) {
    u32 at = thread / 4 * 1024 + thread % 4 * 16;
    Adds adds;
#pragma unroll 8
    for (u32 stripe = 0; stripe < 16; stripe++, at += 64)
        if (at + 16 <= leaf.nbytes) adds.add(leaf, at, *(const Unit*)(leaf.bytes + at), thread);
    adds.share(thread, shared);
}

// Bring one of the eight accumulators through all blocks of the leaf.
INLINE void accumulate(const Leaf& leaf, u32 lane, Shared& shared) {
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
INLINE u64 finish(const Leaf& leaf, const Shared& shared) {
    if (leaf.nbytes <= 240) return short_checksum(leaf.bytes, leaf.nbytes);
    u64 h = leaf.nbytes * PRIME64_1;
    for (u32 i = 0; i < 4; i++)
        h += folded_product(
            shared.accumulators[2 * i] ^ read64(SECRET + 11 + 16 * i),
            shared.accumulators[2 * i + 1] ^ read64(SECRET + 19 + 16 * i)
        );
    return avalanche(h);
}
