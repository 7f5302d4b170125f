// Who computes which part of the decode attention of a batch: all sequences together are cut into tiles of TILE tokens, and the
// tiles into one contiguous range per block, whatever the lengths, so that no block waits for a long sequence.
//
// plan: for each block int4 {first tile, end tile, sequence of the first, 0} and that sequence's entry, then for each sequence
// its entry: int4 {first tile, end tile, tokens, first block | last block << 16}.

#define TILE 32
#define SLACK 2 // tiles that a block may have more than in the most even cut

// The plan from the lengths, once a step for all layers. One block of 1024 threads; batch and blocks at most 1024.
KERNEL void mla_plan(const int* seq_lens, int4* plan, int batch, int blocks) {
    __shared__ int sums[32];
    const int i = threadIdx.x, lane = i % 32, warp = i / 32;
    wait_for_previous();
    const int len = i < batch ? seq_lens[i] : 0, own = (len + TILE - 1) / TILE;
    const auto sum_up_to = [&](int v) { // over the lanes of a warp
        for (int d = 1; d < 32; d *= 2) {
            const int n = __shfl_up_sync(~0u, v, d);
            if (lane >= d) v += n;
        }
        return v;
    };
    const auto sum_of_all_up_to = [&](int v, int& total) {
        int end = sum_up_to(v);
        __syncthreads(); // the sums before may still be read
        if (lane == 31) sums[warp] = end;
        __syncthreads();
        if (warp == 0) sums[lane] = sum_up_to(sums[lane]);
        __syncthreads();
        total = sums[31];
        return warp ? end + sums[warp - 1] : end;
    };
    int total, pieces = 0, used = blocks + 1, last_piece = 0;
    const int end = sum_of_all_up_to(own, total), begin = end - own;
    // A block that ends in the midst of one sequence and begins another pays for it with the time of a tile or two. Nearly as
    // even a cut is taken where it has no such block.
    const int even = (total + blocks - 1) / blocks;
    for (int longest = even; total && longest <= even + SLACK; ++longest) {
        pieces = (own + longest - 1) / longest;
        last_piece = sum_of_all_up_to(pieces, used) - 1;
        if (used <= blocks) break;
    }
    const bool whole = total && used <= blocks;
    if (!whole) used = min(total, blocks); // each has a tile, and leaves a part
    // The blocks of this sequence; of all, block c has the tiles from total * c / used where they are cut without regard to it.
    const int first_block = whole ? last_piece + 1 - pieces : own ? (int)(((begin + 1ll) * used - 1) / total) : 0;
    const int last_block = whole ? last_piece : own ? (int)((end * (long long)used - 1) / total) : 0;
    const int4 entry = make_int4(begin, end, len, first_block | last_block << 16);
    if (i < batch) plan[2 * blocks + i] = entry;
    if (i < blocks && i >= used) plan[2 * i] = make_int4(0, 0, 0, 0);
    if (!own) return;
    // Whoever holds a block's first tile writes that block's entry; blocks without tiles are written by their own thread.
    for (int c = first_block; c <= last_block; ++c) {
        const int piece = c - first_block;
        const int first = whole ? begin + own * piece / pieces : (int)((long long)total * c / used);
        const int until = whole ? begin + own * (piece + 1) / pieces : (int)((long long)total * (c + 1) / used);
        if (first < begin) continue;
        plan[2 * c] = make_int4(first, until, i, 0);
        plan[2 * c + 1] = entry;
    }
}
