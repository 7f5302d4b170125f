// Decode attention over a paged cache of keys and values: a group of query heads shares one head of the cache.
//
// The heads of a group (at most 16) are the rows of the tensor core's A. A sequence is cut into `splits` pieces, one block
// each; within a block every warp is on its own: it takes every fourth tile of 16 tokens, brings it into its own ring by
// asynchronous copies and keeps its own running maximum, sum and result, which the block joins at the end. `gqa_combine`
// joins the pieces. The number of pieces is fixed by the batch size, so a captured graph fits any lengths.
//
// Defined at compile time: DIM (a multiple of 16 up to 256), GROUP (query heads of a cache head), BLOCK_SIZE (tokens of a
// cache block), STAGES.

#define TILE 16
#define WARPS 4
#define ROW_BYTES (DIM * 2)
#define ROW_STRIDE (ROW_BYTES + 16) // an odd number of 16-byte units: no bank conflicts down a column
#define TILE_BYTES (TILE * ROW_STRIDE)
#define UNITS (DIM / 8)

DEVICE void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// qkv [batch, heads + 2 kv, DIM] bf16, of which the queries are read; keys, values [blocks, BLOCK_SIZE, kv, DIM];
// part_out [batch, kv, splits, GROUP, DIM] f32, part_max_sum [batch, kv, splits, GROUP]. scale includes log2(e).
// grid (splits, batch * kv), WARPS * 32 threads
KERNEL void __launch_bounds__(WARPS * 32)
gqa_decode(const bf16* qkv, const bf16* keys, const bf16* values, const int* block_table, const int* seq_lens, float* part_out,
           float2* part_max_sum, int kv, int max_blocks, float scale) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ float2 stats[WARPS][16];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, quad = lane % 4;
    const int sequence = blockIdx.y / kv, head = blockIdx.y % kv, splits = gridDim.x;
    const int len = seq_lens[sequence];
    const int tiles = (len + TILE - 1) / TILE, share = (tiles + splits - 1) / splits;
    const int first = min((int)blockIdx.x * share, tiles), last = min(first + share, tiles);
    const size_t part = (size_t)blockIdx.y * splits + blockIdx.x;
    if (first == last) {
        if (threadIdx.x < GROUP) part_max_sum[part * GROUP + threadIdx.x] = make_float2(NEG_BIG, 0.f);
        return;
    }
    u8* own = memory + warp * STAGES * 2 * TILE_BYTES;
    const u32 ring = shared_address(own);
    const int* table = block_table + (size_t)sequence * max_blocks;

    auto fetch = [&](int tile, int stage) {
        if (tile < last) {
            // Lanes 0 to 15 know where a token lies.
            const int token = min(tile * TILE + lane % TILE, len - 1);
            const u64 row = ((u64)table[token / BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE) * kv + head;
            const u32 to = ring + stage * 2 * TILE_BYTES;
#pragma unroll
            for (int i = 0; i < TILE * UNITS / 32; ++i) {
                const int unit = i * 32 + lane, r = unit / UNITS, c = unit % UNITS;
                const u64 from = __shfl_sync(~0u, row, r) * DIM + c * 8;
                copy_16(to + r * ROW_STRIDE + c * 16, keys + from);
                copy_16(to + TILE_BYTES + r * ROW_STRIDE + c * 16, values + from);
            }
        }
        copies_end();
    };

    u32 query[DIM / 16][4];
    {
        const bf16* base = qkv + ((size_t)sequence * (kv * (GROUP + 2)) + head * GROUP) * DIM + 2 * quad;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            query[k][0] = g < GROUP ? *(const u32*)(base + g * DIM + k * 16) : 0;
            query[k][1] = g + 8 < GROUP ? *(const u32*)(base + (g + 8) * DIM + k * 16) : 0;
            query[k][2] = g < GROUP ? *(const u32*)(base + g * DIM + k * 16 + 8) : 0;
            query[k][3] = g + 8 < GROUP ? *(const u32*)(base + (g + 8) * DIM + k * 16 + 8) : 0;
        }
    }
    float out[DIM / 8][4];
#pragma unroll
    for (int t = 0; t < DIM / 8; ++t) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.f;
    float top[2] = {NEG_BIG, NEG_BIG}, sum[2] = {0.f, 0.f};

    int stage = 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(first + warp + s * WARPS, s);
    for (int tile = first + warp; tile < last; tile += WARPS) {
        fetch(tile + (STAGES - 1) * WARPS, stage == 0 ? STAGES - 1 : stage - 1);
        copies_wait<STAGES - 1>();
        __syncwarp();
        const u32 k_at = ring + stage * 2 * TILE_BYTES, v_at = k_at + TILE_BYTES;
        float score[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) score[t][0] = score[t][1] = score[t][2] = score[t][3] = 0.f;
        const u32 k_row = k_at + (lane / 16 * 8 + lane % 8) * ROW_STRIDE + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            u32 b[4];
            ldmatrix(b, k_row + k * 32);
            mma(score[0], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
            mma(score[1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
        }
        u32 p[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) { // rows g and g + 8
            float now = top[half];
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& s = score[t][half * 2 + j];
                    s = tile * TILE + t * 8 + 2 * quad + j < len ? s * scale : NEG_BIG;
                    now = fmaxf(now, s);
                }
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
            const float shrink = exp2_fast(top[half] - now);
            top[half] = now;
            float more = 0.f;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const float a = exp2_fast(score[t][half * 2] - now), b = exp2_fast(score[t][half * 2 + 1] - now);
                more += a + b;
                p[t * 2 + half] = bf16_pair(a, b);
            }
            sum[half] = sum[half] * shrink + more;
#pragma unroll
            for (int t = 0; t < DIM / 8; ++t) out[t][half * 2] *= shrink, out[t][half * 2 + 1] *= shrink;
        }
        const u32 v_row = v_at + (lane / 8 % 2 * 8 + lane % 8) * ROW_STRIDE + lane / 16 * 16;
#pragma unroll
        for (int t = 0; t < DIM / 16; ++t) {
            u32 b[4];
            ldmatrix_transposed(b, v_row + t * 32);
            mma(out[2 * t], p[0], p[1], p[2], p[3], b[0], b[1]);
            mma(out[2 * t + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
        }
        __syncwarp(); // before the next fetch writes over this stage
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copies_wait<0>();
    // The warps' results are joined over the rings, which nobody needs any more.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
        sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        if (quad == 0) stats[warp][g + half * 8] = make_float2(top[half], sum[half]);
    }
    __syncthreads();
    float* joined = (float*)memory; // [WARPS][GROUP][DIM]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = g + half * 8;
        if (r < GROUP) {
#pragma unroll
            for (int t = 0; t < DIM / 8; ++t)
                *(float2*)(joined + (warp * GROUP + r) * DIM + t * 8 + 2 * quad) = make_float2(out[t][half * 2], out[t][half * 2 + 1]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * DIM; i += WARPS * 32) {
        const int r = i / DIM;
        float most = NEG_BIG, value = 0.f, weight = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, stats[w][r].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float f = exp2_fast(stats[w][r].x - most);
            value += f * joined[w * GROUP * DIM + i];
            weight += f * stats[w][r].y;
        }
        part_out[part * GROUP * DIM + i] = value;
        if (i % DIM == 0) part_max_sum[part * GROUP + r] = make_float2(most, weight);
    }
}

// out [batch, heads, DIM] bf16 from the pieces. Sequences of length 0 get zeros. grid (batch, heads), DIM / 2 threads
KERNEL void gqa_combine(const float* part_out, const float2* part_max_sum, bf16* out, int kv, int splits) {
    let_next_start();
    wait_for_previous();
    const int sequence = blockIdx.x, head = blockIdx.y, heads = kv * GROUP;
    const size_t part = ((size_t)sequence * kv + head / GROUP) * splits;
    const float2* stat = part_max_sum + part * GROUP + head % GROUP;
    float most = NEG_BIG, weight = 0.f, a = 0.f, b = 0.f;
    for (int s = 0; s < splits; ++s) most = fmaxf(most, stat[s * GROUP].x);
    for (int s = 0; s < splits; ++s) {
        const float2 one = stat[s * GROUP];
        if (one.y == 0.f) continue; // nothing was written for it
        const float f = exp2_fast(one.x - most);
        const float2 v = *(const float2*)(part_out + ((part + s) * GROUP + head % GROUP) * DIM + threadIdx.x * 2);
        a += f * v.x;
        b += f * v.y;
        weight += f * one.y;
    }
    const float f = weight > 0.f ? 1.f / weight : 0.f;
    *(u32*)(out + ((size_t)sequence * heads + head) * DIM + threadIdx.x * 2) = bf16_pair(a * f, b * f);
}
