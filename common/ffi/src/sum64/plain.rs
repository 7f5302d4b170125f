//! Without any instruction for it: bit by bit.
use super::{BLOCK, BY_BLOCK, KEYS, Lanes, VECTOR_BYTES, moved};

pub(super) fn product(a: u64, b: u64) -> u128 {
    (0..64).fold(0, |sum, bit| sum ^ ((u128::from(a) << bit) * u128::from((b >> bit) & 1)))
}

/// Vectors up to the next border of blocks, or whole blocks.
pub(super) fn add(lanes: &mut Lanes, vectors: &[[u8; VECTOR_BYTES]]) {
    for vector in vectors {
        let keys = &KEYS.0[lanes.vectors];
        let (words, _) = vector.as_chunks::<8>();
        let keyed = |at: usize| u64::from_le_bytes(words[at]) ^ keys[at];
        for (lane, block) in lanes.block.iter_mut().enumerate() {
            *block ^= product(keyed(2 * lane), keyed(2 * lane + 1));
        }
        lanes.vectors += 1;
        if lanes.vectors == BLOCK {
            for (blocks, block) in lanes.blocks.iter_mut().zip(&mut lanes.block) {
                *blocks = moved(*blocks, BY_BLOCK, product) ^ std::mem::take(block);
            }
            lanes.vectors = 0;
        }
    }
}
