// A mixture-of-experts layer for few rows (decode): router and permutation, gate + up + SwiGLU, down, combine.
//
// Bound by reading weights, so both products stream them through shared memory with bulk copies while the rows stay
// in registers: a block walks a contiguous range of 16-row weight tiles, and an expert's rows are loaded once when the
// walk enters it. Weights are the matrix that the tensor core sees as A (16 rows), activations as B (8 columns a tile).
// Shared experts are experts EXPERTS.. that every row chose: their tiles need no routing and are read while it runs.
//
// Defined at compile time: HIDDEN, INTER (of one expert), EXPERTS, TOP_K, SHARED (experts), NT (row tiles of 8 that a
// segment has), SIGMOID (scores are sigmoids, and a bias has a say in the choice, instead of softmax), NORMALIZE (top-k
// weights sum to one), ROUND_LOGITS (to bf16), WARPS_UP, WARPS_DOWN, STAGES_UP, STAGES_DOWN, OUT_F32,
// STATIC_PERCENT (of the routed tiles that are no block's choice), PACE (cycles for 16 KB that a block fetches while latency
// counts; 0 is as fast as can be), TRACE (times into `routing`, for the benchmark).
// With EXPERTS 0 there is no router: a dense MLP is nothing but shared experts.
//
// A token t owns rows t * CHOICES .. + CHOICES of the intermediate tensors: TOP_K routed, then SHARED.
// The router, and what lies where in `routing`: moe_router.cuh. Who has which tiles: moe_pool.cuh. The sum: moe_combine.cuh.

// ---- the two products -------------------------------------------------------------------------------------------

// One product y[row] = W[expert] in[row] over all segments. WIDTH is the inner dimension, TILES the 16-row weight tiles
// of an expert. GATED: 8 gate rows and 8 up rows make a tile, SwiGLU on the way out, rows come from the token's `in`;
// otherwise rows come from the intermediate row itself. `num_here` routed experts have weights here, the shared ones behind.
template <int WARPS, int STAGES, int WIDTH, int TILES, bool GATED>
DEVICE void stream_experts(const bf16* weight, const bf16* next_weight, const bf16* in, void* out, int* routing, int max_rows, int num_here, int patience) {
    constexpr bool MORE_REGISTERS = WARPS == 8 && NT == 4; // the rows take 128
    constexpr int CHUNKS = WIDTH / 32 / WARPS;
    static_assert(CHUNKS * 32 * WARPS == WIDTH, "inner dimension must divide among the warps");
    constexpr int ROW_BYTES = WIDTH * 2, ROW_STRIDE = ROW_BYTES + 64; // no bank conflicts between neighbouring rows
    constexpr int STAGE_BYTES = 16 * ROW_STRIDE;
    constexpr int PACED_ROWS = ROW_BYTES >= 8192 ? 2 : ROW_BYTES >= 4096 ? 4 : 8; // about 16 KB, at most
    constexpr int RED_BYTES = WARPS * NT * 512;
    constexpr int RED_BUFFERS = STAGES * STAGE_BYTES + 2 * RED_BYTES + 2048 <= 232448 ? 2 : 1;
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    __shared__ int segment_rows[2][SEGMENT_ROWS]; // of the segment being walked and the one before
    const u32 ring = shared_address(memory);
    float4* red = (float4*)(memory + STAGES * STAGE_BYTES);
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    __shared__ int4 announced[STAGES]; // what is in a stage: {segment or NO_MORE, tile, rows (and SEVERAL), 0}
    __shared__ int announced_rows[STAGES][SEGMENT_ROWS]; // the segment's rows of the intermediate tensors
    __shared__ int announced_index[STAGES];              // which walk of the stage it is, to look ahead by
    constexpr int NO_MORE = -1 << 30, NOBODYS = NO_MORE + 1;
    // Of the next segment's rows, so many tiles are asked for while this one's last weights are multiplied: as registers allow.
    constexpr int AHEAD_TILES = NT == 1 || GATED ? 1 : 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) trace(routing, GATED ? 1 : 2, 0);

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS);
            announced_index[s] = -1;
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp >= WARPS) {
        if (MORE_REGISTERS) give_registers<40>();
        if (warp > WARPS) return;
        int stage = 0, parity = 1, index = 0;
        // While the kernels ahead make x, in many short steps, what is fetched beside them must not make theirs long: more on
        // its way than memory delivers only queues. When the ring has been filled once, x is there.
        bool paced = GATED && PACE;
        u32 due = clock_cycles();
        auto pace = [&]() {
            while ((int)(clock_cycles() - due) < 0) {}
            due = clock_cycles() + PACE;
            __syncwarp();
        };
        auto announce = [&](int segment, int tile, int rows, int row) {
            if (lane == 0) announced[stage] = make_int4(segment, tile, rows, 0);
            if (lane < SEGMENT_ROWS) announced_rows[stage][lane] = row;
            __syncwarp();
            if (lane == 0) {
                store_release_shared(&announced_index[stage], index);
                barrier_expect(full + 8 * stage, 16 * ROW_BYTES);
            }
            __syncwarp();
        };
        auto copy = [&](int to, int expert, int tile, u64 policy) {
            const int line = GATED ? tile * 8 + lane % 8 + lane / 8 * INTER : tile * 16 + lane;
            const bf16* source = weight + ((size_t)expert * (GATED ? 2 * INTER : HIDDEN) + line) * WIDTH;
            for (int begin = 0; begin < 16; begin += paced ? PACED_ROWS : 16) {
                if (paced) pace();
                if (lane >= begin && lane < (paced ? begin + PACED_ROWS : 16))
                    bulk_copy(ring + to * STAGE_BYTES + lane * ROW_STRIDE, source, ROW_BYTES, full + 8 * to, policy);
            }
        };
        auto advance = [&]() {
            ++index;
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
                paced = false;
            }
        };
        auto fetch = [&](int expert, int segment, int tile, int rows, int row, u64 policy) {
            barrier_wait(empty + 8 * stage, parity);
            announce(segment, tile, rows, row);
            copy(stage, expert, tile, policy);
            advance();
        };
        // Shared experts have all rows, in passes of a segment each, of which the first brings the weights into the second-level
        // cache. Of more passes than two, as many as fit into the router's time are done at once; memory has nothing to do
        // in the others, so each block does them at another time among its routed tiles, and the last lets go of the weights.
        const int passes = SHARED ? (max_rows + SEGMENT_ROWS - 1) / SEGMENT_ROWS : 0, n = gridDim.x;
        const bool apart = EXPERTS && passes > 2;
        const int at_once = !apart ? passes : GATED ? 2 : 1;
        const u64 once = policy_evict_first(), keep = apart ? policy_evict_last() : policy_keep();
        auto shared = [&](int first, int count) {
            const int all = SHARED * count * TILES, end = (int)((long long)all * (blockIdx.x + 1) / n);
            for (int u = (int)((long long)all * blockIdx.x / n); u < end; ++u) {
                const int expert = u / (TILES * count), pass = first + u / TILES % count, row0 = pass * SEGMENT_ROWS;
                const int rows = min(SEGMENT_ROWS, max_rows - row0), row = (row0 + lane) * CHOICES + TOP_K + expert;
                const bool last = passes == 1 || (apart && pass + 1 == passes);
                fetch(num_here + expert, -1 - expert * passes - pass, u % TILES, rows, row, last ? once : keep);
            }
        };
        shared(0, at_once);
        if (GATED && SHARED) {
            // Nothing can be fetched until the router has ended but what it does not choose: the shared down weights.
            constexpr u32 PIECE = 4096;
            constexpr u32 PIECES = (u32)((size_t)SHARED * HIDDEN * INTER * 2 / PIECE);
            const u8* base = (const u8*)next_weight + (size_t)num_here * HIDDEN * INTER * 2;
            const u32 begin = PIECES * blockIdx.x / n, end = PIECES * (blockIdx.x + 1) / n;
            for (u32 p = begin; p < end; p += 4) {
                if (paced) pace();
                if (lane < 4 && p + lane < end) bulk_prefetch(base + (size_t)(p + lane) * PIECE, PIECE);
            }
        }
        // Without shared experts nothing is sure to be read. But with rows enough nearly every expert will be somebody's choice: then
        // blocks hold the first tiles of each, and fill their rings with them until it is known whose rows they meet.
        constexpr bool HOLDS = GATED && EXPERTS && !SHARED;
        const int holders = HOLDS && num_here && max_rows * TOP_K > 2 * EXPERTS ? min(n / num_here, TILES / STAGES) : 0; // of an expert
        const int held = holders * STAGES, free_tiles = TILES - held;
        const int own = (int)blockIdx.x < holders * num_here ? (int)blockIdx.x / max(holders, 1) : -1;
        const int own_tile = own < 0 ? 0 : (int)blockIdx.x % max(holders, 1) * STAGES;
        if (own >= 0)
            for (int s = 0; s < STAGES; ++s) copy(s, own, own_tile + s, once);
        paced = false;
        __syncwarp();
        // The down product starts after the router has ended, so only the other must wait for the segments.
        if (GATED) wait_for_previous();
        if (GATED) let_next_start();
        if (EXPERTS) {
            const int segments = load_fresh(routing);
            const Pool pool = pool_of(segments * free_tiles);
            int ticket = 0;
            auto take = [&]() {
                if (lane == 0) ticket = atomicAdd(routing + (GATED ? 1 : 2), 1);
            };
            take(); // on its way while the block's own tiles are fetched
            int segment = -1, expert = 0, rows = 0, row = 0;
            auto enter = [&](int next) {
                segment = next;
                // All at once: each is a way to memory and back while it is busy.
                expert = load_fresh(routing + SEGMENTS + 2 * segment);
                rows = load_fresh(routing + SEGMENTS + 2 * segment + 1);
                if (lane < SEGMENT_ROWS) row = load_fresh(routing + SEGMENT_ROWS_AT + segment * SEGMENT_ROWS + lane);
            };
            auto routed = [&](int begin, int end) {
                for (int u = begin; u < end; ++u) {
                    if (u / free_tiles != segment) enter(u / free_tiles);
                    fetch(expert, segment, held + u % free_tiles, rows, row, once);
                }
            };
            if (own >= 0) {
                bool here = true;
                for (int at = 0; at < segments; at += 32) {
                    const bool mine = at + lane < segments && load_fresh(routing + SEGMENTS + 2 * (at + lane)) == own;
                    for (u32 found = __ballot_sync(~0u, mine); found; found &= found - 1) {
                        enter(at + __ffs(found) - 1);
                        for (int s = 0; s < STAGES; ++s) {
                            if (here) announce(segment, own_tile + s, rows, row), advance();
                            else fetch(own, segment, own_tile + s, rows, row, once);
                        }
                        here = false;
                    }
                }
                // Nobody's choice after all.
                for (int s = 0; here && s < STAGES; ++s) announce(NOBODYS, own_tile + s, 0, 0), advance();
            }
            const int begin = (int)((long long)pool.begin * blockIdx.x / n), end = (int)((long long)pool.begin * (blockIdx.x + 1) / n);
            const int until = apart ? begin + (end - begin) * (blockIdx.x * 53 % n) / n : begin;
            if (apart) {
                routed(begin, until);
                shared(at_once, passes - at_once);
            }
            routed(until, end);
            for (;;) {
                const int2 mine = taking(pool, __shfl_sync(~0u, ticket, 0));
                if (mine.x >= mine.y) break;
                take();
                routed(mine.x, mine.y);
            }
        }
        if (GATED && EXPERTS) {
            // What this block's place will read first of the down product, so that memory has something to do until it can.
            constexpr int PREFETCHED_TILES = 3, DOWN_TILES = HIDDEN / 16, BYTES = 16 * INTER * 2, PIECE = 4096;
            const long long own = (long long)load_fresh(routing) * DOWN_TILES * STATIC_PERCENT / 100;
            const int begin = (int)(own * blockIdx.x / n), end = min((int)(own * (blockIdx.x + 1) / n), begin + PREFETCHED_TILES);
            for (int u = begin; u < end; ++u) {
                const int expert = load_fresh(routing + SEGMENTS + 2 * (u / DOWN_TILES));
                const u8* from = (const u8*)(next_weight + ((size_t)expert * HIDDEN + u % DOWN_TILES * 16) * INTER);
                for (int at = lane * PIECE; at < BYTES; at += 32 * PIECE) bulk_prefetch(from + at, min(PIECE, BYTES - at));
            }
        }
        barrier_wait(empty + 8 * stage, parity);
        if (lane == 0) {
            announced[stage] = make_int4(NO_MORE, 0, 0, 0);
            barrier_arrive(full + 8 * stage);
        }
        return;
    }

    if (MORE_REGISTERS) take_registers<232>();
    const int g = lane / 4, q = lane % 4;
    const u64 last = policy_evict_last();
    // What the shared experts need is there before the router has ended: it says so when it has begun.
    bool waited = true;
    if (GATED && SHARED) {
        int left = patience;
        if (lane == 0 && left) {
            const int run = load_fresh(routing + 4) + 1;
            while (load_acquire(routing + 3) != run && --left) __nanosleep(50);
        }
        waited = __shfl_sync(~0u, left, 0) == 0;
    }
    if (waited) wait_for_previous();
    if (!GATED) let_next_start();
    if (threadIdx.x == 0) trace(routing, GATED ? 1 : 2, 1);
    uint4 b[CHUNKS][NT];
    uint4 ahead[CHUNKS][AHEAD_TILES]; // of the next tile, when its segment is another
    int ahead_index = -1;
    int segment = NO_MORE, rows = 0;
    int stage = 0, parity = 0, turn = 0, side = 0;
    // This lane's part of a row, a chunk of 32 elements.
    auto part = [&](int row, int c) {
        return *(const uint4*)(in + (size_t)(GATED ? row / CHOICES : row) * WIDTH + (warp * CHUNKS + c) * 32 + q * 8);
    };
    for (int i = 0;; ++i) {
        barrier_wait(full + 8 * stage, parity);
        const int4 what = announced[stage];
        if (what.x == NO_MORE) break;
        if (what.x != segment) {
            if (!waited && what.x >= 0) {
                wait_for_previous();
                waited = true;
            }
            segment = what.x;
            side ^= 1;
            rows = what.z % SEVERAL;
            if (warp == 0 && lane < rows) segment_rows[side][lane] = announced_rows[stage][lane];
            if (ahead_index == i) {
#pragma unroll
                for (int t = 0; t < NT; ++t)
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c) b[c][t] = t < AHEAD_TILES ? ahead[c][t < AHEAD_TILES ? t : 0] : make_uint4(0, 0, 0, 0);
            } else {
#pragma unroll
                for (int t = 0; t < NT; ++t) {
                    const int n = t * 8 + g;
                    const int row = n < rows ? announced_rows[stage][n] : 0;
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c) b[c][t] = n < rows ? part(row, c) : make_uint4(0, 0, 0, 0);
                }
            }
        }
        const int next = stage + 1 == STAGES ? 0 : stage + 1;
        if (load_acquire_shared(&announced_index[next]) == i + 1) {
            const int4 then = announced[next];
            if (then.x != segment && then.z <= AHEAD_TILES * 8 && (waited || then.x < 0)) {
                ahead_index = i + 1;
#pragma unroll
                for (int t = 0; t < AHEAD_TILES; ++t) {
                    const int n = t * 8 + g, row = n < then.z ? announced_rows[next][n] : 0;
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c) ahead[c][t] = n < then.z ? part(row, c) : make_uint4(0, 0, 0, 0);
                }
            }
        }

        float4* const buffer = red + (RED_BUFFERS == 2 ? (i & 1) * (RED_BYTES / 16) : 0);
        // As many row tiles as the segment has rows for: fewer of them, fewer instructions between two weight tiles.
        const auto multiply = [&](auto tiles) {
            constexpr int N = decltype(tiles)::value;
            constexpr int CHAINS = N == 1 ? 2 : N; // two when there is but one tile
            float acc[CHAINS][4];
#pragma unroll
            for (int t = 0; t < CHAINS; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.f;
            const u32 a = ring + stage * STAGE_BYTES + g * ROW_STRIDE + warp * CHUNKS * 64 + q * 16;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const uint4 low = load_shared_16(a + c * 64), high = load_shared_16(a + 8 * ROW_STRIDE + c * 64);
#pragma unroll
                for (int t = 0; t < N; ++t) mma(acc[t], low.x, high.x, low.y, high.y, b[c][t].x, b[c][t].y);
#pragma unroll
                for (int t = 0; t < N; ++t) mma(acc[N == 1 ? 1 : t], low.z, high.z, low.w, high.w, b[c][t].z, b[c][t].w);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            if (RED_BUFFERS == 1 && i) group_sync(2, WARPS * 32);
            if (N == 1) {
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[0][j] += acc[CHAINS - 1][j];
            }
#pragma unroll
            for (int t = 0; t < N; ++t)
                buffer[(warp * N + t) * 32 + lane] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        };
        // Of an expert's rows it is by chance which are in the last of several segments, and one tile alone is added up in another
        // order than more: there are no less than two then, and the bits are the same whatever the chance.
        const int row_tiles = max((rows + 7) / 8, what.z / SEVERAL * 2);
        if (NT == 1 || row_tiles == 1) multiply(Int<1>());
        else if (NT == 2 || row_tiles == 2) multiply(Int<NT < 2 ? NT : 2>());
        else if (row_tiles == 3) multiply(Int<NT < 3 ? NT : 3>());
        else multiply(Int<NT>());
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }

        // Sum over the warps' parts of the inner dimension, a row tile a warp; they take turns.
        group_sync(1, WARPS * 32);
        const int mine = (warp + WARPS - turn) % WARPS;
        turn = (turn + row_tiles) % WARPS;
        if (mine < row_tiles) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float4 v = buffer[(w * row_tiles + mine) * 32 + lane];
                sum.x += v.x;
                sum.y += v.y;
                sum.z += v.z;
                sum.w += v.w;
            }
            const int tile = what.y;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int n = mine * 8 + 2 * q + j;
                if (n >= rows) continue;
                const float first = j ? sum.y : sum.x, second = j ? sum.w : sum.z;
                if (GATED) {
                    const float h = first / (1.f + __expf(-first)) * second;
                    store_with_policy((bf16*)out + (size_t)segment_rows[side][n] * INTER + tile * 8 + g, bf16_of(h), last);
                } else {
                    float* y = (float*)out + (size_t)segment_rows[side][n] * HIDDEN + tile * 16 + g;
                    store_with_policy(y, first, last);
                    store_with_policy(y + 8, second, last);
                }
            }
        }
    }
    if (!waited) wait_for_previous();
    if (GATED && blockIdx.x == 0 && threadIdx.x == 0) routing[4] = load_fresh(routing + 4) + 1;
    if (threadIdx.x == 0) trace(routing, GATED ? 1 : 2, 2);
}

// h[row] = silu(gate x) * (up x): `weight` is [num_here + SHARED, 2 INTER, HIDDEN], the gate's rows first; `down` what the
// next kernel will read; `patience` how often to look whether x is there before waiting for the router to end. One block a multiprocessor, THREADS_UP threads
KERNEL void __launch_bounds__(THREADS_UP, 1)
moe_gate_up(const bf16* weight, const bf16* down, const bf16* x, bf16* h, int* routing, int max_rows, int num_here, int patience) {
    stream_experts<WARPS_UP, STAGES_UP, HIDDEN, INTER / 8, true>(weight, down, x, h, routing, max_rows, num_here, patience);
}

// y[row] = down h[row], unweighted f32: `weight` is [num_here + SHARED, HIDDEN, INTER].
// one block a multiprocessor, THREADS_DOWN threads
KERNEL void __launch_bounds__(THREADS_DOWN, 1)
moe_down(const bf16* weight, const bf16* h, float* y, int* routing, int max_rows, int num_here) {
    stream_experts<WARPS_DOWN, STAGES_DOWN, INTER, HIDDEN / 16, false>(weight, nullptr, h, y, routing, max_rows, num_here, 0);
}
