//! The sum beside a slow one, and what it finds.
use super::*;

/// Modulo the modulus, bit by bit.
fn times(a: u64, b: u64) -> u64 {
    (0..64).rev().fold(0, |sum, bit| {
        let doubled = (sum << 1) ^ if sum >> 63 == 1 { MODULUS } else { 0 };
        doubled ^ if (b >> bit) & 1 == 1 { a } else { 0 }
    })
}

fn to_the(n: u64) -> u64 {
    let squares = (0..64).scan(2, |square, bit| {
        let this = *square;
        *square = times(this, this);
        Some((bit, this))
    });
    squares.filter(|(bit, _)| (n >> bit) & 1 == 1).fold(1, |power, (_, square)| times(power, square))
}

/// As the module's head says it: every product where it belongs, and no state.
fn reference(bytes: &[u8]) -> u64 {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(64), 0);
    let last = padded.len().div_ceil(1024).saturating_sub(1);
    let mut sum = bytes.len() as u64;
    for (at, lane) in padded.chunks(16).enumerate() {
        let (vector, block) = (at / 4, at / 64);
        let word = |i: usize| {
            let word = lane[8 * i..][..8].try_into().unwrap();
            u64::from_le_bytes(word) ^ KEYS.0[vector % 16][2 * (at % 4) + i]
        };
        let by = to_the((512 * (last - block) + 128 * (4 - at % 4)) as u64);
        sum ^= times(times(word(0), word(1)), by);
    }
    sum
}

fn cpus() -> Vec<Cpu> {
    let mut cpus = vec![Cpu::Plain];
    #[cfg(target_arch = "x86_64")]
    match Cpu::here() {
        Cpu::Wide => cpus.extend([Cpu::Narrow, Cpu::Wide]),
        Cpu::Narrow => cpus.push(Cpu::Narrow),
        Cpu::Plain => {}
    }
    cpus
}

fn sum_by(cpu: Cpu, pieces: &[&[u8]]) -> u64 {
    let mut sum = Sum64::default();
    pieces.iter().for_each(|piece| sum.update_by(cpu, piece));
    sum.finish_by(cpu)
}

fn sum(bytes: &[u8]) -> u64 {
    sum_by(Cpu::here(), &[bytes])
}

fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (to_the(i % 509 + 64).wrapping_mul(i | 1) >> 29) as u8).collect()
}

#[test]
fn sums_are_those_of_another_program() {
    // By a few lines of Python from the module's head.
    let counted: Vec<u8> = (0..5000).map(|i| (i % 251) as u8).collect();
    for (bytes, expected) in [
        (&b""[..], 0),
        (b"a", 0x8345_5cf7_c150_976a),
        (b"123456789", 0x3d16_35f8_fca0_d772),
        (&[0; 64], 0xc92b_7ba6_d2e3_9c01),
        (&[0; 1024], 0x1f92_b1f3_3efd_f0ee),
        (&[0; 1025], 0x89cb_3070_dbc6_c871),
        (&counted, 0x100a_7e9b_8451_8bac),
    ] {
        for cpu in cpus() {
            assert_eq!(sum_by(cpu, &[bytes]), expected, "{} bytes by {cpu:?}", bytes.len());
        }
    }
}

#[test]
fn every_length_and_cut_gives_the_same_on_every_cpu() {
    let bytes = noise(9000);
    for len in (0..200).chain([1000, 1023, 1024, 1025, 2048, 3000, 4096, 8999]) {
        let whole = &bytes[1..][..len];
        let expected = reference(whole);
        for cpu in cpus() {
            assert_eq!(sum_by(cpu, &[whole]), expected, "{len} bytes by {cpu:?}");
            for cut in [1, 63, 64, 65, 1000, 1024, 1500] {
                let (left, right) = whole.split_at(cut.min(len));
                let (middle, right) = right.split_at(right.len() / 3);
                assert_eq!(
                    sum_by(cpu, &[left, middle, &[], right]),
                    expected,
                    "{len} cut at {cut} by {cpu:?}"
                );
            }
        }
    }
}

#[test]
fn every_flipped_bit_and_byte_is_found_whatever_lies_around_it() {
    for bytes in [noise(2500), vec![0; 2500], vec![0xff; 2500], [0x80, 0x3f].repeat(1250)] {
        let (sound, mut damaged) = (sum(&bytes), bytes.clone());
        for at in 0..bytes.len() {
            for flip in (0..8).map(|bit| 1 << bit).chain([0xff, bytes[at].max(1)]) {
                damaged[at] ^= flip;
                assert_ne!(sum(&damaged), sound, "{flip:02x} at {at}");
                damaged[at] ^= flip;
            }
        }
    }
}

#[test]
fn two_flipped_bits_are_found_in_rows_of_zeros() {
    // Changes of one product by what its keyed neighbour makes of them: no two bits of a block may be the same.
    let mut damaged = vec![0; 1024];
    let sound = sum(&damaged);
    let mut changes: Vec<u64> = (0..1024 * 8)
        .map(|bit| {
            damaged[bit / 8] ^= 1 << (bit % 8);
            let change = sum(&damaged) ^ sound;
            damaged[bit / 8] ^= 1 << (bit % 8);
            change
        })
        .collect();
    changes.sort_unstable();
    changes.dedup();
    // Two bits in one product add a term of their own; those are few and tried by themselves.
    assert_eq!(changes.len(), 1024 * 8);
    for (left, right) in (0..64).flat_map(|left| (0..64).map(move |right| (left, 64 + right))) {
        for bit in [left, right] {
            damaged[bit / 8] ^= 1 << (bit % 8);
        }
        assert_ne!(sum(&damaged), sound, "bits {left} and {right}");
        for bit in [left, right] {
            damaged[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn pieces_zeroed_repeated_moved_swapped_or_cut_off_are_found() {
    let bytes = noise(8192);
    let sound = sum(&bytes);
    for len in [1, 2, 4, 8, 16, 64, 128, 1024, 2048] {
        for at in (0..4096 - len).step_by(61).chain([0, 64, 1024, 2048]) {
            for to in [at + len, at + 64.max(len), at + 1024.max(len), at + 2048] {
                let (piece, other) = (bytes[at..][..len].to_vec(), bytes[to..][..len].to_vec());
                if piece == other {
                    continue;
                }
                let changed = |what: &str, change: &dyn Fn(&mut Vec<u8>)| {
                    let mut damaged = bytes.clone();
                    change(&mut damaged);
                    assert!(damaged == bytes || sum(&damaged) != sound, "{len} bytes at {at} {what} {to}");
                };
                changed("are zero as those at", &|damaged| {
                    damaged[at..][..len].fill(0);
                    damaged[to..][..len].fill(0);
                });
                changed("are repeated at", &|damaged| damaged[to..][..len].copy_from_slice(&piece));
                changed("and those at", &|damaged| {
                    damaged[to..][..len].copy_from_slice(&piece);
                    damaged[at..][..len].copy_from_slice(&other);
                });
                changed("are moved to", &|damaged| {
                    damaged.drain(at..at + len);
                    damaged.splice(to - len..to - len, piece.iter().copied());
                });
                changed("are left out, and zeros follow, not", &|damaged| {
                    damaged.drain(at..at + len);
                    damaged.extend(std::iter::repeat_n(0, len));
                });
                changed("are missing, not", &|damaged| damaged.truncate(8192 - len));
            }
        }
    }
    let zeros = vec![0; 4096];
    let lengths: std::collections::HashSet<u64> = (0..4096).map(|len| sum(&zeros[..len])).collect();
    assert_eq!(lengths.len(), 4096, "zeros of another length have another sum");
}

#[test]
fn keys_differ_and_are_numbers_of_no_row() {
    let keys: std::collections::HashSet<u64> = KEYS.0.iter().flatten().copied().collect();
    assert_eq!(keys.len(), WORDS * BLOCK);
    for key in keys {
        for at in [0, 32] {
            assert!(f32::from_bits((key >> at) as u32).is_nan());
            assert!(f32::from_bits(((key >> at) as u32) << 16).is_nan(), "as bf16");
        }
    }
}

#[test]
fn powers_of_x_repeat_only_after_all_of_them() {
    assert_eq!(to_the(u64::MAX), 1);
    for factor in [3, 5, 17, 257, 641, 65_537, 6_700_417] {
        assert_ne!(to_the(u64::MAX / factor), 1);
    }
    assert_eq!((0..600).map(power).collect::<Vec<_>>(), (0..600).map(to_the).collect::<Vec<_>>());
}
