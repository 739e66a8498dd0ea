// Bytes from a socket into memory, each leaf summed up as it is whole, while the caches have it.
#pragma once
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "plan.h"

constexpr int64_t ENDED = -1;  // the other side ended the connection first
constexpr size_t STEP_NBYTES = 256 << 10;  // stay in the caches until they are summed up

// A socket that wakes its reader once so many bytes are there, and not for every packet.
struct Arrivals {
    int fd;
    int silent_max;   // timeouts of the socket one after another: the other side is silent
    size_t left = 0;  // of all records
    int wanted = 1, silent = 0;

    void expect() { want(int(left < STEP_NBYTES ? left : STEP_NBYTES)); }
    void want(int nbytes) {
        if (nbytes < 1 || nbytes == wanted) return;
        if (!setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &nbytes, sizeof nbytes)) wanted = nbytes;
    }
    ~Arrivals() { want(1); }
};

// Fills `to` from a socket that blocks. Returns 0 and the checksum of all; ENDED; or the errno: EAGAIN
// after so many timeouts of the socket without a byte. leaves: room for their checksums.
static int64_t receive_one(const Codec& codec, Arrivals& arrivals, uint8_t* to, size_t nbytes, uint64_t* leaves,
                           uint64_t* sum) {
    size_t have = 0, summed = 0;
    while (have < nbytes) {
        arrivals.expect();
        const size_t room = nbytes - have;
        const ssize_t got = recv(arrivals.fd, to + have, room < STEP_NBYTES ? room : STEP_NBYTES, 0);
        if (got == 0) return ENDED;
        if (got < 0 && errno == EAGAIN && ++arrivals.silent < arrivals.silent_max) continue;
        if (got < 0 && errno != EINTR) return errno;
        if (got < 0) continue;
        arrivals.silent = 0, have += size_t(got), arrivals.left -= size_t(got);
        const size_t whole = have == nbytes ? nbytes : have - have % LEAF_NBYTES;
        if (whole > summed) codec.leaves_of(to + summed, whole - summed, leaves + summed / LEAF_NBYTES), summed = whole;
    }
    *sum = codec.sum_of(leaves, (nbytes + LEAF_NBYTES - 1) / LEAF_NBYTES);
    return 0;
}
// The same of records, one behind the other.
static int64_t receive(const Codec& codec, int fd, int silent_max, size_t count, uint8_t* const* targets,
                       const uint64_t* sizes, uint64_t* sums) {
    uint64_t most = 0;
    Arrivals arrivals{fd, silent_max};
    for (size_t i = 0; i < count; i++) most = sizes[i] > most ? sizes[i] : most, arrivals.left += sizes[i];
    uint64_t* leaves = (uint64_t*)malloc((most / LEAF_NBYTES + 1) * sizeof(uint64_t));
    int64_t outcome = leaves ? 0 : ENOMEM;
    for (size_t i = 0; i < count && !outcome; i++)
        outcome = receive_one(codec, arrivals, targets[i], sizes[i], leaves, &sums[i]);
    free(leaves);
    return outcome;
}
