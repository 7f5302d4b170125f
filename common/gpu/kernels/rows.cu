// Row-wise steps of a decoder layer for few rows: norm (with the residual added first), rope and cache write, argmax.
// Each is bound by latency, not by bytes: one block a row, everything in one pass.

// Sum over a block of at most 1024 threads; `scratch` has 33 floats. All threads get it.
DEVICE float block_sum(float v, float* scratch) {
#pragma unroll
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        float s = threadIdx.x < (blockDim.x + 31) / 32 ? scratch[threadIdx.x] : 0.f;
#pragma unroll
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        if (threadIdx.x == 0) scratch[32] = s;
    }
    __syncthreads();
    return scratch[32];
}

// out = norm of `r` * weight, for eight neighbouring elements of a row per thread.
DEVICE uint4 normed(const uint4& r, const uint4& w, int hidden, float epsilon, float* scratch) {
    const u32 *pairs = (const u32*)&r, *scale = (const u32*)&w;
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) square += f32_low(pairs[i]) * f32_low(pairs[i]) + f32_high(pairs[i]) * f32_high(pairs[i]);
    const float f = rsqrtf(block_sum(square, scratch) / hidden + epsilon);
    uint4 o;
    u32* result = (u32*)&o;
#pragma unroll
    for (int i = 0; i < 4; ++i) // the normed value is rounded before it is scaled, as the models do
    {
        const u32 normed = bf16_pair(f32_low(pairs[i]) * f, f32_high(pairs[i]) * f);
        result[i] = bf16_pair(f32_low(normed) * f32_low(scale[i]), f32_high(normed) * f32_high(scale[i]));
    }
    return o;
}

// Eight of a row's elements of what is added beside the sums, f32; zeros if there is none.
DEVICE void take_more(float (&sum)[8], const float* more, size_t at) {
    if (!more) return;
    const float4 a = ((const float4*)more)[at * 2], b = ((const float4*)more)[at * 2 + 1];
    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
}

// r += sum, which is rounded before it is added, as everywhere.
DEVICE void add_rounded(uint4& r, const float (&sum)[8]) {
    u32* pairs = (u32*)&r;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 whole = bf16_pair(sum[2 * i], sum[2 * i + 1]);
        pairs[i] = bf16_pair(f32_low(pairs[i]) + f32_low(whole), f32_high(pairs[i]) + f32_high(whole));
    }
}

// residual += delta (if any) and `more` f32 (if any, with delta), rounded to bf16 as it is stored; out, and `also` if there is
// one, = norm of that * weight. grid rows and blocks that fetch ahead, hidden / 8 threads
KERNEL void rms_norm(const bf16* delta, const float* more, bf16* residual, const bf16* weight, bf16* out, bf16* also, int hidden,
                     float epsilon, int rows, AHEAD) {
    __shared__ float scratch[33];
    let_next_start();
    if ((int)blockIdx.x >= rows) return FETCH_AHEAD(blockIdx.x - rows, gridDim.x - rows);
    const uint4 w = __ldg((const uint4*)weight + threadIdx.x);
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * (hidden / 8) + threadIdx.x;
    uint4 r = ((const uint4*)residual)[at];
    if (delta) {
        const uint4 d = ((const uint4*)delta)[at];
        const u32* pairs = (const u32*)&d;
        float sum[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[2 * i] = f32_low(pairs[i]), sum[2 * i + 1] = f32_high(pairs[i]);
        take_more(sum, more, at);
        add_rounded(r, sum);
        ((uint4*)residual)[at] = r;
    }
    const uint4 o = normed(r, w, hidden, epsilon, scratch);
    ((uint4*)out)[at] = o;
    if (also) ((uint4*)also)[at] = o;
}

// residual += sum of `count` partial sums, f32, each [.., hidden] at its address in `parts`, added in that order, then `more`;
// out as above. grid rows, hidden / 8 threads
KERNEL void rms_norm_parts(const u64* parts, int count, const float* more, bf16* residual, const bf16* weight, bf16* out, int hidden,
                           float epsilon) {
    __shared__ float scratch[33];
    let_next_start();
    const uint4 w = __ldg((const uint4*)weight + threadIdx.x);
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * (hidden / 8) + threadIdx.x;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int p = 0; p < count; ++p) {
        const float4* part = (const float4*)parts[p] + at * 2;
        const float4 a = part[0], b = part[1];
        sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
        sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    }
    take_more(sum, more, at);
    uint4 r = ((const uint4*)residual)[at];
    add_rounded(r, sum);
    ((uint4*)residual)[at] = r;
    ((uint4*)out)[at] = normed(r, w, hidden, epsilon, scratch);
}

// residual = the embedding of each row's token; out = its norm. Ids beyond the vocabulary read its last row.
// grid rows, hidden / 8 threads
KERNEL void embed_norm(const int* ids, const bf16* table, bf16* residual, const bf16* weight, bf16* out, int vocab, int hidden,
                       float epsilon) {
    __shared__ float scratch[33];
    let_next_start();
    const uint4 w = __ldg((const uint4*)weight + threadIdx.x);
    wait_for_previous();
    const u32 id = min((u32)ids[blockIdx.x], (u32)(vocab - 1));
    const uint4 r = __ldg((const uint4*)table + (size_t)id * (hidden / 8) + threadIdx.x);
    const size_t at = (size_t)blockIdx.x * (hidden / 8) + threadIdx.x;
    ((uint4*)residual)[at] = r;
    ((uint4*)out)[at] = normed(r, w, hidden, epsilon, scratch);
}

// What MLA puts into its cache, the normed latent, then the turned rope key; and the turned rope part of every query.
// `projected` has a row's queries [heads, nope + rope] and behind them its latent and rope key, [latent + rope], and is
// `stride` elements from row to row. A row's turned rope parts go to `query`, `query_row` elements from row to row,
// `query_head` from head to head, beginning at `query_at`; it may be `projected` itself.
// cos_sin [positions, rope] f32: rope / 2 cosines, then as many sines. Pairs are neighbours (interleaved) or halves, and stay
// where they are. grid (rows and blocks that fetch ahead, 1 + heads / 4), 128 threads: block 0 writes the cache, each other one turns four heads.
KERNEL void mla_write(const bf16* projected, const bf16* latent_norm, bf16* query, const float* cos_sin, const int* positions,
                      const long long* slots, bf16* cache, int stride, int query_row, int query_head, int query_at, int latent,
                      int nope, int rope, int heads, int interleaved, float epsilon, int rows, AHEAD) {
    __shared__ float scratch[33];
    let_next_start();
    if ((int)blockIdx.x >= rows) return FETCH_AHEAD((blockIdx.x - rows) * gridDim.y + blockIdx.y, (gridDim.x - rows) * gridDim.y);
    const int row = blockIdx.x, half = rope / 2, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool of_cache = blockIdx.y == 0;
    const int head = (blockIdx.y - 1) * 4 + warp;
    // Everything is asked for before any of it is needed: the device waits for this kernel.
    constexpr int QUADS = 2; // of a thread, at most: 1024 elements of the latent
    uint2 weight[QUADS], value[QUADS];
    if (of_cache) {
#pragma unroll
        for (int j = 0; j < QUADS; ++j)
            if (threadIdx.x + j * 128 < latent / 4) weight[j] = __ldg((const uint2*)latent_norm + threadIdx.x + j * 128);
    }
    wait_for_previous();
    const bf16* own = projected + (size_t)row * stride;
    const bf16* const latents = own + heads * (nope + rope);
    const bf16* from = of_cache ? latents + latent : own + head * (nope + rope) + nope;
    const bool turns = of_cache ? warp == 0 : head < heads;
    const long long slot = of_cache ? slots[row] : 0;
    const int position = positions[row];
    float square = 0.f;
    if (of_cache) {
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            if (threadIdx.x + j * 128 >= latent / 4) continue;
            value[j] = *((const uint2*)latents + threadIdx.x + j * 128);
            const float a = f32_low(value[j].x), b = f32_high(value[j].x), c = f32_low(value[j].y), d = f32_high(value[j].y);
            square += a * a + b * b + c * c + d * d;
        }
    }
    // A lane turns pairs i, i + 32 and so on.
    const auto first = [&](int i) { return interleaved ? 2 * i : i; };
    const auto second = [&](int i) { return interleaved ? 2 * i + 1 : half + i; };
    const float* angle = cos_sin + (size_t)position * rope;
    float x = 0.f, y = 0.f, cs = 0.f, sn = 0.f;
    if (turns && lane < half) {
        x = f32_of(from[first(lane)]);
        y = f32_of(from[second(lane)]);
        cs = angle[lane];
        sn = angle[half + lane];
    }
    bf16* to = query + (size_t)row * query_row + head * query_head + query_at;
    if (of_cache) {
        if (slot < 0) return; // padding
        to = cache + (size_t)slot * (latent + rope);
        const float f = rsqrtf(block_sum(square, scratch) / latent + epsilon);
#pragma unroll
        for (int j = 0; j < QUADS; ++j) {
            if (threadIdx.x + j * 128 >= latent / 4) continue;
            const uint2 v = value[j], w = weight[j];
            const u32 low = bf16_pair(f32_low(v.x) * f, f32_high(v.x) * f), high = bf16_pair(f32_low(v.y) * f, f32_high(v.y) * f);
            *((uint2*)to + threadIdx.x + j * 128) = make_uint2(bf16_pair(f32_low(low) * f32_low(w.x), f32_high(low) * f32_high(w.x)),
                                                               bf16_pair(f32_low(high) * f32_low(w.y), f32_high(high) * f32_high(w.y)));
        }
        to += latent;
    }
    if (!turns) return;
    for (int i = lane; i < half; i += 32) {
        if (i >= 32) {
            x = f32_of(from[first(i)]);
            y = f32_of(from[second(i)]);
            cs = angle[i];
            sn = angle[half + i];
        }
        to[first(i)] = bf16_of(x * cs - y * sn);
        to[second(i)] = bf16_of(y * cs + x * sn);
    }
}

// Norms (per head, if there are weights) and turns the queries of `qkv` [rows, heads + 2 kv, dim] in place, and the keys on
// their way into the cache; values are copied there. keys, values [blocks, block_size, kv, dim]. Halves of the first
// `rotary` elements are pairs. grid (rows, heads + 2 kv), 32 threads; dim is a multiple of 32 up to 256.
KERNEL void gqa_write(bf16* qkv, const bf16* query_norm, const bf16* key_norm, const float* cos_sin, const int* positions,
                      const long long* slots, bf16* keys, bf16* values, int heads, int kv, int dim, int rotary, float epsilon) {
    __shared__ float turned[256];
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x, half = rotary / 2;
    const long long slot = slots[row];
    bf16* own = qkv + ((size_t)row * (heads + 2 * kv) + head) * dim;
    const bool is_query = head < heads;
    if (!is_query && slot < 0) return; // padding
    if (head >= heads + kv) {
        bf16* to = values + ((size_t)slot * kv + head - heads - kv) * dim;
        for (int i = lane; i < dim; i += 32) to[i] = own[i];
        return;
    }
    const bf16* norm = is_query ? query_norm : key_norm;
    float square = 0.f;
    for (int i = lane; i < dim; i += 32) {
        const float x = f32_of(own[i]);
        turned[i] = x;
        square += x * x;
    }
    if (norm) {
#pragma unroll
        for (int d = 16; d; d /= 2) square += __shfl_xor_sync(~0u, square, d);
        const float f = rsqrtf(square / dim + epsilon);
        for (int i = lane; i < dim; i += 32) turned[i] = f32_of(bf16_of(f32_of(bf16_of(turned[i] * f)) * f32_of(norm[i])));
    }
    __syncwarp();
    bf16* to = is_query ? own : keys + ((size_t)slot * kv + head - heads) * dim;
    const float* angle = cos_sin + (size_t)positions[row] * rotary;
    for (int i = lane; i < dim; i += 32) {
        float v = turned[i];
        if (i < half) v = v * angle[i] - turned[i + half] * angle[half + i];
        else if (i < rotary) v = v * angle[i - half] + turned[i - half] * angle[i];
        to[i] = bf16_of(v);
    }
}

// The index of the largest logit of each row, the lowest on ties; -1 when one is not a number or infinitely large.
// grid (up to MAX_ARGMAX_BLOCKS, rows), clusters of the blocks of a row, ARGMAX_THREADS threads
#define MAX_ARGMAX_BLOCKS 8
#define ARGMAX_THREADS 512
KERNEL void __launch_bounds__(ARGMAX_THREADS) argmax(const bf16* logits, int* out, int columns) {
    __shared__ u64 best[ARGMAX_THREADS / 32], best_of_blocks[MAX_ARGMAX_BLOCKS];
    let_next_start();
    wait_for_previous();
    const uint4* row = (const uint4*)(logits + (size_t)blockIdx.y * columns);
    u64 own = 0; // order key of the value, then how far the index is from the end
#pragma unroll 4
    for (int i = blockIdx.x * ARGMAX_THREADS + threadIdx.x; i < columns / 8; i += gridDim.x * ARGMAX_THREADS) {
        const uint4 v = row[i];
        const u32* pairs = (const u32*)&v;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float x = j % 2 ? f32_high(pairs[j / 2]) : f32_low(pairs[j / 2]);
            const u32 bits = __float_as_uint(x), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
            const u64 candidate = x < __uint_as_float(0x7f800000u) ? (u64)key << 32 | (0xffffffffu - (u32)(i * 8 + j)) : ~0ull;
            own = own > candidate ? own : candidate;
        }
    }
    const auto best_of_warp = [&]() {
#pragma unroll
        for (int d = 16; d; d /= 2) {
            const u64 other = __shfl_xor_sync(~0u, own, d);
            own = own > other ? own : other;
        }
    };
    best_of_warp();
    if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x < 32) {
        own = threadIdx.x < ARGMAX_THREADS / 32 ? best[threadIdx.x] : 0;
        best_of_warp();
        if (threadIdx.x == 0) store_shared_cluster(shared_address_of(shared_address(&best_of_blocks[cluster_rank()]), 0), own);
    }
    cluster_sync();
    if (cluster_rank() || threadIdx.x >= 32) return;
    own = threadIdx.x < gridDim.x ? best_of_blocks[threadIdx.x] : 0;
    best_of_warp();
    if (threadIdx.x == 0) out[blockIdx.y] = own == ~0ull ? -1 : (int)(0xffffffffu - (u32)own);
}

// Copies `count` times 16 bytes between the device and page-locked memory of the host. Of the words from `ids_at` on, a multiple
// of 4, the first `rows` are not copied but taken from `tokens`. For some kilobytes this begins and ends microseconds sooner
// than the copy engines, which a stream is handed over to and back. 256 threads
KERNEL void carry(const uint4* from, uint4* to, int count, const int* tokens, int ids_at, int rows) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from + i));
    const int row = i * 4 - ids_at;
    u32* words = (u32*)&v;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (row >= 0 && row + j < rows) words[j] = (u32)tokens[row + j];
    to[i] = v;
}
