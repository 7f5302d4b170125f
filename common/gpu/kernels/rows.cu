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

// residual += delta (if any), rounded to bf16 as it is stored; out = norm of that * weight.
// grid rows, hidden / 8 threads
KERNEL void rms_norm(const bf16* delta, bf16* residual, const bf16* weight, bf16* out, int hidden, float epsilon) {
    __shared__ float scratch[33];
    let_next_start();
    const uint4 w = __ldg((const uint4*)weight + threadIdx.x);
    wait_for_previous();
    const size_t at = (size_t)blockIdx.x * (hidden / 8) + threadIdx.x;
    uint4 r = ((const uint4*)residual)[at];
    u32* pairs = (u32*)&r;
    if (delta) {
        const uint4 d = ((const uint4*)delta)[at];
        const u32* more = (const u32*)&d;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = bf16_pair(f32_low(pairs[i]) + f32_low(more[i]), f32_high(pairs[i]) + f32_high(more[i]));
        ((uint4*)residual)[at] = r;
    }
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) square += f32_low(pairs[i]) * f32_low(pairs[i]) + f32_high(pairs[i]) * f32_high(pairs[i]);
    const float f = rsqrtf(block_sum(square, scratch) / hidden + epsilon);
    const u32* scale = (const u32*)&w;
    uint4 o;
    u32* result = (u32*)&o;
#pragma unroll
    for (int i = 0; i < 4; ++i) // the normed value is rounded before it is scaled, as the models do
    {
        const u32 normed = bf16_pair(f32_low(pairs[i]) * f, f32_high(pairs[i]) * f);
        result[i] = bf16_pair(f32_low(normed) * f32_low(scale[i]), f32_high(normed) * f32_high(scale[i]));
    }
    ((uint4*)out)[at] = o;
}

// What MLA puts into its cache: the normed latent, then the rotated rope key; and the rotated rope part of every query.
// kv [rows, latent + rope], query [rows, heads, query_stride] with the rope part at query_rope, both bf16;
// cos_sin [positions, rope] f32: rope / 2 cosines, then as many sines. Neighbouring elements are a pair and come out
// as halves, as the checkpoint's interleaved layout asks. grid rows, latent / 4 threads
KERNEL void mla_write(const bf16* kv, const bf16* latent_norm, bf16* query, const float* cos_sin, const int* positions,
                      const long long* slots, bf16* cache, int latent, int rope, int heads, int query_stride, int query_rope, float epsilon) {
    __shared__ float scratch[33];
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x, half = rope / 2;
    const bf16* own = kv + (size_t)row * (latent + rope);
    const long long slot = slots[row];
    const float* angle = cos_sin + (size_t)positions[row] * rope;
    const uint2 v = *(const uint2*)(own + threadIdx.x * 4);
    const uint2 w = *(const uint2*)(latent_norm + threadIdx.x * 4);
    const float a = f32_low(v.x), b = f32_high(v.x), c = f32_low(v.y), d = f32_high(v.y);
    const float f = rsqrtf(block_sum(a * a + b * b + c * c + d * d, scratch) / latent + epsilon);
    if (slot >= 0) {
        bf16* target = cache + (size_t)slot * (latent + rope);
        const u32 low = bf16_pair(a * f, b * f), high = bf16_pair(c * f, d * f);
        *(uint2*)(target + threadIdx.x * 4) = make_uint2(bf16_pair(f32_low(low) * f32_low(w.x), f32_high(low) * f32_high(w.x)),
                                                         bf16_pair(f32_low(high) * f32_low(w.y), f32_high(high) * f32_high(w.y)));
        if (threadIdx.x < half) {
            const int i = threadIdx.x;
            const float x = f32_of(own[latent + 2 * i]), y = f32_of(own[latent + 2 * i + 1]), cs = angle[i], sn = angle[half + i];
            target[latent + i] = bf16_of(x * cs - y * sn);
            target[latent + half + i] = bf16_of(y * cs + x * sn);
        }
    }
    // Every pair of a head is read before any is written: one warp a head, one lane a pair.
    for (int head = threadIdx.x / 32; head < heads; head += blockDim.x / 32) {
        bf16* part = query + ((size_t)row * heads + head) * query_stride + query_rope;
        const int i = threadIdx.x % 32;
        const float x = f32_of(part[2 * i]), y = f32_of(part[2 * i + 1]), cs = angle[i], sn = angle[half + i];
        __syncwarp();
        part[i] = bf16_of(x * cs - y * sn);
        part[half + i] = bf16_of(y * cs + x * sn);
    }
}

// The index of the largest logit of each row, the lowest on ties; NaN is never the largest. grid rows, 1024 threads
KERNEL void argmax(const bf16* logits, int* out, int columns) {
    __shared__ u64 best[32];
    let_next_start();
    wait_for_previous();
    const uint4* row = (const uint4*)(logits + (size_t)blockIdx.x * columns);
    u64 own = 0; // order key of the value, then how far the index is from the end
    for (int i = threadIdx.x; i < columns / 8; i += blockDim.x) {
        const uint4 v = row[i];
        const u32* pairs = (const u32*)&v;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float x = j % 2 ? f32_high(pairs[j / 2]) : f32_low(pairs[j / 2]);
            const u32 bits = __float_as_uint(x), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
            const u64 candidate = x == x ? (u64)key << 32 | (0xffffffffu - (u32)(i * 8 + j)) : 0;
            own = own > candidate ? own : candidate;
        }
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
        const u64 other = __shfl_xor_sync(~0u, own, d);
        own = own > other ? own : other;
    }
    if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x < 32) {
        own = threadIdx.x < blockDim.x / 32 ? best[threadIdx.x] : 0;
#pragma unroll
        for (int d = 16; d; d /= 2) {
            const u64 other = __shfl_xor_sync(~0u, own, d);
            own = own > other ? own : other;
        }
        if (threadIdx.x == 0) out[blockIdx.x] = (int)(0xffffffffu - (u32)own);
    }
}
