// A mixture-of-experts layer for few rows (decode): router and permutation, gate + up + SwiGLU, down, combine.
//
// Bound by reading weights, so both products stream them through shared memory with bulk copies while the rows stay
// in registers: a block walks a contiguous range of 16-row weight tiles, and an expert's rows are loaded once when the
// walk enters it. Weights are the matrix that the tensor core sees as A (16 rows), activations as B (8 columns a tile).
// Shared experts are experts EXPERTS.. that every row chose: their tiles need no routing and are read while it runs.
//
// Defined at compile time: HIDDEN, INTER (of one expert), EXPERTS, TOP_K, SHARED (experts), NT (row tiles of 8 that a
// segment has), NORMALIZE (top-k weights sum to one), WARPS_UP, WARPS_DOWN, STAGES_UP, STAGES_DOWN, OUT_F32.
//
// A token t owns rows t * CHOICES .. + CHOICES of the intermediate tensors: TOP_K routed, then SHARED.
// routing: [0] number of segments; from SEGMENTS, int4 {expert, first slot, rows, 0}; from SLOTS, the row of each slot.

#define CHOICES (TOP_K + SHARED)
#define SEGMENT_ROWS (NT * 8)
#define MAX_SEGMENTS (EXPERTS + MAX_ROWS * TOP_K / SEGMENT_ROWS)
#define SEGMENTS 4
#define SLOTS (SEGMENTS + 4 * MAX_SEGMENTS)
#define TOPK_IDS (SLOTS + MAX_ROWS * TOP_K)

// ---- router -----------------------------------------------------------------------------------------------------

// Larger floats have larger keys, NaN aside.
DEVICE u32 order_key(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Logits of 16 experts and 8 rows a block. The last block of a row group chooses its experts, the last of all writes
// the permutation: tickets[0] counts groups, tickets[1 + group] blocks; all are zero before and after.
// grid (ceil(max_rows / 8), EXPERTS / 16), 256 threads
KERNEL void moe_router(const bf16* x, const bf16* router, float* logits, int* routing, float* weights, u32* tickets,
                       const int* num_rows, int max_rows, float scale, int first_local, int num_local) {
    constexpr int CHUNKS = HIDDEN / 256; // of 32 elements, a warp
    __shared__ float4 partial[8][32];
    __shared__ int is_last;
    __shared__ int counts[EXPERTS], starts[EXPERTS];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int rows = num_rows ? min(*num_rows, max_rows) : max_rows;
    const int group = blockIdx.x, expert0 = blockIdx.y * 16;

    {
        const bf16* a = router + (size_t)(expert0 + g) * HIDDEN + warp * CHUNKS * 32 + q * 8;
        const int row = group * 8 + g;
        const bf16* b = x + (size_t)min(row, max_rows - 1) * HIDDEN + warp * CHUNKS * 32 + q * 8;
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        uint4 a0[CHUNKS], a1[CHUNKS], bb[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            a0[c] = __ldg((const uint4*)(a + c * 32));
            a1[c] = __ldg((const uint4*)(a + 8 * HIDDEN + c * 32));
            bb[c] = *(const uint4*)(b + c * 32);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            mma(acc, a0[c].x, a1[c].x, a0[c].y, a1[c].y, bb[c].x, bb[c].y);
            mma(acc, a0[c].z, a1[c].z, a0[c].w, a1[c].w, bb[c].z, bb[c].w);
        }
        partial[warp][lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        // Thread = (pair of columns' lane, element of its float4).
        const int l = threadIdx.x / 4, j = threadIdx.x % 4;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < 8; ++w) sum += ((const float*)&partial[w][l])[j];
        const int expert = expert0 + l / 4 + (j / 2) * 8, row = group * 8 + (l % 4) * 2 + j % 2;
        if (row < max_rows) logits[(size_t)row * EXPERTS + expert] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&tickets[1 + group], 1u) == gridDim.y - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();

    // One warp a row: the best TOP_K of its logits, ties to the lower index.
    {
        const int row = group * 8 + warp;
        constexpr int PER_LANE = (EXPERTS + 31) / 32;
        if (row < rows) {
            float own[PER_LANE];
            u32 keys[PER_LANE];
            float top = NEG_BIG;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const int e = i * 32 + lane;
                own[i] = e < EXPERTS ? load_fresh(&logits[(size_t)row * EXPERTS + e]) : NEG_BIG;
                keys[i] = e < EXPERTS ? order_key(own[i]) : 0;
                top = fmaxf(top, own[i]);
            }
#pragma unroll
            for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            float all = 0.f;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) all += (i * 32 + lane < EXPERTS) ? __expf(own[i] - top) : 0.f;
#pragma unroll
            for (int d = 16; d; d /= 2) all += __shfl_xor_sync(~0u, all, d);
            float my_weight = 0.f, chosen_sum = 0.f;
            int my_expert = 0;
#pragma unroll
            for (int k = 0; k < TOP_K; ++k) {
                u32 best = keys[0];
#pragma unroll
                for (int i = 1; i < PER_LANE; ++i) best = max(best, keys[i]);
                best = __reduce_max_sync(~0u, best);
                int expert = 1 << 30;
#pragma unroll
                for (int i = PER_LANE - 1; i >= 0; --i)
                    if (keys[i] == best) expert = i * 32 + lane;
                expert = __reduce_min_sync(~0u, expert);
                float value = 0.f;
#pragma unroll
                for (int i = 0; i < PER_LANE; ++i) {
                    if (i * 32 + lane == expert) {
                        keys[i] = 0;
                        value = own[i];
                    }
                }
                value = __shfl_sync(~0u, value, expert % 32);
                const float probability = __expf(value - top) / all;
                chosen_sum += probability;
                if (lane == k) {
                    my_weight = probability;
                    my_expert = expert;
                }
            }
            if (lane < TOP_K) {
                const bool local = my_expert >= first_local && my_expert < first_local + num_local;
                const float weight = NORMALIZE ? my_weight / chosen_sum : my_weight;
                weights[row * TOP_K + lane] = local ? weight * scale : 0.f;
                routing[TOPK_IDS + row * TOP_K + lane] = local ? my_expert - first_local : -1;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tickets[1 + group] = 0;
        __threadfence();
        is_last = atomicAdd(&tickets[0], 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();

    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    const int assignments = rows * TOP_K;
    for (int a = threadIdx.x; a < assignments; a += blockDim.x) {
        const int e = load_fresh(&routing[TOPK_IDS + a]);
        if (e >= 0) atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    if (warp == 0) {
        constexpr int PER_LANE = (EXPERTS + 31) / 32;
        int count[PER_LANE], total = 0, segments = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane * PER_LANE + i;
            count[i] = e < EXPERTS ? counts[e] : 0;
            total += count[i];
            segments += (count[i] + SEGMENT_ROWS - 1) / SEGMENT_ROWS;
        }
        int before = total, segments_before = segments;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, before, d), s = __shfl_up_sync(~0u, segments_before, d);
            if (lane >= d) {
                before += n;
                segments_before += s;
            }
        }
        if (lane == 31) routing[0] = segments_before;
        before -= total;
        segments_before -= segments;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane * PER_LANE + i;
            if (e >= EXPERTS) break;
            starts[e] = before;
            for (int done = 0; done < count[i]; done += SEGMENT_ROWS) {
                int4* segment = (int4*)(routing + SEGMENTS) + segments_before++;
                *segment = make_int4(e, before + done, min(SEGMENT_ROWS, count[i] - done), 0);
            }
            before += count[i];
        }
        if (lane == 0) tickets[0] = 0;
    }
    __syncthreads();
    for (int a = threadIdx.x; a < assignments; a += blockDim.x) {
        const int e = load_fresh(&routing[TOPK_IDS + a]);
        if (e >= 0) routing[SLOTS + atomicAdd(&starts[e], 1)] = a / TOP_K * CHOICES + a % TOP_K;
    }
}

// ---- the two products -------------------------------------------------------------------------------------------

// What a block works on: tiles of the shared experts, then of the routed ones.
struct Share {
    int shared_begin, shared_end, routed_begin, routed_end;
};

DEVICE Share share_of(int shared_tiles, int routed_tiles) {
    const int n = gridDim.x, i = blockIdx.x;
    Share s;
    s.shared_begin = (int)((long long)shared_tiles * i / n);
    s.shared_end = (int)((long long)shared_tiles * (i + 1) / n);
    if (routed_tiles >= 2 * n) {
        // Both kinds together are balanced.
        const long long all = shared_tiles + routed_tiles;
        s.routed_begin = (int)(all * i / n) - s.shared_begin;
        s.routed_end = (int)(all * (i + 1) / n) - s.shared_end;
    } else {
        s.routed_begin = (int)((long long)routed_tiles * i / n);
        s.routed_end = (int)((long long)routed_tiles * (i + 1) / n);
    }
    return s;
}

// One product y[row] = W[expert] in[row] over all segments. WIDTH is the inner dimension, TILES the 16-row weight tiles
// of an expert. GATED: 8 gate rows and 8 up rows make a tile, SwiGLU on the way out, rows come from the token's `in`;
// otherwise rows come from the intermediate row itself.
template <int WARPS, int STAGES, int WIDTH, int TILES, bool GATED>
DEVICE void stream_experts(const bf16* __restrict__ weight, const bf16* in, void* out, const int* routing, int max_rows) {
    constexpr int CHUNKS = WIDTH / 32 / WARPS;
    static_assert(CHUNKS * 32 * WARPS == WIDTH, "inner dimension must divide among the warps");
    constexpr int ROW_BYTES = WIDTH * 2, ROW_STRIDE = ROW_BYTES + 64; // no bank conflicts between neighbouring rows
    constexpr int STAGE_BYTES = 16 * ROW_STRIDE;
    constexpr int ACCUMULATORS = NT == 1 ? 2 : NT; // two chains when there is but one tile
    constexpr int RED_BYTES = WARPS * NT * 512;
    constexpr int RED_BUFFERS = STAGES * STAGE_BYTES + 2 * RED_BYTES + 2048 <= 232448 ? 2 : 1;
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    __shared__ int segment_rows[2][SEGMENT_ROWS]; // of the segment being walked and the one before
    const u32 ring = shared_address(memory);
    float4* red = (float4*)(memory + STAGES * STAGE_BYTES);
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int passes = SHARED ? (max_rows + SEGMENT_ROWS - 1) / SEGMENT_ROWS : 0;
    const int shared_tiles = SHARED * passes * TILES;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp == WARPS) {
        const u64 once = policy_evict_first(), keep = policy_keep();
        int stage = 0, parity = 1;
        auto fetch = [&](int expert, int tile, u64 policy) {
            barrier_wait(empty + 8 * stage, parity);
            if (lane == 0) barrier_expect(full + 8 * stage, 16 * ROW_BYTES);
            __syncwarp();
            if (lane < 16) {
                const int row = GATED ? tile * 8 + lane % 8 + (lane / 8) * INTER : tile * 16 + lane;
                const bf16* source = weight + ((size_t)expert * (GATED ? 2 * INTER : HIDDEN) + row) * WIDTH;
                bulk_copy(ring + stage * STAGE_BYTES + lane * ROW_STRIDE, source, ROW_BYTES, full + 8 * stage, policy);
            }
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        };
        Share s = share_of(shared_tiles, 0);
        for (int u = s.shared_begin; u < s.shared_end; ++u) fetch(EXPERTS + u / (TILES * passes), u % TILES, passes > 1 ? keep : once);
        // The down product starts after the router has ended, so only the other must wait for the segments.
        if (GATED) wait_for_previous();
        if (GATED) let_next_start();
        s = share_of(shared_tiles, load_fresh(routing) * TILES);
        int segment = -1, expert = 0;
        for (int u = s.routed_begin; u < s.routed_end; ++u) {
            if (u / TILES != segment) {
                segment = u / TILES;
                expert = load_fresh(routing + SEGMENTS + 4 * segment);
            }
            fetch(expert, u % TILES, once);
        }
        return;
    }

    const int g = lane / 4, q = lane % 4;
    wait_for_previous();
    if (!GATED) let_next_start();
    const Share s = share_of(shared_tiles, load_fresh(routing) * TILES);
    uint4 b[CHUNKS][NT];
    int segment = -1, rows = 0, slot0 = 0, shared_expert = 0;
    int stage = 0, parity = 0, turn = 0, side = 0;
    const int shared_count = s.shared_end - s.shared_begin;
    const int count = shared_count + s.routed_end - s.routed_begin;
    // Row of the intermediate tensors behind column n of the segment; only for n < rows.
    auto row_of = [&](int n) {
        return shared_expert ? (slot0 + n) * CHOICES + TOP_K + shared_expert - 1 : load_fresh(routing + SLOTS + slot0 + n);
    };
    for (int i = 0; i < count; ++i) {
        const bool is_shared = i < shared_count;
        const int u = is_shared ? s.shared_begin + i : s.routed_begin + i - shared_count;
        const int now = is_shared ? -2 - u / TILES : u / TILES;
        if (now != segment) {
            segment = now;
            side ^= 1;
            if (is_shared) {
                shared_expert = 1 + u / (TILES * passes);
                slot0 = u / TILES % passes * SEGMENT_ROWS;
                rows = min(SEGMENT_ROWS, max_rows - slot0);
            } else {
                shared_expert = 0;
                slot0 = load_fresh(routing + SEGMENTS + 4 * segment + 1);
                rows = load_fresh(routing + SEGMENTS + 4 * segment + 2);
            }
            if (warp == 0 && lane < rows) segment_rows[side][lane] = row_of(lane);
#pragma unroll
            for (int t = 0; t < NT; ++t) {
                const int n = t * 8 + g;
                const bool valid = n < rows;
                const int row = valid ? row_of(n) : 0;
                const bf16* source = in + (size_t)(GATED ? row / CHOICES : row) * WIDTH + warp * CHUNKS * 32 + q * 8;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
                    b[c][t] = valid ? *(const uint4*)(source + c * 32) : make_uint4(0, 0, 0, 0);
            }
        }

        float acc[ACCUMULATORS][4];
#pragma unroll
        for (int t = 0; t < ACCUMULATORS; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.f;
        barrier_wait(full + 8 * stage, parity);
        const u32 a = ring + stage * STAGE_BYTES + g * ROW_STRIDE + warp * CHUNKS * 64 + q * 16;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 low = load_shared_16(a + c * 64), high = load_shared_16(a + 8 * ROW_STRIDE + c * 64);
#pragma unroll
            for (int t = 0; t < NT; ++t) mma(acc[t], low.x, high.x, low.y, high.y, b[c][t].x, b[c][t].y);
#pragma unroll
            for (int t = 0; t < NT; ++t) mma(acc[NT == 1 ? 1 : t], low.z, high.z, low.w, high.w, b[c][t].z, b[c][t].w);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }

        // Sum over the warps' parts of the inner dimension; warp t of the turn takes row tile t.
        float4* const buffer = red + (RED_BUFFERS == 2 ? (i & 1) * (RED_BYTES / 16) : 0);
        if (RED_BUFFERS == 1 && i) group_sync(2, WARPS * 32);
        if (NT == 1) {
            buffer[warp * 32 + lane] = make_float4(acc[0][0] + acc[ACCUMULATORS - 1][0], acc[0][1] + acc[ACCUMULATORS - 1][1],
                                                   acc[0][2] + acc[ACCUMULATORS - 1][2], acc[0][3] + acc[ACCUMULATORS - 1][3]);
        } else {
#pragma unroll
            for (int t = 0; t < NT; ++t)
                buffer[(warp * NT + t) * 32 + lane] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        }
        group_sync(1, WARPS * 32);
        const int mine = (warp + WARPS - turn) % WARPS;
        turn = (turn + NT) % WARPS;
        if (mine < NT && mine * 8 < rows) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float4 v = buffer[(w * NT + mine) * 32 + lane];
                sum.x += v.x;
                sum.y += v.y;
                sum.z += v.z;
                sum.w += v.w;
            }
            const int tile = u % TILES;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int n = mine * 8 + 2 * q + j;
                if (n >= rows) continue;
                const float first = j ? sum.y : sum.x, second = j ? sum.w : sum.z;
                if (GATED) {
                    const float h = first / (1.f + __expf(-first)) * second;
                    ((bf16*)out)[(size_t)segment_rows[side][n] * INTER + tile * 8 + g] = bf16_of(h);
                } else {
                    float* y = (float*)out + (size_t)segment_rows[side][n] * HIDDEN + tile * 16 + g;
                    y[0] = first;
                    y[8] = second;
                }
            }
        }
    }
}

// h[row] = silu(gate x) * (up x): `weight` is [EXPERTS + SHARED, 2 INTER, HIDDEN], the gate's rows first.
// one block a multiprocessor, (WARPS_UP + 1) * 32 threads
KERNEL void __launch_bounds__((WARPS_UP + 1) * 32, 1)
moe_gate_up(const bf16* weight, const bf16* x, bf16* h, const int* routing, int max_rows) {
    stream_experts<WARPS_UP, STAGES_UP, HIDDEN, INTER / 8, true>(weight, x, h, routing, max_rows);
}

// y[row] = down h[row], unweighted f32: `weight` is [EXPERTS + SHARED, HIDDEN, INTER].
// one block a multiprocessor, (WARPS_DOWN + 1) * 32 threads
KERNEL void __launch_bounds__((WARPS_DOWN + 1) * 32, 1)
moe_down(const bf16* weight, const bf16* h, float* y, const int* routing, int max_rows) {
    stream_experts<WARPS_DOWN, STAGES_DOWN, INTER, HIDDEN / 16, false>(weight, h, y, routing, max_rows);
}

// out[t] = sum of the chosen experts' rows by their weights, in the order of choice, and the shared experts' rows.
// Rows beyond num_rows become zero. grid max_rows, HIDDEN / 8 threads
KERNEL void moe_combine(const float* y, const float* weights, void* out, const int* num_rows, int max_rows) {
    let_next_start();
    wait_for_previous();
    const int t = blockIdx.x, column = threadIdx.x * 8;
    const int rows = num_rows ? min(*num_rows, max_rows) : max_rows;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (t < rows) {
#pragma unroll
        for (int k = 0; k < CHOICES; ++k) {
            const float w = k < TOP_K ? weights[t * TOP_K + k] : 1.f;
            if (w == 0.f) continue; // another shard's expert: nobody wrote this row
            const float4* row = (const float4*)(y + ((size_t)t * CHOICES + k) * HIDDEN + column);
            const float4 a = row[0], b = row[1];
            sum[0] += w * a.x;
            sum[1] += w * a.y;
            sum[2] += w * a.z;
            sum[3] += w * a.w;
            sum[4] += w * b.x;
            sum[5] += w * b.y;
            sum[6] += w * b.z;
            sum[7] += w * b.w;
        }
    }
#if OUT_F32
    float4* target = (float4*)((float*)out + (size_t)t * HIDDEN + column);
    target[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    target[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#else
    *(uint4*)((bf16*)out + (size_t)t * HIDDEN + column) = make_uint4(
        bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]), bf16_pair(sum[4], sum[5]), bf16_pair(sum[6], sum[7]));
#endif
}
