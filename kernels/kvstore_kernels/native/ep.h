// EP: 8-bit codes over stripes, stored plane by plane, the most significant first. Lossy.
//
// A stripe of keys is a channel over the tokens of a tile; of values, a token over its rotated
// channels. Every step is rounded to nearest, in 32 bits, and not contracted: all
// implementations compute the same bits.
#pragma once
#include <math.h>

#include "rows.h"

// As many values at once as a register has. All instruction sets compute the same: what crosses
// lanes is sums of two, and extremes.
#if defined(__AVX512VBMI2__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH), may_alias));
typedef uint32_t Uints __attribute__((vector_size(4 * WIDTH), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), may_alias));
typedef uint16_t Sixteen16 __attribute__((vector_size(32), may_alias));
typedef uint8_t Sixteen8 __attribute__((vector_size(16), may_alias));

// Bytes and halves in memory, one of each to a lane; and the lesser and the greater of two.
#if defined(__AVX512VBMI2__)
INLINE Uints bytes_at(const uint8_t* from) { return (Uints)_mm512_cvtepu8_epi32(at<__m128i>(from)); }
INLINE Uints halves_at(const void* from) { return (Uints)_mm512_cvtepu16_epi32(at<__m256i>(from)); }
INLINE void put_bytes(uint8_t* to, Uints v) { put(to, _mm512_cvtepi32_epi8((__m512i)v)); }
INLINE void put_halves(void* to, Uints v) { put(to, _mm512_cvtepi32_epi16((__m512i)v)); }
INLINE Floats lesser(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE Floats greater(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE Uints bytes_at(const uint8_t* from) {
    return (Uints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)at<uint64_t>(from)));
}
INLINE Uints halves_at(const void* from) { return (Uints)_mm256_cvtepu16_epi32(at<__m128i>(from)); }
INLINE __m128i halves_of(Uints v) {
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
}
INLINE void put_bytes(uint8_t* to, Uints v) {
    __m128i halves = halves_of(v);
    put(to, _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
}
INLINE void put_halves(void* to, Uints v) { put(to, halves_of(v)); }
INLINE Floats lesser(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE Floats greater(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
#else
typedef uint16_t Four16 __attribute__((vector_size(8), may_alias));
typedef uint8_t Four8 __attribute__((vector_size(4), may_alias));
INLINE Uints bytes_at(const uint8_t* from) { return __builtin_convertvector(at<Four8>(from), Uints); }
INLINE Uints halves_at(const void* from) { return __builtin_convertvector(at<Four16>(from), Uints); }
INLINE void put_bytes(uint8_t* to, Uints v) { put(to, __builtin_convertvector(v, Four8)); }
INLINE void put_halves(void* to, Uints v) { put(to, __builtin_convertvector(v, Four16)); }
INLINE Floats lesser(Floats a, Floats b) { return a < b ? a : b; }
INLINE Floats greater(Floats a, Floats b) { return a > b ? a : b; }
#endif

constexpr uint32_t STEP_BIAS = 824;  // 5 bits of exponent and 3 of mantissa, from 2^-24 on
constexpr float LARGEST = 65504.0f;  // of a half

INLINE Floats floats(float value) { return Floats{} + value; }
// Every lane is the extreme of all of them then.
template <bool LEAST, int STRIDE = WIDTH / 2>
INLINE Floats extreme_of(Floats v) {
    Ints partner;
    for (int i = 0; i < WIDTH; i++) partner[i] = i ^ STRIDE;
    Floats other = __builtin_shuffle(v, partner);
    v = LEAST ? lesser(v, other) : greater(v, other);
    if constexpr (STRIDE > 1) return extreme_of<LEAST, STRIDE / 2>(v);
    else return v;
}
// Down to 10 bits of mantissa, so that a half holds it.
INLINE Floats floor10(Floats x) {
    Uints bits = (Uints)x, negative = (Uints)(x < 0.0f);
    return (Floats)((bits + (negative & 0x1fffu)) & ~0x1fffu);
}
// The half of what `floor10` returned; 0 below 2^-14.
INLINE Uints to_half(Floats x) {
    Uints bits = (Uints)x;
    Ints magnitude = (Ints)((bits >> 13) & 0x3ffffu) - (112 << 10);
    magnitude = magnitude > 0 ? magnitude : Ints{};
    return (Uints)magnitude | ((bits >> 16) & 0x8000u);
}
INLINE Floats of_half(Uints half) {
    Uints magnitude = half & 0x7fffu;
    Uints bits = magnitude != 0u ? (magnitude << 13) + (112u << 23) : Uints{};
    return (Floats)(bits | ((half & 0x8000u) << 16));
}
INLINE Ints step_index(Floats lo, Floats hi) {
    Floats step = (hi - lo + 0.0f) * (1.0f / 255.0f);  // of zeros either may be negative
    Ints index = (Ints)(((Uints)step + 0xfffffu) >> 20) - int32_t(STEP_BIAS);
    return index > 0 ? index : Ints{};
}
// Where a half does not hold the lowest value, or 8 bits the step: rotated values may be larger than
// any that came, and a stripe wider than 255 of the largest steps.
INLINE Ints too_wide(Floats lo, Ints index) { return (Ints)(lo < -LARGEST) | (Ints)(index > 255); }
INLINE Floats step_of(Ints index) { return (Floats)(((Uints)index + STEP_BIAS) << 20); }
INLINE Uints codes_of(Floats x, Floats lo, Floats inverse) {
    const Floats magic = floats(12582912.0f);  // 1.5 * 2^23: adding it rounds to nearest even
    Floats code = (x - lo) * inverse;
    code = greater(code, floats(0.0f));
    code = lesser(code, floats(255.0f));
    return (Uints)(code + magic) & 0xffu;  // the last bits of the mantissa are the integer
}
INLINE Floats values_at(const uint8_t* codes, float half, Floats lo, Floats step) {
    Floats code = __builtin_convertvector((Ints)bytes_at(codes), Floats);
    Floats scaled = (code + half) * step;
    return scaled + lo;
}

// Whether a half holds every value: no infinity, no NaN, none above 65504. `largest` of the bits.
template <typename Value, typename Vector>
INLINE bool fits(const Value* x, ptrdiff_t stride, int T, int D, Value sizes, Value largest) {
    constexpr int LANES_OF = sizeof(Vector) / sizeof(Value);
    Vector most{};
    for (int t = 0; t < T; t++)
        for (int c = 0; c < D; c += LANES_OF) {
            Vector size = at<Vector>(x + t * stride + c) & sizes;
            most = most > size ? most : size;
        }
    Vector over = (Vector)(most > (Vector{} + largest));
    for (int i = 0; i < LANES_OF; i++)
        if (over[i]) return false;
    return true;
}

// Values of an item, as floats and back.
struct Bf16 {
    typedef uint16_t Value;
    INLINE bool fit(const uint16_t* x, ptrdiff_t stride, int T, int D) {
        return fits<uint16_t, Sixteen16>(x, stride, T, D, 0x7fff, 0x477f);
    }
    INLINE Floats load(const uint16_t* from) {
        return (Floats)(halves_at(from) << 16);
    }
    INLINE void store(uint16_t* to, Floats x) {
        Uints bits = (Uints)x;
        put_halves(to, (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};
struct Fp16 {
    typedef uint16_t Value;
    INLINE bool fit(const uint16_t* x, ptrdiff_t stride, int T, int D) {
        return fits<uint16_t, Sixteen16>(x, stride, T, D, 0x7fff, 0x7bff);
    }
    INLINE Floats load(const uint16_t* from) {
        Uints half = halves_at(from);
        Uints magnitude = half & 0x7fffu;
        Floats x = (Floats)(magnitude << 13) * floats(0x1p112f);  // denormals come out right, too
        Uints special = (Uints)(magnitude >= 0x7c00u);
        Uints bits = ((Uints)x & ~special) | (((magnitude << 13) | 0x7f800000u) & special);
        return (Floats)(bits | ((half & 0x8000u) << 16));
    }
    // Of finite values below 65520; above it, the largest half.
    INLINE void store(uint16_t* to, Floats x) {
        Uints bits = (Uints)x, sign = (bits >> 16) & 0x8000u;
        Floats size = (Floats)(bits & 0x7fffffffu);
        size = lesser(size, floats(LARGEST));
        Uints normal = (Uints)size;
        normal = (normal + 0xfffu + ((normal >> 13) & 1u) - (112u << 23)) >> 13;
        // Below 2^-14: add 0.5, whose last bit of mantissa is 2^-24, a half's smallest.
        Uints denormal = (Uints)(size + floats(0.5f)) - 0x3f000000u;
        Uints small = (Uints)(size < 0x1p-14f);
        put_halves(to, (denormal & small) | (normal & ~small) | sign);
    }
};
struct Fp32 {
    typedef uint32_t Value;
    INLINE bool fit(const uint32_t* x, ptrdiff_t stride, int T, int D) {
        return fits<uint32_t, Uints>(x, stride, T, D, 0x7fffffffu, 0x477fe000u);
    }
    INLINE Floats load(const uint32_t* from) { return at<Floats>(from); }
    INLINE void store(uint32_t* to, Floats x) { put(to, x); }
};

template <int STRIDE>
INLINE Floats butterfly(Floats v) {
    Ints partner;
    Floats sign;
    for (int i = 0; i < WIDTH; i++) partner[i] = i ^ STRIDE, sign[i] = i & STRIDE ? -1.0f : 1.0f;
    return __builtin_shuffle(v, partner) + v * sign;
}
// Strides 1, 2, .. below `block` over `count` vectors.
INLINE void butterflies(Floats* v, int count, int block) {
    if (block < 16) return;
    for (int i = 0; i < count; i++) {
        v[i] = butterfly<2>(butterfly<1>(v[i]));
        if (WIDTH > 4) v[i] = butterfly<4 % WIDTH>(v[i]);
        if (WIDTH > 8) v[i] = butterfly<8 % WIDTH>(v[i]);
    }
    for (int stride = 1; stride < block / WIDTH; stride *= 2)
        for (int i = 0; i < count; i++)
            if (!(i & stride)) {
                Floats a = v[i], b = v[i + stride];
                v[i] = a + b;
                v[i + stride] = a - b;
            }
}
// The largest power of two that divides D, if it is worth rotating.
INLINE int rotated_block(int D) {
    int block = D & -D;
    return block < 16 ? 0 : block;
}

template <typename V>
INLINE void write_planes_of(const uint8_t* codes, int T, int D, int t, int c, int base, uint8_t* to, uint8_t* more) {
    V v[8];
    for (int i = 0; i < 8; i++) v[i] = at<V>(codes + (t + i) * D + c);
    transpose_bits(v);
    for (int p = 0; p < 8; p++) {
        uint8_t* plane = p < base ? to + size_t(p) * (T / 8) * D : more + size_t(p - base) * (T / 8) * D;
        put(plane + size_t(t / 8) * D + c, v[7 - p]);
    }
}
// Of all 8 planes of the codes, `base` go to `to`, and the rest to `more`.
INLINE void write_planes(const uint8_t* codes, int T, int D, int base, uint8_t* to, uint8_t* more) {
    for (int t = 0; t < T; t += 8) {
        int c = 0;
        for (; c + LANES <= D; c += LANES) write_planes_of<Bytes>(codes, T, D, t, c, base, to, more);
        for (; c < D; c += 16) write_planes_of<Sixteen8>(codes, T, D, t, c, base, to, more);
    }
}
template <typename V>
INLINE void read_codes_of(uint8_t* codes, int T, int D, int t, int c, int base, const uint8_t* from, int fine,
                          const uint8_t* more) {
    V v[8] = {};
    for (int p = 0; p < base; p++) v[7 - p] = at<V>(from + (size_t(p) * (T / 8) + t / 8) * D + c);
    for (int p = 0; p < fine; p++) v[7 - base - p] = at<V>(more + (size_t(p) * (T / 8) + t / 8) * D + c);
    transpose_bits(v);
    for (int i = 0; i < 8; i++) put(codes + (t + i) * D + c, v[i]);
}
INLINE void read_codes(uint8_t* codes, int T, int D, int base, const uint8_t* from, int fine, const uint8_t* more) {
    for (int t = 0; t < T; t += 8) {
        int c = 0;
        for (; c + LANES <= D; c += LANES) read_codes_of<Bytes>(codes, T, D, t, c, base, from, fine, more);
        for (; c < D; c += 16) read_codes_of<Sixteen8>(codes, T, D, t, c, base, from, fine, more);
    }
}

// TOKENS: T where it is the usual one, so that a stripe stays in registers; else 0.
// Whether all stripes fit.
template <typename Item, int TOKENS>
static bool encode_keys_of(const typename Item::Value* x, ptrdiff_t stride, int tokens, int D, uint8_t* lows,
                           uint8_t* steps, uint8_t* codes) {
    const int T = TOKENS ? TOKENS : tokens;
    Ints over{};
    for (int c = 0; c < D; c += WIDTH) {
        Floats v[TOKENS ? TOKENS : TOKENS_MAX], lo, hi;
        for (int t = 0; t < T; t++) v[t] = Item::load(x + t * stride + c);
        lo = hi = v[0];
        for (int t = 1; t < T; t++) lo = lesser(lo, v[t]), hi = greater(hi, v[t]);
        lo = floor10(lo) + 0.0f;  // no negative zero: which of two zeros is less is not defined
        Ints index = step_index(lo, hi);
        over |= too_wide(lo, index);
        Floats inverse = 1.0f / step_of(index);
        put_halves(lows + 2 * c, to_half(lo));
        put_bytes(steps + c, (Uints)index);
        for (int t = 0; t < T; t++) put_bytes(codes + t * D + c, codes_of(v[t], lo, inverse));
    }
    for (int i = 0; i < WIDTH; i++)
        if (over[i]) return false;
    return true;
}
template <typename Item>
INLINE bool encode_keys(const typename Item::Value* x, ptrdiff_t stride, int T, int D, uint8_t* lows, uint8_t* steps,
                        uint8_t* codes) {
    if (T == 16) return encode_keys_of<Item, 16>(x, stride, T, D, lows, steps, codes);
    return encode_keys_of<Item, 0>(x, stride, T, D, lows, steps, codes);
}
template <typename Item>
INLINE void decode_keys(typename Item::Value* x, ptrdiff_t stride, int T, int D, const uint8_t* lows,
                        const uint8_t* steps, const uint8_t* codes, float half) {
    for (int c = 0; c < D; c += WIDTH) {
        Floats lo = of_half(halves_at(lows + 2 * c)), step = step_of((Ints)bytes_at(steps + c));
        for (int t = 0; t < T; t++) Item::store(x + t * stride + c, values_at(codes + t * D + c, half, lo, step));
    }
}
// CHANNELS: D where it is one of the usual ones, so that loops over it are unrolled; else 0.
template <typename Item, int CHANNELS>
static bool encode_values_of(const typename Item::Value* x, ptrdiff_t stride, int T, int channels, const float* signs,
                             uint8_t* lows, uint8_t* steps, uint8_t* codes) {
    const int D = CHANNELS ? CHANNELS : channels, count = D / WIDTH, block = rotated_block(D);
    const float norm = 1.0f / sqrtf(float(block));
    bool fits = true;
    for (int t = 0; t < T; t++) {
        Floats v[(CHANNELS ? CHANNELS : CHANNELS_MAX) / WIDTH];
        for (int i = 0; i < count; i++) v[i] = Item::load(x + t * stride + WIDTH * i) * at<Floats>(signs + WIDTH * i);
        butterflies(v, count, block);
        for (int i = 0; i < count; i++) v[i] = v[i] * norm;
        Floats low = v[0], high = v[0];
        for (int i = 1; i < count; i++) low = lesser(low, v[i]), high = greater(high, v[i]);
        Floats lo = floor10(extreme_of<true>(low)) + 0.0f;
        Ints index = step_index(lo, extreme_of<false>(high));
        fits &= !too_wide(lo, index)[0];
        Floats inverse = 1.0f / step_of(index);
        uint16_t half = uint16_t(to_half(lo)[0]);
        memcpy(lows + 2 * t, &half, 2);
        steps[t] = uint8_t(index[0]);
        for (int i = 0; i < count; i++) put_bytes(codes + t * D + WIDTH * i, codes_of(v[i], lo, inverse));
    }
    return fits;
}
template <typename Item, int CHANNELS>
static void decode_values_of(typename Item::Value* x, ptrdiff_t stride, int T, int channels, const float* signs,
                             const uint8_t* lows, const uint8_t* steps, const uint8_t* codes, float half) {
    const int D = CHANNELS ? CHANNELS : channels, count = D / WIDTH, block = rotated_block(D);
    const float norm = 1.0f / sqrtf(float(block));
    for (int t = 0; t < T; t++) {
        Floats v[(CHANNELS ? CHANNELS : CHANNELS_MAX) / WIDTH];
        uint16_t low;
        memcpy(&low, lows + 2 * t, 2);
        Floats lo = of_half(Uints{} + low), step = step_of(Ints{} + steps[t]);
        for (int i = 0; i < count; i++) v[i] = values_at(codes + t * D + WIDTH * i, half, lo, step);
        butterflies(v, count, block);
        for (int i = 0; i < count; i++)
            Item::store(x + t * stride + WIDTH * i, v[i] * norm * at<Floats>(signs + WIDTH * i));
    }
}
template <typename Item>
INLINE bool encode_values(const typename Item::Value* x, ptrdiff_t stride, int T, int D, const float* signs,
                          uint8_t* lows, uint8_t* steps, uint8_t* codes) {
    if (D == 64) return encode_values_of<Item, 64>(x, stride, T, D, signs, lows, steps, codes);
    if (D == 128) return encode_values_of<Item, 128>(x, stride, T, D, signs, lows, steps, codes);
    if (D == 256) return encode_values_of<Item, 256>(x, stride, T, D, signs, lows, steps, codes);
    return encode_values_of<Item, 0>(x, stride, T, D, signs, lows, steps, codes);
}
template <typename Item>
INLINE void decode_values(typename Item::Value* x, ptrdiff_t stride, int T, int D, const float* signs,
                          const uint8_t* lows, const uint8_t* steps, const uint8_t* codes, float half) {
    if (D == 64) decode_values_of<Item, 64>(x, stride, T, D, signs, lows, steps, codes, half);
    else if (D == 128) decode_values_of<Item, 128>(x, stride, T, D, signs, lows, steps, codes, half);
    else if (D == 256) decode_values_of<Item, 256>(x, stride, T, D, signs, lows, steps, codes, half);
    else decode_values_of<Item, 0>(x, stride, T, D, signs, lows, steps, codes, half);
}

INLINE Rows<uint16_t> rows_of(const Tile& tile, uint8_t* page, bool read, uint16_t*) { return rows16(tile, page, read); }
INLINE Rows<uint32_t> rows_of(const Tile& tile, uint8_t* page, bool read, uint32_t*) { return rows32(tile, page, read); }

template <typename Item>
static int encode_parts(const Plan* plan, int64_t block, uint8_t* base, uint8_t* fine, const uint8_t planes[2],
                        const uint8_t fine_planes[2]) {
    typedef typename Item::Value Value;
    base += HEADER, fine += HEADER;
    for (uint32_t n = 0; n < plan->tiles_count; n++) {
        const Tile& tile = plan->tiles[n];
        const int T = tile.tokens, D = tile.channels, kind = tile.kind;
        Rows<Value> rows = rows_of(tile, page_of(*plan, tile, block), true, (Value*)nullptr);
        ask_for_group<false>(*plan, n + 1, block, 0, D);
        if (!Item::fit(rows.first, rows.stride, T, D)) return 1;
        size_t stripes = stripes_of(tile), size = ep_nbytes(tile, planes[kind], true);
        uint8_t *codes = scratch().codes, *steps = base + 2 * stripes, *to = steps + stripes;
        if (kind == KEYS ? !encode_keys<Item>(rows.first, rows.stride, T, D, base, steps, codes)
                         : !encode_values<Item>(rows.first, rows.stride, T, D, plan->signs, base, steps, codes))
            return 1;
        write_planes(codes, T, D, planes[kind], to, fine);
        uint8_t* used = to + size_t(T) * D / 8 * planes[kind];
        memset(used, 0, size_t(base + size - used));
        base += size;
        size = ep_nbytes(tile, fine_planes[kind], false);
        used = fine + size_t(T) * D / 8 * fine_planes[kind];
        memset(used, 0, size_t(fine + size - used));
        fine += size;
    }
    return 0;
}

template <typename Item>
static void decode_parts(const Plan* plan, int64_t block, const uint8_t* base, const uint8_t* fine,
                         const uint8_t planes[2], const uint8_t fine_planes[2]) {
    typedef typename Item::Value Value;
    base += HEADER;
    const bool all = fine != nullptr;
    if (all) fine += HEADER;
    for (uint32_t n = 0; n < plan->tiles_count; n++) {
        const Tile& tile = plan->tiles[n];
        const int T = tile.tokens, D = tile.channels, kind = tile.kind;
        uint8_t* page = page_of(*plan, tile, block);
        Rows<Value> rows = rows_of(tile, page, false, (Value*)nullptr);
        size_t stripes = stripes_of(tile);
        const uint8_t *steps = base + 2 * stripes, *from = steps + stripes;
        const int more = all ? fine_planes[kind] : 0, known = planes[kind] + more;
        const float half = float((1 << (8 - known)) - 1) * 0.5f;
        uint8_t* codes = scratch().codes;
        ask_for_group<true>(*plan, n + 1, block, 0, D);
        read_codes(codes, T, D, planes[kind], from, more, fine);
        if (kind == KEYS) decode_keys<Item>(rows.first, rows.stride, T, D, base, steps, codes, half);
        else decode_values<Item>(rows.first, rows.stride, T, D, plan->signs, base, steps, codes, half);
        write_back(tile, page, rows);
        base += ep_nbytes(tile, planes[kind], true);
        if (all) fine += ep_nbytes(tile, fine_planes[kind], false);
    }
}

static int ep_encode(const Plan* plan, int64_t block, uint8_t* base, uint8_t* fine, const uint8_t planes[2],
                     const uint8_t fine_planes[2]) {
    if (plan->item == BF16) return encode_parts<Bf16>(plan, block, base, fine, planes, fine_planes);
    if (plan->item == FP16) return encode_parts<Fp16>(plan, block, base, fine, planes, fine_planes);
    return encode_parts<Fp32>(plan, block, base, fine, planes, fine_planes);
}
static void ep_decode(const Plan* plan, int64_t block, const uint8_t* base, const uint8_t* fine,
                      const uint8_t planes[2], const uint8_t fine_planes[2]) {
    if (plan->item == BF16) decode_parts<Bf16>(plan, block, base, fine, planes, fine_planes);
    else if (plan->item == FP16) decode_parts<Fp16>(plan, block, base, fine, planes, fine_planes);
    else decode_parts<Fp32>(plan, block, base, fine, planes, fine_planes);
}
