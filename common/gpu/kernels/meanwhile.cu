// What a device that waits for another one does meanwhile: it brings into its second-level cache what it will read once the rows
// are there, weights and part of a paged cache.
//
// Of the cache it takes as many units of neighbouring tokens as there is room for, evenly spread over all sequences: however
// the kernels that read it share the work, each finds the same part of its own there, and memory and second-level cache
// deliver at the same time.
//
// Defined at compile time: LISTED, 1 for the check, which is told what would be asked for.

#define PIECE 4096 // bytes that are asked for at once

DEVICE void ask(const u8* source, u32 bytes, u64* list) {
#if LISTED
    const u64 at = atomicAdd(list, 1ull);
    list[1 + 2 * at] = (u64)source;
    list[2 + 2 * at] = bytes;
#else
    bulk_prefetch(source, bytes);
#endif
}

// first, second (may be null): [blocks, block_tokens, row_bytes]; block_table [batch, max_blocks]. A unit is `unit_tokens` that lie
// together: block_tokens is a multiple of it. Of all units together `room` are taken, or all there are. list: of the check:
// how many, then address and bytes of each. grid (batch, any), one warp
KERNEL void fetch_meanwhile(const u8* first, const u8* second, const int* block_table, const int* seq_lens, int batch, int max_blocks,
                            int block_tokens, int unit_tokens, int row_bytes, int room, u64* list, AHEAD) {
    // Not before the put ahead has ended: its rows would go out behind what is asked for here.
    wait_for_previous();
    let_next_start();
    const int lane = threadIdx.x;
    FETCH_AHEAD(blockIdx.x * gridDim.y + blockIdx.y, gridDim.x * gridDim.y);
    if (!first) return;
    const int sequence = blockIdx.x;
    // Units of the sequences before this one, and of all.
    u64 before = 0, total = 0;
    for (int i = lane; i < batch; i += 32) {
        const u64 units = (seq_lens[i] + unit_tokens - 1) / unit_tokens;
        total += units;
        if (i < sequence) before += units;
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
        before += __shfl_xor_sync(~0u, before, d);
        total += __shfl_xor_sync(~0u, total, d);
    }
    const u64 own = (seq_lens[sequence] + unit_tokens - 1) / unit_tokens, taken = min((u64)room, total);
    if (!own || !taken) return;
    // Unit i * total / taken of all is the i-th one that is taken.
    const u64 begin = (before * taken + total - 1) / total, end = ((before + own) * taken + total - 1) / total;
    const u32 unit_bytes = unit_tokens * row_bytes, pieces = (unit_bytes + PIECE - 1) / PIECE;
    for (u64 j = blockIdx.y * 32 + lane; j < (end - begin) * pieces; j += gridDim.y * 32) {
        const u64 unit = (begin + j / pieces) * total / taken - before, token = unit * unit_tokens;
        const u64 block = block_table[(size_t)sequence * max_blocks + token / block_tokens];
        const u32 at = j % pieces * PIECE, bytes = min(PIECE, unit_bytes - at);
        const u64 place = (block * block_tokens + token % block_tokens) * row_bytes + at;
        ask(first + place, bytes, list);
        if (second) ask(second + place, bytes, list);
    }
}
