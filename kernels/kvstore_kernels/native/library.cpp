// What Python calls, by ctypes, without the interpreter's lock: whole batches of records.
#include <string.h>

#include "load.h"
#include "pages.h"
#include "plan.h"
#include "receive.h"
#include "shared.h"
#include "slots.h"

extern const Codec codec_plain;
#ifdef WITH_X86
extern const Codec codec_avx2, codec_vbmi2;
#endif

#ifdef WITH_X86
#define HAS __builtin_cpu_supports
// What a processor of a level has: see X86 in build.py.
static bool is_level(int level) {
    __builtin_cpu_init();
#if __GNUC__ >= 12
    return level >= 4 ? HAS("x86-64-v4") : level == 3 ? HAS("x86-64-v3") : HAS("x86-64-v2");
#else  // it knows no levels
    if (level >= 4 && !(HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl")))
        return false;
    if (level >= 3 && !(HAS("avx2") && HAS("fma") && HAS("bmi") && HAS("bmi2"))) return false;
    return HAS("sse4.2") && HAS("ssse3") && HAS("popcnt");
#endif
}
#endif

static const Codec& best(int limit) {
#ifdef WITH_X86
    if (limit >= 2 && is_level(4) && HAS("avx512vbmi") && HAS("avx512vbmi2")) return codec_vbmi2;
    if (limit >= 1 && is_level(3)) return codec_avx2;
#endif
    (void)limit;
    return codec_plain;
}
static int isa_limit = 2;

// Copies of so many bytes go past the caches: 1.3 to 1.5 times as fast where neither side is in them.
constexpr size_t PAST_CACHES = 8 << 20;
// Decoded blocks do so sooner: a call has a thread's share of a load, which is larger than the caches.
// 1.2 to 1.4 times as fast.
constexpr size_t PAST_CACHES_DECODED = 512 << 10;

static inline void fence() {
#ifdef WITH_X86
    __builtin_ia32_sfence();
#endif
}

#define EXPORT __attribute__((visibility("default")))

extern "C" {
// The format of everything below; a library of another one is not used. 0: this processor has less than
// all of it was compiled for.
EXPORT int kvstore_native_version() {
#ifdef WITH_X86
    if (!is_level(2)) return 0;
#endif
    return 6;
}

// 0: any processor, 1: AVX2, 2: AVX-512 with VBMI2. Returns what is used from now on.
EXPORT int kvstore_use_isa(int limit) {
    isa_limit = limit;
#ifdef WITH_X86
    const Codec* used = &best(limit);
    return used == &codec_vbmi2 ? 2 : used == &codec_avx2 ? 1 : 0;
#else
    return 0;
#endif
}

// sizes[i]: bytes of record i; 0: more than its capacity.
EXPORT void kvstore_l3_encode(const Plan* plan, size_t count, const int64_t* blocks, uint8_t* const* records,
                       const uint64_t* capacities, uint64_t* sizes) {
    const Codec& codec = best(isa_limit);
    for (size_t i = 0; i < count; i++) sizes[i] = codec.l3_encode(plan, blocks[i], records[i], capacities[i]);
}
// wrong[i]: 1 if record i's escapes do not add up.
EXPORT void kvstore_l3_decode(const Plan* plan, size_t count, const int64_t* blocks, const uint8_t* const* records,
                       const uint64_t* sizes, uint8_t* wrong) {
    const Codec& codec = best(isa_limit);
    const bool past = count * raw_nbytes(*plan) >= PAST_CACHES_DECODED;
    for (size_t i = 0; i < count; i++)
        wrong[i] = uint8_t(codec.l3_decode(plan, blocks[i], records[i], sizes[i], past));
    if (past) fence();
}
// refused[i]: 1 if block i has values that EP does not hold; its records mean nothing then.
EXPORT void kvstore_ep_encode(const Plan* plan, size_t count, const int64_t* blocks, uint8_t* const* bases,
                       uint8_t* const* fines, const uint8_t* planes, uint8_t* refused) {
    const Codec& codec = best(isa_limit);
    for (size_t i = 0; i < count; i++)
        refused[i] = uint8_t(codec.ep_encode(plan, blocks[i], bases[i], fines[i], planes, planes + 2));
}
// fines[i]: null for the base alone.
EXPORT void kvstore_ep_decode(const Plan* plan, size_t count, const int64_t* blocks, const uint8_t* const* bases,
                       const uint8_t* const* fines, const uint8_t* planes) {
    const Codec& codec = best(isa_limit);
    for (size_t i = 0; i < count; i++) codec.ep_decode(plan, blocks[i], bases[i], fines[i], planes, planes + 2);
}

// leaves: the checksum of each 64 KiB.
EXPORT void kvstore_leaves(const uint8_t* data, size_t nbytes, uint64_t* leaves) {
    best(isa_limit).leaves_of(data, nbytes, leaves);
}
// sums[i]: the checksum of record i as it was copied. targets: null for no copies.
EXPORT void kvstore_copies(size_t count, const uint8_t* const* sources, uint8_t* const* targets, const uint64_t* sizes,
                    uint64_t* sums) {
    const Codec& codec = best(isa_limit);
    size_t nbytes = 0;
    for (size_t i = 0; i < count; i++) nbytes += sizes[i];
    const bool past = targets && nbytes >= PAST_CACHES;
    for (size_t i = 0; i < count; i++)
        sums[i] = codec.copy_sum(targets ? targets[i] : nullptr, sources[i], sizes[i], past);
    if (past) fence();
}
// For any number of threads at once; `shared` is over when all of them have returned.
EXPORT void kvstore_share(Shared* shared) { take_part(best(isa_limit), *shared, fence); }
// outcome: what `receive` returns. sums: the checksum of each record, if that is 0.
EXPORT void kvstore_receive(int fd, size_t count, uint8_t* const* targets, const uint64_t* sizes, int64_t* outcome,
                     uint64_t* sums) {
    *outcome = receive(best(isa_limit), fd, count, targets, sizes, sums);
}
// Blocks to or from records; sums: of records as they were copied. leaves: room for those of a record.
EXPORT void kvstore_pages(const Pages* layers, size_t layers_count, size_t count, const int64_t* blocks,
                   uint8_t* const* records, int to_pages, uint64_t* sums, uint64_t* leaves) {
    const Codec& codec = best(isa_limit);
    for (size_t i = 0; i < count; i++)
        sums[i] = copy_pages(codec, layers, layers_count, blocks[i], records[i], to_pages != 0, leaves);
}
// fines: null for none at all. states[i]: a State; sums[i]: the checksum of base i as it was copied.
EXPORT void kvstore_load(const Load* load, size_t count, const int64_t* blocks, const Stored* bases, const Stored* fines,
                  uint64_t* sums, uint8_t* states) {
    const Codec& codec = best(isa_limit);
    const Stored none = {};
    const bool past = count * raw_nbytes(*load->plan) >= PAST_CACHES_DECODED;
    for (size_t i = 0; i < count; i++)
        states[i] = load_one(codec, *load, blocks[i], bases[i], fines ? fines[i] : none, past, &sums[i]);
    if (past) fence();
}
EXPORT void kvstore_slots_find(size_t buckets, const int32_t* slots, const uint8_t* tags, const uint64_t* hashes,
                        size_t count, const uint64_t* wanted, int64_t* rows, int64_t* places) {
    slots::find(buckets, slots, tags, hashes, count, wanted, rows, places);
}
// dead: how many slots were those of rows that had left.
EXPORT void kvstore_slots_place(size_t buckets, int32_t* slots, uint8_t* tags, size_t count, const uint64_t* hashes,
                         const int64_t* rows, int64_t* dead) {
    *dead = slots::place(buckets, slots, tags, count, hashes, rows);
}
}
