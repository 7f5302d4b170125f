// How the weight tiles of a mixture of experts' routed experts are shared out among blocks: for the kernels for few rows.

// Multiprocessors do not get equal bandwidth, so each block has a first part of the routed tiles for itself, one after
// the other, and the rest is a pool that blocks take from: four tiles at a time, later two, at the very end one.
struct Pool {
    int fours, twos, begin, end;
};

DEVICE Pool pool_of(int routed_tiles) {
    Pool p;
    p.begin = (int)((long long)routed_tiles * STATIC_PERCENT / 100);
    p.end = routed_tiles;
    const int size = p.end - p.begin, n = gridDim.x;
    p.fours = max(0, size - 3 * n) / 4;
    p.twos = max(0, size - 4 * p.fours - n) / 2;
    return p;
}
// Tiles of the `ticket`th taking; begin >= end when there are none left.
DEVICE int2 taking(const Pool& p, int ticket) {
    int at = ticket < p.fours ? 4 * ticket : 4 * p.fours, count = 4;
    if (ticket >= p.fours) {
        const int t = ticket - p.fours;
        at += t < p.twos ? 2 * t : 2 * p.twos + (t - p.twos);
        count = t < p.twos ? 2 : 1;
    }
    return make_int2(p.begin + at, min(p.begin + at + count, p.end));
}
