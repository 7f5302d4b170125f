//! One product at a time, and how every x86 CPU with such products ends a sum.
use std::arch::x86_64::*;

use super::{BLOCK, BY_BLOCK, KEYS, Lanes, VECTOR_BYTES, finish_with, moved};

#[inline]
#[target_feature(enable = "pclmulqdq")]
fn product(a: u64, b: u64) -> u128 {
    let of = |word: u64| _mm_set_epi64x(0, word as i64);
    let product = _mm_clmulepi64_si128::<0x00>(of(a), of(b));
    let upper = _mm_cvtsi128_si64(_mm_unpackhi_epi64(product, product)) as u64;
    u128::from(upper) << 64 | u128::from(_mm_cvtsi128_si64(product) as u64)
}

/// Vectors up to the next border of blocks, or whole blocks.
#[target_feature(enable = "pclmulqdq")]
pub(super) fn add(lanes: &mut Lanes, vectors: &[[u8; VECTOR_BYTES]]) {
    for vector in vectors {
        let keys = &KEYS.0[lanes.vectors];
        let (words, _) = vector.as_chunks::<8>();
        for (lane, block) in lanes.block.iter_mut().enumerate() {
            let (left, right) = (2 * lane, 2 * lane + 1);
            *block ^= product(
                u64::from_le_bytes(words[left]) ^ keys[left],
                u64::from_le_bytes(words[right]) ^ keys[right],
            );
        }
        lanes.vectors += 1;
        if lanes.vectors == BLOCK {
            for (blocks, block) in lanes.blocks.iter_mut().zip(&mut lanes.block) {
                *blocks = moved(*blocks, BY_BLOCK, |a, b| product(a, b)) ^ std::mem::take(block);
            }
            lanes.vectors = 0;
        }
    }
}

/// See [`finish_with`].
#[target_feature(enable = "pclmulqdq")]
pub(super) fn finish(lanes: &Lanes, bytes: u64) -> u64 {
    finish_with(lanes, bytes, |a, b| product(a, b))
}
