// A product of a mixture-of-experts layer for many rows: out[row] = weight[group] in[row], for groups of rows that lie
// together: the rows of each routed expert, and once more all rows for each shared expert. With GATED, SwiGLU on the way
// out.
//
// Two blocks of a cluster have 128 weight rows each and the same up to 256 rows, of which each fetches half for both.
// Weights are what the tensor core sees as A. In a block one warp fetches; two warpgroups have 64 weight rows each. With
// GATED, eight gate rows and eight up rows take turns, so that a thread has both for its elements.
//
// Defined at compile time: WIDTH (inner dimension, a multiple of 64), FEATURES (of the result; a multiple of 256, or of 128
// with GATED), GATED, EXPERTS (routed, here), TOP_K, SHARED.

#define STAGES 4
// Results leave by the copy engine while the next tile is multiplied: 32 rows of a warpgroup's features at once. Stores of
// threads would touch eight lines each, which took a fifth of the down product's time.
#define OUT_ROWS 32
#define OUT_BYTES BLOCK_FEATURES // of a row of a warpgroup: half the block's features
#define OUT_BUFFERS 3
#define ROWS 256                     // of a tile at most
#define A_BYTES (128 * 128)          // 128 weight rows of 64 elements
#define STAGE_BYTES (A_BYTES + ROWS * 128)
#define GROUPS (EXPERTS + SHARED)
#define BLOCK_FEATURES (GATED ? 64 : 128)
#define FEATURE_TILES (FEATURES / (2 * BLOCK_FEATURES)) // of a cluster
#define STEPS (WIDTH / 64)
// Tiles of as many rows as there can be come first, then those of up to 192, 128 and 64: what is left of a group.
#define CLASSES (ROWS / 64)

DEVICE u32 address_in(u32 shared_address, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
    return address;
}
// Of either block. Only what the tensor core has read is handed over, so no memory order beyond the barrier's own is asked for.
DEVICE void arrive_cluster(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Never long; a kernel that waits for what cannot come ends with an error instead of never.
DEVICE void wait_cluster(u32 barrier, u32 parity) {
    u32 done = 0;
    for (u32 tries = 0; !done; ++tries) {
        asm volatile("{ .reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        if (tries == 1u << 24) asm volatile("trap;");
    }
}
// A map lies in memory, where another may have been before: what the copy engine remembers of it does not count.
DEVICE void fresh_map(const void* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// A box of the gates' and ups' map: 64 elements, 8 rows, gate and up, 8 times; or of the plain map: 64 elements, 128 rows.
DEVICE void fetch_weight(u32 to, const void* map, int element, int row, int expert, u32 barrier) {
#if GATED
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
                 "l"(map), "r"(element), "r"(0), "r"(0), "r"(row / 8), "r"(expert), "r"(barrier) : "memory");
#else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(element), "r"(row), "r"(expert), "r"(barrier) : "memory");
#endif
}
// 32 rows of 64 elements, into both blocks.
DEVICE void fetch_rows(u32 to, const void* map, int element, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(element), "r"(row), "r"(barrier), "h"((u16)3) : "memory");
}

// Eight by eight elements each, of which a lane has two neighbours of a column as memory sees it; lane l says where row l % 8
// of matrix l / 8 goes.
DEVICE void stmatrix_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// A box of a warpgroup's features and OUT_ROWS rows.
DEVICE void store_rows(const void* map, int feature, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;" ::"l"(map), "r"(feature), "r"(row), "r"(from) : "memory");
}
// Until at most one box of this thread's has not been read.
DEVICE void wait_for_stores_but_one() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
DEVICE void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Where eight features (a chunk) of a row are among OUT_ROWS.
DEVICE u32 place_of(int row, int chunk) { return row * OUT_BYTES + (GATED ? (chunk ^ row / 2) % 4 : (chunk ^ row) % 8) * 16; }

// What a cluster works on: features from `feature` on, of a group's rows from `in` (and to `out`) on, `rows` of them.
struct Tile {
    int group, feature, in, out, rows;
};

// silu(gate) * up, by sigmoid(x) = (1 + tanh(x / 2)) / 2: one special function instead of two.
DEVICE float swiglu(float gate, float up) {
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(gate * 0.5f));
    const float half = gate * 0.5f * up;
    return half + half * t;
}

// The tile's steps, and its way out by way of `leaving`, OUT_BUFFERS for this warpgroup. `stage`, `parity` and `turn` go on
// from tile to tile.
template <int N>
DEVICE void multiply(const Tile& tile, u32 ring, u32 full, u32 empty, u32 peer_empty, int& stage, int& parity, u32 leaving, int& turn,
                     const void* store, bf16* out) {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
    float acc[N / 2];
    int before = -1;
    const auto release = [&](int which) {
        if (thread == 0) {
            arrive_cluster(empty + 8 * which);
            arrive_cluster(peer_empty + 8 * which);
        }
    };
    for (int step = 0; step < STEPS; ++step) {
        wait_cluster(full + 8 * stage, parity);
        const u32 a = ring + stage * STAGE_BYTES + warpgroup * (A_BYTES / 2), b = ring + stage * STAGE_BYTES + A_BYTES;
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<N>::multiply(acc, swizzled_tile(a + k * 32), swizzled_tile(b + k * 32), step || k);
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0) release(before);
        before = stage;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    wgmma_wait<0>();
    release(before);

    const int feature = tile.feature + warpgroup * (BLOCK_FEATURES / 2);
#pragma unroll
    for (int r = 0; r < N; r += OUT_ROWS) {
        if (r >= tile.rows) break;
        const u32 box = leaving + turn * (OUT_ROWS * OUT_BYTES);
        const float* sums = acc + r / 2; // of 8 rows, four a thread: two rows of one feature, and of the feature eight further
#if GATED
        u32 h[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            h[j] = bf16_pair(swiglu(sums[4 * j], sums[4 * j + 2]), swiglu(sums[4 * j + 1], sums[4 * j + 3]));
        stmatrix_transposed(box + place_of(lane, warp), h[0], h[1], h[2], h[3]);
#else
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            stmatrix_transposed(box + place_of(j * 8 + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2),
                                bf16_pair(sums[4 * j], sums[4 * j + 1]), bf16_pair(sums[4 * j + 2], sums[4 * j + 3]),
                                bf16_pair(sums[4 * j + 4], sums[4 * j + 5]), bf16_pair(sums[4 * j + 6], sums[4 * j + 7]));
#endif
        fence_for_copies();
        // The box after this one may be written when the box before last has been read.
        if (thread == 0) wait_for_stores_but_one();
        group_sync(1 + warpgroup, 128);
        if (r + OUT_ROWS <= tile.rows) {
            if (thread == 0) store_rows(store, feature, tile.out + r, box);
        } else { // what lies behind belongs to others
            constexpr int CHUNKS = OUT_BYTES / 16;
            for (int i = thread; i < (tile.rows - r) * CHUNKS; i += 128)
                *(uint4*)(out + (size_t)(tile.out + r + i / CHUNKS) * FEATURES + feature + i % CHUNKS * 8) =
                    load_shared_16(box + place_of(i / CHUNKS, i % CHUNKS));
        }
        if (++turn == OUT_BUFFERS) turn = 0;
    }
}

// `weight` and `in` are maps of the weights and of the rows (sorted by expert, then once more as they came; GATED) or of
// what the gated product wrote (not GATED); `store` is one of `out`, of boxes of OUT_ROWS rows. `ends` says where the routed experts' rows end. The result's rows are the
// routed experts', up to rows * TOP_K of them, then `rows` for each shared expert.
// a cluster of two blocks for every two multiprocessors, 384 threads
KERNEL void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
moe_product(const void* weight, const void* in, const void* store, const int* ends, bf16* out, int rows) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    __shared__ int begins[GROUPS + 1], first_tile[CLASSES * GROUPS + 1];
    const u32 ring = (shared_address(memory) + 1023) / 1024 * 1024, full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 rank = cluster_rank(), peer_empty = address_in(empty, rank ^ 1), own_empty = address_in(empty, rank);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4); // two warpgroups of two blocks
        }
        barrier_init_fence();
        begins[0] = first_tile[0] = 0;
    }
    wait_for_previous();
    if (threadIdx.x < EXPERTS) begins[threadIdx.x + 1] = ends[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < GROUPS) {
        const int group = threadIdx.x, count = group < EXPERTS ? begins[group + 1] - begins[group] : rows;
        const int left = (count % ROWS + 63) / 64; // class of what is left, counted from below
        for (int c = 0; c < CLASSES; ++c)
            first_tile[c * GROUPS + group + 1] = ((c == 0 ? count / ROWS : 0) + (left == CLASSES - c)) * FEATURE_TILES;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 1; i <= CLASSES * GROUPS; ++i) first_tile[i] = sum += first_tile[i];
    }
    __syncthreads();
    cluster_sync();

    const int clusters = gridDim.x / 2;
    // Tile `index` of all, which is of class `c`.
    const auto tile_of = [&](int c, int index) {
        int low = c * GROUPS, high = low + GROUPS;
        while (low + 1 < high) {
            const int middle = (low + high) / 2;
            if (first_tile[middle] <= index) low = middle;
            else high = middle;
        }
        const int row_tiles = (first_tile[low + 1] - first_tile[low]) / FEATURE_TILES, at = index - first_tile[low];
        const int group = low - c * GROUPS, shared = rows * TOP_K + (group - EXPERTS) * rows;
        const bool routed = group < EXPERTS;
        const int count = routed ? begins[group + 1] - begins[group] : rows;
        const int row = c == 0 ? at % row_tiles * ROWS : count / ROWS * ROWS;
        Tile tile;
        tile.group = group;
        tile.feature = (at / row_tiles * 2 + rank) * BLOCK_FEATURES;
        tile.in = (routed ? begins[group] : GATED ? rows * TOP_K : shared) + row;
        tile.out = (routed ? begins[group] : shared) + row;
        tile.rows = min(ROWS, count - row);
        return tile;
    };

    if (threadIdx.x >= 256) {
        give_registers<40>();
        if (threadIdx.x == 256) {
            fresh_map(weight);
            fresh_map(in);
            int stage = 0, parity = 1, t = blockIdx.x / 2;
            for (int c = 0; c < CLASSES; ++c) {
                const int half = (ROWS - 64 * c) / 2;
                for (; t < first_tile[(c + 1) * GROUPS]; t += clusters) {
                    const Tile tile = tile_of(c, t);
                    for (int step = 0; step < STEPS; ++step) {
                        wait_cluster(empty + 8 * stage, parity);
                        barrier_expect(full + 8 * stage, A_BYTES + 2 * half * 128);
                        const u32 at = ring + stage * STAGE_BYTES;
                        fetch_weight(at, weight, step * 64, tile.feature, tile.group, full + 8 * stage);
                        for (int r = rank * half; r < (int)(rank + 1) * half; r += 32)
                            fetch_rows(at + A_BYTES + r * 128, in, step * 64, tile.in + r, full + 8 * stage);
                        if (++stage == STAGES) {
                            stage = 0;
                            parity ^= 1;
                        }
                    }
                }
            }
        }
    } else {
        take_registers<232>();
        const u32 leaving = ring + STAGES * STAGE_BYTES + threadIdx.x / 128 * (OUT_BUFFERS * OUT_ROWS * OUT_BYTES);
        if (threadIdx.x % 128 == 0) fresh_map(store);
        int stage = 0, parity = 0, turn = 0, t = blockIdx.x / 2;
        // One after the other, so that each has the registers for itself.
        const auto all_of = [&](auto n) {
            constexpr int N = decltype(n)::value, c = (ROWS - N) / 64;
            for (; t < first_tile[(c + 1) * GROUPS]; t += clusters)
                multiply<N>(tile_of(c, t), ring, full, own_empty, peer_empty, stage, parity, leaving, turn, store, out);
        };
        all_of(Int<256>());
        all_of(Int<192>());
        all_of(Int<128>());
        all_of(Int<64>());
        wait_for_stores();
    }
    __syncthreads();
    // What the peer still sends must find this block alive.
    cluster_sync();
}
