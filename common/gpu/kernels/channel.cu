// The two ends of a step channel: rows go into memory that the receiver owns, and a word after them says so.
//
// A slot, in the receiver's memory, written by the sender (a peer's mapping of it over NVLink, or the same device):
//   0     u64 flags[BLOCKS]   identity << 32 | sequence, one for each block of the put
//   256   int rows            how many of the rows are real
//   384   16 bytes            in the first slot: what proves that a mapping is of this memory
//   512   rows, dense
//   ...   packets of 16 bytes {data, sequence, data, sequence}: the low-latency form, where data is its own flag
//
// Sequences count frames of a slot, per block, in device memory on both sides: a captured graph replays with fresh
// ones, and a frame of an earlier replay is not taken for this one's. A wait gives up at its deadline. Whatever goes
// wrong is written once into `status` (and the host's copy of it); from then on puts and waits do nothing, so that
// the rest of a graph drains.

#define BLOCKS 16
#define ROWS_AT 256
#define DATA_AT 512

struct Status {
    u32 code; // 0 well, 1 timed out, 2 foreign identity, 3 sequence ahead, 4 given up by the host, which writes this itself
    u32 slot;
    u64 seen, expected;
};
#define TIMED_OUT 1
#define FOREIGN 2
#define TOO_FAR 3

DEVICE void fail(Status* status, Status* host, u32 code, u32 slot, u64 seen, u64 expected) {
    if (atomicCAS(&status->code, 0u, code)) return;
    status->slot = slot;
    status->seen = seen;
    status->expected = expected;
    host->slot = slot;
    host->seen = seen;
    host->expected = expected;
    __threadfence_system();
    *(volatile u32*)&host->code = code;
}
DEVICE bool failed(const Status* status) { return *(const volatile u32*)&status->code; }

// ---- flags --------------------------------------------------------------------------------------------------------

// Copies rows and releases a flag per block. grid BLOCKS; row_units: 16-byte units of a row.
KERNEL void channel_put(const uint4* rows, u8* slot, u32* sequences, const Status* status, u32 identity,
                        const int* num_rows, int max_rows, int row_units) {
    wait_for_previous();
    let_next_start(); // not before: the wait behind may read the sequences then
    if (failed(status)) return;
    uint4* target = (uint4*)(slot + DATA_AT);
    const int units = max_rows * row_units, stride = BLOCKS * blockDim.x;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < units; i += 4 * stride) {
        const uint4 a = rows[i], b = rows[i + stride], c = rows[i + 2 * stride], d = rows[i + 3 * stride];
        target[i] = a;
        target[i + stride] = b;
        target[i + 2 * stride] = c;
        target[i + 3 * stride] = d;
    }
    for (; i < units; i += stride) target[i] = rows[i];
    if (blockIdx.x == 0 && threadIdx.x == 0) *(int*)(slot + ROWS_AT) = num_rows ? *num_rows : max_rows;
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 sequence = ++sequences[blockIdx.x];
        store_release_system((u64*)slot + blockIdx.x, (u64)identity << 32 | sequence);
    }
}

// Releases the flags for rows that kernels before have written straight into the slot. One warp.
KERNEL void channel_flag(u8* slot, u32* sequences, const Status* status, u32 identity, const int* num_rows, int max_rows) {
    wait_for_previous();
    let_next_start(); // not before: the wait behind may read the sequences then
    if (failed(status)) return;
    if (threadIdx.x == 0) *(int*)(slot + ROWS_AT) = num_rows ? *num_rows : max_rows;
    __syncwarp();
    __threadfence_system();
    if (threadIdx.x < BLOCKS) {
        const u32 sequence = ++sequences[threadIdx.x];
        store_release_system((u64*)slot + threadIdx.x, (u64)identity << 32 | sequence);
    }
}

// Blocks of a wait beyond those that wait, `own` of them: they fetch what this device will read once the rows are there.
// Not before the put ahead has ended: its rows would go out behind what was asked for.
#define FETCH_MEANWHILE(own) \
    if (blockIdx.x >= own) { \
        wait_for_previous(); \
        return FETCH_AHEAD(blockIdx.x - own, gridDim.x - own); \
    }

// Waits for all flags of a put. One warp, and blocks that fetch ahead. `open_early` lets the kernels behind take their places
// meanwhile.
KERNEL void channel_wait(const u8* slot, u32* sequences, Status* status, Status* host, u32 slot_index, u32 identity,
                         u64 patience_ns, int open_early, AHEAD) {
    if (open_early) let_next_start();
    FETCH_MEANWHILE(1)
    if (threadIdx.x < BLOCKS) {
        const u32 sequence = sequences[threadIdx.x] + 1;
        const u64 expected = (u64)identity << 32 | sequence;
        u64 begin = 0;
        for (u32 polls = 0;; ++polls) {
            const u64 seen = load_acquire_system((const u64*)slot + threadIdx.x);
            if (seen == expected) {
                sequences[threadIdx.x] = sequence;
                break;
            }
            if ((u32)seen == sequence) {
                fail(status, host, FOREIGN, slot_index, seen, expected);
                break;
            }
            if ((int)((u32)seen - sequence) > 0) {
                fail(status, host, TOO_FAR, slot_index, seen, expected);
                break;
            }
            if (polls % 64 == 63) {
                if (failed(status)) break;
                const u64 now = nanoseconds();
                if (!begin) begin = now;
                if (now - begin > patience_ns) {
                    fail(status, host, TIMED_OUT, slot_index, seen, expected);
                    break;
                }
            }
        }
    }
    wait_for_previous();
}

// ---- low latency --------------------------------------------------------------------------------------------------

DEVICE void store_packet(uint4* p, u32 a, u32 b, u32 sequence) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(a), "r"(sequence), "r"(b), "r"(sequence) : "memory");
}
DEVICE uint4 load_packet(const uint4* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// Packet 0 holds identity and rows, the others 8 bytes of rows each. grid BLOCKS. packets: those of the rows.
KERNEL void channel_put_packets(const uint2* rows, u8* slot, u32* sequences, const Status* status, u32 identity,
                                const int* num_rows, int max_rows, int packets, u32 packets_at) {
    __shared__ u32 sequence_shared;
    wait_for_previous();
    let_next_start(); // not before: the wait behind may read the sequences then
    if (threadIdx.x == 0) sequence_shared = sequences[blockIdx.x] + 1;
    __syncthreads();
    const u32 sequence = sequence_shared;
    if (failed(status)) return;
    uint4* target = (uint4*)(slot + packets_at);
    if (blockIdx.x == 0 && threadIdx.x == 0) store_packet(target, identity, num_rows ? *num_rows : max_rows, sequence);
    ++target;
    const int stride = BLOCKS * blockDim.x;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < packets; i += 4 * stride) {
        uint2 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = rows[i + j * stride];
#pragma unroll
        for (int j = 0; j < 4; ++j) store_packet(target + i + j * stride, v[j].x, v[j].y, sequence);
    }
    for (; i < packets; i += stride) {
        const uint2 v = rows[i];
        store_packet(target + i, v.x, v.y, sequence);
    }
    if (threadIdx.x == 0) sequences[blockIdx.x] = sequence;
}

// Unpacks into the slot's dense rows. grid BLOCKS and blocks that fetch ahead, the sender's block size or not.
KERNEL void channel_wait_packets(u8* slot, u32* sequences, Status* status, Status* host, u32 slot_index, u32 identity,
                                 u64 patience_ns, int packets, u32 packets_at, int open_early, AHEAD) {
    __shared__ u32 sequence_shared;
    if (open_early) let_next_start();
    FETCH_MEANWHILE(BLOCKS)
    if (threadIdx.x == 0) sequence_shared = sequences[blockIdx.x] + 1;
    __syncthreads();
    const u32 sequence = sequence_shared;
    const uint4* source = (const uint4*)(slot + packets_at);
    uint2* target = (uint2*)(slot + DATA_AT);
    u64 begin = 0;
    u32 polls = 0;
    bool gave_up = false;
    // Whether to poll on; false also when someone else failed.
    auto patient = [&](u32 seen) {
        if (++polls % 64) return true;
        if (failed(status)) return false;
        const u64 now = nanoseconds();
        if (!begin) begin = now;
        if (now - begin <= patience_ns) return true;
        fail(status, host, TIMED_OUT, slot_index, seen, sequence);
        return false;
    };
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        uint4 v = load_packet(source);
        while (!gave_up && (v.y != sequence || v.w != sequence)) {
            gave_up = !patient(v.y);
            v = load_packet(source);
        }
        if (!gave_up) {
            *(int*)(slot + ROWS_AT) = v.z;
            if (v.x != identity) {
                fail(status, host, FOREIGN, slot_index, (u64)v.x << 32 | v.y, (u64)identity << 32 | sequence);
                gave_up = true;
            }
        }
    }
    ++source;
    const int stride = BLOCKS * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < packets && !gave_up; i += 4 * stride) {
        uint4 v[4];
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (i + j * stride < packets) v[j] = load_packet(source + i + j * stride);
            u32 seen = sequence;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (i + j * stride < packets && (v[j].y != sequence || v[j].w != sequence)) {
                    ready = false;
                    seen = v[j].y;
                }
            }
            if (!ready) gave_up = !patient(seen);
        } while (!ready && !gave_up);
        if (gave_up) break;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (i + j * stride < packets) target[i + j * stride] = make_uint2(v[j].x, v[j].z);
    }
    __syncthreads();
    if (threadIdx.x == 0 && !failed(status)) sequences[blockIdx.x] = sequence;
    wait_for_previous();
}

// ---- frames over a transport that orders by itself ----------------------------------------------------------------

// What goes before the rows of a frame, in one message with them.
struct Header {
    int rows; // real ones
    u32 identity, sequence, reserved;
};

// Whether a frame that was received is the `expected`th one of its slot, and of the right hop, in status.
DEVICE void check_header(const Header& seen, u32 expected, Status* status, Status* host, u32 slot_index, u32 identity) {
    const u64 seen_word = (u64)seen.identity << 32 | seen.sequence, expected_word = (u64)identity << 32 | expected;
    if (seen.identity != identity) fail(status, host, FOREIGN, slot_index, seen_word, expected_word);
    else if (seen.sequence != expected) fail(status, host, TOO_FAR, slot_index, seen_word, expected_word);
}

// Puts a frame together: header, and behind it `units` times 16 bytes of rows (0 when they go by themselves). On its way it
// checks the frame that was received last through the slot, `seen`, if there is one that was not checked yet: the peer
// does not write there before it has this one. Any grid.
KERNEL void channel_stage(const uint4* rows, Header* header, u32* sequence, u32 identity, const int* num_rows, int max_rows,
                          int units, const Header* seen, u32* seen_sequence, Status* status, Status* host, u32 slot_index,
                          u32 seen_identity) {
    let_next_start();
    wait_for_previous();
    // All that one thread has to know is asked for at once, and before the rows: it is what the kernel waits for.
    const bool leads = blockIdx.x == 0 && threadIdx.x == 0;
    int real = max_rows;
    u32 put = 0, received = 0, broken = 0;
    Header last = {0, 0, 0, 0};
    if (leads) {
        put = *sequence;
        if (num_rows) real = *num_rows;
        if (seen) {
            broken = failed(status);
            received = *seen_sequence;
            last = *seen;
        }
    }
    uint4* target = (uint4*)(header + 1);
    const int stride = gridDim.x * blockDim.x;
#pragma unroll 4
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += stride) target[i] = rows[i];
    if (!leads) return;
    *header = {real, identity, put + 1, 0};
    *sequence = put + 1;
    if (seen && !broken) {
        *seen_sequence = received + 1;
        check_header(last, received + 1, status, host, slot_index, seen_identity);
    }
}

// Checks a frame that nothing is put behind. One thread.
KERNEL void channel_check(const Header* seen, u32* sequence, Status* status, Status* host, u32 slot_index, u32 identity) {
    let_next_start();
    wait_for_previous();
    if (failed(status)) return;
    const u32 expected = ++*sequence;
    check_header(*seen, expected, status, host, slot_index, identity);
}
