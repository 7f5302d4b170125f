// Products with few rows, bound by reading the weight: out[rows, columns] = x[rows, inner] · weight[columns, inner]ᵀ, or as
// many of them as the grid is high. A block has 16 columns and asks for all of its weight before it waits for x, so that the
// weight is read while the kernels ahead still run; its warps share the inner dimension.
//
// By bulk copies into shared memory: where kernels have their way with most of that, first-level caches are small, and
// loads on their way need room there.

#define MAX_WARPS 16
#define OPERANDS \
    const bf16 *x, const bf16 *weight, bf16 *out, int rows, int x_stride, int x_batch, int weight_batch, int out_stride, int out_batch

// CHUNKS of 32 elements of the inner dimension a warp, NT tiles of 8 rows.
template <int CHUNKS, int NT> DEVICE void few_product(OPERANDS) {
    extern __shared__ __align__(128) u8 memory[]; // 16 rows of the weight, each 64 bytes longer: no bank conflicts
    __shared__ float4 partial[MAX_WARPS][NT][32];
    __shared__ __align__(8) u64 barrier_word;
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int warps = blockDim.x / 32, inner = warps * CHUNKS * 32, begin = warp * CHUNKS * 32 + q * 8;
    const u32 barrier = shared_address(&barrier_word), tile = shared_address(memory), row_bytes = inner * 2, row_stride = row_bytes + 64;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, 16 * row_bytes);
    }
    __syncthreads();
    if (threadIdx.x < 16) {
        const bf16* source = weight + (size_t)blockIdx.y * weight_batch + (size_t)(blockIdx.x * 16 + threadIdx.x) * inner;
        bulk_copy(tile + threadIdx.x * row_stride, source, row_bytes, barrier, policy_evict_first());
    }
    wait_for_previous();
    const u32 a = tile + g * row_stride + begin * 2;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
        const bf16* b = x + (size_t)blockIdx.y * x_batch + (size_t)min(t * 8 + g, rows - 1) * x_stride + begin;
        uint4 part[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) part[c] = *(const uint4*)(b + c * 32);
        if (t == 0) barrier_wait(barrier, 0);
        // The weight is what the tensor core sees as A: both take the inner dimension in the same order, whichever that is.
        float acc[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 low = load_shared_16(a + c * 64), high = load_shared_16(a + 8 * row_stride + c * 64);
            mma(acc[0], low.x, high.x, low.y, high.y, part[c].x, part[c].y);
            mma(acc[1], low.z, high.z, low.w, high.w, part[c].z, part[c].w);
        }
        partial[warp][t][lane] =
            make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
    }
    __syncthreads();
    // A thread sums one element over the warps: element j of lane l of tile t.
    for (int i = threadIdx.x; i < NT * 128; i += blockDim.x) {
        const int t = i / 128, l = i % 128 / 4, j = i % 4;
        const int column = blockIdx.x * 16 + l / 4 + j / 2 * 8, row = t * 8 + l % 4 * 2 + j % 2;
        if (row >= rows) continue;
        float sum = 0.f;
        for (int w = 0; w < warps; ++w) sum += ((const float*)&partial[w][t][l])[j];
        out[(size_t)blockIdx.y * out_batch + (size_t)row * out_stride + column] = bf16_of(sum);
    }
}

// grid (columns / 16, products), 32 threads for each CHUNKS * 32 elements of the inner dimension
#define FEW_PRODUCT(CHUNKS, NT) \
    KERNEL void __launch_bounds__(MAX_WARPS * 32) few_product_##CHUNKS##_##NT(OPERANDS) { \
        few_product<CHUNKS, NT>(x, weight, out, rows, x_stride, x_batch, weight_batch, out_stride, out_batch); \
    }
FEW_PRODUCT(1, 1)
FEW_PRODUCT(2, 1)
FEW_PRODUCT(4, 1)
FEW_PRODUCT(8, 1)
FEW_PRODUCT(1, 2)
FEW_PRODUCT(2, 2)
FEW_PRODUCT(4, 2)
FEW_PRODUCT(8, 2)
