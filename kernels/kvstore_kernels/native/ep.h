// EP: 8-bit codes over stripes, stored plane by plane, the most significant first. Lossy.
//
// A stripe of keys is a channel over the tokens of a tile; of values, a token over its rotated
// channels. Every step is rounded to nearest, in 32 bits, and not contracted: all
// implementations compute the same bits.
#pragma once
#include <math.h>

#include "rows.h"

typedef float Floats __attribute__((vector_size(64), may_alias));
typedef uint32_t Uints __attribute__((vector_size(64), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
typedef uint16_t Sixteen16 __attribute__((vector_size(32), may_alias));
typedef uint8_t Sixteen8 __attribute__((vector_size(16), may_alias));

constexpr uint32_t STEP_BIAS = 824;  // 5 bits of exponent and 3 of mantissa, from 2^-24 on
constexpr float LARGEST = 65504.0f;  // of a half

INLINE Floats floats(float value) { return Floats{} + value; }
INLINE Floats lesser(Floats a, Floats b) { return a < b ? a : b; }
INLINE Floats greater(Floats a, Floats b) { return a > b ? a : b; }
typedef float Eight __attribute__((vector_size(32), may_alias));
typedef float Four __attribute__((vector_size(16), may_alias));
template <bool LEAST>
INLINE float extreme_of(Floats v) {
    Eight halves[2];
    memcpy(halves, &v, sizeof(v));
    Eight e = (LEAST ? halves[0] < halves[1] : halves[0] > halves[1]) ? halves[0] : halves[1];
    Four quarters[2];
    memcpy(quarters, &e, sizeof(e));
    Four q = (LEAST ? quarters[0] < quarters[1] : quarters[0] > quarters[1]) ? quarters[0] : quarters[1];
    float a = (LEAST ? q[0] < q[1] : q[0] > q[1]) ? q[0] : q[1], b = (LEAST ? q[2] < q[3] : q[2] > q[3]) ? q[2] : q[3];
    return (LEAST ? a < b : a > b) ? a : b;
}
// Down to 10 bits of mantissa, so that a half holds it.
INLINE Floats floor10(Floats x) {
    Uints bits = (Uints)x, negative = (Uints)(x < 0.0f);
    return (Floats)((bits + (negative & 0x1fffu)) & ~0x1fffu);
}
// The half of what `floor10` returned; 0 below 2^-14.
INLINE Sixteen16 to_half(Floats x) {
    Uints bits = (Uints)x;
    Ints magnitude = (Ints)((bits >> 13) & 0x3ffffu) - (112 << 10);
    magnitude = magnitude > 0 ? magnitude : Ints{};
    return __builtin_convertvector((Uints)magnitude | ((bits >> 16) & 0x8000u), Sixteen16);
}
INLINE Floats of_half(Sixteen16 half) {
    Uints wide = __builtin_convertvector(half, Uints), magnitude = wide & 0x7fffu;
    Uints bits = magnitude != 0u ? (magnitude << 13) + (112u << 23) : Uints{};
    return (Floats)(bits | ((wide & 0x8000u) << 16));
}
INLINE Ints step_index(Floats lo, Floats hi) {
    Floats step = (hi - lo + 0.0f) * (1.0f / 255.0f);  // of zeros either may be negative
    Ints index = (Ints)(((Uints)step + 0xfffffu) >> 20) - int32_t(STEP_BIAS);
    index = index > 0 ? index : Ints{};
    return index < 255 ? index : Ints{} + 255;
}
INLINE Floats step_of(Ints index) { return (Floats)(((Uints)index + STEP_BIAS) << 20); }
INLINE Sixteen8 codes_of(Floats x, Floats lo, Floats inverse) {
    const Floats magic = floats(12582912.0f);  // 1.5 * 2^23: adding it rounds to nearest even
    Floats code = (x - lo) * inverse;
    code = greater(code, floats(0.0f));
    code = lesser(code, floats(255.0f));
    code = (code + magic) - magic;
    return __builtin_convertvector(__builtin_convertvector(code, Ints), Sixteen8);
}
INLINE Floats values_at(const uint8_t* codes, float half, Floats lo, Floats step) {
    Floats code = __builtin_convertvector(__builtin_convertvector(at<Sixteen8>(codes), Ints), Floats);
    Floats scaled = (code + half) * step;
    return scaled + lo;
}

// Whether a half holds every value: no infinity, no NaN, none above 65504. `largest` of the bits.
template <typename Value, typename Vector>
INLINE bool fits(const Value* x, ptrdiff_t stride, int T, int D, Value sizes, Value largest) {
    Vector most{};
    for (int t = 0; t < T; t++)
        for (int c = 0; c < D; c += 16) {
            Vector size = at<Vector>(x + t * stride + c) & sizes;
            most = most > size ? most : size;
        }
    Vector over = (Vector)(most > (Vector{} + largest));
    for (int i = 0; i < 16; i++)
        if (over[i]) return false;
    return true;
}

// Sixteen values of an item, as floats and back.
struct Bf16 {
    typedef uint16_t Value;
    INLINE bool fit(const uint16_t* x, ptrdiff_t stride, int T, int D) {
        return fits<uint16_t, Sixteen16>(x, stride, T, D, 0x7fff, 0x477f);
    }
    INLINE Floats load(const uint16_t* from) {
        return (Floats)(__builtin_convertvector(at<Sixteen16>(from), Uints) << 16);
    }
    INLINE void store(uint16_t* to, Floats x) {
        Uints bits = (Uints)x;
        put(to, __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, Sixteen16));
    }
};
struct Fp16 {
    typedef uint16_t Value;
    INLINE bool fit(const uint16_t* x, ptrdiff_t stride, int T, int D) {
        return fits<uint16_t, Sixteen16>(x, stride, T, D, 0x7fff, 0x7bff);
    }
    INLINE Floats load(const uint16_t* from) {
        Uints half = __builtin_convertvector(at<Sixteen16>(from), Uints);
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
        put(to, __builtin_convertvector((denormal & small) | (normal & ~small) | sign, Sixteen16));
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
    for (int i = 0; i < 16; i++) partner[i] = i ^ STRIDE, sign[i] = i & STRIDE ? -1.0f : 1.0f;
    return __builtin_shuffle(v, partner) + v * sign;
}
// Strides 1, 2, .. below `block` over `count` vectors of 16 channels.
INLINE void butterflies(Floats* v, int count, int block) {
    if (block < 16) return;
    for (int i = 0; i < count; i++) v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v[i]))));
    for (int stride = 1; stride < block / 16; stride *= 2)
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

INLINE void write_planes(const uint8_t* codes, int T, int D, int first, int count, uint8_t* to) {
    for (int t = 0; t < T; t += 8) {
        int c = 0;
        for (; c + 64 <= D; c += 64) {
            typedef uint8_t Wide __attribute__((vector_size(64), may_alias));
            Wide v[8];
            for (int i = 0; i < 8; i++) v[i] = at<Wide>(codes + (t + i) * D + c);
            transpose_bits(v);
            for (int p = 0; p < count; p++) put(to + (size_t(p) * (T / 8) + t / 8) * D + c, v[7 - first - p]);
        }
        for (; c < D; c += 16) {
            Sixteen8 v[8];
            for (int i = 0; i < 8; i++) v[i] = at<Sixteen8>(codes + (t + i) * D + c);
            transpose_bits(v);
            for (int p = 0; p < count; p++) put(to + (size_t(p) * (T / 8) + t / 8) * D + c, v[7 - first - p]);
        }
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
    typedef uint8_t Wide __attribute__((vector_size(64), may_alias));
    for (int t = 0; t < T; t += 8) {
        int c = 0;
        for (; c + 64 <= D; c += 64) read_codes_of<Wide>(codes, T, D, t, c, base, from, fine, more);
        for (; c < D; c += 16) read_codes_of<Sixteen8>(codes, T, D, t, c, base, from, fine, more);
    }
}

template <typename Item>
INLINE void encode_keys(const typename Item::Value* x, ptrdiff_t stride, int T, int D, uint8_t* lows, uint8_t* steps,
                        uint8_t* codes) {
    for (int c = 0; c < D; c += 16) {
        Floats v[TOKENS_MAX], lo, hi;
        for (int t = 0; t < T; t++) v[t] = Item::load(x + t * stride + c);
        lo = hi = v[0];
        for (int t = 1; t < T; t++) lo = lesser(lo, v[t]), hi = greater(hi, v[t]);
        lo = floor10(lo) + 0.0f;  // no negative zero: which of two zeros is less is not defined
        Ints index = step_index(lo, hi);
        Floats inverse = 1.0f / step_of(index);
        put(lows + 2 * c, to_half(lo));
        put(steps + c, __builtin_convertvector(index, Sixteen8));
        for (int t = 0; t < T; t++) put(codes + t * D + c, codes_of(v[t], lo, inverse));
    }
}
template <typename Item>
INLINE void decode_keys(typename Item::Value* x, ptrdiff_t stride, int T, int D, const uint8_t* lows,
                        const uint8_t* steps, const uint8_t* codes, float half) {
    for (int c = 0; c < D; c += 16) {
        Floats lo = of_half(at<Sixteen16>(lows + 2 * c));
        Floats step = step_of(__builtin_convertvector(at<Sixteen8>(steps + c), Ints));
        for (int t = 0; t < T; t++) Item::store(x + t * stride + c, values_at(codes + t * D + c, half, lo, step));
    }
}
template <typename Item>
INLINE void encode_values(const typename Item::Value* x, ptrdiff_t stride, int T, int D, const float* signs,
                          uint8_t* lows, uint8_t* steps, uint8_t* codes) {
    const int count = D / 16, block = rotated_block(D);
    const float norm = 1.0f / sqrtf(float(block));
    for (int t = 0; t < T; t++) {
        Floats v[CHANNELS_MAX / 16];
        for (int i = 0; i < count; i++) v[i] = Item::load(x + t * stride + 16 * i) * at<Floats>(signs + 16 * i);
        butterflies(v, count, block);
        for (int i = 0; i < count; i++) v[i] = v[i] * norm;
        Floats low = v[0], high = v[0];
        for (int i = 1; i < count; i++) low = lesser(low, v[i]), high = greater(high, v[i]);
        Floats lo = floor10(floats(extreme_of<true>(low))) + 0.0f;
        Ints index = step_index(lo, floats(extreme_of<false>(high)));
        Floats inverse = 1.0f / step_of(index);
        uint16_t half = to_half(lo)[0];
        memcpy(lows + 2 * t, &half, 2);
        steps[t] = uint8_t(index[0]);
        for (int i = 0; i < count; i++) put(codes + t * D + 16 * i, codes_of(v[i], lo, inverse));
    }
}
template <typename Item>
INLINE void decode_values(typename Item::Value* x, ptrdiff_t stride, int T, int D, const float* signs,
                          const uint8_t* lows, const uint8_t* steps, const uint8_t* codes, float half) {
    const int count = D / 16, block = rotated_block(D);
    const float norm = 1.0f / sqrtf(float(block));
    for (int t = 0; t < T; t++) {
        Floats v[CHANNELS_MAX / 16];
        uint16_t low;
        memcpy(&low, lows + 2 * t, 2);
        Floats lo = of_half(Sixteen16{} + low), step = step_of(Ints{} + steps[t]);
        for (int i = 0; i < count; i++) v[i] = values_at(codes + t * D + 16 * i, half, lo, step);
        butterflies(v, count, block);
        for (int i = 0; i < count; i++) Item::store(x + t * stride + 16 * i, v[i] * norm * at<Floats>(signs + 16 * i));
    }
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
        if (!Item::fit(rows.first, rows.stride, T, D)) return 1;
        size_t stripes = stripes_of(tile), size = ep_nbytes(tile, planes[kind], true);
        uint8_t *codes = scratch().codes, *steps = base + 2 * stripes, *to = steps + stripes;
        if (kind == KEYS) encode_keys<Item>(rows.first, rows.stride, T, D, base, steps, codes);
        else encode_values<Item>(rows.first, rows.stride, T, D, plan->signs, base, steps, codes);
        write_planes(codes, T, D, 0, planes[kind], to);
        uint8_t* used = to + size_t(T) * D / 8 * planes[kind];
        memset(used, 0, size_t(base + size - used));
        base += size;
        size = ep_nbytes(tile, fine_planes[kind], false);
        write_planes(codes, T, D, planes[kind], fine_planes[kind], fine);
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
