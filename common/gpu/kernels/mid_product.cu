// Products with a few dozen rows, bound by reading the weight: out[rows, columns] = x[rows, inner] · weight[columns, inner]ᵀ,
// or as many of them as the grid is deep. The blocks of a cluster share the inner dimension of WARPGROUPS * 64 columns: each
// asks for as much of its weight as its memory holds before it waits for x, so that the weight is read while the kernels
// ahead still run; then they sum through each other's memory, in a fixed order.
//
// The weight is what the tensor core sees as A. One warp fetches, a warpgroup has 64 columns.

#define MAX_STAGES 16
#define MAX_SPLITS 4
#define BOX 64 // elements of the inner dimension that are fetched at once: 128 bytes

DEVICE float4 load_shared_cluster(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

// N: rows of a block. `steps` boxes of the inner dimension are this block's.
template <int N, int WARPGROUPS>
DEVICE void mid_product(const TensorMap& weight, const TensorMap& x, bf16* out, int rows, int columns, int steps, int stages,
                        int out_stride, int out_batch) {
    constexpr int COLUMNS = WARPGROUPS * 64, A_BYTES = COLUMNS * 128, STAGE_BYTES = A_BYTES + N * 128;
    constexpr int STRIDE = COLUMNS + 4; // of the sums, floats: no bank conflicts between the lanes that write
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * MAX_STAGES];
    let_next_start();
    const u32 ring = (shared_address(memory) + 1023) / 1024 * 1024, full = shared_address(barriers), empty = full + 8 * MAX_STAGES;
    const int splits = gridDim.x, split = blockIdx.x, column0 = blockIdx.y * COLUMNS;
    const int row_tiles = (rows + N - 1) / N, row0 = blockIdx.z % row_tiles * N, product = blockIdx.z / row_tiles;
    const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPGROUPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == WARPGROUPS) {
        if (lane == 0) {
            const u64 once = policy_evict_first(), keep = policy_keep();
            const int element = split * steps * BOX, early = min(steps, stages);
            for (int s = 0; s < early; ++s) {
                barrier_expect(full + 8 * s, STAGE_BYTES);
                fetch_box(ring + s * STAGE_BYTES, weight, element + s * BOX, column0, product, full + 8 * s, once);
            }
            wait_for_previous();
            for (int s = 0; s < early; ++s)
                fetch_box(ring + s * STAGE_BYTES + A_BYTES, x, element + s * BOX, row0, product, full + 8 * s, keep);
            int stage = 0, parity = 0;
            for (int step = stages; step < steps; ++step) {
                const u32 at = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
                barrier_wait(empty + 8 * stage, parity);
                barrier_expect(barrier, STAGE_BYTES);
                fetch_box(at, weight, element + step * BOX, column0, product, barrier, once);
                fetch_box(at + A_BYTES, x, element + step * BOX, row0, product, barrier, keep);
                if (++stage == stages) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
        __syncwarp();
    }
    wait_for_previous();

    float acc[N / 2];
    if (warpgroup < WARPGROUPS) {
        int stage = 0, parity = 0, before = 0;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + 8 * stage, parity);
            const u32 a = ring + stage * STAGE_BYTES + warpgroup * (64 * 128), b = ring + stage * STAGE_BYTES + A_BYTES;
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k) Wgmma<N>::multiply(acc, swizzled_tile(a + k * 32), swizzled_tile(b + k * 32), step || k);
            wgmma_commit();
            wgmma_wait<1>();
            if (step && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        wgmma_wait<0>();
    }
    // The ring has been read: the block's sums take its place, [row][column].
    __syncthreads();
    if (warpgroup < WARPGROUPS) {
        float* sums = (float*)(memory + (ring - shared_address(memory)));
        const int column = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            float* at = sums + (8 * j + lane % 4 * 2) * STRIDE + column;
            at[0] = acc[4 * j];
            at[STRIDE] = acc[4 * j + 1];
            at[8] = acc[4 * j + 2];
            at[STRIDE + 8] = acc[4 * j + 3];
        }
    }
    if (splits > 1) cluster_sync();
    else __syncthreads();

    // A row in turn for each block of the cluster; a thread has eight columns of it.
    bf16* const to = out + (size_t)product * out_batch + (size_t)row0 * out_stride + column0;
    if (warpgroup < WARPGROUPS) {
        constexpr int PARTS = COLUMNS / 8;
        const int part = threadIdx.x % PARTS;
        if (column0 + part * 8 < columns) {
            for (int row = threadIdx.x / PARTS * splits + split; row < min(N, rows - row0); row += WARPGROUPS * 128 / PARTS * splits) {
                // All of them are on their way before one is needed.
                float4 v[MAX_SPLITS][2];
#pragma unroll
                for (int s = 0; s < MAX_SPLITS; ++s) {
                    const u32 at = shared_address_of(ring + (row * STRIDE + part * 8) * 4, s < splits ? s : 0);
                    v[s][0] = s < splits ? load_shared_cluster(at) : make_float4(0.f, 0.f, 0.f, 0.f);
                    v[s][1] = s < splits ? load_shared_cluster(at + 16) : make_float4(0.f, 0.f, 0.f, 0.f);
                }
                float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
                for (int s = 0; s < MAX_SPLITS; ++s) {
                    const float4 a = v[s][0], b = v[s][1];
                    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
                    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
                }
                *(uint4*)(to + (size_t)row * out_stride + part * 8) = make_uint4(
                    bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]), bf16_pair(sum[4], sum[5]), bf16_pair(sum[6], sum[7]));
            }
        }
    }
    // The others still read this block's sums.
    if (splits > 1) cluster_sync();
}

// grid (blocks that share the inner dimension, columns / (WARPGROUPS * 64), products * rows / N), clusters of as many blocks as the grid
// is wide, WARPGROUPS * 128 + 32 threads. weight, x: maps of [products, columns or rows, inner], boxes of 64 elements by all
// the columns or rows of a block.
#define MID_PRODUCT(N, WARPGROUPS) \
    KERNEL void __launch_bounds__(WARPGROUPS * 128 + 32, 1) mid_product_##N##_##WARPGROUPS( \
        const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, bf16* out, int rows, int columns, int steps, \
        int stages, int out_stride, int out_batch) { \
        mid_product<N, WARPGROUPS>(weight, x, out, rows, columns, steps, stages, out_stride, out_batch); \
    }
MID_PRODUCT(32, 1)
MID_PRODUCT(64, 1)
MID_PRODUCT(128, 1)
MID_PRODUCT(32, 2)
MID_PRODUCT(64, 2)
MID_PRODUCT(128, 2)
