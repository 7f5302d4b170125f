// A mixture-of-experts layer for at most eight rows as one kernel: router, gate + up + SwiGLU, down, combine.
//
// Bound by reading weights, and at so few rows by the ways between kernels as well. So a block a multiprocessor stays from
// the router to the sum: one warp streams weight tiles through a ring from the first to the last without a gap, across what
// must be awaited; eight warps multiply; four choose, and then add up what the eight leave. What blocks tell each other goes
// through memory: logits as words that carry the call's number, which rows of h are there by counters. All blocks must run at
// once: one a multiprocessor, one call at a time.
//
// Every row is a column of the tensor core's B, whether it chose the expert or not: x is loaded once for all experts. A block
// has sixteen columns of the result from all experts and adds them up itself, in one order: no parts of the sum are written.
//
// Defined at compile time, as in moe.cu: HIDDEN, INTER, EXPERTS, TOP_K, SHARED, SIGMOID, NORMALIZE, ROUND_LOGITS, OUT_F32,
// STATIC_PERCENT, PACE, TRACE; and STAGES of the ring.
//
// state: ints at RUN (calls so far), TICKET (how many tiles were handed out), LEFT (blocks that need to know nothing more), each
// with a line for itself; from WRITTEN, of every segment how many tiles of it are in h; all but the first are zero between
// calls; from PACKETS, u64 [ROWS][EXPERTS], a logit in the low half and its call's number in the high one.
// h [SHARED + MAX_SEGMENTS, ROWS, INTER]: a segment is a shared expert, or behind those one that some row chose, in their order.
// Constants, what warps share, the choice: moe_whole.cuh.

// The warp that fetches. First what needs no choice, then the chosen experts' gates and ups, then the down product's. Of that
// weights are fetched while other blocks still make the rows that they are multiplied with; these follow into the same stage.
DEVICE void stream(Shared& shared, u32 ring, const bf16* gate_up, const bf16* down, const bf16* h, int* state, int max_rows, int num_here) {
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const u64 once = policy_evict_first(), keep = policy_keep();
    const int lane = threadIdx.x % 32, n = gridDim.x, all_rows = (1 << max_rows) - 1;
    int stage = 0, parity = 1, index = 0;
    // What is fetched while x is being made must not make the short steps that make it long: more on its way than memory
    // delivers only queues. When the ring has been filled once, x is there.
    bool paced = PACE;
    u32 due = clock_cycles();
    const auto pace = [&]() {
        while ((int)(clock_cycles() - due) < 0) {}
        due = clock_cycles() + PACE;
        __syncwarp();
    };
    // Eight rows, then eight that are LINES behind them, into the next stage; `more` bytes will follow. Gives the stage.
    const auto fetch = [&](Tile what, const bf16* from, auto bytes, auto lines, int more) {
        constexpr int BYTES = decltype(bytes)::value, LINES = decltype(lines)::value;
        constexpr int PACED_ROWS = BYTES >= 8192 ? 2 : BYTES >= 4096 ? 4 : 8; // about 16 KB, at most
        barrier_wait(empty + 8 * stage, parity);
        if (lane == 0) {
            shared.tiles[stage] = what;
            if (BYTES) barrier_expect(full + 8 * stage, 16 * BYTES + more);
            else barrier_arrive(full + 8 * stage);
        }
        __syncwarp();
        const bf16* source = from + (size_t)(lane % 8 + lane / 8 * LINES) * (BYTES / 2);
        for (int begin = 0; BYTES && begin < 16; begin += paced ? PACED_ROWS : 16) {
            if (paced) pace();
            if (lane >= begin && lane < (paced ? begin + PACED_ROWS : 16))
                bulk_copy(ring + stage * STAGE_BYTES + lane * STRIDE_OF(BYTES), source, BYTES, full + 8 * stage, once);
        }
        ++index;
        const int filled = stage;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
            paced = false;
        }
        return filled;
    };
    const auto fetch_up = [&](Tile what, int expert) {
        fetch(what, gate_up + ((size_t)expert * 2 * INTER + what.tile * 8) * HIDDEN, Int<HIDDEN * 2>(), Int<INTER>(), 0);
    };
    const int shared_end = SHARED * UP_TILES * ((int)blockIdx.x + 1) / n;
    for (int u = SHARED * UP_TILES * (int)blockIdx.x / n; u < shared_end; ++u)
        fetch_up({u / UP_TILES, u % UP_TILES, all_rows, SHARED_ONE}, num_here + u / UP_TILES);
    // A tile of the down product, into the second-level cache.
    const auto prefetch_down = [&](int expert, int tile) {
        constexpr int BYTES = 16 * INTER * 2, PIECE = 4096;
        const u8* from = (const u8*)(down + ((size_t)expert * HIDDEN + tile * 16) * INTER);
        for (int at = 0; at < BYTES; at += 4 * PIECE) {
            if (paced) pace();
            const int own = at + lane * PIECE;
            if (lane < 4 && own < BYTES) bulk_prefetch(from + own, min(PIECE, BYTES - own));
        }
    };
    // Until the choice is made: the shared experts' part of this block's.
    for (int tile = blockIdx.x; tile < DOWN_TILES; tile += n)
        for (int e = 0; e < SHARED; ++e) prefetch_down(num_here + e, tile);
    paced = false;
    barrier_wait(shared_address(&shared.chosen), 0);
    const int segments = shared.num_segments, tiles = segments * UP_TILES;
    // In rounds, so that segments are done one after the other and the down product need not wait for all; in each a block has
    // tiles one behind the other, which memory reads faster than tiles that blocks have in turn. Multiprocessors do not get equal
    // bandwidth: what is not everybody's own is handed out.
    constexpr int RUN_TILES = 4;
    const int round = RUN_TILES * n, rounds = (int)((long long)tiles * STATIC_PERCENT / 100) / round;
    int ticket = 0;
    const auto take = [&]() {
        if (lane == 0) ticket = atomicAdd(state + TICKET, 1);
    };
    const auto routed = [&](int u) {
        const int2 of = shared.segments[u / UP_TILES];
        fetch_up({SHARED + u / UP_TILES, u % UP_TILES, of.y, of.x}, of.x);
    };
    take(); // on its way while the block's own tiles are fetched
    for (int i = 0; i < rounds; ++i)
        for (int j = 0; j < RUN_TILES; ++j) routed(i * round + blockIdx.x * RUN_TILES + j);
    for (;;) {
        const int u = rounds * round + __shfl_sync(~0u, ticket, 0);
        if (u >= tiles) break;
        take();
        routed(u);
    }

    // How many segments are known to be in h. A lane looks at one; the fence is once for all that is new, as it holds up copies.
    int written = 0;
    const auto look = [&]() {
        const int s = written + lane;
        const bool is_there = s < SHARED + segments && load_acquire(state + WRITTEN + s) == UP_TILES;
        const int more = __ffs((int)~__ballot_sync(~0u, is_there)) - 1;
        if (more == 0) return;
        written += more < 0 ? 32 : more;
        fence_for_copies_of_memory();
        __syncwarp();
    };
    const auto fetch_rows = [&](int into) {
        const Tile& what = shared.tiles[into];
        if (lane < ROWS && what.mask >> lane & 1)
            bulk_copy(ring + into * STAGE_BYTES + (16 + lane) * DOWN_STRIDE, h + ((size_t)what.segment * ROWS + lane) * INTER, INTER * 2,
                      full + 8 * into, keep);
    };
    // The last `waiting` stages wait for their rows. When they are all, nothing is done before the first one has them, but that
    // the tiles that follow come into the second-level cache.
    int waiting = 0;
    bool prefetched = false;
    const auto bring_rows = [&](int most, int tile, int next) {
        while (waiting) {
            const int into = (stage + STAGES - waiting) % STAGES, segment = shared.tiles[into].segment;
            Patience patience;
            if (segment >= written) look();
            while (segment >= written) {
                if (waiting <= most) return;
                for (int s = next; !prefetched && s < min(segments, next + PREFETCHED_TILES); ++s) prefetch_down(shared.segments[s].x, tile);
                prefetched = true;
                patience.look();
                look();
            }
            fetch_rows(into);
            --waiting;
        }
    };
    for (int tile = blockIdx.x; tile < DOWN_TILES; tile += n) {
        for (int s = 0; s < SHARED + segments; ++s) {
            const bool is_shared = s < SHARED;
            const int2 of = is_shared ? make_int2(SHARED_ONE, all_rows) : shared.segments[s - SHARED];
            const int expert = is_shared ? num_here + s : of.x;
            const int place = (s == 0 ? FIRST : 0) | (s == SHARED + segments - 1 ? LAST : 0);
            const Tile what = {s, tile | DOWN | place, of.y, of.x};
            fetch(what, down + ((size_t)expert * HIDDEN + tile * 16) * INTER, Int<INTER * 2>(), Int<8>(), __popc(of.y) * (INTER * 2));
            ++waiting;
            bring_rows(STAGES - 1, tile, max(0, s + 1 - SHARED));
        }
        bring_rows(0, tile, segments);
        // Nobody chose an expert that is here: the sum is of nothing.
        if (SHARED + segments == 0) fetch({0, tile | DOWN | FIRST | LAST, 0, 0}, down, Int<0>(), Int<0>(), 0);
    }
    // Nobody looks at the counters any more when all have been here: the last one sets them back.
    int before = 0;
    if (lane == 0) before = atomicAdd(state + LEFT, 1);
    if (__shfl_sync(~0u, before, 0) == n - 1) {
        for (int i = lane; i < MAX_SEGMENTS + SHARED; i += 32) state[WRITTEN + i] = 0;
        if (lane == 0) {
            state[TICKET] = state[LEFT] = 0;
            state[RUN] = load_fresh(state + RUN) + 1;
        }
    }
    fetch({NO_MORE, 0, 0, 0}, down, Int<0>(), Int<0>(), 0);
}

// The warps that multiply: each has a part of the inner dimension, and leaves its part of a tile's sum to the ones that add.
DEVICE void multiply(Shared& shared, u32 ring, float4* parts, const bf16* x, int* state, int max_rows) {
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    wait_for_previous();
    uint4 of_x[UP_CHUNKS];
#pragma unroll
    for (int c = 0; c < UP_CHUNKS; ++c)
        of_x[c] = g < max_rows ? *(const uint4*)(x + (size_t)g * HIDDEN + (warp * UP_CHUNKS + c) * 32 + q * 8) : make_uint4(0, 0, 0, 0);
    u32 uses = (1 << ADDERS) - 1; // of each adder's place a bit: the parity to wait for
    const auto leave = [&](int adder, const Tile& what, const float4& sum) {
        barrier_wait(shared_address(&shared.added[adder]), uses >> adder & 1);
        uses ^= 1 << adder;
        parts[(adder * WARPS + warp) * 32 + lane] = sum;
        if (threadIdx.x == 0) shared.left[adder] = what;
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.summed[adder]));
    };
    const auto leave_all = [&](int what, int tile) {
        for (int adder = 0; adder < ADDERS; ++adder) leave(adder, {what, tile, 0, 0}, make_float4(0.f, 0.f, 0.f, 0.f));
    };
    int stage = 0, parity = 0, turn = 0;
    for (;;) {
        barrier_wait(full + 8 * stage, parity);
        const Tile what = shared.tiles[stage];
        if (what.segment == NO_MORE) break;
        float acc[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
        const auto chunk = [&](u32 a, int stride, const uint4& b) {
            const uint4 low = load_shared_16(a), high = load_shared_16(a + 8 * stride);
            mma(acc[0], low.x, high.x, low.y, high.y, b.x, b.y);
            mma(acc[1], low.z, high.z, low.w, high.w, b.z, b.w);
        };
        const u32 base = ring + stage * STAGE_BYTES + q * 16;
        if (what.tile & DOWN) {
#pragma unroll
            for (int c = 0; c < DOWN_CHUNKS; ++c) {
                const int at = (warp * DOWN_CHUNKS + c) * 64;
                if (at >= INTER * 2) break;
                const bool chose = what.mask >> g & 1;
                chunk(base + g * DOWN_STRIDE + at, DOWN_STRIDE,
                      chose ? load_shared_16(base + (16 + g) * DOWN_STRIDE + at) : make_uint4(0, 0, 0, 0));
            }
            // Whose turn it is depends on the expert's place alone, so that sums have one order.
            if (what.tile & FIRST) turn = 0;
        } else {
#pragma unroll
            for (int c = 0; c < UP_CHUNKS; ++c) chunk(base + g * UP_STRIDE + (warp * UP_CHUNKS + c) * 64, UP_STRIDE, of_x[c]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
        leave(turn, what, make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]));
        if (++turn == ADDERS) turn = 0;
        if (what.tile & LAST) leave_all(COLUMNS_DONE, what.tile & (DOWN - 1));
    }
    leave_all(NO_MORE, 0);
    if (threadIdx.x == 0) trace(state, 2, 2);
}

// The warps that add: a tile's sum over the warps that multiply, then SwiGLU and into h, or to what other experts gave.
DEVICE void add(Shared& shared, const float4* parts, bf16* h, void* out, int* state, const int* num_rows, int max_rows) {
    const int thread = threadIdx.x - (WARPS + 1) * 32, own = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
    const int rows = num_rows ? min(load_fresh(num_rows), max_rows) : max_rows;
    float sums[2][2] = {{0.f, 0.f}, {0.f, 0.f}}; // row 2 q + i, column g + 8 j
    for (int parity = 0;; parity ^= 1) {
        barrier_wait(shared_address(&shared.summed[own]), parity);
        const Tile what = shared.left[own];
        if (what.segment == NO_MORE) return;
        if (what.segment == COLUMNS_DONE) {
            // The adders' sums, one after the other: a thread has one column of one row.
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    shared.sums[own][2 * q + i][g + 8 * j] = sums[i][j];
                    sums[i][j] = 0.f;
                }
            group_sync(2, ADDERS * 32);
            const int row = thread / 16, column = thread % 16;
            float sum = 0.f;
#pragma unroll
            for (int a = 0; a < ADDERS; ++a) sum += shared.sums[a][row][column];
            if (row >= rows) sum = 0.f;
            const size_t at = (size_t)row * HIDDEN + what.tile * 16 + column;
#if OUT_F32
            if (row < max_rows) ((float*)out)[at] = sum;
#else
            if (row < max_rows) ((bf16*)out)[at] = bf16_of(sum);
#endif
            group_sync(2, ADDERS * 32);
            if (lane == 0) barrier_arrive(shared_address(&shared.added[own]));
            continue;
        }
        float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}}; // as `sums`: of gate and up, j is which
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float4 v = parts[(own * WARPS + w) * 32 + lane];
            sum[0][0] += v.x, sum[1][0] += v.y, sum[0][1] += v.z, sum[1][1] += v.w;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.added[own]));
        if (what.tile & DOWN) {
            barrier_wait(shared_address(&shared.weighed), 0);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 2 * q + i;
                if (!(what.mask >> row & 1)) continue;
                const float weight = what.expert == SHARED_ONE ? 1.f : shared.weights[what.expert][row];
                sums[i][0] += weight * sum[i][0];
                sums[i][1] += weight * sum[i][1];
            }
            continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 2 * q + i;
            if (what.mask >> row & 1)
                h[((size_t)what.segment * ROWS + row) * INTER + what.tile * 8 + g] = bf16_of(sum[i][0] / (1.f + __expf(-sum[i][0])) * sum[i][1]);
        }
        // It is there for all.
        __syncwarp();
        if (lane == 0) add_release(state + WRITTEN + what.segment, 1);
        if (lane == 0) trace(state, 1, 2);
    }
}

// out [max_rows, HIDDEN]: rows beyond num_rows become zero. gate_up [num_here + SHARED, 2 INTER, HIDDEN], the gate's rows first;
// down [num_here + SHARED, HIDDEN, INTER]; logits [max_rows, EXPERTS] for whoever wants to know; tally [EXPERTS] or null: how often each
// expert was chosen, added to. One block a multiprocessor, THREADS threads
KERNEL void __launch_bounds__(THREADS, 1)
moe_whole(const bf16* gate_up, const bf16* down, const bf16* router, const float* bias, const bf16* x, void* out, bf16* h, float* logits,
          int* state, u64* tally, const int* num_rows, int max_rows, int num_here, int first_here, float scale) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Shared shared;
    const u32 ring = shared_address(memory);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) trace(state, 0, 0);
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) shared.masks[e] = 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared_address(&shared.full[s]), 1);
            barrier_init(shared_address(&shared.empty[s]), WARPS);
        }
        for (int a = 0; a < ADDERS; ++a) {
            barrier_init(shared_address(&shared.summed[a]), WARPS);
            barrier_init(shared_address(&shared.added[a]), 1);
        }
        barrier_init(shared_address(&shared.chosen), 1);
        barrier_init(shared_address(&shared.weighed), CHOOSERS);
        barrier_init_fence();
    }
    __syncthreads();
    // All blocks of this kernel have their places then.
    let_next_start();
    float4* const parts = (float4*)(memory + STAGES * STAGE_BYTES);
    if (warp < WARPS) multiply(shared, ring, parts, x, state, max_rows);
    else if (warp == WARPS) stream(shared, ring, gate_up, down, h, state, max_rows, num_here);
    else {
        choose(shared, x, router, bias, logits, state, tally, num_rows, max_rows, num_here, first_here, scale);
        add(shared, parts, h, out, state, num_rows, max_rows);
    }
}
