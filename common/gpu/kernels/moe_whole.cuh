// Of the kernel that is a whole mixture-of-experts layer for at most eight rows (moe_whole.cu, which says what is defined and what lies
// where): its constants, what its warps share, and the warps that choose the experts.

#define ROWS 8
#define WARPS 8
#define CHOOSERS 4
#define ADDERS CHOOSERS // the same warps, later
#define THREADS ((WARPS + 1 + CHOOSERS) * 32)
#define MAX_SEGMENTS (EXPERTS < ROWS * TOP_K ? EXPERTS : ROWS * TOP_K)
#define UP_TILES (INTER / 8)
#define DOWN_TILES (HIDDEN / 16)
// Of a row in the ring: neighbouring rows have no bank conflicts.
#define STRIDE_OF(bytes) (((bytes) + 127) / 128 * 128 + 64)
#define UP_STRIDE STRIDE_OF(HIDDEN * 2)
#define DOWN_STRIDE STRIDE_OF(INTER * 2)
// A tile of gate and up, or one of down and the rows that it is multiplied with.
#define STAGE_BYTES (16 * UP_STRIDE > (16 + ROWS) * DOWN_STRIDE ? 16 * UP_STRIDE : (16 + ROWS) * DOWN_STRIDE)
// Of the inner dimensions, chunks of 32 elements for each warp.
#define UP_CHUNKS (HIDDEN / 32 / WARPS)
#define DOWN_CHUNKS ((INTER / 32 + WARPS - 1) / WARPS)
// Of the down product, that a block has brought into the second-level cache while it waits: together less than that holds.
#define PREFETCHED_TILES 5
#define RUN 0
#define TICKET 32
#define LEFT 64
#define WRITTEN 96
#define PACKETS ((WRITTEN + MAX_SEGMENTS + SHARED + 1) / 2 * 2)

#if TRACE
#define TRACE_AT (PACKETS + 2 * ROWS * EXPERTS)
DEVICE void trace(int* state, int kernel, int what) {
    ((u64*)(state + TRACE_AT))[(kernel * 256 + blockIdx.x) * 4 + what] = nanoseconds();
}
#else
#define trace(state, kernel, what)
#endif

// Of what other blocks of this kernel will have done in microseconds: when they have not in four seconds, the call fails.
struct Patience {
    u64 until = 0;
    int looks = 0;
    DEVICE void look() {
        if (++looks % 1024) return;
        if (!until) until = nanoseconds() + 4000000000ull;
        else if (nanoseconds() > until) asm volatile("trap;");
    }
};

// What is in a stage of the ring.
struct Tile {
    int segment; // its place in h; NO_MORE; COLUMNS_DONE
    int tile;
    int mask;    // the rows that chose the expert
    int expert;  // its number among all, for the weights of its rows; SHARED_ONE
};
#define NO_MORE -1
#define COLUMNS_DONE -2
#define SHARED_ONE 0xffff
// In `tile`, beside the number: a tile of the down product, the first of its columns, the last.
#define DOWN (1 << 28)
#define FIRST (1 << 29)
#define LAST (1 << 30)

DEVICE u64 load_packet(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_packet(u64* p, float value, u32 call) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"((u64)call << 32 | __float_as_uint(value)) : "memory");
}
struct Shared {
    u64 full[STAGES], empty[STAGES], chosen, weighed;
    u64 summed[ADDERS], added[ADDERS]; // each adder's parts are there; have been read
    Tile tiles[STAGES];
    int num_segments;
    int2 segments[MAX_SEGMENTS + 1]; // {expert, mask}
    u32 masks[EXPERTS];         // the rows that chose an expert
    float weights[EXPERTS][ROWS];
    float partial[CHOOSERS][ROWS];
    float sums[ADDERS][ROWS][16];
    Tile left[ADDERS]; // what the parts for each are of
};

// The warps that choose: logits of the block's experts for all blocks, then every block's own choice from everybody's.
DEVICE void choose(Shared& shared, const bf16* x, const bf16* router, const float* bias, float* logits, int* state, u64* tally,
                   const int* num_rows, int max_rows, int num_here, int first_here, float scale) {
    constexpr int UNITS = HIDDEN / 8, EACH = (UNITS + CHOOSERS * 32 - 1) / (CHOOSERS * 32), PER_LANE = (EXPERTS + 31) / 32;
    const int thread = threadIdx.x - (WARPS + 1) * 32, warp = thread / 32, lane = thread % 32;
    u64* const packets = (u64*)(state + PACKETS);
    uint4 w[EACH];
    const auto load_router = [&](int e) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = i * CHOOSERS * 32 + thread;
            w[i] = unit < UNITS ? __ldg((const uint4*)router + (size_t)e * UNITS + unit) : make_uint4(0, 0, 0, 0);
        }
    };
    if (blockIdx.x < EXPERTS) load_router(blockIdx.x);
    wait_for_previous();
    if (thread == 0) trace(state, 0, 1);
    const u32 call = (u32)load_fresh(state + RUN) + 1;
    const int rows = num_rows ? min(load_fresh(num_rows), max_rows) : max_rows;
    for (int e = blockIdx.x; e < EXPERTS; e += gridDim.x) {
        if (e != blockIdx.x) load_router(e);
        float acc[ROWS];
        uint4 v[ROWS][EACH];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int unit = i * CHOOSERS * 32 + thread;
                v[r][i] = r < max_rows && unit < UNITS ? ((const uint4*)x)[(size_t)r * UNITS + unit] : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            acc[r] = 0.f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const u32 *a = (const u32*)&w[i], *b = (const u32*)&v[r][i];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    acc[r] += f32_low(a[j]) * f32_low(b[j]) + f32_high(a[j]) * f32_high(b[j]);
            }
        }
        // Halves of the warp keep halves of the rows: a lane ends with row (lane / 4) of four lanes.
#pragma unroll
        for (int half = 4, d = 16; half; half /= 2, d /= 2)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (r >= half) continue;
                const bool high = lane & d;
                const float keep = high ? acc[r + half] : acc[r], give = high ? acc[r] : acc[r + half];
                acc[r] = keep + __shfl_xor_sync(~0u, give, d);
            }
        acc[0] += __shfl_xor_sync(~0u, acc[0], 2);
        acc[0] += __shfl_xor_sync(~0u, acc[0], 1);
        if (e != blockIdx.x) group_sync(2, CHOOSERS * 32);
        if (lane % 4 == 0) shared.partial[warp][lane / 4] = acc[0];
        group_sync(2, CHOOSERS * 32);
        if (thread < max_rows) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < CHOOSERS; ++i) sum += shared.partial[i][thread];
            if (ROUND_LOGITS) sum = f32_of(bf16_of(sum));
            store_packet(packets + thread * EXPERTS + e, sum, call);
            if (thread == 0) trace(state, 3, 0);
            logits[thread * EXPERTS + e] = sum;
        }
    }

    // A warp has rows `warp` and `warp` + 4. All their logits are asked for at once.
    constexpr int OWN = ROWS / CHOOSERS;
    float own[OWN][PER_LANE];
    Patience patience;
    for (bool missing = true; missing; patience.look()) {
        missing = false;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const int row = i * CHOOSERS + warp, e = j * 32 + lane;
                if (row >= rows || e >= EXPERTS) continue;
                const u64 packet = load_packet(packets + row * EXPERTS + e);
                own[i][j] = __uint_as_float((u32)packet);
                missing |= (u32)(packet >> 32) != call;
            }
        missing = __any_sync(~0u, missing);
    }
    if (thread == 0) trace(state, 3, 1);
    // Who multiplies waits for the choice alone; the weights come behind it.
    int experts[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int row = i * CHOOSERS + warp;
        if (row >= rows) continue;
        const auto logit = [&](int e) { return own[i][(e - lane) / 32]; };
        float scores[PER_LANE];
        experts[i] = pick_experts<EXPERTS, TOP_K, SIGMOID>(scores, logit, bias, lane) - first_here;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) own[i][j] = scores[j];
        if (lane < TOP_K && experts[i] >= 0 && experts[i] < num_here) atomicOr(&shared.masks[experts[i]], 1u << row);
    }
    group_sync(2, CHOOSERS * 32);
    if (warp == 0) {
        int before = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int e = j * 32 + lane;
            const u32 mask = e < EXPERTS ? shared.masks[e] : 0, active = __ballot_sync(~0u, mask != 0);
            if (mask) shared.segments[before + __popc(active & ((1u << lane) - 1))] = make_int2(e, (int)mask);
            before += __popc(active);
        }
        if (lane == 0) shared.num_segments = before;
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.chosen));
        if (lane == 0) trace(state, 0, 2);
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int row = i * CHOOSERS + warp;
        if (row >= rows) continue;
        const float weight = weigh_experts<EXPERTS, TOP_K, SIGMOID, NORMALIZE>(own[i], experts[i] + first_here, lane) * scale;
        if (lane < TOP_K && experts[i] >= 0 && experts[i] < num_here) shared.weights[experts[i]][row] = weight;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.weighed));
    if (tally && blockIdx.x == 0)
        for (int e = thread; e < EXPERTS; e += CHOOSERS * 32)
            if (shared.masks[e]) atomicAdd(tally + first_here + e, (u64)__popc(shared.masks[e]));
}
