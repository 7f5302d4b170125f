//! Rounds by a library, which has them for every CPU.
use aes::Block;
use aes::hazmat::cipher_round;

use super::{BLOCK_BYTES, MORE, States, WORD_BYTES, join_with};

fn round(state: u128, word: u128) -> u128 {
    let mut block = Block::from(state.to_le_bytes());
    cipher_round(&mut block, &Block::from(word.to_le_bytes()));
    u128::from_le_bytes(block.into())
}

pub(super) fn add(States(states): &mut States, blocks: &[[u8; BLOCK_BYTES]]) {
    for block in blocks {
        let (words, _) = block.as_chunks::<WORD_BYTES>();
        for (state, word) in states.iter_mut().zip(words) {
            *state = round(*state, u128::from_le_bytes(*word));
        }
    }
}

/// See [`join_with`].
pub(super) fn join(States(states): &States, bytes: u64) -> u64 {
    let joined = join_with(*states, bytes.into(), MORE, round);
    joined as u64 ^ (joined >> 64) as u64
}
