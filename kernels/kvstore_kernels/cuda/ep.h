// EP, lossy: 8-bit codes over stripes, stored plane by plane, the most significant first.
//
// A stripe of keys is a channel over the tokens of a tile: one warp takes 64 of them, a lane two. A
// stripe of values is a token over its rotated channels: one warp takes 8 tokens, and a lane the
// channels 64k + 2 lane and the next one, for all k. Butterflies of strides 1, and 64 on, stay in
// the lane. Compiled with -fmad=false: every step is rounded by itself, as on the host.

const u32 STEP_BIAS = 824;  // 5 bits of exponent and 3 of mantissa, from 2^-24 on
const float LARGEST = 65504.0f;  // of a half
const float ALL = 3.4028234e38f;

INLINE u32 bits_of(float x) {
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    u32 bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
#endif
}
INLINE float float_of(u32 bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
#endif
}
INLINE float reciprocal(float x) {
#ifdef __CUDACC__
    return __frcp_rn(x);
#else
    return 1.0f / x;
#endif
}
INLINE float root(float x) {
#ifdef __CUDACC__
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}

template <u32 ITEM>
INLINE bool fits(u32 value) {
    if (ITEM == BF16) return (value & 0x7fff) <= 0x477f;
    if (ITEM == FP16) return (value & 0x7fff) <= 0x7bff;
    return (value & 0x7fffffff) <= 0x477fe000;
}

template <u32 ITEM>
INLINE float loaded(u32 value) {
    if (ITEM == BF16) return float_of(value << 16);
    if (ITEM == FP32) return float_of(value);
    u32 size = value & 0x7fff;
    u32 bits = bits_of(float_of(size << 13) * 0x1p112f);  // denormals come out right, too
    if (size >= 0x7c00) bits = size << 13 | 0x7f800000;
    return float_of(bits | (value & 0x8000) << 16);
}

// To nearest even; a half stays finite.
template <u32 ITEM>
INLINE u32 stored(float x) {
    u32 bits = bits_of(x);
    if (ITEM == BF16) return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if (ITEM == FP32) return bits;
    float size = lesser(float_of(bits & 0x7fffffff), LARGEST);
    u32 normal = bits_of(size);
    normal = (normal + 0xfff + (normal >> 13 & 1) - (112u << 23)) >> 13;
    // Below 2^-14: add 0.5, whose last bit of mantissa is 2^-24, a half's smallest.
    u32 denormal = bits_of(size + 0.5f) - 0x3f000000;
    return (size < 0x1p-14f ? denormal : normal) | (bits >> 16 & 0x8000);
}

// Down to 10 bits of mantissa, so that a half holds it; no negative zero.
INLINE float floor10(float x) {
    u32 bits = (bits_of(x) + (x < 0.0f ? 0x1fffu : 0u)) & ~0x1fffu;
    return float_of(bits) + 0.0f;
}

// A stripe's lowest value and the step of its codes, as stored: a half, and 8 bits.
struct Stripe {
    float low, step;

    INLINE Stripe() {}
    INLINE Stripe(u32 half, u32 index) {
        u32 size = half & 0x7fff;
        low = float_of((size ? (size << 13) + (112u << 23) : 0) | (half & 0x8000) << 16);
        step = float_of((index + STEP_BIAS) << 20);
    }
    static INLINE Stripe over(float least, float most) {
        Stripe stripe;
        stripe.low = floor10(least);
        // Of zeros either may be negative.
        u32 size = bits_of((most - stripe.low + 0.0f) * (1.0f / 255.0f));
        int index = (int)((size + 0xfffff) >> 20) - (int)STEP_BIAS;
        index = greater(index, 0);
        stripe.step = float_of(((u32)index + STEP_BIAS) << 20);
        return stripe;
    }
    // A half holds the lowest value, and 8 bits the step: rotated values may be larger than any that
    // came, and a stripe wider than 255 of the largest steps.
    INLINE bool held() const { return low >= -LARGEST && index() <= 255; }
    INLINE u32 half() const {
        u32 bits = bits_of(low);
        int size = (int)(bits >> 13 & 0x3ffff) - (112 << 10);
        return (u32)greater(size, 0) | (bits >> 16 & 0x8000);
    }
    INLINE u32 index() const { return (bits_of(step) >> 20) - STEP_BIAS; }
    INLINE u32 code(float x, float inverse) const {
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest even
        float code = lesser(greater((x - low) * inverse, 0.0f), 255.0f);
        return (u32)((code + magic) - magic);
    }
    INLINE float value(u32 code, float half) const { return ((float)code + half) * step + low; }
};

// Where the parts of a tile begin, in the base part and in the fine one.
struct EpTile {
    u8 *lows, *steps, *base, *used, *end;
    u8 *fine, *fine_used, *fine_end;
    u32 planes, fine_planes;
    u64 plane;  // bytes of one

    INLINE EpTile(const Plan& plan, const Record& record, const Tile& tile, const Work& work) {
        u32 stripes = tile.kind == KEYS ? tile.channels : tile.tokens;
        planes = tile.kind == KEYS ? plan.planes[0] : plan.planes[1];
        fine_planes = tile.kind == KEYS ? plan.planes[2] : plan.planes[3];
        plane = (u64)tile.tokens * tile.channels / 8;
        lows = (u8*)record.base + work.at;
        steps = lows + 2 * stripes;
        base = steps + stripes;
        used = base + plane * planes;
        end = lows + whole((u64)(used - lows));
        fine = (u8*)(record.fine + work.more);
        fine_used = fine + plane * fine_planes;
        fine_end = fine + whole(plane * fine_planes);
    }

    // The planes of 8 tokens of two channels: `at` bytes from the first plane's begin.
    INLINE void put_planes(u64 at, u64 a, u64 b) const {
        a = transposed(a);
        b = transposed(b);
#pragma unroll
        for (u32 p = 0; p < 8; p++) {
            u8* to = p < planes ? base + p * plane : fine + (p - planes) * plane;
            put_two(to + at, byte_of(a, 7 - p), byte_of(b, 7 - p));
        }
    }
    INLINE void take_planes(u64 at, u32 known, u64& a, u64& b) const {
        a = b = 0;
#pragma unroll
        for (u32 p = 0; p < 8; p++) {
            if (p >= known) break;
            const u8* from = p < planes ? base + p * plane : fine + (p - planes) * plane;
            u32 two = *(const u16*)(from + at);
            a |= (u64)(two & 255) << 8 * (7 - p);
            b |= (u64)(two >> 8) << 8 * (7 - p);
        }
        a = transposed(a);
        b = transposed(b);
    }
    INLINE void fill(u32 lane) const {
        put_zeros(used, end, lane, WARP);
        put_zeros(fine_used, fine_end, lane, WARP);
    }
};

// ---- keys -----------------------------------------------------------------------------------

template <u32 ITEM>
INLINE void encode_keys(
    const Plan& plan, const Record& record, const Tile& tile, const Work& work, Result& result
) {
    const EpTile to(plan, record, tile, work);
    const u32 D = tile.channels, T = tile.tokens;
    FOR_LANES(lane) {
        const u32 channel = work.first + 2 * lane;
        if (channel < D) {
            const Columns<ITEM> columns(plan, tile, record.block, channel);
            float low_a = ALL, low_b = ALL, high_a = -ALL, high_b = -ALL;
            bool fit = true;
            for (u32 t = 0; t < T; t += 8) {
                u32 a[8], b[8];
                columns.template load<8>(t, a, b);
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    fit = fit && fits<ITEM>(a[i]) && fits<ITEM>(b[i]);
                    float x = loaded<ITEM>(a[i]), y = loaded<ITEM>(b[i]);
                    low_a = lesser(low_a, x);
                    low_b = lesser(low_b, y);
                    high_a = greater(high_a, x);
                    high_b = greater(high_b, y);
                }
            }
            const Stripe first = Stripe::over(low_a, high_a), second = Stripe::over(low_b, high_b);
            if (!fit || !first.held() || !second.held()) {
                result.wrong = 1;
                continue;
            }
            *(u32*)(to.lows + 2 * channel) = first.half() | second.half() << 16;
            put_two(to.steps + channel, first.index(), second.index());
            const float up = reciprocal(first.step), other_up = reciprocal(second.step);
            for (u32 t = 0; t < T; t += 8) {
                u32 a[8], b[8];
                columns.template load<8>(t, a, b);
                u64 codes_a = 0, codes_b = 0;
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    codes_a |= (u64)first.code(loaded<ITEM>(a[i]), up) << 8 * i;
                    codes_b |= (u64)second.code(loaded<ITEM>(b[i]), other_up) << 8 * i;
                }
                to.put_planes((u64)(t / 8) * D + channel, codes_a, codes_b);
            }
        }
    }
    FOR_LANES(lane) if (!work.first) to.fill(lane);
}

template <u32 ITEM>
INLINE void decode_keys(
    const Plan& plan, const Record& record, const Tile& tile, const Work& work, bool refined
) {
    const EpTile from(plan, record, tile, work);
    const u32 D = tile.channels, T = tile.tokens;
    const u32 known = from.planes + (refined ? from.fine_planes : 0);
    const float half = (float)((1 << (8 - known)) - 1) * 0.5f;
    FOR_LANES(lane) {
        const u32 channel = work.first + 2 * lane;
        if (channel < D) {
            const Columns<ITEM> columns(plan, tile, record.block, channel);
            const u32 lows = *(const u32*)(from.lows + 2 * channel);
            const u32 steps = *(const u16*)(from.steps + channel);
            const Stripe first(lows & 0xffff, steps & 255), second(lows >> 16, steps >> 8);
            for (u32 t = 0; t < T; t += 8) {
                u64 a, b;
                from.take_planes((u64)(t / 8) * D + channel, known, a, b);
#pragma unroll
                for (u32 i = 0; i < 8; i++)
                    columns.store(
                        t + i,
                        stored<ITEM>(first.value(byte_of(a, i), half)),
                        stored<ITEM>(second.value(byte_of(b, i), half))
                    );
            }
        }
    }
}

// ---- values ---------------------------------------------------------------------------------

// A token's channels, as one lane has them: PAIRS pairs, 64 channels apart.
template <u32 PAIRS> struct Floats { float of[2 * PAIRS]; };
template <u32 PAIRS> struct Codes { u64 of[2 * PAIRS]; };
template <u32 COUNT> struct Raw { u32 a[COUNT], b[COUNT]; };

// Sums and differences of channels 1, 2, .. below `block` apart, in this order.
template <u32 PAIRS>
INLINE void butterflies(Each<Floats<PAIRS>>& x, u32 block) {
    FOR_LANES(lane) {
#pragma unroll
        for (u32 k = 0; k < PAIRS; k++) {
            float a = x[lane].of[2 * k], b = x[lane].of[2 * k + 1];
            x[lane].of[2 * k] = a + b;
            x[lane].of[2 * k + 1] = a - b;
        }
    }
#pragma unroll
    for (u32 bits = 1; bits < WARP; bits *= 2) {
        if (2 * bits >= block) break;
#pragma unroll
        for (u32 k = 0; k < 2 * PAIRS; k++) {
            Each<float> own;
            FOR_LANES(lane) own[lane] = x[lane].of[k];
            const Each<float> other = across(own, bits);
            FOR_LANES(lane)
                x[lane].of[k] = lane & bits ? other[lane] - own[lane] : own[lane] + other[lane];
        }
    }
    FOR_LANES(lane) {
#pragma unroll
        for (u32 step = 1; step < PAIRS; step *= 2) {
            if (GROUP * step >= block) break;
#pragma unroll
            for (u32 k = 0; k < 2 * PAIRS; k++)
                if (!(k & 2 * step) && k + 2 * step < 2 * PAIRS) {
                    float a = x[lane].of[k], b = x[lane].of[k + 2 * step];
                    x[lane].of[k] = a + b;
                    x[lane].of[k + 2 * step] = a - b;
                }
        }
    }
}

// The largest power of two that divides D: 16 at least.
INLINE u32 rotated_block(u32 D) { return D & (~D + 1); }

template <u32 ITEM, u32 PAIRS>
INLINE void encode_values(
    const Plan& plan, const Record& record, const Tile& tile, const Work& work, Result& result
) {
    const u32 AHEAD = PAIRS >= 8 ? 1 : 8 / PAIRS;  // tokens that are loaded at once
    const EpTile to(plan, record, tile, work);
    const u32 D = tile.channels, block = rotated_block(D);
    const float norm = reciprocal(root((float)block));
    Each<Codes<PAIRS>> codes;
    Each<u32> unfit;
    FOR_LANES(lane) {
        unfit[lane] = 0;
#pragma unroll
        for (u32 k = 0; k < 2 * PAIRS; k++) codes[lane].of[k] = 0;
    }
#pragma unroll 1
    for (u32 begin = 0; begin < 8; begin += AHEAD) {
        Each<Raw<AHEAD * PAIRS>> raw;
        FOR_LANES(lane) {
#pragma unroll
            for (u32 k = 0; k < PAIRS; k++)
                if (GROUP * k + 2 * lane < D)
                    Columns<ITEM>(plan, tile, record.block, GROUP * k + 2 * lane)
                        .template load<AHEAD>(
                            work.first + begin, raw[lane].a + k * AHEAD, raw[lane].b + k * AHEAD
                        );
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 token = begin + i;
            Each<Floats<PAIRS>> x;
            FOR_LANES(lane) {
#pragma unroll
                for (u32 k = 0; k < PAIRS; k++) {
                    x[lane].of[2 * k] = x[lane].of[2 * k + 1] = 0;
                    const u32 channel = GROUP * k + 2 * lane;
                    if (channel < D) {
                        const u32 a = raw[lane].a[k * AHEAD + i], b = raw[lane].b[k * AHEAD + i];
                        if (!fits<ITEM>(a) || !fits<ITEM>(b)) unfit[lane] = 1;
                        x[lane].of[2 * k] = loaded<ITEM>(a) * plan.signs[channel];
                        x[lane].of[2 * k + 1] = loaded<ITEM>(b) * plan.signs[channel + 1];
                    }
                }
            }
            butterflies<PAIRS>(x, block);
            Each<float> low, high;
            FOR_LANES(lane) {
                low[lane] = ALL;
                high[lane] = -ALL;
#pragma unroll
                for (u32 k = 0; k < 2 * PAIRS; k++)
                    if (GROUP * (k / 2) + 2 * lane < D) {
                        x[lane].of[k] *= norm;
                        low[lane] = lesser(low[lane], x[lane].of[k]);
                        high[lane] = greater(high[lane], x[lane].of[k]);
                    }
            }
            const Stripe stripe = Stripe::over(least(low), largest(high));
            const float up = reciprocal(stripe.step);
            FOR_LANES(lane) {
#pragma unroll
                for (u32 k = 0; k < 2 * PAIRS; k++)
                    codes[lane].of[k] |= (u64)stripe.code(x[lane].of[k], up) << 8 * token;
                if (!lane) {
                    if (!stripe.held()) unfit[lane] = 1;
                    *(u16*)(to.lows + 2 * (work.first + token)) = (u16)stripe.half();
                    to.steps[work.first + token] = (u8)stripe.index();
                }
            }
        }
    }
    FOR_LANES(lane) {
#pragma unroll
        for (u32 k = 0; k < PAIRS; k++)
            if (GROUP * k + 2 * lane < D)
                to.put_planes(
                    (u64)(work.first / 8) * D + GROUP * k + 2 * lane,
                    codes[lane].of[2 * k],
                    codes[lane].of[2 * k + 1]
                );
        if (!work.first) to.fill(lane);
        if (unfit[lane]) result.wrong = 1;
    }
}

template <u32 ITEM, u32 PAIRS>
INLINE void decode_values(
    const Plan& plan, const Record& record, const Tile& tile, const Work& work, bool refined
) {
    const EpTile from(plan, record, tile, work);
    const u32 D = tile.channels, block = rotated_block(D);
    const u32 known = from.planes + (refined ? from.fine_planes : 0);
    const float half = (float)((1 << (8 - known)) - 1) * 0.5f;
    const float norm = reciprocal(root((float)block));
    Each<Codes<PAIRS>> codes;
    FOR_LANES(lane) {
#pragma unroll
        for (u32 k = 0; k < PAIRS; k++) {
            codes[lane].of[2 * k] = codes[lane].of[2 * k + 1] = 0;
            if (GROUP * k + 2 * lane < D)
                from.take_planes(
                    (u64)(work.first / 8) * D + GROUP * k + 2 * lane,
                    known,
                    codes[lane].of[2 * k],
                    codes[lane].of[2 * k + 1]
                );
        }
    }
#pragma unroll 1
    for (u32 token = 0; token < 8; token++) {
        const u32 t = work.first + token;
        const Stripe stripe(*(const u16*)(from.lows + 2 * t), from.steps[t]);
        Each<Floats<PAIRS>> x;
        FOR_LANES(lane) {
#pragma unroll
            for (u32 k = 0; k < 2 * PAIRS; k++)
                x[lane].of[k] = stripe.value(byte_of(codes[lane].of[k], token), half);
        }
        butterflies<PAIRS>(x, block);
        FOR_LANES(lane) {
#pragma unroll
            for (u32 k = 0; k < PAIRS; k++) {
                const u32 channel = GROUP * k + 2 * lane;
                if (channel < D)
                    Columns<ITEM>(plan, tile, record.block, channel)
                        .store(
                            t,
                            stored<ITEM>(x[lane].of[2 * k] * norm * plan.signs[channel]),
                            stored<ITEM>(x[lane].of[2 * k + 1] * norm * plan.signs[channel + 1])
                        );
            }
        }
    }
}

// ---- both -----------------------------------------------------------------------------------

template <u32 ITEM, u32 PAIRS>
INLINE void ep_encode(const Plan& plan, const Record& record, u32 index, Result& result) {
    const Work work = plan.parts[index];
    const Tile tile = plan.tiles[work.tile];
    FOR_LANES(lane) if (!index) {
        put_header(plan, EP_BASE, record.base, plan.base_nbytes, lane);
        put_header(plan, EP_FINE, record.fine, plan.fine_nbytes, lane);
        if (!lane) result.nbytes = result.stored = plan.base_nbytes;
    }
    if (tile.kind == KEYS) encode_keys<ITEM>(plan, record, tile, work, result);
    else encode_values<ITEM, PAIRS>(plan, record, tile, work, result);
}

template <u32 ITEM, u32 PAIRS>
INLINE void ep_decode(const Plan& plan, const Record& record, u32 index, bool refined) {
    const Work work = plan.parts[index];
    const Tile tile = plan.tiles[work.tile];
    if (tile.kind == KEYS) decode_keys<ITEM>(plan, record, tile, work, refined);
    else decode_values<ITEM, PAIRS>(plan, record, tile, work, refined);
}
