// The kernels of paged.cu as plain C++: each phase is a loop over the CTA's threads.
#include "paged.cu"

template <u32 WORD, bool GATHER>
static void run(const Layer* layers, const Record* records, u64* checksums, u32 count) {
    for (const Record* record = records; record < records + count; record++)
        for (u32 index = 0; (u64)index * LEAF_NBYTES < record->nbytes; index++) {
            Shared shared;
            for (u8* byte = (u8*)&shared; byte < (u8*)(&shared + 1); byte++) *byte = 0xAB;
            const Leaf leaf = leaf_of(*record, index);
            for (u32 t = 0; t < THREADS; t++) move<WORD, GATHER>(layers, *record, leaf, t, shared);
            for (u32 t = 0; t < 8; t++) accumulate(leaf, t, shared);
            checksums[record->first_leaf + index] = finish(leaf, shared);
        }
}

#define LAUNCH(NAME, WORD, GATHER)                                                              \
    extern "C" void NAME##_##WORD(const Layer* l, const Record* r, u64* c, u32 n) {             \
        run<WORD, GATHER>(l, r, c, n);                                                          \
    }

LAUNCH(gather, 1, true)
LAUNCH(gather, 4, true)
LAUNCH(gather, 16, true)
LAUNCH(scatter, 1, false)
LAUNCH(scatter, 4, false)
LAUNCH(scatter, 16, false)
