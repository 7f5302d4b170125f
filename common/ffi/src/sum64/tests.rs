//! The sum beside a slow one, and what it finds.
use super::*;

/// Over the field of AES, bit by bit.
fn times(a: u8, b: u8) -> u8 {
    (0..8).rev().fold(0, |sum, bit| {
        let doubled = (sum << 1) ^ if sum >> 7 == 1 { 0x1b } else { 0 };
        doubled ^ if (b >> bit) & 1 == 1 { a } else { 0 }
    })
}

/// SubBytes: the inverse, and an affine map of it.
fn substituted(byte: u8) -> u8 {
    let inverse = (1..=255).find(|other| times(byte, *other) == 1).unwrap_or(0);
    (0..5).fold(0x63, |sum, by| sum ^ inverse.rotate_left(by))
}

/// As the standard says it (FIPS 197): columns of four bytes.
fn round(boxes: &[u8; 256], state: [u8; 16], word: &[u8]) -> [u8; 16] {
    std::array::from_fn(|at| {
        let (column, row) = (at / 4, at % 4);
        let shifted = |row: usize| boxes[usize::from(state[(column + row) % 4 * 4 + row])];
        let mixed = (0..4).map(|i| times([2, 3, 1, 1][i], shifted((row + i) % 4)));
        mixed.fold(word[at], |sum, byte| sum ^ byte)
    })
}

/// As the module's head says it.
fn reference(bytes: &[u8]) -> u64 {
    let boxes: [u8; 256] = std::array::from_fn(|byte| substituted(byte as u8));
    let mut states = FIRST.0.map(u128::to_le_bytes);
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    for (at, word) in padded.chunks(WORD_BYTES).enumerate() {
        states[at % WORDS] = round(&boxes, states[at % WORDS], word);
    }
    let [joining, before_last, last] = MORE.map(u128::to_le_bytes);
    let join = |a, b: &[u8]| round(&boxes, round(&boxes, a, b), &joining);
    for n in [8, 4, 2, 1] {
        for i in 0..n {
            states[i] = join(states[i], &states[i + n]);
        }
    }
    let all = join(states[0], &(bytes.len() as u128).to_le_bytes());
    let last = u128::from_le_bytes(round(&boxes, round(&boxes, all, &before_last), &last));
    last as u64 ^ (last >> 64) as u64
}

fn cpus() -> Vec<Cpu> {
    let mut cpus = vec![Cpu::Plain];
    #[cfg(target_arch = "x86_64")]
    match Cpu::here() {
        Cpu::Four => cpus.extend([Cpu::One, Cpu::Two, Cpu::Four]),
        Cpu::Two => cpus.extend([Cpu::One, Cpu::Two]),
        Cpu::One => cpus.push(Cpu::One),
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
    (0..len as u64).map(|i| (number(i + 1000) >> 29) as u8).collect()
}

#[test]
fn sums_are_those_of_another_program() {
    // By a few lines of Python from the module's head, with a table of SubBytes.
    let counted: Vec<u8> = (0..5000).map(|i| (i % 251) as u8).collect();
    for (bytes, expected) in [
        (&b""[..], 0xa5e3_c88a_fc13_0388),
        (b"a", 0x093c_41d6_f819_4a7e),
        (b"123456789", 0xf73f_4fa7_581b_b7a5),
        (&[0; 256], 0xd2c4_82fc_d276_dae3),
        (&[0; 257], 0xa6e9_0ee5_1293_5ac1),
        (&[0; 4096], 0x277d_1274_dd90_7d10),
        (&counted, 0x209d_b610_f20c_3358),
    ] {
        for cpu in cpus() {
            assert_eq!(sum_by(cpu, &[bytes]), expected, "{} bytes by {cpu:?}", bytes.len());
        }
    }
}

#[test]
fn every_length_and_cut_gives_the_same_on_every_cpu() {
    let bytes = noise(9000);
    for len in (0..40).chain([255, 256, 257, 511, 512, 513, 1000, 4096, 8999]) {
        let whole = &bytes[1..][..len];
        let expected = reference(whole);
        for cpu in cpus() {
            assert_eq!(sum_by(cpu, &[whole]), expected, "{len} bytes by {cpu:?}");
            for cut in [1, 15, 16, 255, 256, 257, 1000, 1024, 1500] {
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
fn two_flipped_bits_are_found_where_they_meet_in_one_state() {
    for bytes in [vec![0; 1024], noise(1024)] {
        let (sound, mut damaged) = (sum(&bytes), bytes);
        let flip = |bytes: &mut Vec<u8>, bit: usize| bytes[bit / 8] ^= 1 << (bit % 8);
        for (first, second, blocks) in
            (0..128).flat_map(|a| (0..128).flat_map(move |b| [1, 2, 3].map(|n| (a, b, n))))
        {
            let bits = [first, second + blocks * 8 * BLOCK_BYTES];
            bits.iter().for_each(|bit| flip(&mut damaged, *bit));
            assert_ne!(sum(&damaged), sound, "bits {bits:?}");
            bits.iter().for_each(|bit| flip(&mut damaged, *bit));
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
fn states_begin_differently() {
    let all: std::collections::HashSet<u128> = FIRST.0.into_iter().chain(MORE).collect();
    assert_eq!(all.len(), WORDS + MORE.len());
}
