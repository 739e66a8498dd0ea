// Bytes and halves by the vector: what L3 does to 64 channels of a token, for each instruction set.
#pragma once
#include <string.h>

#include "plan.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint64_t Words64 __attribute__((vector_size(64), may_alias));

template <typename V>
INLINE V at(const void* from) {
    V vector;
    memcpy(&vector, from, sizeof(V));
    return vector;
}
template <typename V>
INLINE void put(void* to, V vector) {
    memcpy(to, &vector, sizeof(V));
}

// One line of memory, 64 bytes at a multiple of 64. PAST: it is not read before, and not kept in the
// caches; the caller ends with a fence. The halves are 32 bytes.
template <bool PAST, typename Half>
INLINE void put_line(void* to, Half low, Half high) {
#if defined(__AVX512F__)
    const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
    if (PAST) return _mm512_stream_si512((__m512i*)to, line);
    return _mm512_storeu_si512(to, line);
#elif defined(__AVX2__)
    if (PAST) {
        _mm256_stream_si256((__m256i*)to, (__m256i)low);
        return _mm256_stream_si256((__m256i*)to + 1, (__m256i)high);
    }
#endif
    put(to, low);
    put((uint8_t*)to + sizeof(Half), high);
}

// `lanes` bytes that are handled at once; a group of 64 channels is 64 / lanes strips of them.
#if defined(__AVX512VBMI2__)
typedef uint8_t Bytes __attribute__((vector_size(64), may_alias));

struct Shuffles {
    __m512i low, high, first, second;
};
// Which bytes of two vectors of 32 halves: all the low ones, all the high ones; and back.
struct ByteOrders {
    alignas(64) uint8_t low[64], high[64], first[64], second[64];
    constexpr ByteOrders() : low(), high(), first(), second() {
        for (int i = 0; i < 64; i++) {
            low[i] = uint8_t(2 * i), high[i] = uint8_t(2 * i + 1);
            first[i] = uint8_t(i / 2 + (i & 1) * 64), second[i] = uint8_t(32 + i / 2 + (i & 1) * 64);
        }
    }
};
static constexpr ByteOrders orders;
INLINE Shuffles shuffles() {
    return {_mm512_load_si512(orders.low), _mm512_load_si512(orders.high), _mm512_load_si512(orders.first),
            _mm512_load_si512(orders.second)};
}
constexpr int SELECT = 0xca;  // ternary logic: bits of the second where the first is set, else of the third

// 64 halves -> their exponents, and their signs and mantissas.
INLINE void split(const Shuffles& by, const uint16_t* row, Bytes& exponents, Bytes& rest) {
    __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(row + 32);
    __m512i sign = _mm512_set1_epi8(char(0x80));
    exponents = (Bytes)_mm512_permutex2var_epi8(_mm512_slli_epi16(a, 1), by.high, _mm512_slli_epi16(b, 1));
    rest = (Bytes)_mm512_ternarylogic_epi64(sign, _mm512_permutex2var_epi8(a, by.high, b),
                                            _mm512_permutex2var_epi8(a, by.low, b), SELECT);
}
template <bool PAST>
INLINE void join(const Shuffles& by, uint16_t* row, Bytes exponents, Bytes rest) {
    __m512i e = (__m512i)exponents, sign = _mm512_set1_epi8(char(0x80));
    __m512i high = _mm512_ternarylogic_epi64(sign, (__m512i)rest, _mm512_srli_epi16(e, 1), SELECT);
    __m512i low = _mm512_ternarylogic_epi64(sign, _mm512_slli_epi16(e, 7), (__m512i)rest, SELECT);
    const __m512i first = _mm512_permutex2var_epi8(low, by.first, high);
    const __m512i second = _mm512_permutex2var_epi8(low, by.second, high);
    if (PAST) {
        _mm512_stream_si512((__m512i*)row, first);
        return _mm512_stream_si512((__m512i*)row + 1, second);
    }
    _mm512_storeu_si512(row, first);
    _mm512_storeu_si512(row + 32, second);
}
// May write 64 bytes whatever there is to write.
INLINE uint8_t* put_escapes(uint8_t* to, Bytes distances, uint64_t wanted) {
    __mmask64 mask = _mm512_cmpge_epu8_mask((__m512i)distances, _mm512_set1_epi8(7)) & wanted;
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(mask, (__m512i)distances));
    return to + __builtin_popcountll(mask);
}
// May read 64 bytes whatever there is to read.
INLINE const uint8_t* take_escapes(const uint8_t* from, Bytes& distances, uint64_t wanted) {
    __mmask64 mask = _mm512_cmpeq_epu8_mask((__m512i)distances, _mm512_set1_epi8(7)) & wanted;
    distances = (Bytes)_mm512_mask_expand_epi8((__m512i)distances, mask, _mm512_loadu_si512(from));
    return from + __builtin_popcountll(mask);
}
INLINE uint8_t largest(Bytes bytes) {
    __m512i v = (__m512i)bytes;
    __m256i h = _mm256_max_epu8(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    __m128i q = _mm_max_epu8(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    q = _mm_sub_epi8(_mm_set1_epi8(-1), q);  // the smallest of the complements, two bytes a half
    q = _mm_min_epu8(q, _mm_srli_epi16(q, 8));
    return uint8_t(255 - (_mm_extract_epi16(_mm_minpos_epu16(_mm_and_si128(q, _mm_set1_epi16(255))), 0)));
}
#elif defined(__AVX2__)
typedef uint8_t Bytes __attribute__((vector_size(32), may_alias));
struct Shuffles {};
INLINE Shuffles shuffles() { return {}; }

INLINE __m256i narrowed(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8); }
INLINE void split(const Shuffles&, const uint16_t* row, Bytes& exponents, Bytes& rest) {
    __m256i a = at<__m256i>(row), b = at<__m256i>(row + 16);
    __m256i byte = _mm256_set1_epi16(255), sign = _mm256_set1_epi8(char(0x80));
    exponents = (Bytes)narrowed(_mm256_and_si256(_mm256_srli_epi16(a, 7), byte), _mm256_and_si256(_mm256_srli_epi16(b, 7), byte));
    __m256i high = narrowed(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    __m256i low = narrowed(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
    rest = (Bytes)_mm256_or_si256(_mm256_and_si256(high, sign), _mm256_andnot_si256(sign, low));
}
template <bool PAST>
INLINE void join(const Shuffles&, uint16_t* row, Bytes exponents, Bytes rest) {
    __m256i e = (__m256i)exponents, r = (__m256i)rest, sign = _mm256_set1_epi8(char(0x80));
    __m256i high = _mm256_or_si256(_mm256_and_si256(r, sign), _mm256_andnot_si256(sign, _mm256_srli_epi16(e, 1)));
    __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, r), _mm256_and_si256(sign, _mm256_slli_epi16(e, 7)));
    __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
    put_line<PAST>(row, _mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31));
}
INLINE uint8_t* put_escapes(uint8_t* to, Bytes distances, uint32_t wanted) {
    __m256i d = (__m256i)distances, seven = _mm256_set1_epi8(7);
    uint32_t mask = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(d, seven), d))) & wanted;
    if (mask) {
        uint8_t each[32];
        put(each, d);
        do *to++ = each[__builtin_ctz(mask)];
        while (mask &= mask - 1);
    }
    return to;
}
INLINE const uint8_t* take_escapes(const uint8_t* from, Bytes& distances, uint32_t wanted) {
    uint32_t mask = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8((__m256i)distances, _mm256_set1_epi8(7)))) & wanted;
    if (mask) {
        uint8_t each[32];
        put(each, distances);
        do each[__builtin_ctz(mask)] = *from++;
        while (mask &= mask - 1);
        distances = at<Bytes>(each);
    }
    return from;
}
INLINE uint8_t largest(Bytes bytes) {
    uint8_t most = 0;
    for (int i = 0; i < 32; i++) most = bytes[i] > most ? bytes[i] : most;
    return most;
}
#else
typedef uint8_t Bytes __attribute__((vector_size(16), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), may_alias));
struct Shuffles {};
INLINE Shuffles shuffles() { return {}; }

INLINE void split(const Shuffles&, const uint16_t* row, Bytes& exponents, Bytes& rest) {
    Halves halves = at<Halves>(row);
    exponents = __builtin_convertvector((halves >> 7) & 255, Bytes);
    rest = __builtin_convertvector(((halves >> 8) & 128) | (halves & 127), Bytes);
}
template <bool PAST>
INLINE void join(const Shuffles&, uint16_t* row, Bytes exponents, Bytes rest) {
    Halves e = __builtin_convertvector(exponents, Halves), r = __builtin_convertvector(rest, Halves);
    put(row, ((r & 128) << 8) | (e << 7) | (r & 127));
}
INLINE uint8_t* put_escapes(uint8_t* to, Bytes distances, uint16_t wanted) {
    for (int i = 0; i < 16; i++)
        if (distances[i] >= 7 && wanted >> i & 1) *to++ = distances[i];
    return to;
}
INLINE const uint8_t* take_escapes(const uint8_t* from, Bytes& distances, uint16_t wanted) {
    for (int i = 0; i < 16; i++)
        if (distances[i] == 7 && wanted >> i & 1) distances[i] = *from++;
    return from;
}
INLINE uint8_t largest(Bytes bytes) {
    uint8_t most = 0;
    for (int i = 0; i < 16; i++) most = bytes[i] > most ? bytes[i] : most;
    return most;
}
#endif

constexpr int LANES = sizeof(Bytes);
constexpr int STRIPS = GROUP / LANES;

typedef uint8_t Bytes32 __attribute__((vector_size(32), may_alias));
#if defined(__AVX512VBMI2__)
INLINE Bytes both(Bytes32 low, Bytes32 high) {
    return (Bytes)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
}
#else
INLINE Bytes both(Bytes32, Bytes32) { return Bytes{}; }  // strips are smaller than a group here
#endif

INLINE Bytes every(uint8_t value) { return Bytes{} + value; }
INLINE Bytes least(Bytes a, Bytes b) { return a < b ? a : b; }
INLINE Bytes most(Bytes a, Bytes b) { return a > b ? a : b; }

// Shifts of bytes, bits that cross into the neighbour included: the callers' masks know.
template <typename V>
INLINE V shifted_up(V bytes, int by) {
    typedef uint64_t Words __attribute__((vector_size(sizeof(V)), may_alias));
    return (V)((Words)bytes << by);
}
template <typename V>
INLINE V shifted_down(V bytes, int by) {
    typedef uint64_t Words __attribute__((vector_size(sizeof(V)), may_alias));
    return (V)((Words)bytes >> by);
}

// Swap the bits `mask << by` of a with the bits `mask` of b.
template <typename V>
INLINE void swap_bits(V& a, V& b, int by, uint8_t mask) {
    V moved = (shifted_down(a, by) ^ b) & (V{} + mask);
    b ^= moved;
    a ^= shifted_up(moved, by);
}
// Bit p of byte c of v[t] <-> bit t of byte c of v[p].
template <typename V>
INLINE void transpose_bits(V v[8]) {
    for (int i = 0; i < 4; i++) swap_bits(v[i], v[i + 4], 4, 0x0f);
    for (int i = 0; i < 8; i++)
        if (!(i & 2)) swap_bits(v[i], v[i + 2], 2, 0x33);
    for (int i = 0; i < 8; i += 2) swap_bits(v[i], v[i + 1], 1, 0x55);
}
// The same for values below 8, which have three planes: v[0], v[1] and v[2].
template <typename V>
INLINE void planes_of(V v[8]) {
    V pair[4];
    for (int i = 0; i < 4; i++) pair[i] = v[i] | shifted_up(v[i + 4], 4);
    swap_bits(pair[0], pair[2], 2, 0x33);
    swap_bits(pair[1], pair[3], 2, 0x33);
    swap_bits(pair[0], pair[1], 1, 0x55);
    v[0] = pair[0], v[1] = pair[1];
    v[2] = (pair[2] & (V{} + 0x55)) | shifted_up(pair[3] & (V{} + 0x55), 1);
}
template <typename V>
INLINE void values_of(V v[8]) {
    V pair[4] = {v[0], v[1], v[2] & (V{} + 0x55), shifted_down(v[2], 1) & (V{} + 0x55)};
    swap_bits(pair[0], pair[1], 1, 0x55);
    swap_bits(pair[0], pair[2], 2, 0x33);
    swap_bits(pair[1], pair[3], 2, 0x33);
    for (int i = 0; i < 4; i++) v[i] = pair[i] & (V{} + 0x0f), v[i + 4] = shifted_down(pair[i], 4) & (V{} + 0x0f);
}
