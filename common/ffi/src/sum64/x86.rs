//! Rounds by the CPU: of four words at once, of two, of one.
use std::arch::x86_64::*;

use super::{BLOCK_BYTES, MORE, States, WORDS, join_with};

/// A function that adds blocks by instructions of one width: the states lie in so many vectors.
macro_rules! add_by {
    ($name:ident, $features:literal, $vectors:literal of $vector:ty, $zero:ident, $load:ident, $store:ident, $round:ident) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name(States(states): &mut States, blocks: &[[u8; BLOCK_BYTES]]) {
            let states: *mut $vector = states.as_mut_ptr().cast();
            let mut vectors = [$zero(); $vectors];
            for (i, vector) in vectors.iter_mut().enumerate() {
                // SAFETY: all vectors together are the states, and the load asks for no alignment.
                *vector = unsafe { $load(states.add(i).cast_const().cast()) };
            }
            for block in blocks {
                let words: *const $vector = block.as_ptr().cast();
                for (i, vector) in vectors.iter_mut().enumerate() {
                    // SAFETY: a block is as long as all vectors, and the load asks for no alignment.
                    *vector = $round(*vector, unsafe { $load(words.add(i).cast()) });
                }
            }
            for (i, vector) in vectors.into_iter().enumerate() {
                // SAFETY: as above; states are numbers, which any bits make, and the store asks for no alignment.
                unsafe { $store(states.add(i).cast(), vector) };
            }
        }
    };
}

add_by!(
    add_by_four, "avx512f,vaes", 4 of __m512i,
    _mm512_setzero_si512, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_aesenc_epi128
);
add_by!(
    add_by_two, "avx,vaes", 8 of __m256i,
    _mm256_setzero_si256, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_aesenc_epi128
);
add_by!(
    add_by_one, "avx,aes", 16 of __m128i,
    _mm_setzero_si128, _mm_loadu_si128, _mm_storeu_si128, _mm_aesenc_si128
);

/// See [`join_with`].
#[target_feature(enable = "avx,aes")]
pub(super) fn join(States(states): &States, bytes: u64) -> u64 {
    let states: *const __m128i = states.as_ptr().cast();
    let mut words = [_mm_setzero_si128(); WORDS];
    for (i, word) in words.iter_mut().enumerate() {
        // SAFETY: there are as many states, and the load asks for no alignment.
        *word = unsafe { _mm_loadu_si128(states.add(i)) };
    }
    let bytes = _mm_set_epi64x(0, bytes as i64);
    let joined = join_with(words, bytes, MORE.map(|more| word(more)), |a, b| _mm_aesenc_si128(a, b));
    (_mm_extract_epi64::<1>(joined) ^ _mm_cvtsi128_si64(joined)) as u64
}

#[inline]
#[target_feature(enable = "avx")]
fn word(value: u128) -> __m128i {
    _mm_set_epi64x((value >> 64) as i64, value as i64)
}
