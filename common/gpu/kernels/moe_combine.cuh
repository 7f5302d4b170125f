// The last of a mixture of experts' kernels for few rows: a row's sum. moe.cu says which constants are defined.

// out[t] = sum of the chosen experts' rows by their weights, in the order of choice, and the shared experts' rows.
// Rows beyond num_rows become zero. grid (max_rows and blocks that fetch ahead, HIDDEN / 256), 64 threads of four columns
KERNEL void moe_combine(const float* y, const float* weights, void* out, const int* num_rows, int max_rows, AHEAD) {
    let_next_start();
    if ((int)blockIdx.x >= max_rows)
        return FETCH_AHEAD((blockIdx.x - max_rows) * gridDim.y + blockIdx.y, (gridDim.x - max_rows) * gridDim.y);
    wait_for_previous();
    const int t = blockIdx.x, column = blockIdx.y * 256 + threadIdx.x * 4;
    // All is asked for at once, needed or not: the device waits for this kernel.
    const int real = num_rows ? load_fresh(num_rows) : max_rows;
    float w[CHOICES];
    float4 v[CHOICES];
#pragma unroll
    for (int k = 0; k < CHOICES; ++k) {
        w[k] = k < TOP_K ? load_now(weights + t * TOP_K + k) : 1.f;
        v[k] = load_now((const float4*)(y + ((size_t)t * CHOICES + k) * HIDDEN + column));
    }
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (t < min(real, max_rows)) {
        // A weight of zero is another shard's expert: nobody wrote that row.
#pragma unroll
        for (int k = 0; k < CHOICES; ++k) {
            if (w[k] == 0.f) continue;
            sum.x += w[k] * v[k].x;
            sum.y += w[k] * v[k].y;
            sum.z += w[k] * v[k].z;
            sum.w += w[k] * v[k].w;
        }
    }
#if OUT_F32
    *(float4*)((float*)out + (size_t)t * HIDDEN + column) = sum;
#else
    *(uint2*)((bf16*)out + (size_t)t * HIDDEN + column) = make_uint2(bf16_pair(sum.x, sum.y), bf16_pair(sum.z, sum.w));
#endif
}
