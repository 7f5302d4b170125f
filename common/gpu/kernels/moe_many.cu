// What stands around the products of a mixture-of-experts layer with many rows (prompts): the choice of experts, the rows in
// the order of experts, the weighted sum, and SwiGLU where the products are not moe_product.cu's. Each is bound by the bytes that it moves.
//
// Defined at compile time: HIDDEN, INTER (of one expert), EXPERTS, TOP_K, SHARED (experts), SIGMOID, NORMALIZE,
// ROUND_LOGITS, OUT_F32: as in moe.cu. With EXPERTS 0 there is a sum over shared experts alone.
//
// positions[row * TOP_K + k]: where the row's k-th choice stands among all rows sorted by expert; -1 where another shard
// has that expert.

#if EXPERTS
// grid ceil(rows / 8), 256 threads: a warp a row. `logits` [rows, EXPERTS]
KERNEL void many_choose(const float* logits, const float* bias, int* ids, float* weights, int rows, float scale, int first_local,
                        int num_local) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    const float* own = logits + (size_t)row * EXPERTS;
    const auto logit = [&](int e) { return ROUND_LOGITS ? f32_of(bf16_of(own[e])) : own[e]; };
    float scores[(EXPERTS + 31) / 32];
    const int expert = pick_experts<EXPERTS, TOP_K, SIGMOID>(scores, logit, bias, lane);
    const float weight = weigh_experts<EXPERTS, TOP_K, SIGMOID, NORMALIZE>(scores, expert, lane);
    if (lane >= TOP_K) return;
    const bool local = expert >= first_local && expert < first_local + num_local;
    ids[row * TOP_K + lane] = local ? expert - first_local : -1;
    weights[row * TOP_K + lane] = local ? weight * scale : 0.f;
}

// Sum over a block of 1024 threads, for all of them, and of the threads before this one in `before`.
DEVICE int block_scan(int value, int& before, int* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int n = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += n;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int total = scratch[lane];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, total, d);
            if (lane >= d) total += n;
        }
        scratch[lane] = total;
    }
    __syncthreads();
    before = sum - value + (warp ? scratch[warp - 1] : 0);
    const int all = scratch[31];
    __syncthreads();
    return all;
}

// Block e gives places to the choices of expert e, in their order, behind those of all experts before it; ends[e] is where
// they end. A choice of nobody here (-1) gets place -1. tally [num_experts], if there is one: how often each was chosen, added to.
// grid local experts, 1024 threads
KERNEL void __launch_bounds__(1024)
many_place(const int* ids, int* positions, int* ends, u64* tally, int count, int first_local) {
    __shared__ int scratch[32];
    const int expert = blockIdx.x;
    const int each = ((count + 1023) / 1024 + 3) / 4 * 4, begin = threadIdx.x * each, end = min(begin + each, count);
    int earlier = 0, own = 0;
    const auto look = [&](int id) {
        earlier += (u32)id < (u32)expert;
        own += id == expert;
    };
    for (int i = begin; i < end; i += 4) {
        if (i + 4 <= end) {
            const int4 four = *(const int4*)(ids + i);
            look(four.x), look(four.y), look(four.z), look(four.w);
        } else {
            for (int j = i; j < end; ++j) look(ids[j]);
        }
    }
    int at, unused;
    const int first = block_scan(earlier, unused, scratch), all = block_scan(own, at, scratch);
    if (threadIdx.x == 0) {
        ends[expert] = first + all;
        if (tally) atomicAdd(tally + first_local + expert, (u64)all);
    }
    if (own == 0 && expert) return;
    at += first;
    for (int i = begin; i < end; ++i) {
        const int id = ids[i];
        if (id == expert) positions[i] = at++;
        if (expert == 0 && id < 0) positions[i] = -1;
    }
}

// sorted[position] = x[row], for every choice of the row; with `copy` all rows once more behind the choices of all.
// grid rows, HIDDEN / 8 threads
KERNEL void many_scatter(const bf16* x, const int* positions, bf16* sorted, int copy) {
    const int* own = positions + (size_t)blockIdx.x * TOP_K;
    const uint4 v = ((const uint4*)x)[(size_t)blockIdx.x * (HIDDEN / 8) + threadIdx.x];
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        const int at = own[k];
        if (at >= 0) ((uint4*)sorted)[(size_t)at * (HIDDEN / 8) + threadIdx.x] = v;
    }
    if (copy) ((uint4*)sorted)[((size_t)gridDim.x * TOP_K + blockIdx.x) * (HIDDEN / 8) + threadIdx.x] = v;
}
#endif

DEVICE float swiglu(float gate, float up) { return gate / (1.f + __expf(-gate)) * up; }

// out = silu(gate) * up; a row of `both` is INTER gates, then INTER ups. A thread has eight of each.
// grid ceil(rows * INTER / 8 / 256), 256 threads
KERNEL void many_swiglu(const bf16* both, bf16* out, int rows) {
    constexpr u32 PARTS = INTER / 8;
    const u32 at = blockIdx.x * 256 + threadIdx.x, row = at / PARTS, part = at % PARTS;
    if (row >= (u32)rows) return;
    const uint4* source = (const uint4*)both + (size_t)row * 2 * PARTS + part;
    const uint4 gate = source[0], up = source[PARTS];
    const u32 *g = (const u32*)&gate, *u = (const u32*)&up;
    uint4 result;
    u32* pairs = (u32*)&result;
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = bf16_pair(swiglu(f32_low(g[i]), f32_low(u[i])), swiglu(f32_high(g[i]), f32_high(u[i])));
    ((uint4*)out)[at] = result;
}

// out[row] = the chosen experts' rows by their weights, in the order of choice, and the shared experts' rows, [SHARED, rows,
// HIDDEN]. grid rows, HIDDEN / 8 threads of eight columns
KERNEL void many_combine(const bf16* sorted, const int* positions, const float* weights, const bf16* shared, void* out, int rows) {
    const size_t row = blockIdx.x, column = threadIdx.x;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    const auto add = [&](const uint4& v, float weight) {
        const u32* pairs = (const u32*)&v;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[2 * i] += weight * f32_low(pairs[i]);
            sum[2 * i + 1] += weight * f32_high(pairs[i]);
        }
    };
#if EXPERTS
    uint4 routed[TOP_K];
    float weight[TOP_K];
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        const int at = positions[row * TOP_K + k];
        weight[k] = weights[row * TOP_K + k];
        // What no expert here wrote is not even a number.
        routed[k] = at >= 0 ? ((const uint4*)sorted)[(size_t)at * (HIDDEN / 8) + column] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) add(routed[k], weight[k]);
#endif
#pragma unroll
    for (int s = 0; s < SHARED; ++s) add(((const uint4*)shared)[((size_t)s * rows + row) * (HIDDEN / 8) + column], 1.f);
#if OUT_F32
    float4* to = (float4*)((float*)out + row * HIDDEN + column * 8);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#else
    uint4 result;
    u32* pairs = (u32*)&result;
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = bf16_pair(sum[2 * i], sum[2 * i + 1]);
    ((uint4*)out)[row * (HIDDEN / 8) + column] = result;
#endif
}
