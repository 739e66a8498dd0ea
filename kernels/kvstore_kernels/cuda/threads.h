// What the kernels share: types, and code over the threads of a CTA or the lanes of a warp that is
// plain C++ on the host, where a loop over them takes the place of each phase (tests/kernels).
//
// No headers but those beside this one: NVRTC has none. `launch.py` puts them in for `#include`.

#ifdef __CUDACC__
#define INLINE __device__ __forceinline__
#define TABLE static __device__ const
#define SHARED __shared__
#else
#define INLINE inline
#define TABLE static const
#define SHARED
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

const u32 THREADS = 256;  // of a CTA
const u32 WARP = 32;
const u32 WARPS = THREADS / WARP;

// One phase, for each thread of the CTA, for each of its warps, or for each lane of a warp. Nothing
// but `Each` and shared memory goes from one phase to the next.
#ifdef __CUDACC__
#define FOR_THREADS(thread) for (u32 thread = threadIdx.x, once = 1; once; once = 0)
#define FOR_LANES(lane) for (u32 lane = threadIdx.x % WARP, once = 1; once; once = 0)
#define FOR_WARPS(warp) for (u32 warp = threadIdx.x / WARP, once = 1; once; once = 0)
INLINE void barrier() { __syncthreads(); }
#else
#define FOR_THREADS(thread) for (u32 thread = 0; thread < THREADS; thread++)
#define FOR_LANES(lane) for (u32 lane = 0; lane < WARP; lane++)
#define FOR_WARPS(warp) for (u32 warp = 0; warp < WARPS; warp++)
INLINE void barrier() {}
#endif

// A value of each lane of a warp: registers on a device, an array on the host.
template <typename T>
struct Each {
#ifdef __CUDACC__
    T own;
    INLINE T& operator[](u32) { return own; }
    INLINE const T& operator[](u32) const { return own; }
#else
    T of[WARP];
    INLINE T& operator[](u32 lane) { return of[lane]; }
    INLINE const T& operator[](u32 lane) const { return of[lane]; }
#endif
};

// The values of the lanes whose number differs in the bits of `bits`.
template <typename T>
INLINE Each<T> across(const Each<T>& x, u32 bits) {
    Each<T> other;
#ifdef __CUDACC__
    other.own = __shfl_xor_sync(~0u, x.own, bits);
#else
    for (u32 lane = 0; lane < WARP; lane++) other.of[lane] = x.of[lane ^ bits];
#endif
    return other;
}

// The values of the lanes `count` further on; the last `count` lanes get anything.
template <typename T>
INLINE Each<T> further(const Each<T>& x, u32 count) {
    Each<T> other;
#ifdef __CUDACC__
    other.own = __shfl_down_sync(~0u, x.own, count);
#else
    for (u32 lane = 0; lane < WARP; lane++) other.of[lane] = x.of[(lane + count) % WARP];
#endif
    return other;
}

// A bit for each lane.
INLINE u32 ballot(const Each<u32>& set) {
#ifdef __CUDACC__
    return __ballot_sync(~0u, set.own);
#else
    u32 bits = 0;
    for (u32 lane = 0; lane < WARP; lane++) bits |= (set.of[lane] ? 1u : 0u) << lane;
    return bits;
#endif
}

INLINE u32 count_of(u32 bits) {
#ifdef __CUDACC__
    return __popc(bits);
#else
    return (u32)__builtin_popcount(bits);
#endif
}

template <typename T> INLINE T lesser(T a, T b) { return a < b ? a : b; }
template <typename T> INLINE T greater(T a, T b) { return a > b ? a : b; }

template <typename T>
INLINE T least(Each<T> x) {
    for (u32 bits = 1; bits < WARP; bits *= 2) {
        Each<T> other = across(x, bits);
        FOR_LANES(lane) x[lane] = lesser(x[lane], other[lane]);
    }
    return x[0];
}

template <typename T>
INLINE T largest(Each<T> x) {
    for (u32 bits = 1; bits < WARP; bits *= 2) {
        Each<T> other = across(x, bits);
        FOR_LANES(lane) x[lane] = greater(x[lane], other[lane]);
    }
    return x[0];
}
