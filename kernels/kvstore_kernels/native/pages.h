// Blocks to and from records, which have a page of each layer, one after another.
#pragma once
#include <string.h>

#include "plan.h"

// Where a copy has come to: so many bytes into the page of a layer.
struct Position {
    const Pages* layer;
    uint64_t at;
};

// Bytes that lie together from here on, at most `most`; moves the position behind them.
static inline uint8_t* take_piece(Position& position, int64_t block, size_t most, size_t* nbytes) {
    const Pages& layer = *position.layer;
    uint8_t* piece = (uint8_t*)layer.address + block * layer.stride + position.at;
    const size_t left = layer.nbytes - position.at;
    *nbytes = most < left ? most : left;
    position.at += *nbytes;
    if (position.at == layer.nbytes) position = {position.layer + 1, 0};
    return piece;
}

// Copies one block and returns the checksum of what was copied: sources are read once, whoever writes
// to them meanwhile. A leaf in pieces passes through a buffer, which stays in the caches. leaves: room
// for their checksums.
static uint64_t copy_pages(const Codec& codec, const Pages* layers, size_t count, int64_t block, uint8_t* record,
                           bool to_pages, uint64_t* leaves) {
    alignas(64) uint8_t leaf[LEAF_NBYTES];
    Position position = {layers, 0};
    size_t nbytes = 0, leaves_count = 0;
    for (size_t i = 0; i < count; i++) nbytes += layers[i].nbytes;
    for (size_t at = 0; at < nbytes; at += LEAF_NBYTES) {
        const size_t size = nbytes - at < LEAF_NBYTES ? nbytes - at : LEAF_NBYTES;
        size_t done;
        uint8_t* piece = take_piece(position, block, size, &done);
        if (done == size) {
            uint8_t* to = to_pages ? piece : record + at;
            leaves[leaves_count++] = codec.copied(to, to_pages ? record + at : piece, size, false);
            continue;
        }
        if (to_pages) leaves[leaves_count] = codec.copied(leaf, record + at, size, false);
        for (size_t begin = 0; begin < size; begin += done) {
            if (begin) piece = take_piece(position, block, size - begin, &done);
            if (to_pages) memcpy(piece, leaf + begin, done);
            else memcpy(leaf + begin, piece, done);
        }
        if (!to_pages) leaves[leaves_count] = codec.copied(record + at, leaf, size, false);
        leaves_count++;
    }
    return codec.sum_of(leaves, leaves_count);
}
