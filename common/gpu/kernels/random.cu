// Seeded numbers, made where they are used: full-size dummy weights in milliseconds. The same on the host (`random.rs`).

DEVICE u32 scramble(u64 x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    x ^= x >> 33;
    return (u32)(x >> 32);
}

// Uniform in [-scale, scale), 24 bits, rounded to bf16.
KERNEL void fill_uniform(bf16* out, u64 count, u64 seed, float scale) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        const float unit = (float)(scramble(seed + i * 0x9e3779b97f4a7c15ull) >> 8) * (2.f / 16777216.f) - 1.f;
        out[i] = bf16_of(unit * scale);
    }
}

// Whether `found` is what fill_uniform makes of `seed`, and `*rows` (where given) is `wanted_rows`: writes one more than the
// number of differences for the host to see. One block.
KERNEL void check_uniform(const bf16* found, u64 count, u64 seed, float scale, const int* rows, int wanted_rows, u32* verdict) {
    __shared__ u32 wrong;
    if (threadIdx.x == 0) wrong = rows && *rows != wanted_rows;
    __syncthreads();
    u32 mine = 0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        const float unit = (float)(scramble(seed + i * 0x9e3779b97f4a7c15ull) >> 8) * (2.f / 16777216.f) - 1.f;
        mine += found[i] != bf16_of(unit * scale);
    }
    if (mine) atomicAdd(&wrong, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile u32*)verdict = wrong + 1;
        __threadfence_system();
    }
}

// Reads everything with plain 16-byte loads and keeps one word of it: what this device reads in the best case.
KERNEL void read_all(const uint4* p, u64 count, u32* sink) {
    u32 mix = 0;
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(p + i + j * stride);
#pragma unroll
        for (int j = 0; j < 8; ++j) mix ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += stride) mix ^= p[i].x;
    if (mix == 0x12345678u) *sink = mix;
}

// The time, for who pauses behind this. One thread
KERNEL void stamp(u64* time) {
    wait_for_previous();
    let_next_start();
    *time = nanoseconds();
}

// Does nothing for a while, from now on or since a stamp, as a wait for another device does: what comes behind may take its place
// meanwhile, and blocks beyond the first fetch ahead. One warp a block
KERNEL void pause(u64 ns, const u64* since, AHEAD) {
    let_next_start();
    wait_for_previous();
    if (blockIdx.x) return FETCH_AHEAD(blockIdx.x - 1, gridDim.x - 1);
    for (const u64 begin = since ? *since : nanoseconds(); nanoseconds() - begin < ns;) {}
}
