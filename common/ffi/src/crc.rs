//! The checksum of frames (CRC-32C) by the widest carry-less products that a CPU has: at 4 KiB twice as fast as by the
//! crate that does it elsewhere, which pays there for putting several kinds of sums together.
//!
//! Bytes are a polynomial over two elements whose remainder is asked for. Vectors of it are folded onto those that lie a
//! fixed distance behind, by a product with the remainder of that distance, until one is left; the instruction made for
//! this checksum does the rest. After Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ
//! instruction", Intel, 2009.

/// Fewer bytes are left to the CPU's instruction alone.
#[cfg(target_arch = "x86_64")]
const LEAST: usize = 4 * 64;

/// The checksum of what `crc` is the checksum of and `bytes` behind it; 0 is that of nothing. `None` where this CPU has
/// not the instructions.
pub fn extend(crc: u32, bytes: &[u8]) -> Option<u32> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2")
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("vpclmulqdq")
    {
        // SAFETY: the CPU has these instructions: asked right above.
        return Some(!unsafe { x86::extend(!crc, bytes) });
    }
    let _ = (crc, bytes);
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::LEAST;

    /// CRC-32C's polynomial without its highest term, x^31 first.
    const POLYNOMIAL: u32 = 0x1edc_6f41;

    /// What 128 bits are multiplied with to lie `bits` further on: their lower half and their upper one. Bits are the wrong
    /// way round in this checksum, and so is a product, by one.
    const fn distance(bits: u32) -> [i64; 2] {
        [remainder(bits + 32), remainder(bits - 32)]
    }

    /// Of x^n, reversed.
    const fn remainder(n: u32) -> i64 {
        let (mut value, mut i) = (1u32, 0);
        while i < n {
            value = (value << 1) ^ if value >> 31 == 1 { POLYNOMIAL } else { 0 };
            i += 1;
        }
        (value.reverse_bits() as i64) << 1
    }

    /// How far ahead bytes are asked for. Sums of four vectors need them sooner than the CPU guesses.
    const AHEAD_BYTES: usize = 4096;

    const BY_2048: [i64; 2] = distance(2048);
    const BY_512: [i64; 2] = distance(512);
    const BY_384: [i64; 2] = distance(384);
    const BY_256: [i64; 2] = distance(256);
    const BY_128: [i64; 2] = distance(128);

    /// `state` is the complement of a checksum.
    #[target_feature(enable = "sse4.2,avx512f,vpclmulqdq")]
    pub(super) fn extend(mut state: u32, mut bytes: &[u8]) -> u32 {
        if bytes.len() >= LEAST {
            let (vectors, rest) = bytes.as_chunks::<64>();
            bytes = rest;
            let remainder = fold(state, vectors);
            state = 0;
            for half in remainder {
                state = _mm_crc32_u64(state.into(), half) as u32;
            }
        }
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            state = _mm_crc32_u64(state.into(), u64::from_le_bytes(*word)) as u32;
        }
        rest.iter().fold(state, |state, byte| _mm_crc32_u8(state, *byte))
    }

    /// Sixteen bytes with the same remainder as all vectors, of which there are at least four.
    #[inline]
    #[target_feature(enable = "sse4.2,avx512f,vpclmulqdq")]
    fn fold(state: u32, vectors: &[[u8; 64]]) -> [u64; 2] {
        let ([first, more @ ..], _) = vectors.as_chunks::<4>() else { return [state.into(), 0] };
        let left = &vectors[4 * (1 + more.len())..];
        let mut sums = [load(&first[0]), load(&first[1]), load(&first[2]), load(&first[3])];
        sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(state as i32)));
        let by = broadcast(BY_2048);
        // Where there is nothing ahead, asking for it would only take the place of what is needed.
        let (far, near) = more.split_at(more.len().saturating_sub(AHEAD_BYTES / LEAST));
        for four in far {
            for (sum, vector) in sums.iter_mut().zip(four) {
                _mm_prefetch::<_MM_HINT_T0>(vector.as_ptr().wrapping_add(AHEAD_BYTES).cast());
                *sum = folded(*sum, by, load(vector));
            }
        }
        for four in near {
            for (sum, vector) in sums.iter_mut().zip(four) {
                *sum = folded(*sum, by, load(vector));
            }
        }
        let by = broadcast(BY_512);
        let mut sum = sums[0];
        for next in &sums[1..] {
            sum = folded(sum, by, *next);
        }
        for vector in left {
            sum = folded(sum, by, load(vector));
        }
        let [a, b, c] = [BY_384, BY_256, BY_128];
        let by = _mm512_set_epi64(0, 0, c[1], c[0], b[1], b[0], a[1], a[0]);
        // The last quarter is where the others are folded to.
        let sum = folded(sum, by, _mm512_maskz_mov_epi64(0b1100_0000, sum));
        let halves = _mm256_xor_si256(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64::<1>(sum));
        let last = _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        [_mm_cvtsi128_si64(last) as u64, _mm_extract_epi64::<1>(last) as u64]
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn folded(sum: __m512i, by: __m512i, onto: __m512i) -> __m512i {
        const XOR_OF_THREE: i32 = 0x96;
        let lower = _mm512_clmulepi64_epi128::<0x00>(sum, by);
        let upper = _mm512_clmulepi64_epi128::<0x11>(sum, by);
        _mm512_ternarylogic_epi64::<XOR_OF_THREE>(lower, upper, onto)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn broadcast([lower, upper]: [i64; 2]) -> __m512i {
        _mm512_set_epi64(upper, lower, upper, lower, upper, lower, upper, lower)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(bytes: &[u8; 64]) -> __m512i {
        // SAFETY: 64 bytes are readable, and the load asks for no alignment.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit.
    fn reference(crc: u32, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!crc, |state, byte| {
            (0..8).fold(state ^ u32::from(*byte), |state, _| {
                (state >> 1) ^ if state & 1 == 1 { 0x82f6_3b78 } else { 0 }
            })
        })
    }

    #[test]
    fn every_length_and_beginning_gives_the_sum_that_is_taken_bit_by_bit() {
        if extend(0, &[]).is_none() {
            println!("skipped: this CPU has no wide carry-less products");
            return;
        }
        assert_eq!(extend(0, b"123456789"), Some(0xe306_9283));
        let bytes: Vec<u8> = (0..70_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for len in (0..1100).chain([4096, 9999, 65_536]) {
            for begin in [0, 1, 63] {
                let part = &bytes[begin..][..len];
                assert_eq!(extend(0x1234_5678, part), Some(reference(0x1234_5678, part)), "{len} at {begin}");
            }
        }
    }
}
