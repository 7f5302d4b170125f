//! Four products at once: a vector's.
use std::arch::x86_64::*;

use super::{BLOCK, BY_BLOCK, KEYS, Lanes, VECTOR_BYTES};

/// Vectors up to the next border of blocks, or whole blocks.
#[target_feature(enable = "avx512f,vpclmulqdq")]
pub(super) fn add(lanes: &mut Lanes, vectors: &[[u8; VECTOR_BYTES]]) {
    let (whole, rest) = vectors.as_chunks::<BLOCK>();
    if lanes.vectors == 0 && rest.is_empty() {
        let mut blocks = load_lanes(&lanes.blocks);
        for block in whole {
            blocks = added(blocks, block);
        }
        store_lanes(&mut lanes.blocks, blocks);
        return;
    }
    let mut block = load_lanes(&lanes.block);
    for vector in vectors {
        block = _mm512_xor_si512(block, product(vector, lanes.vectors));
        lanes.vectors += 1;
    }
    if lanes.vectors == BLOCK {
        let blocks = load_lanes(&lanes.blocks);
        let [lower, upper] = moved(blocks);
        store_lanes(&mut lanes.blocks, xor_of_three(lower, upper, block));
        (block, lanes.vectors) = (_mm512_setzero_si512(), 0);
    }
    store_lanes(&mut lanes.block, block);
}

/// A block behind those before it. Two sums at once, and two products for each: every exclusive or takes the place of a
/// product in the CPU.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn added(blocks: __m512i, block: &[[u8; VECTOR_BYTES]; BLOCK]) -> __m512i {
    let [mut one, mut other] = moved(blocks);
    let mut at = 0;
    while at < BLOCK {
        one = xor_of_three(one, product(&block[at], at), product(&block[at + 1], at + 1));
        other = xor_of_three(other, product(&block[at + 2], at + 2), product(&block[at + 3], at + 3));
        at += 4;
    }
    _mm512_xor_si512(one, other)
}

/// By a block, as two products that are still to be added up.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn moved(blocks: __m512i) -> [__m512i; 2] {
    let [lower, upper] = BY_BLOCK.map(|by| by as i64);
    let by = _mm512_set_epi64(upper, lower, upper, lower, upper, lower, upper, lower);
    [_mm512_clmulepi64_epi128::<0x00>(blocks, by), _mm512_clmulepi64_epi128::<0x11>(blocks, by)]
}

#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn product(vector: &[u8; VECTOR_BYTES], at: usize) -> __m512i {
    // SAFETY: 64 bytes are readable at either, and the loads ask for no alignment.
    let (words, keys) = unsafe {
        (_mm512_loadu_si512(vector.as_ptr().cast()), _mm512_loadu_si512(KEYS.0[at].as_ptr().cast()))
    };
    let keyed = _mm512_xor_si512(words, keys);
    _mm512_clmulepi64_epi128::<0x10>(keyed, keyed)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn xor_of_three(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0x96>(a, b, c)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_lanes(lanes: &[u128; 4]) -> __m512i {
    // SAFETY: 64 bytes are readable, and the load asks for no alignment.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_lanes(lanes: &mut [u128; 4], value: __m512i) {
    // SAFETY: 64 bytes are writable, every one of them makes a number, and the store asks for no alignment.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), value) };
}
