// A record's checksum, as kvstore/model/checksum.py defines it: XXH3-64 over the little-endian
// XXH3-64s of its leaves. And copies that are summed up on their way, stripe by stripe.
//
// A source may change while it is copied: others write to the memory that it lies in. So each byte is
// read once, into a register, and what is summed up there is what is stored. (Where the last stripe
// overlaps the one before, both are summed up, and the last one stays.) A sum that is right
// says that the copy is, whoever has written to the source meanwhile, just as if the copy had been
// read again.
#pragma once
#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

#include "plan.h"
#include "vectors.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE_MEMBER inline __attribute__((always_inline))

constexpr size_t STRIPE = XXH_STRIPE_LEN, BLOCK_STRIPES = 16;  // of XXH3's long form
constexpr size_t SHORT = XXH3_MIDSIZE_MAX;                     // what has another form
// What is read soon. Chosen on one Xeon, with few runs: 2048 was the best past the caches in most of
// them, by a few percent. Into them 512 helps AVX2 with records of 4 KiB, and AVX-512 lost a little at
// odd addresses.
constexpr size_t AHEAD = 2048, AHEAD_IN_CACHES = 512;

static_assert((XXH_SECRET_DEFAULT_SIZE - STRIPE) / XXH_SECRET_CONSUME_RATE == BLOCK_STRIPES, "XXH3's secret");

// As many 64-bit numbers as a register has; the product of the low halves of two, and neighbours that
// change places.
#if defined(__AVX512F__)
typedef uint64_t Lane __attribute__((vector_size(64), may_alias));
INLINE Lane low_product(Lane a, Lane b) { return (Lane)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
INLINE Lane pairs_swapped(Lane a) { return (Lane)_mm512_shuffle_epi32((__m512i)a, (_MM_PERM_ENUM)0x4e); }
#elif defined(__AVX2__)
typedef uint64_t Lane __attribute__((vector_size(32), may_alias));
INLINE Lane low_product(Lane a, Lane b) { return (Lane)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
INLINE Lane pairs_swapped(Lane a) { return (Lane)_mm256_shuffle_epi32((__m256i)a, 0x4e); }
#else
typedef uint64_t Lane __attribute__((vector_size(16), may_alias));
#if defined(__SSE2__)
INLINE Lane low_product(Lane a, Lane b) { return (Lane)_mm_mul_epu32((__m128i)a, (__m128i)b); }
INLINE Lane pairs_swapped(Lane a) { return (Lane)_mm_shuffle_epi32((__m128i)a, 0x4e); }
#elif defined(__ARM_NEON)
INLINE Lane low_product(Lane a, Lane b) {
    return (Lane)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
}
INLINE Lane pairs_swapped(Lane a) { return (Lane)vextq_u64((uint64x2_t)a, (uint64x2_t)a, 1); }
#else
INLINE Lane low_product(Lane a, Lane b) { return (a & 0xffffffff) * (b & 0xffffffff); }
INLINE Lane pairs_swapped(Lane a) { return Lane{a[1], a[0]}; }
#endif
#endif
// Takes a value into a register now: it is neither read once more later nor computed later.
INLINE void settle(Lane& lane) {
#if defined(__SSE2__)
    __asm__("" : "+v"(lane));
#elif defined(__aarch64__)
    __asm__("" : "+w"(lane));
#else
    __asm__("" : "+m"(lane));
#endif
}

// PAST: bytes of a store that goes past the caches, to a multiple of them; 0: into the caches.
template <size_t PAST>
INLINE void store(uint8_t* to, Lane lane) {
#if defined(__AVX512F__)
    const __m512i all = (__m512i)lane;
    if (PAST == 64) return _mm512_stream_si512((__m512i*)to, all);
    if (PAST == 32) {
        _mm256_stream_si256((__m256i*)to, _mm512_castsi512_si256(all));
        return _mm256_stream_si256((__m256i*)to + 1, _mm512_extracti64x4_epi64(all, 1));
    }
    if (PAST == 16) {
        _mm_stream_si128((__m128i*)to, _mm512_castsi512_si128(all));
        _mm_stream_si128((__m128i*)to + 1, _mm512_extracti32x4_epi32(all, 1));
        _mm_stream_si128((__m128i*)to + 2, _mm512_extracti32x4_epi32(all, 2));
        return _mm_stream_si128((__m128i*)to + 3, _mm512_extracti32x4_epi32(all, 3));
    }
#elif defined(__AVX2__)
    if (PAST >= 32) return _mm256_stream_si256((__m256i*)to, (__m256i)lane);
    if (PAST == 16) {
        _mm_stream_si128((__m128i*)to, _mm256_castsi256_si128((__m256i)lane));
        return _mm_stream_si128((__m128i*)to + 1, _mm256_extracti128_si256((__m256i)lane, 1));
    }
#elif defined(__SSE2__)
    if (PAST) return _mm_stream_si128((__m128i*)to, (__m128i)lane);
#endif
    put(to, lane);
}

// XXH3's sums of 64 bytes: of as many lanes as they are in registers.
template <size_t... LANE>
struct LongSums {
    Lane lanes[sizeof...(LANE)];

    INLINE_MEMBER LongSums() {
        alignas(64) const xxh_u64 start[XXH_ACC_NB] = XXH3_INIT_ACC;
        ((lanes[LANE] = at<Lane>((const uint8_t*)start + LANE * sizeof(Lane))), ...);
    }
    template <size_t PAST>
    INLINE_MEMBER void move(uint8_t* to, const uint8_t* from, const uint8_t* key) {
        (move_lane<PAST>(lanes[LANE], to + LANE * sizeof(Lane), from + LANE * sizeof(Lane), key + LANE * sizeof(Lane)),
         ...);
    }
    INLINE_MEMBER void scramble(const uint8_t* key) {
        (scramble_lane(lanes[LANE], key + LANE * sizeof(Lane)), ...);
    }
    INLINE_MEMBER uint64_t merged(size_t nbytes) const {
        return XXH3_mergeAccs((const xxh_u64*)lanes, XXH3_kSecret + XXH_SECRET_MERGEACCS_START, nbytes * XXH_PRIME64_1);
    }

    template <size_t PAST>
    INLINE_MEMBER static void move_lane(Lane& sum, uint8_t* to, const uint8_t* from, const uint8_t* key) {
        Lane lane = at<Lane>(from);
        settle(lane);
        const Lane keyed = lane ^ at<Lane>(key);
        sum += pairs_swapped(lane) + low_product(keyed, keyed >> 32);
        settle(sum);  // else all sums of a block are put off, and what they are of waits in memory
        store<PAST>(to, lane);
    }
    INLINE_MEMBER static void scramble_lane(Lane& sum, const uint8_t* key) {
        const Lane mixed = sum ^ sum >> 47 ^ at<Lane>(key), prime = Lane{} + XXH_PRIME32_1;
        sum = low_product(mixed, prime) + (low_product(mixed >> 32, prime) << 32);
    }
};
#if defined(__AVX512F__)
typedef LongSums<0> Sums;
#elif defined(__AVX2__)
typedef LongSums<0, 1> Sums;
#else
typedef LongSums<0, 1, 2, 3> Sums;
#endif

// Copies more than SHORT bytes; returns their XXH3-64.
template <size_t PAST>
static uint64_t copied_long(uint8_t* to, const uint8_t* from, size_t nbytes) {
    Sums sums;
    const uint8_t *secret = XXH3_kSecret, *secret_end = XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE;
    const uint8_t* last = from + nbytes - STRIPE;
    size_t left = (nbytes - 1) / STRIPE;
    for (; left >= BLOCK_STRIPES; left -= BLOCK_STRIPES) {
#pragma GCC unroll 16
        for (size_t i = 0; i < BLOCK_STRIPES; i++) {
            __builtin_prefetch(from + i * STRIPE + (PAST ? AHEAD : AHEAD_IN_CACHES), 0, 2);
            sums.move<PAST>(to + i * STRIPE, from + i * STRIPE, secret + i * XXH_SECRET_CONSUME_RATE);
        }
        sums.scramble(secret_end - STRIPE);
        from += BLOCK_STRIPES * STRIPE, to += BLOCK_STRIPES * STRIPE;
    }
    for (; left; left--, from += STRIPE, to += STRIPE, secret += XXH_SECRET_CONSUME_RATE)
        sums.move<PAST>(to, from, secret);
    const uint8_t* last_key = secret_end - STRIPE - XXH_SECRET_LASTACC_START;
    if (last == from) sums.move<PAST>(to, last, last_key);
    else sums.move<0>(to + (last - from), last, last_key);
    return sums.merged(nbytes);
}

static uint64_t copied_short(uint8_t* to, const uint8_t* from, size_t nbytes) {
    uint8_t own[SHORT];
    memcpy(own, from, nbytes);
    __asm__ volatile("" : : "r"(own) : "memory");  // what is summed up is not read again
    memcpy(to, own, nbytes);
    return XXH3_64bits(own, nbytes);
}

// Copies a leaf, or part of one, and returns its XXH3-64. past: past the caches, if the target is
// aligned; what the caller has to fence.
static uint64_t copied(uint8_t* to, const uint8_t* from, size_t nbytes, bool past) {
    if (nbytes <= SHORT) return copied_short(to, from, nbytes);
    const size_t aligned = past ? uintptr_t(to) | 64 : 1;
    if (aligned % 64 == 0) return copied_long<64>(to, from, nbytes);
    if (aligned % 32 == 0) return copied_long<32>(to, from, nbytes);
    if (aligned % 16 == 0) return copied_long<16>(to, from, nbytes);
    return copied_long<0>(to, from, nbytes);
}

static void leaves_of(const uint8_t* data, size_t nbytes, uint64_t* leaves) {
    for (size_t at = 0; at < nbytes; at += LEAF_NBYTES)
        *leaves++ = XXH3_64bits(data + at, nbytes - at < LEAF_NBYTES ? nbytes - at : LEAF_NBYTES);
}

static uint64_t sum_of(const uint64_t* leaves, size_t count) { return XXH3_64bits(leaves, count * sizeof(*leaves)); }

// Copies `from` to `to` unless that is null; returns the checksum. past: see `copied`.
static uint64_t copy_sum(uint8_t* to, const uint8_t* from, size_t nbytes, bool past) {
    XXH3_state_t whole;
    XXH3_64bits_reset(&whole);
    for (size_t at = 0; at < nbytes; at += LEAF_NBYTES) {
        size_t size = nbytes - at < LEAF_NBYTES ? nbytes - at : LEAF_NBYTES;
        uint64_t leaf = to ? copied(to + at, from + at, size, past) : XXH3_64bits(from + at, size);
        XXH3_64bits_update(&whole, &leaf, sizeof(leaf));
    }
    return XXH3_64bits_digest(&whole);
}
