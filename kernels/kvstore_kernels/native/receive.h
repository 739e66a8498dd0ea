// Bytes from a socket into memory, each leaf summed up as it is whole, while the caches have it.
#pragma once
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <algorithm>

#include "plan.h"

constexpr int64_t ENDED = -1;  // the other side ended the connection first
constexpr size_t PIECE_NBYTES = 4 * LEAF_NBYTES;  // received at once: it is still in the cache when it is summed up

// Fills `to` from a socket that blocks. Returns 0 and the checksum of all; ENDED; or the errno: EAGAIN
// after a silence as long as the socket's timeout. leaves: room for their checksums.
static int64_t receive_one(const Codec& codec, int fd, uint8_t* to, size_t nbytes, uint64_t* leaves, uint64_t* sum) {
    size_t have = 0, summed = 0;
    while (have < nbytes) {
        const ssize_t got = recv(fd, to + have, std::min(nbytes - have, PIECE_NBYTES), 0);
        if (got == 0) return ENDED;
        if (got < 0 && errno != EINTR) return errno;
        if (got < 0) continue;
        have += size_t(got);
        const size_t whole = have == nbytes ? nbytes : have - have % LEAF_NBYTES;
        if (whole > summed) codec.leaves_of(to + summed, whole - summed, leaves + summed / LEAF_NBYTES), summed = whole;
    }
    *sum = codec.sum_of(leaves, (nbytes + LEAF_NBYTES - 1) / LEAF_NBYTES);
    return 0;
}
// The same of records, one behind the other.
static int64_t receive(const Codec& codec, int fd, size_t count, uint8_t* const* targets, const uint64_t* sizes,
                       uint64_t* sums) {
    uint64_t most = 0;
    for (size_t i = 0; i < count; i++) most = sizes[i] > most ? sizes[i] : most;
    uint64_t* leaves = (uint64_t*)malloc((most / LEAF_NBYTES + 1) * sizeof(uint64_t));
    int64_t outcome = leaves ? 0 : ENOMEM;
    for (size_t i = 0; i < count && !outcome; i++)
        outcome = receive_one(codec, fd, targets[i], sizes[i], leaves, &sums[i]);
    free(leaves);
    return outcome;
}
