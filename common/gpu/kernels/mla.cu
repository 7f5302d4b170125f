// Decode attention over a paged latent cache (MLA, absorbed): every head reads the same rows of LATENT + ROPE.
//
// Bound by reading the cache, so all sequences together are cut into tiles of 64 tokens and the tiles into one
// contiguous range per block, whatever the lengths: no block waits for a long sequence. Bulk copies bring rows into a
// ring of half tiles; the 16 heads are the 16 rows of the tensor core's A. A block that ends inside a sequence leaves a
// partial sum; `mla_combine` joins them.
//
// Defined at compile time: LATENT (512), ROPE (64), BLOCK_SIZE (tokens of a cache block, a power of two), STAGES.
//
// q [batch, 16, LATENT + ROPE] bf16, cache [blocks, BLOCK_SIZE, LATENT + ROPE] bf16, block_table [batch, max_blocks],
// tile_starts [batch + 1]: tiles before each sequence. Part c + s belongs to block c's share of sequence s.

#define HEADS 16
#define WIDTH (LATENT + ROPE)
#define TILE 64
#define HALF 32
#define ROW_BYTES (WIDTH * 2)
#define ROW_STRIDE (ROW_BYTES + 16) // an odd number of 16-byte units: no bank conflicts down a column
#define STAGE_BYTES (HALF * ROW_STRIDE)
#define SCORE_STRIDE 72 // floats
#define SCORE_BYTES (2 * HEADS * SCORE_STRIDE * 4)
#define WARPS 8
#define K_STEPS (WIDTH / 32) // of 16 elements, for half of the inner dimension

// tile_starts from the lengths, once a step for all layers. One block of 1024 threads; batch at most 1024.
KERNEL void mla_plan(const int* seq_lens, int* tile_starts, int batch) {
    __shared__ int sums[32];
    const int i = threadIdx.x, lane = i % 32, warp = i / 32;
    wait_for_previous();
    const int own = i < batch ? (seq_lens[i] + TILE - 1) / TILE : 0;
    int before = own;
    for (int d = 1; d < 32; d *= 2) {
        const int n = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += n;
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    if (warp == 0) {
        int s = sums[lane];
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, s, d);
            if (lane >= d) s += n;
        }
        sums[lane] = s;
    }
    __syncthreads();
    if (warp) before += sums[warp - 1];
    if (i < batch) tile_starts[i + 1] = before;
    if (i == 0) tile_starts[0] = 0;
}

// The sequence that holds a tile: the last one that starts at or before it.
DEVICE int sequence_of(const int* tile_starts, int batch, int tile) {
    int low = 0, high = batch; // tile_starts[low] <= tile < tile_starts[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (tile_starts[middle] <= tile) low = middle;
        else high = middle;
    }
    return low;
}

// One block a multiprocessor, (WARPS + 1) * 32 threads. scale includes log2(e).
KERNEL void __launch_bounds__((WARPS + 1) * 32, 1)
mla_decode(const bf16* q, const bf16* cache, const int* block_table, const int* seq_lens, const int* tile_starts,
           float* part_out, float2* part_max_sum, int batch, int max_blocks, float scale) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 ring = shared_address(memory);
    float* scores = (float*)(memory + STAGES * STAGE_BYTES);
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    let_next_start();
    wait_for_previous();
    const long long total = tile_starts[batch];
    const int begin = (int)(total * blockIdx.x / gridDim.x), end = (int)(total * (blockIdx.x + 1) / gridDim.x);
    if (begin == end) return;
    int sequence = sequence_of(tile_starts, batch, begin);

    if (warp == WARPS) {
        const u64 policy = policy_evict_first();
        int stage = 0, parity = 1;
        int start = tile_starts[sequence], next = tile_starts[sequence + 1], len = seq_lens[sequence];
        // Lane i copies token i of each half tile; its cache row is looked up one half tile ahead.
        auto source_of = [&](int tile, int half) {
            const int token = min((tile - start) * TILE + half * HALF + lane, len - 1);
            const int block = block_table[(size_t)sequence * max_blocks + token / BLOCK_SIZE];
            return cache + ((size_t)block * BLOCK_SIZE + token % BLOCK_SIZE) * WIDTH;
        };
        const bf16* source = source_of(begin, 0);
        for (int i = 2 * begin; i < 2 * end; ++i) {
            const bf16* const now = source;
            const int tile = (i + 1) / 2;
            if (i + 1 < 2 * end) {
                while (tile >= next) {
                    ++sequence;
                    start = next;
                    next = tile_starts[sequence + 1];
                    len = seq_lens[sequence];
                }
                source = source_of(tile, (i + 1) % 2);
            }
            barrier_wait(empty + 8 * stage, parity);
            if (lane == 0) barrier_expect(full + 8 * stage, HALF * ROW_BYTES);
            __syncwarp();
            bulk_copy(ring + stage * STAGE_BYTES + lane * ROW_STRIDE, now, ROW_BYTES, full + 8 * stage, policy);
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        return;
    }

    const int g = lane / 4, quad = lane % 4;
    // Scores: this warp does 16 tokens of the tile, over one half of the inner dimension.
    const int inner_half = warp % 2, tokens = warp / 2;
    // Output: this warp does LATENT / WARPS columns.
    constexpr int COLUMN_TILES = LATENT / WARPS / 8;
    u32 query[K_STEPS][4];
    float out[COLUMN_TILES][4];
    float row_max[2] = {NEG_BIG, NEG_BIG}, row_sum[2] = {0.f, 0.f};
    int stage = 0, parity = 0;

    auto enter = [&]() {
        const bf16* base = q + ((size_t)sequence * HEADS + g) * WIDTH + inner_half * (WIDTH / 2) + 2 * quad;
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            query[k][0] = *(const u32*)(base + k * 16);
            query[k][1] = *(const u32*)(base + 8 * WIDTH + k * 16);
            query[k][2] = *(const u32*)(base + k * 16 + 8);
            query[k][3] = *(const u32*)(base + 8 * WIDTH + k * 16 + 8);
        }
#pragma unroll
        for (int t = 0; t < COLUMN_TILES; ++t) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.f;
        row_max[0] = row_max[1] = NEG_BIG;
        row_sum[0] = row_sum[1] = 0.f;
    };
    auto leave = [&]() {
        const size_t part = blockIdx.x + sequence;
        float* base = part_out + (part * HEADS + g) * LATENT + warp * (LATENT / WARPS) + 2 * quad;
#pragma unroll
        for (int t = 0; t < COLUMN_TILES; ++t) {
            *(float2*)(base + t * 8) = make_float2(out[t][0], out[t][1]);
            *(float2*)(base + 8 * LATENT + t * 8) = make_float2(out[t][2], out[t][3]);
        }
        if (warp == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = row_sum[r];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (quad == 0) part_max_sum[part * HEADS + g + 8 * r] = make_float2(row_max[r], sum);
            }
        }
    };

    enter();
    int start = tile_starts[sequence], next = tile_starts[sequence + 1], len = seq_lens[sequence];
    for (int tile = begin; tile < end; ++tile) {
        if (tile >= next) {
            leave();
            while (tile >= next) {
                ++sequence;
                start = next;
                next = tile_starts[sequence + 1];
            }
            len = seq_lens[sequence];
            enter();
        }
        const int second = stage + 1 == STAGES ? 0 : stage + 1, second_parity = second ? parity : parity ^ 1;
        float* const buffer = scores + (tile & 1) * (SCORE_BYTES / 4);

        // Scores of 16 tokens.
        {
            const bool in_second = tokens >= 2;
            barrier_wait(full + 8 * (in_second ? second : stage), in_second ? second_parity : parity);
            const u32 base = ring + (in_second ? second : stage) * STAGE_BYTES +
                             (tokens % 2 * 16 + lane % 8 + lane / 16 * 8) * ROW_STRIDE + inner_half * WIDTH + lane / 8 % 2 * 16;
            float acc[4][4];
#pragma unroll
            for (int t = 0; t < 4; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.f;
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                u32 b[4];
                ldmatrix(b, base + k * 32);
                float(&first)[4] = acc[k % 2 * 2], (&last)[4] = acc[k % 2 * 2 + 1];
                mma(first, query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
                mma(last, query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
            }
            float* target = buffer + (inner_half * HEADS + g) * SCORE_STRIDE + tokens * 16 + 2 * quad;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                *(float2*)(target + t * 8) = make_float2(acc[t][0] + acc[t + 2][0], acc[t][1] + acc[t + 2][1]);
                *(float2*)(target + 8 * SCORE_STRIDE + t * 8) =
                    make_float2(acc[t][2] + acc[t + 2][2], acc[t][3] + acc[t + 2][3]);
            }
        }
        group_sync(1, WARPS * 32);

        // Softmax, by every warp for itself: its lanes need exactly these probabilities as A.
        u32 probability[4][4];
        {
            const int left = len - (tile - start) * TILE - 2 * quad;
            float p[4][8]; // [step of 16 tokens][row g: 0 1 8 9, row g + 8: 0 1 8 9]
            float top[2] = {NEG_BIG, NEG_BIG};
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const float* source = buffer + (g + 8 * r) * SCORE_STRIDE + k * 16 + c * 8 + 2 * quad;
                        const float2 a = *(const float2*)source, b = *(const float2*)(source + HEADS * SCORE_STRIDE);
                        const int token = k * 16 + c * 8;
                        const float x = token < left ? (a.x + b.x) * scale : NEG_BIG;
                        const float y = token + 1 < left ? (a.y + b.y) * scale : NEG_BIG;
                        p[k][r * 4 + c * 2] = x;
                        p[k][r * 4 + c * 2 + 1] = y;
                        top[r] = fmaxf(top[r], fmaxf(x, y));
                    }
            float shrink[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
                top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
                top[r] = fmaxf(top[r], row_max[r]);
                shrink[r] = exp2_fast(row_max[r] - top[r]);
                row_max[r] = top[r];
                row_sum[r] *= shrink[r];
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    p[k][j] = exp2_fast(p[k][j] - top[j / 4]);
                    row_sum[j / 4] += p[k][j];
                }
                probability[k][0] = bf16_pair(p[k][0], p[k][1]);
                probability[k][1] = bf16_pair(p[k][4], p[k][5]);
                probability[k][2] = bf16_pair(p[k][2], p[k][3]);
                probability[k][3] = bf16_pair(p[k][6], p[k][7]);
            }
#pragma unroll
            for (int t = 0; t < COLUMN_TILES; ++t) {
                out[t][0] *= shrink[0];
                out[t][1] *= shrink[0];
                out[t][2] *= shrink[1];
                out[t][3] *= shrink[1];
            }
        }

        // Weighted sum of the latents. Each warp saw only its own half of the tile arrive.
        barrier_wait(full + 8 * stage, parity);
        barrier_wait(full + 8 * second, second_parity);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 base = ring + (k < 2 ? stage : second) * STAGE_BYTES + (k % 2 * 16 + lane % 16) * ROW_STRIDE +
                             warp * (LATENT / WARPS) * 2 + lane / 16 * 16;
#pragma unroll
            for (int t = 0; t < COLUMN_TILES; t += 2) {
                u32 b[4];
                ldmatrix_transposed(b, base + t * 16);
                mma(out[t], probability[k][0], probability[k][1], probability[k][2], probability[k][3], b[0], b[1]);
                mma(out[t + 1], probability[k][0], probability[k][1], probability[k][2], probability[k][3], b[2], b[3]);
            }
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(empty + 8 * stage);
            barrier_arrive(empty + 8 * second);
        }
        stage = second + 1 == STAGES ? 0 : second + 1;
        parity = stage > second ? second_parity : second_parity ^ 1;
    }
    leave();
}

// out [batch, 16, LATENT] bf16 from the parts, whose `blocks` blocks shared the tiles. Sequences of length 0 get zeros.
// grid (batch, 4), 256 threads: 4 heads a block, 8 columns a thread.
KERNEL void mla_combine(const float* part_out, const float2* part_max_sum, const int* tile_starts, bf16* out, int batch,
                        int blocks) {
    let_next_start();
    wait_for_previous();
    const int sequence = blockIdx.x, head = blockIdx.y * 4 + threadIdx.x / 64, column = threadIdx.x % 64 * 8;
    const long long total = tile_starts[batch], first = tile_starts[sequence], last = (long long)tile_starts[sequence + 1] - 1;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, weight_sum = 0.f;
    if (first <= last) {
        // Block c has the tiles from total * c / blocks.
        const int c0 = (int)(((first + 1) * blocks - 1) / total), c1 = (int)(((last + 1) * blocks - 1) / total);
        float top = NEG_BIG;
        for (int c = c0; c <= c1; ++c) top = fmaxf(top, part_max_sum[(size_t)(c + sequence) * HEADS + head].x);
#pragma unroll 2
        for (int c = c0; c <= c1; ++c) {
            const size_t part = (size_t)(c + sequence) * HEADS + head;
            const float2 ms = part_max_sum[part];
            const float w = exp2_fast(ms.x - top);
            const float4* row = (const float4*)(part_out + part * LATENT + column);
            const float4 a = row[0], b = row[1];
            weight_sum += w * ms.y;
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
    const float f = weight_sum > 0.f ? 1.f / weight_sum : 0.f;
    *(uint4*)(out + ((size_t)sequence * HEADS + head) * LATENT + column) =
        make_uint4(bf16_pair(sum[0] * f, sum[1] * f), bf16_pair(sum[2] * f, sum[3] * f),
                   bf16_pair(sum[4] * f, sum[5] * f), bf16_pair(sum[6] * f, sum[7] * f));
}
