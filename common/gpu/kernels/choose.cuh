// How a row chooses its experts: shared by the kernels for few rows and for many.

// Larger floats have larger keys, NaN aside.
DEVICE u32 order_key(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What a lane of the row's warp knows behind `choose_experts`: lane k holds the k-th best.
struct Choice {
    int expert;
    float score;      // before it is normalised
    float all_scores; // sum over the chosen
};

// The best TOP_K of a row's EXPERTS logits, ties to the lower index, by one warp. `logit(e)` gives a logit. With SIGMOID
// `bias`, if there is one, has a say in the choice and none in the score.
template <int EXPERTS_, int TOP_K_, bool SIGMOID_, typename Logit>
DEVICE Choice choose_experts(const Logit& logit, const float* bias, int lane) {
    constexpr int PER_LANE = (EXPERTS_ + 31) / 32;
    // By softmax `own` is the logit, of which the score is a rising function; by sigmoid it is the score.
    float own[PER_LANE];
    u32 keys[PER_LANE];
    float top = NEG_BIG;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int e = i * 32 + lane;
        own[i] = e < EXPERTS_ ? logit(e) : NEG_BIG;
        if (SIGMOID_) own[i] = 1.f / (1.f + __expf(-own[i]));
        keys[i] = e < EXPERTS_ ? order_key(SIGMOID_ && bias ? own[i] + bias[e] : own[i]) : 0;
        top = fmaxf(top, own[i]);
    }
    float all = 0.f;
    if (!SIGMOID_) {
#pragma unroll
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) all += (i * 32 + lane < EXPERTS_) ? __expf(own[i] - top) : 0.f;
#pragma unroll
        for (int d = 16; d; d /= 2) all += __shfl_xor_sync(~0u, all, d);
    }
    Choice mine = {0, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < TOP_K_; ++k) {
        u32 best = keys[0];
#pragma unroll
        for (int i = 1; i < PER_LANE; ++i) best = max(best, keys[i]);
        best = __reduce_max_sync(~0u, best);
        int expert = 1 << 30;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
            if (keys[i] == best) expert = i * 32 + lane;
        expert = __reduce_min_sync(~0u, expert);
        float value = 0.f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (i * 32 + lane == expert) {
                keys[i] = 0;
                value = own[i];
            }
        }
        value = __shfl_sync(~0u, value, expert % 32);
        const float score = SIGMOID_ ? value : __expf(value - top) / all;
        mine.all_scores += score;
        if (lane == k) {
            mine.score = score;
            mine.expert = expert;
        }
    }
    return mine;
}
