// Sampled tokens where the logits are: temperature, top-k, top-p, min-p and the draw, one block a row. argmax ran before
// and left the best token of every row; rows whose `scale` is 0 keep it.
//
// Which tokens may be drawn follows from one bound, because all three cuts keep the most probable ones: those above a key
// (a logit's bits, in its order) and of those at the key the first few in order of id. bf16 has 16 bits of key, so a cut is
// found exactly by four passes over the row, each of which settles four bits: every thread adds up what it sees of each of
// 16 digits in memory of its own. No atomics: the same row always comes to the same token.

#define THREADS 1024
#define WARPS (THREADS / 32)
#define DIGITS 16

// What the host says of a row.
struct Rule {
    float scale; // 1 / temperature, 0 for the best token
    u32 top_k;   // 0 for all
    float top_p; // 1 for all
    float min_p;
    double uniform; // in [0, 1)
    double reserved;
};
// The chosen token's interval, its tokens laid out in order of id.
struct Interval {
    double below, upto;
};

// What may be drawn: keys above `key`, and of those equal to it the first `ties`.
struct Bound {
    u32 key;
    int ties;
};

DEVICE u32 key_of(u32 bits) {
    if (bits == 0x8000u) bits = 0; // zeros are equal
    return bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
}
DEVICE float logit_of(u32 key) { return f32_of((bf16)(key & 0x8000u ? key & 0x7fffu : ~key & 0xffffu)); }

// Probability over that of the best token.
DEVICE float weight_of(float logit, float best, float scale) {
    // The difference first: no temperature makes it overflow upwards. 0 times infinity is no number, and becomes 0.
    return exp2_fast(fminf((logit - best) * scale, 0.f) * LOG2_E);
}
DEVICE u32 half_of(const uint4& unit, int i) { return ((const u32*)&unit)[i / 2] >> (i % 2 * 16) & 0xffffu; }

DEVICE double warp_sum(double v) {
#pragma unroll
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
// Sum of the lanes below and this one.
template <class T> DEVICE T warp_scan(T v, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const T other = __shfl_up_sync(~0u, v, d);
        if (lane >= d) v += other;
    }
    return v;
}

// Calls `f` for units from, from + stride, .. below upto; several are on their way at once.
template <class F> DEVICE void each_unit(const uint4* row, int from, int upto, int stride, F f) {
    for (int i = from; i < upto; i += 4 * stride) {
        uint4 units[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (i + j * stride < upto) units[j] = row[i + j * stride];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (i + j * stride < upto) f(units[j]);
    }
}

// The bound above which the row has as much as `target`: tokens, or their weight.
template <bool BY_WEIGHT>
DEVICE Bound cut(const uint4* row, int units, float best, float scale, double target, float* own, double* digit_sums) {
    u32 prefix = 0;
    double above = 0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int shift = 12; shift >= 0; shift -= 4) {
#pragma unroll
        for (int d = 0; d < DIGITS; ++d) own[d * THREADS + threadIdx.x] = 0.f;
        each_unit(row, threadIdx.x, units, THREADS, [&](const uint4& unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const u32 bits = half_of(unit, j), key = key_of(bits);
                if (key >> shift >> 4 != prefix) continue;
                own[(key >> shift & 15) * THREADS + threadIdx.x] += BY_WEIGHT ? weight_of(f32_of((bf16)bits), best, scale) : 1.f;
            }
        });
        __syncthreads();
        if (warp < DIGITS) {
            double sum = 0;
            for (int i = lane; i < THREADS; i += 32) sum += own[warp * THREADS + i];
            sum = warp_sum(sum);
            if (lane == 0) digit_sums[warp] = sum;
        }
        __syncthreads();
        // The same in every thread. Should rounding leave the target out of reach, the last digit that has anything will do.
        double sum = above, found_above = above;
        int digit = 0;
        for (int d = DIGITS - 1; d >= 0; --d) {
            if (digit_sums[d] == 0) continue;
            digit = d;
            found_above = sum;
            sum += digit_sums[d];
            if (sum >= target) break;
        }
        above = found_above;
        prefix = prefix << 4 | digit;
    }
    const double each = BY_WEIGHT ? (double)weight_of(logit_of(prefix), best, scale) : 1.0;
    const double ties = each > 0 ? ceil((target - above) / each) : 1.0;
    return {prefix, (int)fmin(fmax(ties, 1.0), 1.0e9)};
}

// What each warp's part of the row, in order of id, has above the bound's key and at it.
DEVICE void add_up(const uint4* row, int from, int upto, float best, const Rule& rule, const Bound& bound, double* sums, int* ties) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.f;
    int equal = 0;
    each_unit(row, from + lane, upto, 32, [&](const uint4& unit) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 bits = half_of(unit, j), key = key_of(bits);
            const float weight = weight_of(f32_of((bf16)bits), best, rule.scale);
            if (key > bound.key && weight >= rule.min_p) sum += weight;
            equal += key == bound.key;
        }
    });
    const double whole = warp_sum((double)sum);
    equal = __reduce_add_sync(~0u, equal);
    if (lane == 0) sums[warp] = whole, ties[warp] = equal;
}

// The place of a part of the row among the others: what is before it, and what it has.
struct Part {
    int ties_before, ties; // at the bound's key, of those that may be drawn
    double before, own, total;
};
// In every warp; lane i has part i.
DEVICE Part part_of(const double* sums, const int* equal, const Bound& bound, double at_key) {
    const int lane = threadIdx.x % 32;
    const int here = equal[lane], ties_upto = warp_scan(here, lane), ties_before = ties_upto - here;
    const int ties = max(0, min(bound.ties - ties_before, here));
    const double own = sums[lane] + ties * at_key, upto = warp_scan(own, lane);
    return {ties_before, ties, upto - own, own, __shfl_sync(~0u, upto, 31)};
}

// grid rows, THREADS threads, DIGITS * THREADS floats of shared memory. columns is a multiple of 8, at most 8 * THREADS *
// WARPS.
KERNEL void __launch_bounds__(THREADS, 1)
sample(const bf16* logits, const Rule* rules, int* tokens, Interval* intervals, int columns) {
    extern __shared__ float own[];
    __shared__ double digit_sums[DIGITS], sums[WARPS];
    __shared__ int equal[WARPS], first_reached, last_of_any;
    let_next_start();
    wait_for_previous();
    const Rule rule = rules[blockIdx.x];
    const int token = tokens[blockIdx.x];
    if (rule.scale == 0.f || token < 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, units = columns / 8;
    const uint4* row = (const uint4*)(logits + (size_t)blockIdx.x * columns);
    const float best = f32_of(logits[(size_t)blockIdx.x * columns + token]);
    if (best == -__uint_as_float(0x7f800000u)) { // every token is ruled out
        if (threadIdx.x == 0) tokens[blockIdx.x] = -1;
        return;
    }
    const int per_warp = (units + WARPS - 1) / WARPS, from = min(warp * per_warp, units), upto = min(from + per_warp, units);

    Bound bound = {0, 1 << 30};
    if (rule.top_k && rule.top_k < (u32)columns)
        bound = cut<false>(row, units, best, rule.scale, (double)rule.top_k, own, digit_sums);
    if (rule.top_p < 1.f) {
        Rule all = rule;
        all.min_p = 0.f;
        add_up(row, from, upto, best, all, bound, sums, equal);
        __syncthreads();
        const Part part = part_of(sums, equal, bound, (double)weight_of(logit_of(bound.key), best, rule.scale));
        const Bound nucleus = cut<true>(row, units, best, rule.scale, (double)rule.top_p * part.total, own, digit_sums);
        if (nucleus.key > bound.key) bound = nucleus;
        else if (nucleus.key == bound.key) bound.ties = min(bound.ties, nucleus.ties);
        __syncthreads();
    }
    add_up(row, from, upto, best, rule, bound, sums, equal);
    __syncthreads();

    // The same in every warp: the part that the target lies in.
    const float at_bound = weight_of(logit_of(bound.key), best, rule.scale);
    const float at_key = at_bound >= rule.min_p ? at_bound : 0.f;
    const Part part = part_of(sums, equal, bound, (double)at_key);
    const double target = rule.uniform * part.total;
    u32 reached = __ballot_sync(~0u, part.own > 0 && part.before + part.own > target);
    if (!reached) reached = 0x80000000u >> __clz(__ballot_sync(~0u, part.own > 0)); // rounding: the last that has anything
    const int chosen = __ffs(reached) - 1;
    const double before = __shfl_sync(~0u, part.before, chosen);
    const int ties_before = __shfl_sync(~0u, part.ties_before, chosen);
    const int begin = min(chosen * per_warp, units), end = min(begin + per_warp, units);
    const bool works = warp * 32 < end - begin;
    __syncthreads(); // sums and equal are used again

    // Its units, one a thread, in order: first which of those at the bound may be drawn, then where every unit begins.
    const int i = begin + threadIdx.x;
    const bool mine = i < end;
    uint4 unit = make_uint4(0, 0, 0, 0);
    int rank = 0, here = 0;
    if (works) {
        if (mine) {
            unit = row[i];
#pragma unroll
            for (int j = 0; j < 8; ++j) here += key_of(half_of(unit, j)) == bound.key;
        }
        const int ties_upto = warp_scan(here, lane);
        rank = ties_upto - here;
        if (lane == 31) equal[warp] = ties_upto;
    }
    __syncthreads();
    float weights[8];
    double sum = 0, sum_upto = 0;
    if (works) {
        rank += ties_before;
        for (int w = 0; w < warp; ++w) rank += equal[w];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 bits = half_of(unit, j), key = key_of(bits);
            float weight = 0.f;
            if (mine && key > bound.key) weight = weight_of(f32_of((bf16)bits), best, rule.scale);
            else if (mine && key == bound.key && rank++ < bound.ties) weight = at_bound;
            weights[j] = weight < rule.min_p ? 0.f : weight;
            sum += weights[j];
        }
        sum_upto = warp_scan(sum, lane);
        if (lane == 31) sums[warp] = sum_upto;
    }
    if (threadIdx.x == 0) first_reached = last_of_any = -1;
    __syncthreads();
    if (!works) return;
    double start = before;
    for (int w = 0; w < warp; ++w) start += sums[w];
    // The lowest id whose interval reaches beyond the target; should rounding leave none, the last of any weight.
    double running = start + sum_upto - sum;
    int own_reached = -1, own_last = -1;
    Interval at_reached = {0, 0}, at_last = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (weights[j] == 0.f || own_reached >= 0) continue;
        at_last = {running, running + weights[j]};
        own_last = i * 8 + j;
        running = at_last.upto;
        if (running > target) own_reached = own_last, at_reached = at_last;
    }
    // As distance from the end, so that the lowest id is the largest number.
    if (own_reached >= 0) atomicMax(&first_reached, columns - own_reached);
    if (own_last >= 0) atomicMax(&last_of_any, own_last);
    group_sync(1, (end - begin + 31) / 32 * 32);
    const bool any = first_reached >= 0;
    if (any ? columns - own_reached != first_reached || own_reached < 0 : own_last < 0 || own_last != last_of_any) return;
    const Interval found = any ? at_reached : at_last;
    tokens[blockIdx.x] = any ? own_reached : own_last;
    intervals[blockIdx.x] = {found.below / part.total, found.upto / part.total};
}
