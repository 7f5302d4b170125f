// Decode attention over a paged latent cache (MLA, absorbed): every head reads the same rows of LATENT + ROPE.
//
// Bound by reading the cache, so all sequences together are cut into tiles of 32 tokens and the tiles into one
// contiguous range per block, whatever the lengths: no block waits for a long sequence. The copy engine brings tiles into a
// ring, cut into slabs of 64 elements of every token, swizzled; the 16 heads are the 16 rows of the tensor core's A. While
// one tile's probabilities are made, the next tile's scores already are: one barrier a tile. A block that ends inside a
// sequence leaves a partial sum; `mla_combine` joins them.
//
// Defined at compile time: LATENT (512), ROPE (64), BLOCK_SIZE (tokens of a cache block, a power of two), STAGES, and
// VARIANT, which leaves parts out for the benchmark: 1 no arithmetic.
//
// q [batch, 16, LATENT + ROPE] bf16, cache [blocks, BLOCK_SIZE, LATENT + ROPE] bf16, block_table [batch, max_blocks].
// plan: int4 {first tile, end tile, sequence of the first, 0} for each block, then int4 {first tile, end tile, tokens, 0}
// for each sequence. Part c + s belongs to block c's share of sequence s.

#define HEADS 16
#define WIDTH (LATENT + ROPE)
#define TILE 32
#define SLABS (WIDTH / 64)
#define SLAB_BYTES (TILE * 128)
#define STAGE_BYTES (SLABS * SLAB_BYTES)
#define BOX_TOKENS (BLOCK_SIZE < TILE ? BLOCK_SIZE : TILE) // that lie together in the cache
#define BOXES (TILE / BOX_TOKENS)                          // of a slab
#define QUERY_STRIDE (WIDTH * 2 + 16) // bytes, of a head: an odd number of 16-byte units, no bank conflicts
#define SCORE_STRIDE 40 // floats
#define P_STRIDE 40     // bf16
#define WARPS 16        // of heads in the softmax, of column parts in the output
#define PARTS 4         // of the inner dimension in the scores
#define K_STEPS (WIDTH / PARTS / 16)

// Blocks that share `total` tiles: no more than there are tiles, so that each has one and leaves a part.
DEVICE int sharers(long long total, int blocks) { return total < blocks ? (int)total : blocks; }

// The plan from the lengths, once a step for all layers. One block of 1024 threads; batch and blocks at most 1024.
KERNEL void mla_plan(const int* seq_lens, int4* plan, int batch, int blocks) {
    __shared__ int sums[32];
    const int i = threadIdx.x, lane = i % 32, warp = i / 32;
    wait_for_previous();
    const int len = i < batch ? seq_lens[i] : 0, own = (len + TILE - 1) / TILE;
    const auto sum_up_to = [&](int v) { // over the lanes of a warp
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, v, d);
            if (lane >= d) v += n;
        }
        return v;
    };
    int end = sum_up_to(own);
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    if (warp == 0) sums[lane] = sum_up_to(sums[lane]);
    __syncthreads();
    if (warp) end += sums[warp - 1];
    const long long total = sums[31];
    const int begin = end - own;
    if (i < batch) plan[blocks + i] = make_int4(begin, end, len, 0);
    // Whoever holds a block's first tile writes that block's entry; blocks without tiles are written by their own thread.
    const int used = sharers(total, blocks);
    if (i < blocks && i >= used) plan[i] = make_int4(0, 0, 0, 0);
    if (own) {
        int c = (int)((begin * (long long)used + total - 1) / total); // the first whose share begins here or later
        for (; c < used; ++c) {
            const int first = (int)(total * c / used), last = (int)(total * (c + 1) / used);
            if (first >= end) break;
            if (first >= begin && first < last) plan[c] = make_int4(first, last, i, 0);
        }
    }
}

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
    __shared__ float scores[2][PARTS][HEADS][SCORE_STRIDE]; // [tile parity][part of the inner dimension]
    __shared__ __align__(16) bf16 probabilities[2][HEADS][P_STRIDE];
    __shared__ float shrinks[2][HEADS];
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
    const int4* const sequences = plan + gridDim.x;
    bool waited = !early;
    if (!early) wait_for_previous();
    const int4 share = plan[blockIdx.x];
    const int begin = share.x, end = share.y;
    int sequence = share.z;
    if (begin == end) {
        if (!waited) wait_for_previous();
        return;
    }
    int4 now = sequences[sequence]; // first tile, end tile, tokens

    if (warp == WARPS) {
        const u64 policy = policy_evict_first(), keep = policy_keep();
        int stage = 0, parity = 1, query_parity = 1;
        // A sequence's query comes ahead of its first tile, so that nobody waits for it behind what is on its way.
        bool wanted = true;
        auto fetch_query = [&](int of) {
            if (VARIANT & 1) return; // nobody multiplies
            barrier_wait(query_empty, query_parity);
            if (lane == 0) barrier_expect(query_full, HEADS * WIDTH * 2);
            __syncwarp();
            if (lane < HEADS)
                bulk_copy(query_room + lane * QUERY_STRIDE, q + ((size_t)of * HEADS + lane) * WIDTH, WIDTH * 2, query_full, keep);
            query_parity ^= 1;
            wanted = false;
        };
        // A lane fetches one box of tokens of one slab, or of several; their cache row is looked up one tile ahead. Boxes
        // beyond the last token are its own once more.
        const int box = lane % BOXES;
        auto source_of = [&](int tile) {
            const int token = min((tile - now.x) * TILE + box * BOX_TOKENS, (now.z - 1) / BOX_TOKENS * BOX_TOKENS);
            return block_table[(size_t)sequence * max_blocks + token / BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE;
        };
        int source = source_of(begin);
        bool last = begin + 1 == now.y;
        for (int tile = begin; tile < end; ++tile) {
            const int from = source;
            if (!waited && (last || tile - begin == STAGES)) {
                wait_for_previous();
                waited = true;
            }
            if (waited && wanted) fetch_query(sequence);
            if (tile + 1 < end) {
                wanted |= tile + 1 >= now.y;
                while (tile + 1 >= now.y) now = sequences[++sequence];
                source = source_of(tile + 1);
                last = tile + 2 == now.y;
            }
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
        }
        if (!waited) wait_for_previous();
        if (wanted) fetch_query(sequence);
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
    const int g = lane / 4, quad = lane % 4;
    // Scores: this warp does 8 tokens of a tile, over one part of the inner dimension.
    const int inner = warp % PARTS, tokens = warp / PARTS * 8;
    // Softmax: this warp does one head, a lane one token. Output: this warp does LATENT / WARPS columns.
    const int head = warp;
    constexpr int COLUMN_TILES = LATENT / WARPS / 8;
    u32 query[K_STEPS][4];
    float out[COLUMN_TILES][4];
    float head_max = NEG_BIG, head_sum = 0.f;

    // Four matrices at a time, of which an odd step's last two are not used: k 0-7, 8-15, 16-23, 24-31.
    constexpr int LOADS = (K_STEPS + 1) / 2;
    u32 score_places[LOADS], value_places[COLUMN_TILES / 2];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        score_places[i] = place_of(tokens + lane % 8, min(inner * (WIDTH / PARTS / 8) + i * 4 + lane / 8, WIDTH / 8 - 1));
#pragma unroll
    for (int t = 0; t < COLUMN_TILES / 2; ++t)
        value_places[t] = place_of(lane % 16, warp * (LATENT / WARPS / 8) + t * 2 + lane / 16);

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
    // Scores of a tile that is in `stage`, into scores[side].
    auto score = [&](int stage, int parity, int side) {
        barrier_wait(full + 8 * stage, parity);
        u32 b[LOADS][4];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) ldmatrix(b[i], ring + stage * STAGE_BYTES + score_places[i]);
        float acc[3][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k)
            mma(acc[k % 3], query[k][0], query[k][1], query[k][2], query[k][3], b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]);
        float* target = &scores[side][inner][g][tokens + 2 * quad];
        *(float2*)target = make_float2(acc[0][0] + acc[1][0] + acc[2][0], acc[0][1] + acc[1][1] + acc[2][1]);
        *(float2*)(target + 8 * SCORE_STRIDE) = make_float2(acc[0][2] + acc[1][2] + acc[2][2], acc[0][3] + acc[1][3] + acc[2][3]);
    };

    load_query();
    start();
    score(0, 0, 0);
    group_sync(1, WARPS * 32);
    int stage = 0, parity = 0, ahead = sequence; // whose query is loaded
    int ahead_end = now.y;
    for (int tile = begin; tile < end; ++tile) {
        const int side = tile - begin & 1;
        if (tile >= now.y) {
            leave();
            while (tile >= now.y) now = sequences[++sequence];
            start();
        }
        {
            float x = 0.f;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) x += scores[side][p][head][lane];
            x = lane < now.z - (tile - now.x) * TILE ? x * scale : NEG_BIG;
            const u32 bits = __float_as_uint(x);
            // The largest by integer comparison: one instruction for the warp.
            const u32 key = __reduce_max_sync(~0u, bits & 0x80000000u ? ~bits : bits | 0x80000000u);
            const float top = fmaxf(head_max, __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key));
            const float shrink = exp2_fast(head_max - top), p = exp2_fast(x - top);
            head_max = top;
            head_sum = head_sum * shrink + p;
            probabilities[side][head][lane] = bf16_of(p);
            if (lane == 0) shrinks[side][head] = shrink;
        }
        const int next_stage = stage + 1 == STAGES ? 0 : stage + 1, next_parity = next_stage ? parity : parity ^ 1;
        if (tile + 1 < end) {
            if (tile + 1 >= ahead_end) {
                while (tile + 1 >= ahead_end) ahead_end = sequences[++ahead].y;
                load_query();
            }
            score(next_stage, next_parity, side ^ 1);
        }
        group_sync(1, WARPS * 32);

        const float low = shrinks[side][g], high = shrinks[side][g + 8];
        u32 p[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k)
            ldmatrix(p[k], shared_address(&probabilities[side][lane % 16][k * 16 + lane / 16 * 8]));
        if (__any_sync(~0u, low != 1.f || high != 1.f)) {
#pragma unroll
            for (int t = 0; t < COLUMN_TILES; ++t) out[t][0] *= low, out[t][1] *= low, out[t][2] *= high, out[t][3] *= high;
        }
        const int valid = now.z - (tile - now.x) * TILE;
        if (valid < TILE) { // what lies behind the last token counts nothing, whatever it is
            constexpr int CHUNKS = LATENT / WARPS / 8;
            for (int i = valid * CHUNKS + lane; i < TILE * CHUNKS; i += 32)
                store_shared_16(ring + stage * STAGE_BYTES + place_of(i / CHUNKS, warp * CHUNKS + i % CHUNKS), make_uint4(0, 0, 0, 0));
            fence_for_copies();
            __syncwarp();
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            u32 b[COLUMN_TILES / 2][4];
#pragma unroll
            for (int t = 0; t < COLUMN_TILES / 2; ++t) ldmatrix_transposed(b[t], ring + stage * STAGE_BYTES + value_places[t] + k * (16 * 128));
#pragma unroll
            for (int t = 0; t < COLUMN_TILES / 2; ++t) {
                mma(out[2 * t], p[k][0], p[k][1], p[k][2], p[k][3], b[t][0], b[t][1]);
                mma(out[2 * t + 1], p[k][0], p[k][1], p[k][2], p[k][3], b[t][2], b[t][3]);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        stage = next_stage;
        parity = next_parity;
    }
    leave();
}

// out [batch, 16, LATENT] bf16 from the parts, whose `blocks` blocks shared the tiles. Sequences of length 0 get zeros. early:
// the plan was written before the kernel ahead began.
// Four groups of 64 threads of 8 columns each: GROUPS of them share the parts of a head. grid (batch, 4 * GROUPS)
template <int GROUPS>
DEVICE void combine_parts(const float* part_out, const float2* part_max_sum, const int4* plan, bf16* out, int batch, int blocks, int early) {
    __shared__ float sums[GROUPS > 1 ? GROUPS - 1 : 1][LATENT];
    let_next_start();
    if (!early) wait_for_previous();
    const int sequence = blockIdx.x, head = GROUPS == 1 ? blockIdx.y * 4 + threadIdx.x / 64 : blockIdx.y;
    const int group = GROUPS == 1 ? 0 : threadIdx.x / 64, column = threadIdx.x % 64 * 8, lane = threadIdx.x % 32;
    const int4 own = plan[blocks + sequence];
    const long long total = plan[blocks + batch - 1].y;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, weight_sum = 0.f, top = NEG_BIG;
    if (own.x < own.y) {
        // Block c has the tiles from total * c / used.
        const int used = sharers(total, blocks);
        const int first = (int)(((own.x + 1ll) * used - 1) / total), last = (int)((own.y * (long long)used - 1) / total);
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
KERNEL void mla_combine(const float* part_out, const float2* part_max_sum, const int4* plan, bf16* out, int batch, int blocks, int early) {
    combine_parts<1>(part_out, part_max_sum, plan, out, batch, blocks, early);
}

// For few sequences, of many parts each: a block has one head. grid (batch, 16), 256 threads
KERNEL void mla_combine_few(const float* part_out, const float2* part_max_sum, const int4* plan, bf16* out, int batch, int blocks, int early) {
    combine_parts<4>(part_out, part_max_sum, plan, out, batch, blocks, early);
}
