// L3, exact: signs and mantissas as they are, exponents as distances below a channel's maximum.
// One warp takes a group: 64 channels (the last one of a tile may have fewer) of all its tokens.

const u32 ESCAPE = 7;
const u32 BELOW_MAX = 15;
const u32 GROUPS_A_CTA = 32;  // of the kernels that have to know where a group's escapes begin

INLINE u32 rest_of(u32 half) { return (half >> 8 & 128) | (half & 127); }
INLINE u32 half_of(u32 exponent, u32 rest) {
    return (rest & 128) << 8 | (exponent & 255) << 7 | (rest & 127);
}

// Where the parts of a tile begin.
struct L3Tile {
    u64 rest, below, planes, lows, used, end;
    INLINE L3Tile(const Tile& tile, u64 at, bool wide) {
        u64 values = (u64)tile.tokens * tile.channels;
        rest = at;
        below = rest + values;
        planes = below + tile.channels / 2;
        lows = planes + values / 8 * 3;
        used = lows + (wide ? values * 2 : 0);
        end = rest + whole(used - rest);
    }
};

// The distances of 8 tokens, of two channels, a byte each.
struct Distances {
    u64 a, b;
};
struct Two {
    u32 a, b;
};

// The escapes of one token: their places among the group's, in the order of channels.
struct Ranks {
    u32 even, odd;
    INLINE Ranks(const Each<u32>& a, const Each<u32>& b) : even(ballot(a)), odd(ballot(b)) {}
    INLINE u32 count() const { return count_of(even) + count_of(odd); }
    INLINE u32 before(u32 lane) const {
        u32 lower = (1u << lane) - 1;
        return count_of(even & lower) + count_of(odd & lower);
    }
};

template <u32 ITEM>
INLINE void l3_encode(const Plan& plan, const Record& record, u32 index) {
    const Work work = plan.groups[index];
    const Tile tile = plan.tiles[work.tile];
    const bool wide = ITEM == FP32;
    const u32 D = tile.channels, T = tile.tokens;
    const u32 width = lesser(D - work.first, GROUP);
    const L3Tile to(tile, record.base + work.at, wide);
    u8* escapes = (u8*)record.scratch + work.more;

    Each<Columns<ITEM>> columns;
    Each<Two> highest;
    Each<u32> high;
    FOR_LANES(lane) {
        u32 most_a = 0, most_b = 0;
        columns[lane] = Columns<ITEM>(plan, tile, record.block, work.first + 2 * lane);
        if (2 * lane < width) {
            for (u32 t = 0; t < T; t += 8) {
                u32 a[8], b[8];
                columns[lane].template load<8>(t, a, b);
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    most_a = greater(most_a, a[i] >> (wide ? 23 : 7) & 255);
                    most_b = greater(most_b, b[i] >> (wide ? 23 : 7) & 255);
                }
            }
        }
        highest[lane] = {most_a, most_b};
        high[lane] = greater(most_a, most_b);
    }
    const u32 top = largest(high);

    Each<u32> below;
    FOR_LANES(lane) {
        u32 a = lesser(top - highest[lane].a, BELOW_MAX);
        u32 b = lesser(top - highest[lane].b, BELOW_MAX);
        below[lane] = a | b << 8;
        highest[lane] = {top - a, top - b};
    }
    const Each<u32> upper = further(below, width / 4);
    FOR_LANES(lane) if (lane < width / 4) {
        u32 both = below[lane] | upper[lane] << 4;
        put_two((u8*)to.below + work.first / 2 + 2 * lane, both & 255, both >> 8);
    }

    u32 count = 0;
    for (u32 t = 0; t < T; t += 8) {
        Each<Distances> far;
        FOR_LANES(lane) {
            far[lane] = {0, 0};
            if (2 * lane < width) {
                u32 a[8], b[8];
                const u32 channel = work.first + 2 * lane;
                columns[lane].template load<8>(t, a, b);
                u64 least_a = 0, least_b = 0;
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    const u64 at = (u64)(t + i) * D + channel;
                    if (wide) {
                        *(Pair<u16>*)(to.lows + 2 * at) = {(u16)a[i], (u16)b[i]};
                        a[i] >>= 16;
                        b[i] >>= 16;
                    }
                    put_two((u8*)to.rest + at, rest_of(a[i]), rest_of(b[i]));
                    u32 first = highest[lane].a - (a[i] >> 7 & 255);
                    u32 second = highest[lane].b - (b[i] >> 7 & 255);
                    far[lane].a |= (u64)first << 8 * i;
                    far[lane].b |= (u64)second << 8 * i;
                    least_a |= (u64)lesser(first, ESCAPE) << 8 * i;
                    least_b |= (u64)lesser(second, ESCAPE) << 8 * i;
                }
                least_a = transposed(least_a);
                least_b = transposed(least_b);
#pragma unroll
                for (u32 p = 0; p < 3; p++)
                    put_two(
                        (u8*)to.planes + ((u64)p * (T / 8) + t / 8) * D + channel,
                        byte_of(least_a, p), byte_of(least_b, p)
                    );
            }
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            Each<u32> a, b;
            FOR_LANES(lane) {
                a[lane] = byte_of(far[lane].a, i) >= ESCAPE;
                b[lane] = byte_of(far[lane].b, i) >= ESCAPE;
            }
            const Ranks ranks(a, b);
            FOR_LANES(lane) {
                u32 rank = count + ranks.before(lane);
                if (a[lane]) escapes[rank] = (u8)byte_of(far[lane].a, i);
                if (b[lane]) escapes[rank + a[lane]] = (u8)byte_of(far[lane].b, i);
            }
            count += ranks.count();
        }
    }
    FOR_LANES(lane) {
        if (!lane) ((u32*)(record.base + HEADER))[index] = count | top << 16;
        if (!work.first) put_zeros((u8*)to.used, (u8*)to.end, lane, WARP);
    }
}

// What `l3_decode` and the tail need to know of the groups of one CTA. In u64: a table that lies
// may say more than 32 bits hold.
struct Starts {
    u64 sums[THREADS];
    u64 eighths[GROUPS_A_CTA];
    u32 counts[GROUPS_A_CTA];
    u64 starts[GROUPS_A_CTA + 1];
};

// Add up the escapes of all groups before group `first`, and of each of those from there on.
INLINE void find_starts(const Plan& plan, u64 record, u32 first, Starts& shared) {
    const u32* table = (const u32*)(record + HEADER);
    FOR_THREADS(thread) {
        u64 sum = 0;
        for (u32 i = thread; i < first; i += THREADS) sum += table[i] & 0xffff;
        shared.sums[thread] = sum;
        if (thread < GROUPS_A_CTA)
            shared.counts[thread] =
                first + thread < plan.group_count ? table[first + thread] & 0xffff : 0;
    }
    barrier();
    FOR_THREADS(thread) if (thread < GROUPS_A_CTA) {
        const u32 each = THREADS / GROUPS_A_CTA;
        u64 sum = 0;
        for (u32 i = 0; i < each; i++) sum += shared.sums[each * thread + i];
        shared.eighths[thread] = sum;
    }
    barrier();
    FOR_THREADS(thread) if (thread <= GROUPS_A_CTA) {
        u64 sum = 0;
        for (u32 i = 0; i < GROUPS_A_CTA; i++) sum += shared.eighths[i];
        for (u32 i = 0; i < thread; i++) sum += shared.counts[i];
        shared.starts[thread] = sum;
    }
    barrier();
}

// The tail of a record, and what goes around it: the header, and zeros behind both. Done when
// every group was encoded.
INLINE void l3_tail(
    const Plan& plan, const Record& record, Result& result, u32 chunk, Starts& shared
) {
    const u32 first = chunk * GROUPS_A_CTA;
    const u64 most = plan.raw_nbytes - 1;
    find_starts(plan, record.base, first, shared);
    FOR_THREADS(thread) {
        const u32 lane = thread % WARP;
        for (u32 i = thread / WARP; i < GROUPS_A_CTA && first + i < plan.group_count; i += WARPS) {
            const u8* from = (const u8*)record.scratch + plan.groups[first + i].more;
            const u64 at = plan.tail_at + shared.starts[i];
            if (at + shared.counts[i] > most) break;
            u8* to = (u8*)record.base + at;
            for (u32 k = lane; k < shared.counts[i]; k += WARP) to[k] = from[k];
        }
    }
    if (first + GROUPS_A_CTA < plan.group_count) return;
    const u64 nbytes = plan.tail_at + shared.starts[GROUPS_A_CTA];
    if (nbytes > most) return;  // the result says 0
    const u64 stored = lesser((nbytes + plan.step - 1) / plan.step * plan.step, plan.raw_nbytes);
    FOR_THREADS(thread) {
        put_header(plan, L3, record.base, nbytes, thread);
        u8* table_end = (u8*)record.base + HEADER + (u64)plan.group_count * 4;
        put_zeros(table_end, (u8*)record.base + plan.body_at, thread, THREADS);
        put_zeros((u8*)record.base + nbytes, (u8*)record.base + stored, thread, THREADS);
        if (!thread) {
            result.nbytes = nbytes;
            result.stored = stored;
        }
    }
}

// One group, whose escapes are `count` bytes at `escapes`. Returns how many it asked for.
template <u32 ITEM>
INLINE u32 l3_decode_group(
    const Plan& plan, const Record& record, u32 index, u32 top, const u8* escapes, u32 count
) {
    const Work work = plan.groups[index];
    const Tile tile = plan.tiles[work.tile];
    const bool wide = ITEM == FP32;
    const u32 D = tile.channels, T = tile.tokens;
    const u32 width = lesser(D - work.first, GROUP);
    const L3Tile from(tile, record.base + work.at, wide);

    Each<Columns<ITEM>> columns;
    Each<Two> base;
    FOR_LANES(lane) {
        columns[lane] = Columns<ITEM>(plan, tile, record.block, work.first + 2 * lane);
        u32 quarter = width / 4, both = 0;
        if (2 * lane < width) {
            const u8* below = (const u8*)from.below + work.first / 2;
            both = *(const u16*)(below + 2 * (lane < quarter ? lane : lane - quarter));
            if (lane >= quarter) both >>= 4;
        }
        base[lane] = {top - (both & 15), top - (both >> 8 & 15)};
    }
    u32 found = 0;
    for (u32 t = 0; t < T; t += 8) {
        Each<Distances> far;
        FOR_LANES(lane) {
            u64 a = 0, b = 0;
            if (2 * lane < width) {
#pragma unroll
                for (u32 p = 0; p < 3; p++) {
                    u64 at = ((u64)p * (T / 8) + t / 8) * D + work.first + 2 * lane;
                    u32 two = *(const u16*)(from.planes + at);
                    a |= (u64)(two & 255) << 8 * p;
                    b |= (u64)(two >> 8) << 8 * p;
                }
            }
            far[lane] = {transposed(a), transposed(b)};
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            Each<u32> a, b;
            FOR_LANES(lane) {
                a[lane] = byte_of(far[lane].a, i) == ESCAPE;
                b[lane] = byte_of(far[lane].b, i) == ESCAPE;
            }
            const Ranks ranks(a, b);
            FOR_LANES(lane) if (2 * lane < width) {
                u32 first = byte_of(far[lane].a, i), second = byte_of(far[lane].b, i);
                u32 rank = found + ranks.before(lane);
                if (a[lane]) first = rank < count ? escapes[rank] : 0;
                rank += a[lane];
                if (b[lane]) second = rank < count ? escapes[rank] : 0;
                const u64 at = (u64)(t + i) * D + work.first + 2 * lane;
                u32 rest = *(const u16*)(from.rest + at);
                first = half_of(base[lane].a - first, rest & 255);
                second = half_of(base[lane].b - second, rest >> 8);
                if (wide) {
                    Pair<u16> low = *(const Pair<u16>*)(from.lows + 2 * at);
                    first = first << 16 | low.first;
                    second = second << 16 | low.second;
                }
                columns[lane].store(t + i, first, second);
            }
            found += ranks.count();
        }
    }
    return found;
}

// The groups [first, first + GROUPS_A_CTA) of a record, which is known to reach to its tail.
template <u32 ITEM>
INLINE void l3_decode(
    const Plan& plan, const Record& record, Result& result, u32 chunk, Starts& shared
) {
    const u32 first = chunk * GROUPS_A_CTA;
    const u64 room = result.nbytes - plan.tail_at;
    const u8* tail = (const u8*)record.base + plan.tail_at;
    find_starts(plan, record.base, first, shared);
    FOR_WARPS(warp) {
        u32 wrong = 0;
        for (u32 i = warp; i < GROUPS_A_CTA && first + i < plan.group_count; i += WARPS) {
            const u32 count = shared.counts[i];
            if (shared.starts[i] + count > room) {
                wrong = 1;
                break;
            }
            const u32 top = ((const u32*)(record.base + HEADER))[first + i] >> 16 & 255;
            const u8* escapes = tail + shared.starts[i];
            wrong |= l3_decode_group<ITEM>(plan, record, first + i, top, escapes, count) != count;
        }
        const bool last = first + GROUPS_A_CTA >= plan.group_count;
        if (last && shared.starts[GROUPS_A_CTA] != room) wrong = 1;
        if (wrong) result.wrong = 1;  // whoever writes it, writes this
    }
}
