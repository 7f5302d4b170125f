// The router of a mixture-of-experts layer for few rows, and how what it decides lies in memory. moe.cu says which constants are
// defined.
//
// routing: [0] number of segments, [1] and [2] how far the pools of tiles are handed out, [3] for which run of the gate and
// up product x is there, [4] how many runs of it have ended; from SEGMENTS, {expert, rows} of each segment, and SEVERAL more
// rows where it is one of several of its expert; from SEGMENT_ROWS_AT, SEGMENT_ROWS for the rows of each.

#define CHOICES (TOP_K + SHARED)
#define SEGMENT_ROWS (NT * 8)
#define MAX_SEGMENTS (EXPERTS + MAX_ROWS * TOP_K / SEGMENT_ROWS)
#define SEGMENTS 8
#define SEVERAL (1 << 16)
#define SEGMENT_ROWS_AT (SEGMENTS + 2 * MAX_SEGMENTS)
#define TOPK_IDS (SEGMENT_ROWS_AT + SEGMENT_ROWS * MAX_SEGMENTS)

#if TRACE
#define TRACE_AT ((TOPK_IDS + MAX_ROWS * TOP_K + 1) / 2 * 2)
DEVICE void trace(int* routing, int kernel, int what) {
    ((u64*)(routing + TRACE_AT))[(kernel * 256 + blockIdx.x) * 4 + what] = nanoseconds();
}
#else
#define trace(routing, kernel, what)
#endif

// Logits of 16 experts and 8 rows a block; the blocks of a row group are a cluster, whose first chooses the experts. The
// last group of all writes the permutation; *ticket counts groups, and is zero before and after. tally [num_experts], if there is one:
// how often each expert was chosen, added to.
// grid (ceil(max_rows / 8), EXPERTS / 16), 256 threads
#if EXPERTS
KERNEL void __cluster_dims__(1, EXPERTS / 16, 1)
moe_router(const bf16* x, const bf16* router, const float* bias, float* logits, int* routing, float* weights, u32* ticket,
           u64* tally, const int* num_rows, int max_rows, float scale, int first_local, int num_local) {
    constexpr int CHUNKS = HIDDEN / 256; // of 32 elements, a warp
    constexpr int PER_LANE = (EXPERTS + 31) / 32;
    __shared__ float4 partial[8][32];
    __shared__ float group_logits[8][EXPERTS];
    __shared__ int counts[EXPERTS], first_segments[EXPERTS], ids[8 * TOP_K];
    __shared__ int is_last;
    let_next_start();
    if (threadIdx.x == 0) trace(routing, 0, 0);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int group = blockIdx.x, expert0 = blockIdx.y * 16;
    {
        const bf16* a = router + (size_t)(expert0 + g) * HIDDEN + warp * CHUNKS * 32 + q * 8;
        const bf16* b = x + (size_t)min(group * 8 + g, max_rows - 1) * HIDDEN + warp * CHUNKS * 32 + q * 8;
        float acc[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
        uint4 a0[CHUNKS], a1[CHUNKS], bb[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            a0[c] = __ldg((const uint4*)(a + c * 32));
            a1[c] = __ldg((const uint4*)(a + 8 * HIDDEN + c * 32));
        }
        wait_for_previous();
        if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) store_release(routing + 3, load_fresh(routing + 4) + 1);
        if (threadIdx.x == 0) trace(routing, 0, 1);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) bb[c] = *(const uint4*)(b + c * 32);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            mma(acc[0], a0[c].x, a1[c].x, a0[c].y, a1[c].y, bb[c].x, bb[c].y);
            mma(acc[1], a0[c].z, a1[c].z, a0[c].w, a1[c].w, bb[c].z, bb[c].w);
        }
        partial[warp][lane] =
            make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
    }
    const int rows = num_rows ? min(*num_rows, max_rows) : max_rows;
    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    if (threadIdx.x < 128) {
        // Thread = (lane of the partial sums, element of its four).
        const int l = threadIdx.x / 4, j = threadIdx.x % 4;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < 8; ++w) sum += ((const float*)&partial[w][l])[j];
        if (ROUND_LOGITS) sum = f32_of(bf16_of(sum));
        const int expert = expert0 + l / 4 + j / 2 * 8, row = l % 4 * 2 + j % 2;
        store_shared_cluster(shared_address_of(shared_address(&group_logits[row][expert]), 0), sum);
        if (group * 8 + row < max_rows) logits[(size_t)(group * 8 + row) * EXPERTS + expert] = sum;
    }
    cluster_sync();
    if (cluster_rank()) return;

    // One warp a row: the best TOP_K of its logits, ties to the lower index.
    const int row = group * 8 + warp;
    if (row < rows) {
        float own[PER_LANE];
        const int expert = pick_experts<EXPERTS, TOP_K, SIGMOID>(own, [&](int e) { return group_logits[warp][e]; }, bias, lane);
        const float weight = weigh_experts<EXPERTS, TOP_K, SIGMOID, NORMALIZE>(own, expert, lane);
        if (lane < TOP_K) {
            const bool local = expert >= first_local && expert < first_local + num_local;
            const int id = local ? expert - first_local : -1;
            weights[row * TOP_K + lane] = local ? weight * scale : 0.f;
            ids[warp * TOP_K + lane] = id;
            if (gridDim.x > 1) routing[TOPK_IDS + row * TOP_K + lane] = id;
        }
    }
    __syncthreads();
    const bool alone = gridDim.x == 1; // then everything is in shared memory
    if (!alone) {
        if (threadIdx.x == 0) {
            __threadfence();
            is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
    }

    const int assignments = rows * TOP_K;
    constexpr int PER_THREAD = (MAX_ROWS * TOP_K + 255) / 256;
    int chosen[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int a = i * 256 + threadIdx.x;
        chosen[i] = a >= assignments ? -1 : alone ? ids[a] : load_fresh(&routing[TOPK_IDS + a]);
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
        if (chosen[i] >= 0) atomicAdd(&counts[chosen[i]], 1);
    __syncthreads();
    if (warp == 0) {
        int count[PER_LANE], segments = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane * PER_LANE + i;
            count[i] = e < EXPERTS ? counts[e] : 0;
            segments += (count[i] + SEGMENT_ROWS - 1) / SEGMENT_ROWS;
        }
        int before = segments;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, before, d);
            if (lane >= d) before += n;
        }
        if (lane == 31) routing[0] = before;
        before -= segments;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane * PER_LANE + i;
            if (e >= EXPERTS) break;
            first_segments[e] = before;
            if (tally && count[i]) atomicAdd(tally + first_local + e, (u64)count[i]);
            counts[e] = 0; // then how many rows have a place
            const int several = count[i] > SEGMENT_ROWS ? SEVERAL : 0;
            for (int done = 0; done < count[i]; done += SEGMENT_ROWS)
                ((int2*)(routing + SEGMENTS))[before++] = make_int2(e, min(SEGMENT_ROWS, count[i] - done) + several);
        }
        if (lane == 0) *ticket = 0;
        if (lane < 2) routing[1 + lane] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int a = i * 256 + threadIdx.x, e = chosen[i];
        if (e < 0) continue;
        const int place = first_segments[e] * SEGMENT_ROWS + atomicAdd(&counts[e], 1);
        routing[SEGMENT_ROWS_AT + place] = a / TOP_K * CHOICES + a % TOP_K;
    }
    if (threadIdx.x == 0) trace(routing, 0, 2);
}
#endif
