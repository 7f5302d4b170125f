// What every kernel file begins with: number formats, matrix instructions, asynchronous copies, barriers and
// memory orders, as thin names for single PTX instructions. No CUDA header is needed: run-time compilation puts this
// file before the kernel's own.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16; // bit pattern

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__

// ---- bfloat16 -------------------------------------------------------------------------------------------------

DEVICE float f32_of(bf16 value) { return __uint_as_float((u32)value << 16); }
DEVICE float f32_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float f32_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even; `low` in the low half.
DEVICE u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE bf16 bf16_of(float value) { return (bf16)bf16_pair(value, 0.f); }

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define LOG2_E 1.4426950408889634f
#define NEG_BIG (-1.0e30f) // stands for minus infinity where inf - inf must not become NaN

// ---- tensor cores ---------------------------------------------------------------------------------------------

// acc[16 x 8] += a[16 x 16] b[16 x 8]. Lane (g = lane / 4, q = lane % 4) holds acc rows g, g + 8 at columns 2q, 2q + 1;
// a0, a2 are row g at k = 2q.. and 8 + 2q.., a1, a3 the same of row g + 8; b0, b1 are column g at the same k.
DEVICE void mma(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void ldmatrix(u32 (&r)[4], u32 shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address) : "memory");
}
DEVICE void ldmatrix_transposed(u32 (&r)[4], u32 shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address) : "memory");
}

// ---- shared memory, its barriers, bulk copies into it ---------------------------------------------------------

DEVICE u32 shared_address(const void* pointer) {
    u32 address;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(pointer));
    return address;
}
DEVICE uint4 load_shared_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
DEVICE float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
DEVICE void store_shared_16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine; a __syncthreads must follow.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@done bra ready;\n"
                 "bra again;\n"
                 "ready:\n"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}
// `bytes`, source and destination are multiples of 16.
DEVICE void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(destination),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
DEVICE u64 policy_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE u64 policy_keep() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// What others of the device read again soon, and the stream of weights must not push out of the second-level cache.
DEVICE u64 policy_evict_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void store_with_policy(float* p, float v, u64 policy) {
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(p), "f"(v), "l"(policy) : "memory");
}
DEVICE void store_with_policy(bf16* p, bf16 v, u64 policy) {
    asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(p), "h"(v), "l"(policy) : "memory");
}
// What the copy engine is told about a matrix, as an argument of a kernel.
struct alignas(64) TensorMap {
    u64 words[16];
};
// A box of three dimensions, of which the innermost begins at `x`.
DEVICE void fetch_box(u32 destination, const TensorMap& map, int x, int y, int z, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy) : "memory");
}
// Where shared memory was written by ordinary stores, before the copy engine may write it again.
DEVICE void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for memory of the device that others wrote, by who knows that they did and will ask the copy engine for it.
DEVICE void fence_for_copies_of_memory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// A barrier among `threads` threads of the block; ids 1..15 (0 is __syncthreads).
DEVICE void group_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Asks for `bytes` (a multiple of 16) to be brought into the second-level cache.
DEVICE void bulk_prefetch(const void* source, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(source)), "r"(bytes) : "memory");
}
// Three stretches of memory that a later kernel will read whatever it is told: blocks beyond a kernel's own ask for them
// and end, so that idle memory has something to do. Sizes are multiples of 16, or zero.
#define AHEAD const u8 *ahead_a, u32 bytes_a, const u8 *ahead_b, u32 bytes_b, const u8 *ahead_c, u32 bytes_c
#define FETCH_AHEAD(index, count) \
    (fetch_ahead(ahead_a, bytes_a, index, count), fetch_ahead(ahead_b, bytes_b, index, count), \
     fetch_ahead(ahead_c, bytes_c, index, count))
DEVICE void fetch_ahead(const u8* source, u32 bytes, u32 index, u32 count) {
    constexpr u32 PIECE = 4096;
    const u32 pieces = (bytes + PIECE - 1) / PIECE;
    for (u32 p = index * blockDim.x + threadIdx.x; p < pieces; p += count * blockDim.x)
        bulk_prefetch(source + (size_t)p * PIECE, min(PIECE, bytes - p * PIECE));
}

// Registers of this warpgroup's threads from here on; more only what another gave up.
template <int N> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- clusters -----------------------------------------------------------------------------------------------------

// Blocks of a cluster run at once and reach each other's shared memory.
DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The address, in the whole cluster, of the place that `address` is in block `rank`.
DEVICE u32 shared_address_of(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
DEVICE void store_shared_cluster(u32 address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
DEVICE void store_shared_cluster(u32 address, u64 v) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(v) : "memory");
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
// As barrier_wait, where what came was written by other blocks of the cluster.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra ready;\n"
                 "bra again;\n"
                 "ready:\n"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}

// A compile-time number as an argument.
template <int N> struct Int {
    static constexpr int value = N;
};

// ---- order between kernels of one stream ----------------------------------------------------------------------

// The next kernel, if it was launched to overlap, may start once every block said this or ended.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Blocks until the kernels before have ended and their writes are visible; nothing if none overlaps.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- memory orders --------------------------------------------------------------------------------------------

// Reads that may not come from a stale first-level cache line.
DEVICE int load_fresh(const int* p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE float load_fresh(const float* p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
// Reads that are asked for here, in this order, though they may turn out not to be needed.
DEVICE float load_now(const float* p) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
DEVICE float4 load_now(const float4* p) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE int load_acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_release(int* p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void add_release(int* p, int v) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE int load_acquire_shared(const int* p) {
    int v;
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
    return v;
}
DEVICE void store_release_shared(int* p, int v) {
    asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}
DEVICE void store_release_system(u64* p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE u64 load_acquire_system(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
// Of this multiprocessor; it wraps around.
DEVICE u32 clock_cycles() {
    u32 t;
    asm volatile("mov.u32 %0, %clock;" : "=r"(t));
    return t;
}
DEVICE u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
