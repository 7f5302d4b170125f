// Decode attention over a paged latent cache (MLA, absorbed): every head reads the same rows of LATENT + ROPE.
//
// Bound by reading the cache, so all sequences together are cut into tiles of 32 tokens and the tiles into one
// contiguous range per block (mla_plan.cuh). The copy engine brings tiles into a
// ring, cut into slabs of 64 elements of every token, swizzled; the 16 heads are the 16 rows of the tensor core's A. Two tiles
// are computed with at once, between two barriers: then the results of one pair and the scores of the next. A block that ends
// inside a sequence leaves a partial sum; `mla_combine` joins them.
//
// Defined at compile time: LATENT (512), ROPE (64), BLOCK_SIZE (tokens of a cache block, a power of two), STAGES, and
// VARIANT, which leaves parts out for the benchmark: 1 no arithmetic.
//
// q [batch, 16, LATENT + ROPE] bf16, cache [blocks, BLOCK_SIZE, LATENT + ROPE] bf16, block_table [batch, max_blocks].
// plan: as mla_plan.cuh makes it. Part c + s belongs to block c's share of sequence s.

#define HEADS 16
#define WIDTH (LATENT + ROPE)
#define SLABS (WIDTH / 64)
#define SLAB_BYTES (TILE * 128)
#define STAGE_BYTES (SLABS * SLAB_BYTES)
#define BOX_TOKENS (BLOCK_SIZE < TILE ? BLOCK_SIZE : TILE) // that lie together in the cache
#define BOXES (TILE / BOX_TOKENS)                          // of a slab
#define QUERY_STRIDE (WIDTH * 2 + 16) // bytes, of a head: an odd number of 16-byte units, no bank conflicts
#define SCORE_STRIDE (2 * TILE + 8) // floats
#define P_STRIDE (2 * TILE + 8)     // bf16
#define WARPS 16        // of heads in the softmax, of column parts in the output
#define PARTS 4         // of the inner dimension in the scores
#define K_STEPS (WIDTH / PARTS / 16)

// Where eight elements (a chunk) of a token of a tile are in its stage.
DEVICE u32 place_of(int token, int chunk) { return chunk / 8 * SLAB_BYTES + token * 128 + ((chunk ^ token) % 8) * 16; }

// One block a multiprocessor, (WARPS + 1) * 32 threads. scale includes log2(e). early: what is read but q and the last
// token of each sequence was written before the kernel ahead began. cache: a map of [SLABS, tokens, 64], boxes of a slab of
// BOX_TOKENS.
KERNEL void __launch_bounds__((WARPS + 1) * 32, 1)
mla_decode(const __grid_constant__ TensorMap cache, const bf16* q, const int* block_table, const int4* plan, float* part_out,
           float2* part_max_sum, int max_blocks, float scale, int early) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES + 2];
    __shared__ __align__(16) float scores[PARTS][HEADS][SCORE_STRIDE]; // of a pair of tiles, by part of the inner dimension
    __shared__ __align__(16) bf16 probabilities[HEADS][P_STRIDE];
    __shared__ float shrinks[HEADS];
    const u32 ring = (shared_address(memory) + 1023) / 1024 * 1024;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 query_room = ring + STAGES * STAGE_BYTES, query_full = empty + 8 * STAGES, query_empty = query_full + 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        barrier_init(query_full, 1);
        barrier_init(query_empty, WARPS);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    let_next_start();
    const int4* const sequences = plan + 2 * gridDim.x;
    bool waited = !early;
    if (!early) wait_for_previous();
    const int4 share = plan[2 * blockIdx.x];
    int4 now = plan[2 * blockIdx.x + 1]; // first tile, end tile, tokens
    const int begin = share.x, end = share.y;
    int sequence = share.z;
    if (begin == end) {
        if (!waited) wait_for_previous();
        return;
    }

    auto fetch_query = [&](int of) { // by a warp
        if (lane == 0) barrier_expect(query_full, HEADS * WIDTH * 2);
        __syncwarp();
        if (lane < HEADS)
            bulk_copy(query_room + lane * QUERY_STRIDE, q + ((size_t)of * HEADS + lane) * WIDTH, WIDTH * 2, query_full, policy_keep());
    };

    if (warp == WARPS) {
        const u64 policy = policy_evict_first();
        int stage = 0, parity = 1, query_parity = 0;
        // A lane fetches one box of tokens of one slab, or of several. Where boxes lie is looked up for a run of tiles at once,
        // a lane a box, and for the next run while this one is on its way. Boxes beyond the last token are its own once more.
        constexpr int RUN = 32 / BOXES;
        const int box = lane % BOXES;
        auto look_up = [&](const int4& of, int sequence, int tile) {
            const int token = min((tile + lane / BOXES - of.x) * TILE + box * BOX_TOKENS, (of.z - 1) / BOX_TOKENS * BOX_TOKENS);
            return block_table[(size_t)sequence * max_blocks + token / BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE;
        };
        int run = begin, run_end = min(begin + RUN, now.y), sources = look_up(now, sequence, begin), next_sources = 0;
        for (int tile = begin; tile < end; ++tile) {
            if (tile == run_end) {
                // A sequence's query comes ahead of its first tile, so that nobody waits for it behind what is on its way.
                if (tile == now.x && !(VARIANT & 1)) {
                    barrier_wait(query_empty, query_parity);
                    query_parity ^= 1;
                    fetch_query(sequence);
                }
                run = tile;
                run_end = min(tile + RUN, now.y);
                sources = next_sources;
            }
            const bool last = tile + 1 == (tile < now.x ? now.x : now.y);
            if (!waited && (last || tile - begin == STAGES)) {
                wait_for_previous();
                waited = true;
            }
            const int from = __shfl_sync(~0u, sources, (tile - run) * BOXES + box);
            barrier_wait(empty + 8 * stage, parity);
            if (lane == 0) barrier_expect(full + 8 * stage, STAGE_BYTES);
            __syncwarp();
#pragma unroll
            for (int slab = lane / BOXES; slab < SLABS; slab += 32 / BOXES)
                fetch_box(ring + stage * STAGE_BYTES + slab * SLAB_BYTES + box * (BOX_TOKENS * 128), cache, 0, from, slab,
                          full + 8 * stage, policy);
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
            // Once enough is on its way, or nothing more of this run.
            if (run_end < end && tile == min(run + STAGES, run_end) - 1) {
                while (run_end >= now.y) now = sequences[++sequence];
                next_sources = look_up(now, sequence, run_end);
            }
        }
        if (!waited) wait_for_previous();
        return;
    }

    if (!waited) wait_for_previous();
#if VARIANT & 1
    for (int i = 0; i < end - begin; ++i) {
        barrier_wait(full + 8 * (i % STAGES), i / STAGES % 2);
        if (lane == 0) barrier_arrive(empty + 8 * (i % STAGES));
    }
    return;
#endif
    // The first query by whoever multiplies: who fetches tiles may be busy with those.
    if (warp == 0) fetch_query(sequence);
    const int g = lane / 4, quad = lane % 4;
    // Scores: this warp does 8 tokens of a tile, over one part of the inner dimension.
    const int inner = warp % PARTS, tokens = warp / PARTS * 8;
    // Softmax: this warp does one head, a lane two tokens. Output: this warp does LATENT / WARPS columns.
    const int head = warp;
    constexpr int COLUMN_TILES = LATENT / WARPS / 8;
    u32 query[K_STEPS][4];
    float out[COLUMN_TILES][4];
    float head_max = NEG_BIG, head_sum = 0.f;

    // Four matrices at a time, of which an odd step's last two are not used: k 0-7, 8-15, 16-23, 24-31. The next four are in the
    // other half of the 128 bytes; what is read beyond the last slab is not used.
    constexpr int LOADS = (K_STEPS + 1) / 2;
    const int chunk = inner * (WIDTH / PARTS / 8) + lane / 8;
    const u32 score_places[2] = {place_of(tokens + lane % 8, chunk), place_of(tokens + lane % 8, chunk + 4)};
    const u32 value_place = place_of(lane % 16, warp * (LATENT / WARPS / 8) + lane / 16);
    const u32 probability_place = shared_address(&probabilities[lane % 16][lane / 16 * 8]);

    int query_parity = 0;
    auto load_query = [&]() {
        barrier_wait(query_full, query_parity);
        query_parity ^= 1;
        const u32 base = query_room + lane % 16 * QUERY_STRIDE + inner * (WIDTH / PARTS) * 2 + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) ldmatrix(query[k], base + k * 32);
        __syncwarp();
        if (lane == 0) barrier_arrive(query_empty);
    };
    auto start = [&]() {
#pragma unroll
        for (int t = 0; t < COLUMN_TILES; ++t) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.f;
        head_max = NEG_BIG;
        head_sum = 0.f;
    };
    auto leave = [&]() {
        const size_t part = blockIdx.x + sequence;
        float* base = part_out + (part * HEADS + g) * LATENT + warp * (LATENT / WARPS) + 2 * quad;
#pragma unroll
        for (int t = 0; t < COLUMN_TILES; ++t) {
            *(float2*)(base + t * 8) = make_float2(out[t][0], out[t][1]);
            *(float2*)(base + 8 * LATENT + t * 8) = make_float2(out[t][2], out[t][3]);
        }
        float sum = head_sum;
#pragma unroll
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane == 0) part_max_sum[part * HEADS + head] = make_float2(head_max, sum);
    };
    // Two tiles of a sequence, or one, are done at once. Scores of those in the ring from `stage` on.
    int next_stage = 0, next_parity = 0;
    auto score = [&](int tiles) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == tiles) break;
            barrier_wait(full + 8 * next_stage, next_parity);
            const u32 from = ring + next_stage * STAGE_BYTES;
            constexpr int ON_THEIR_WAY = 3;
            u32 b[LOADS][4];
#pragma unroll
            for (int i = 0; i < ON_THEIR_WAY; ++i) ldmatrix(b[i], from + score_places[i % 2] + i / 2 * SLAB_BYTES);
            float acc[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                mma(acc[k % 2], query[k][0], query[k][1], query[k][2], query[k][3], b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]);
                const int i = k / 2 + ON_THEIR_WAY;
                if (k % 2 && i < LOADS) ldmatrix(b[i], from + score_places[i % 2] + i / 2 * SLAB_BYTES);
            }
            float* target = &scores[inner][g][half * TILE + tokens + 2 * quad];
            *(float2*)target = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
            *(float2*)(target + 8 * SCORE_STRIDE) = make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
            if (++next_stage == STAGES) {
                next_stage = 0;
                next_parity ^= 1;
            }
        }
    };

    load_query();
    start();
    int tiles = min(2, min(end, now.y) - begin);
    score(tiles);
    int stage = 0, ahead = sequence, ahead_end = now.y; // of the sequence whose query is loaded
    for (int tile = begin;;) {
        if (tile >= now.y) {
            leave();
            while (tile >= now.y) now = sequences[++sequence];
            start();
        }
        group_sync(1, WARPS * 32);
        const int valid = min(now.z - (tile - now.x) * TILE, tiles * TILE);
        {
            float2 x = make_float2(0.f, 0.f); // of two neighbouring tokens
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const float2 part = *(const float2*)&scores[p][head][2 * lane];
                x.x += part.x, x.y += part.y;
            }
            x.x = 2 * lane < valid ? x.x * scale : NEG_BIG;
            x.y = 2 * lane + 1 < valid ? x.y * scale : NEG_BIG;
            const u32 bits = __float_as_uint(fmaxf(x.x, x.y));
            // The largest by integer comparison: one instruction for the warp.
            const u32 key = __reduce_max_sync(~0u, bits & 0x80000000u ? ~bits : bits | 0x80000000u);
            const float top = fmaxf(head_max, __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key));
            const float shrink = exp2_fast(head_max - top), first = exp2_fast(x.x - top), second = exp2_fast(x.y - top);
            head_max = top;
            head_sum = head_sum * shrink + (first + second);
            *(u32*)&probabilities[head][2 * lane] = bf16_pair(first, second);
            if (lane == 0) shrinks[head] = shrink;
        }
        group_sync(1, WARPS * 32);

        const float low = shrinks[g], high = shrinks[g + 8];
        if (__any_sync(~0u, low != 1.f || high != 1.f)) {
#pragma unroll
            for (int t = 0; t < COLUMN_TILES; ++t) out[t][0] *= low, out[t][1] *= low, out[t][2] *= high, out[t][3] *= high;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == tiles) break;
            const u32 from = ring + stage * STAGE_BYTES;
            const int first_behind = valid - half * TILE;
            if (first_behind < TILE) { // what lies behind the last token counts nothing, whatever it is
                constexpr int CHUNKS = LATENT / WARPS / 8;
                for (int i = first_behind * CHUNKS + lane; i < TILE * CHUNKS; i += 32)
                    store_shared_16(from + place_of(i / CHUNKS, warp * CHUNKS + i % CHUNKS), make_uint4(0, 0, 0, 0));
                fence_for_copies();
                __syncwarp();
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                u32 p[4], b[COLUMN_TILES / 2][4];
                ldmatrix(p, probability_place + half * (TILE * 2) + k * 32);
#pragma unroll
                for (int t = 0; t < COLUMN_TILES / 2; ++t)
                    ldmatrix_transposed(b[t], ((from + value_place) ^ t * 32) + k * (16 * 128));
#pragma unroll
                for (int t = 0; t < COLUMN_TILES / 2; ++t) {
                    mma(out[2 * t], p[0], p[1], p[2], p[3], b[t][0], b[t][1]);
                    mma(out[2 * t + 1], p[0], p[1], p[2], p[3], b[t][2], b[t][3]);
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        tile += tiles;
        if (tile >= end) break;
        if (tile >= ahead_end) {
            while (tile >= ahead_end) ahead_end = sequences[++ahead].y;
            load_query();
        }
        tiles = min(2, min(end, ahead_end) - tile);
        score(tiles);
    }
    leave();
}

// out [batch, 16, LATENT] bf16 from the parts, whose `blocks` blocks shared the tiles. Sequences of length 0 get zeros. early:
// the plan was written before the kernel ahead began.
// Four groups of 64 threads of 8 columns each: GROUPS of them share the parts of a head. grid (batch, 4 * GROUPS)
template <int GROUPS>
DEVICE void combine_parts(const float* part_out, const float2* part_max_sum, const int4* plan, bf16* out, int blocks, int early) {
    __shared__ float sums[GROUPS > 1 ? GROUPS - 1 : 1][LATENT];
    let_next_start();
    if (!early) wait_for_previous();
    const int sequence = blockIdx.x, head = GROUPS == 1 ? blockIdx.y * 4 + threadIdx.x / 64 : blockIdx.y;
    const int group = GROUPS == 1 ? 0 : threadIdx.x / 64, column = threadIdx.x % 64 * 8, lane = threadIdx.x % 32;
    const int4 own = plan[2 * blocks + sequence];
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, weight_sum = 0.f, top = NEG_BIG;
    if (own.x < own.y) {
        const int first = own.w & 0xffff, last = own.w >> 16;
        if (early) wait_for_previous();
        // 32 parts at a time, a lane each; of what comes before, sums relative to `top` are carried.
        for (int c0 = first; c0 <= last; c0 += 32) {
            const int count = min(32, last - c0 + 1);
            float2 ms = make_float2(NEG_BIG, 0.f);
            if (lane < count) ms = part_max_sum[(size_t)(c0 + lane + sequence) * HEADS + head];
            // A few parts are on their way before their weights are known.
            constexpr int AT_ONCE = GROUPS == 1 ? 4 : 32 / GROUPS;
            float4 rows[AT_ONCE][2];
            const auto fetch = [&](int k0) {
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const int c = (k0 + k) * GROUPS + group;
                    const float4* row = (const float4*)(part_out + ((size_t)(c0 + c + sequence) * HEADS + head) * LATENT + column);
                    rows[k][0] = c < count ? row[0] : make_float4(0.f, 0.f, 0.f, 0.f);
                    rows[k][1] = c < count ? row[1] : make_float4(0.f, 0.f, 0.f, 0.f);
                }
            };
            fetch(0);
            float now = ms.x;
#pragma unroll
            for (int d = 16; d; d /= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, d));
            now = fmaxf(now, top);
            const float shrink = exp2_fast(top - now), weight = exp2_fast(ms.x - now);
            top = now;
            weight_sum *= shrink;
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] *= shrink;
            for (int k0 = 0; k0 < 32 / GROUPS; k0 += AT_ONCE) {
                if (k0 * GROUPS >= count) break;
                if (k0) fetch(k0);
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const float w = __shfl_sync(~0u, weight, (k0 + k) * GROUPS + group);
                    const float4 a = rows[k][0], b = rows[k][1];
                    sum[0] += w * a.x, sum[1] += w * a.y, sum[2] += w * a.z, sum[3] += w * a.w;
                    sum[4] += w * b.x, sum[5] += w * b.y, sum[6] += w * b.z, sum[7] += w * b.w;
                }
            }
            float share = weight * ms.y;
#pragma unroll
            for (int d = 16; d; d /= 2) share += __shfl_xor_sync(~0u, share, d);
            weight_sum += share;
        }
    }
    if (GROUPS > 1) {
        if (group) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[group - 1][column + j] = sum[j];
        }
        __syncthreads();
        if (group) return;
#pragma unroll
        for (int g = 0; g < GROUPS - 1; ++g)
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += sums[g][column + j];
    }
    if (own.x == own.y && early) wait_for_previous(); // what is written may still be read
    const float f = weight_sum > 0.f ? 1.f / weight_sum : 0.f;
    *(uint4*)(out + ((size_t)sequence * HEADS + head) * LATENT + column) =
        make_uint4(bf16_pair(sum[0] * f, sum[1] * f), bf16_pair(sum[2] * f, sum[3] * f),
                   bf16_pair(sum[4] * f, sum[5] * f), bf16_pair(sum[6] * f, sum[7] * f));
}

// For many sequences, of few parts each: a block has four heads. grid (batch, 4), 256 threads
KERNEL void mla_combine(const float* part_out, const float2* part_max_sum, const int4* plan, bf16* out, int blocks, int early) {
    combine_parts<1>(part_out, part_max_sum, plan, out, blocks, early);
}

// For few sequences, of many parts each: a block has one head. grid (batch, 16), 256 threads
KERNEL void mla_combine_few(const float* part_out, const float2* part_max_sum, const int4* plan, bf16* out, int blocks, int early) {
    combine_parts<4>(part_out, part_max_sum, plan, out, blocks, early);
}
