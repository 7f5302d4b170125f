// Products with a few dozen rows, bound by reading the weight: out[rows, columns] = x[rows, inner] · weight[columns, inner]ᵀ,
// or as many of them as the grid is deep. The blocks of a cluster share the inner dimension of WARPGROUPS * 64 columns: each
// asks for as much of its weight as its memory holds before it waits for x, so that the weight is read while the kernels
// ahead still run; then each sums some of the rows, of which the others push their parts into its memory.
//
// The weight is what the tensor core sees as A. One warp fetches, a warpgroup has 64 columns.

#define MAX_STAGES 16
#define BOX 64 // elements of the inner dimension that are fetched at once: 128 bytes

// Into the memory of another block of the cluster, whose barrier counts the bytes that have arrived.
DEVICE void push(u32 address, float4 v, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
}

// The sum of what the blocks of a cluster have, and its rows in `to` (of which `rows` and `columns` are left). A block sums the
// groups of eight rows that are its own, in the order of the blocks; what a thread has of the others' goes to the same thread
// there, sixteen bytes at once, as the tensor core left it.
template <int N, int WARPGROUPS, int SPLITS>
DEVICE void join(const float (&acc)[N / 2], u32 inbox, u32 arrived, int split, bf16* to, int rows, int columns, int out_stride) {
    constexpr int OWN = N / 8 / SPLITS, GROUP = WARPGROUPS * 128 * 16;
    inbox += threadIdx.x * 16;
    float4 own[OWN];
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
        const u32 there = shared_address_of(inbox + (split - (split > s)) * OWN * GROUP, s), barrier = shared_address_of(arrived, s);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float* a = acc + 4 * (s * OWN + i);
            const float4 v = make_float4(a[0], a[1], a[2], a[3]);
            if (s == split) own[i] = v;
            else push(there + i * GROUP, v, barrier);
        }
    }
    barrier_wait_cluster(arrived, 0);

    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, odd = g & 1;
    const int column = threadIdx.x / 32 * 16 + g - odd;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
            const float4 there = load_shared_float4(inbox + ((s == split ? 0 : s - (s > split)) * OWN + i) * GROUP);
            const float4 v = s == split ? own[i] : there;
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        // Two columns of one row: the neighbour has the other column of this row, and gets the other row of this column.
        const float first = __shfl_xor_sync(~0u, odd ? sum.x : sum.y, 4), second = __shfl_xor_sync(~0u, odd ? sum.z : sum.w, 4);
        const int row = 8 * (split * OWN + i) + 2 * q + odd;
        if (row >= rows) continue;
        bf16* const at = to + (size_t)row * out_stride + column;
        if (column < columns) *(u32*)at = odd ? bf16_pair(first, sum.y) : bf16_pair(sum.x, first);
        if (column + 8 < columns) *(u32*)(at + 8) = odd ? bf16_pair(second, sum.w) : bf16_pair(sum.z, second);
    }
}

// N: rows of a block. `steps` boxes of the inner dimension are this block's. Behind the ring, where the inner dimension is
// shared, there is room for the others' parts of its rows: rows * columns * 4 / blocks bytes from each.
template <int N, int WARPGROUPS>
DEVICE void mid_product(const TensorMap& weight, const TensorMap& x, bf16* out, int rows, int columns, int steps, int stages,
                        int out_stride, int out_batch) {
    constexpr int COLUMNS = WARPGROUPS * 64, A_BYTES = COLUMNS * 128, STAGE_BYTES = A_BYTES + N * 128;
    constexpr int STRIDE = COLUMNS + 4; // of the sums, floats: no bank conflicts between the lanes that write
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * MAX_STAGES + 1];
    let_next_start();
    const u32 ring = (shared_address(memory) + 1023) / 1024 * 1024, full = shared_address(barriers), empty = full + 8 * MAX_STAGES;
    const u32 arrived = empty + 8 * MAX_STAGES, inbox = ring + stages * STAGE_BYTES;
    const int splits = gridDim.x, split = blockIdx.x, column0 = blockIdx.y * COLUMNS;
    const int row_tiles = (rows + N - 1) / N, row0 = blockIdx.z % row_tiles * N, product = blockIdx.z / row_tiles;
    const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        barrier_init(arrived, 1);
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPGROUPS);
        }
        barrier_init_fence();
        if (splits > 1) barrier_expect(arrived, (splits - 1) * (N / splits) * COLUMNS * 4);
    }
    __syncthreads();
    if (splits > 1) cluster_arrive();
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
    bf16* const to = out + (size_t)product * out_batch + (size_t)row0 * out_stride + column0;
    if (splits > 1) {
        // The others have begun, and their barriers wait for what comes.
        cluster_wait();
        if (warpgroup == WARPGROUPS) return;
        if (splits == 2) join<N, WARPGROUPS, 2>(acc, inbox, arrived, split, to, rows - row0, columns - column0, out_stride);
        else join<N, WARPGROUPS, 4>(acc, inbox, arrived, split, to, rows - row0, columns - column0, out_stride);
        return;
    }
    // The ring has been read: the block's sums take its place, [row][column].
    __syncthreads();
    float* sums = (float*)(memory + (ring - shared_address(memory)));
    if (warpgroup < WARPGROUPS) {
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
    __syncthreads();
    // A thread has eight columns of a row.
    constexpr int PARTS = COLUMNS / 8;
    const int part = threadIdx.x % PARTS;
    if (warpgroup == WARPGROUPS || column0 + part * 8 >= columns) return;
    for (int row = threadIdx.x / PARTS; row < min(N, rows - row0); row += WARPGROUPS * 128 / PARTS) {
        const float4 *at = (const float4*)(sums + row * STRIDE + part * 8), a = at[0], b = at[1];
        *(uint4*)(to + (size_t)row * out_stride + part * 8) =
            make_uint4(bf16_pair(a.x, a.y), bf16_pair(a.z, a.w), bf16_pair(b.x, b.y), bf16_pair(b.z, b.w));
    }
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
