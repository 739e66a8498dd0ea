// What the codec's kernels are told, as native/plan.h has it for the host, and values of a tile by
// pairs of channels. Every number here but what records hold was checked by the caller.

enum Item { BF16 = 1, FP16 = 2, FP32 = 4 };
enum Kind { KEYS = 0, VALUES = 1 };
enum Form { WRONG = 0, RAW = 1, L3 = 2, EP_BASE = 3, EP_FINE = 4 };

const u32 GROUP = 64;  // channels that share a maximum in L3, and that a warp takes at once
const u64 HEADER = 64;

struct Layer {
    u64 address;  // of block 0
    i64 stride;   // bytes from a block to the next one
};

// Token t of channel c lies at first + (t / token_run) * token_far + t % token_run * token + the
// same of the channel, in bytes from the layer's part of the block.
struct Tile {
    i64 first;
    i64 token, token_far;
    i64 channel, channel_far;
    u32 layer;
    u16 tokens, channels;
    u16 token_run, channel_run;
    u16 kind;
    u16 unused[5];
};

// What one warp does: of L3, GROUP channels of a tile from `first` on; of EP's keys the same, of
// its values 8 tokens. at: where the tile begins in the record. more: of L3, where the escapes go
// in scratch memory; of EP, where the tile begins in the fine part.
struct Work {
    u32 tile, first;
    u64 at, more;
};

// Mirrored in device_tables.py.
struct Plan {
    const Layer* layers;
    const Tile* tiles;
    const Work* groups;  // of L3, in the order of its group table
    const Work* parts;   // of EP
    const float* signs;  // of EP's rotation, a channel each
    const u32* headers;  // 16 words for each form, as in a record but for sizes that vary and pairs
    u64 body_at, tail_at;  // of L3: first tile, escapes
    u64 raw_nbytes;        // a raw record's; none has more
    u64 base_nbytes, fine_nbytes;  // of EP
    u64 step;              // sizes of L3 records are stored in multiples of it
    u32 group_count, part_count;
    u32 pairs;      // 1: two channels 2i and 2i + 1 of a token lie side by side, aligned to both
    u32 planes[4];  // of K and V in the base part, of K and V in the fine part
    u32 unused;
};

// One block and its records. first_leaf, fine_leaf: where the checksums of leaves go, even numbers.
struct Record {
    i64 block;
    u64 base, fine;     // addresses, multiples of 16. fine 0: there is none
    u64 scratch;        // encoding by L3: room for every value's escape
    u64 nbytes, fine_nbytes;  // decoding: bytes there are
    u64 fine_sum;       // decoding: what the checksum of the fine part has to be
    u64 first_leaf, fine_leaf;
};

// What became of a record; zeros before.
struct Result {
    u64 sum, fine_sum;  // checksums
    u64 nbytes;         // what the base part's header says
    u64 stored;         // encoding: with the zeros behind it; 0: not encoded
    u32 form;           // decoding: 0 if it is no record of this shape
    u32 wrong;          // encoding: EP cannot hold the values. decoding: escapes do not add up
    u32 refined;        // decoding: the fine part belongs to the base and is used
    u32 unused;
};

INLINE u64 whole(u64 nbytes) { return (nbytes + 15) & ~(u64)15; }

// Two neighbouring channels of one tile in one block, as one lane handles them.
template <u32 ITEM> struct ValueOf { typedef u16 type; };
template <> struct ValueOf<FP32> { typedef u32 type; };
template <typename Value> struct alignas(2 * sizeof(Value)) Pair { Value first, second; };

template <u32 ITEM>
struct Columns {
    typedef typename ValueOf<ITEM>::type Value;
    u8 *first, *second;
    i64 token, token_far;
    u32 token_run;
    bool pairs, even;

    INLINE Columns() {}
    INLINE Columns(const Plan& plan, const Tile& tile, i64 block, u32 channel) {
        const Layer& layer = plan.layers[tile.layer];
        u8* page = (u8*)layer.address + block * layer.stride + tile.first;
        first = page + at(channel, tile.channel_run, tile.channel, tile.channel_far);
        second = page + at(channel + 1, tile.channel_run, tile.channel, tile.channel_far);
        token = tile.token;
        token_far = tile.token_far;
        token_run = tile.token_run;
        pairs = plan.pairs;
        even = tile.token_run == tile.tokens;
    }

    static INLINE i64 at(u32 index, u32 run, i64 near, i64 far) {
        return (i64)(index / run) * far + (i64)(index % run) * near;
    }
    INLINE i64 row(u32 t) const {
        return even ? t * token : at(t, token_run, token, token_far);
    }

    // COUNT tokens from `t` on.
    template <u32 COUNT>
    INLINE void load(u32 t, u32* a, u32* b) const {
        if (pairs) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                Pair<Value> both = *(const Pair<Value>*)(first + row(t + i));
                a[i] = both.first;
                b[i] = both.second;
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                a[i] = *(const Value*)(first + row(t + i));
                b[i] = *(const Value*)(second + row(t + i));
            }
        }
    }
    INLINE void store(u32 t, u32 a, u32 b) const {
        if (pairs) {
            *(Pair<Value>*)(first + row(t)) = {(Value)a, (Value)b};
        } else {
            *(Value*)(first + row(t)) = (Value)a;
            *(Value*)(second + row(t)) = (Value)b;
        }
    }
};

// Bit 8i + j <-> bit 8j + i: the codes of 8 tokens, a byte each, <-> their bit planes.
INLINE u64 transposed(u64 x) {
    u64 t = (x ^ x >> 7) & 0x00aa00aa00aa00aaull;
    x ^= t ^ t << 7;
    t = (x ^ x >> 14) & 0x0000cccc0000ccccull;
    x ^= t ^ t << 14;
    t = (x ^ x >> 28) & 0x00000000f0f0f0f0ull;
    return x ^ t ^ t << 28;
}

INLINE u32 byte_of(u64 word, u32 index) { return (u32)(word >> 8 * index) & 255; }

// Two bytes of neighbouring channels; they begin at an even place.
INLINE void put_two(u8* to, u32 a, u32 b) { *(u16*)to = (u16)(a | b << 8); }

// Bytes [from, to) of zeros, by one lane or thread of `count`.
INLINE void put_zeros(u8* from, u8* to, u32 mine, u32 count) {
    for (u8* at = from + mine; at < to; at += count) *at = 0;
}

// By 16 lanes or threads. The pair of a fine part is not known yet.
INLINE void put_header(const Plan& plan, u32 form, u64 record, u64 nbytes, u32 lane) {
    if (lane < 16) ((u32*)record)[lane] = lane == 9 ? (u32)nbytes : plan.headers[16 * form + lane];
}
