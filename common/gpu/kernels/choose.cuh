// How a row chooses its experts: shared by the kernels for few rows and for many.

// Larger floats have larger keys, NaN aside.
DEVICE u32 order_key(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The best TOP_K of a row's EXPERTS logits, ties to the lower index, by one warp: lane k gets the k-th best. `logit(e)` gives a
// logit; by softmax `own` is then a lane's logits, of which the score is a rising function; by sigmoid it is its scores. With
// SIGMOID_ `bias`, if there is one, has a say in the choice and none in the score.
template <int EXPERTS_, int TOP_K_, bool SIGMOID_, int PER_LANE, typename Logit>
DEVICE int pick_experts(float (&own)[PER_LANE], const Logit& logit, const float* bias, int lane) {
    u32 keys[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int e = i * 32 + lane;
        own[i] = e < EXPERTS_ ? logit(e) : NEG_BIG;
        if (SIGMOID_) own[i] = 1.f / (1.f + __expf(-own[i]));
        keys[i] = e < EXPERTS_ ? order_key(SIGMOID_ && bias ? own[i] + bias[e] : own[i]) : 0;
    }
    int mine = 0;
#pragma unroll
    for (int k = 0; k < TOP_K_; ++k) {
        u32 best = keys[0];
#pragma unroll
        for (int i = 1; i < PER_LANE; ++i) best = max(best, keys[i]);
        best = __reduce_max_sync(~0u, best);
        int expert = 0;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i) {
            const u32 lanes = __ballot_sync(~0u, keys[i] == best);
            if (lanes) expert = i * 32 + __ffs((int)lanes) - 1;
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (i * 32 + lane == expert) keys[i] = 0;
        if (lane == k) mine = expert;
    }
    return mine;
}

// The weights of what was picked: lane k gets that of the k-th best, its score, or with NORMALIZE_ its share of the chosen ones' scores.
template <int EXPERTS_, int TOP_K_, bool SIGMOID_, bool NORMALIZE_, int PER_LANE>
DEVICE float weigh_experts(const float (&own)[PER_LANE], int expert, int lane) {
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const float theirs = __shfl_sync(~0u, own[i], expert % 32);
        if (expert / 32 == i) score = theirs;
    }
    if (!SIGMOID_) {
        float top = own[0], all = 0.f;
#pragma unroll
        for (int i = 1; i < PER_LANE; ++i) top = fmaxf(top, own[i]);
#pragma unroll
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) all += (i * 32 + lane < EXPERTS_) ? __expf(own[i] - top) : 0.f;
#pragma unroll
        for (int d = 16; d; d /= 2) all += __shfl_xor_sync(~0u, all, d);
        score = __expf(score - top) / all;
    }
    if (!NORMALIZE_) return score;
    float chosen = 0.f;
#pragma unroll
    for (int k = 0; k < TOP_K_; ++k) chosen += __shfl_sync(~0u, score, k);
    return score / chosen;
}
