// Warpgroup matrix products of Hopper: d[64 x N] (+)= a[64 x 16] b[N x 16]ᵀ, both in shared memory, 16 elements of rows of 64
// that are stored with the 128-byte swizzle. Lane (g = lane / 4, q = lane % 4) of warp w holds rows 16 w + g, + 8 at columns
// 8 j + 2 q, + 1: d[4 j], d[4 j + 1], and d[4 j + 2], d[4 j + 3] of row g + 8.

// What the tensor core takes for a tile: 8 rows of 128 bytes are 1024 bytes apart.
DEVICE u64 swizzled_tile(u32 shared_address) {
    return (u64)((shared_address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most LEFT of the committed groups are not done.
template <int LEFT> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// d, sixteen registers a group: as operands, and as the instruction names them.
#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(i) WGMMA_4(i), WGMMA_4(i + 4), WGMMA_4(i + 8), WGMMA_4(i + 12)
#define WGMMA_32(i) WGMMA_16(i), WGMMA_16(i + 16)
#define WGMMA_64(i) WGMMA_32(i), WGMMA_32(i + 32)
#define WGMMA_96(i) WGMMA_64(i), WGMMA_32(i + 64)
#define WGMMA_128(i) WGMMA_64(i), WGMMA_64(i + 64)
#define WGMMA_NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_NAMES_1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NAMES_2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_NAMES_3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_NAMES_4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_NAMES_5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_NAMES_6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_NAMES_7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_NAMES_01 WGMMA_NAMES_0 "," WGMMA_NAMES_1
#define WGMMA_NAMES_03 WGMMA_NAMES_01 "," WGMMA_NAMES_2 "," WGMMA_NAMES_3
#define WGMMA_NAMES_05 WGMMA_NAMES_03 "," WGMMA_NAMES_4 "," WGMMA_NAMES_5
#define WGMMA_NAMES_07 WGMMA_NAMES_05 "," WGMMA_NAMES_6 "," WGMMA_NAMES_7

template <int N> struct Wgmma;
#define WGMMA(N, NAMES, OPERANDS, A, B, ADD) \
    template <> struct Wgmma<N> { \
        static DEVICE void multiply(float (&d)[N / 2], u64 a, u64 b, int add) { \
            asm volatile("{ .reg .pred add; setp.ne.b32 add, " ADD ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, " A ", " B ", add, 1, 1, 0, 0; }" \
                         : OPERANDS : "l"(a), "l"(b), "r"(add)); \
        } \
    };
WGMMA(32, WGMMA_NAMES_0, WGMMA_16(0), "%16", "%17", "%18")
WGMMA(64, WGMMA_NAMES_01, WGMMA_32(0), "%32", "%33", "%34")
WGMMA(128, WGMMA_NAMES_03, WGMMA_64(0), "%64", "%65", "%66")
WGMMA(192, WGMMA_NAMES_05, WGMMA_96(0), "%96", "%97", "%98")
WGMMA(256, WGMMA_NAMES_07, WGMMA_128(0), "%128", "%129", "%130")
