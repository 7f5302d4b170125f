//! A 64-bit checksum for bodies of frames that costs one instruction for as many bytes as a vector of the CPU has: where a
//! cache holds a body, it is summed about as fast as it can be read.
//!
//! Bytes are words of 128 bits, continued with zeros to whole blocks of sixteen words. There are sixteen states of 128 bits,
//! one for each place in a block. A word changes its state by a round of AES, R(state) + word, where R is SubBytes, ShiftRows
//! and MixColumns and + is exclusive or: what CPUs do at once. In the end the states are joined in pairs, and the number of
//! bytes at last:
//!
//! ```text
//! state[i]    =  R(state[i]) + word[i]                    for every block; at first constant[i]
//! join(a, b)  =  R(R(a) + b) + constant[16]
//! state[i]    =  join(state[i], state[i + n])             for i < n, n = 8, 4, 2, 1
//! last        =  R(R(join(state[0], bytes)) + constant[17]) + constant[18]
//! sum         =  lower half of last + upper half of last
//! ```
//! Constants are no secret: this finds accidents, not forgers, as CRC-32C does.
//!
//! # What it finds
//! R maps states to states one to one. So a change within one word leaves its state another one for certain, and this one
//! alone; what differs in `last` is then all but one in 2^64 times seen in the sum. Several changed words (zeroed, moved, in
//! each other's place, repeated) meet at best in one state, to which the later one must bring just what rounds have made of the
//! earlier one, four bytes or more of a change of one byte: by chance all but one in 2^64 are found. Words and blocks in each
//! other's place change it because R is not linear; the states begin differently, and so do bodies of zeros of different
//! lengths end.
//!
//! CRC-32C is certain of other things, up to three bits anywhere and bursts of 32 bits across any border, and misses one in
//! 2^32 of everything else.

mod plain;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Words of a block, each with a state of its own.
const WORDS: usize = 16;
const WORD_BYTES: usize = 16;
const BLOCK_BYTES: usize = WORDS * WORD_BYTES;

/// What states begin with. From SplitMix64, as are the constants that are added while states are joined.
static FIRST: States = States(constants(0));
/// Of joining, of the last round but one, and of the last.
static MORE: [u128; 3] = constants(WORDS);

const fn constants<const N: usize>(from: usize) -> [u128; N] {
    let mut all = [0; N];
    let mut i = 0;
    while i < N {
        let at = 2 * (from + i) as u64;
        all[i] = (number(at + 2) as u128) << 64 | number(at + 1) as u128;
        i += 1;
    }
    all
}

const fn number(n: u64) -> u64 {
    let mut value = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The sum of what comes piece by piece, in pieces of any length.
#[derive(Clone)]
pub struct Sum64 {
    states: States,
    /// Bytes that make no whole block yet.
    part: [u8; BLOCK_BYTES],
    filled: usize,
    bytes: u64,
}

#[derive(Clone)]
#[repr(align(64))]
struct States([u128; WORDS]);

/// Which instructions there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cpu {
    /// Rounds of four words at once.
    #[cfg(target_arch = "x86_64")]
    Four,
    /// Of two.
    #[cfg(target_arch = "x86_64")]
    Two,
    /// Of one.
    #[cfg(target_arch = "x86_64")]
    One,
    /// None that this file knows.
    Plain,
}

impl Cpu {
    #[inline]
    fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("aes") && is_x86_feature_detected!("avx") {
            let has_wide_rounds = is_x86_feature_detected!("vaes");
            if has_wide_rounds && is_x86_feature_detected!("avx512f") {
                return Self::Four;
            }
            return if has_wide_rounds { Self::Two } else { Self::One };
        }
        Self::Plain
    }
}

/// Whether this CPU does rounds of AES itself: where it does not, another checksum is the better one.
pub fn is_fast() -> bool {
    Cpu::here() != Cpu::Plain
}

impl Default for Sum64 {
    fn default() -> Self {
        Self { states: FIRST.clone(), part: [0; BLOCK_BYTES], filled: 0, bytes: 0 }
    }
}

impl Sum64 {
    /// The next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.update_by(Cpu::here(), piece);
    }

    /// Of all pieces together.
    pub fn finish(&self) -> u64 {
        self.finish_by(Cpu::here())
    }

    fn update_by(&mut self, cpu: Cpu, mut piece: &[u8]) {
        self.bytes += piece.len() as u64;
        if self.filled > 0 {
            let (taken, rest) = piece.split_at(piece.len().min(BLOCK_BYTES - self.filled));
            self.part[self.filled..][..taken.len()].copy_from_slice(taken);
            self.filled += taken.len();
            if self.filled < BLOCK_BYTES {
                return;
            }
            piece = rest;
            self.states.add(cpu, &[self.part]);
            self.filled = 0;
        }
        let (blocks, rest) = piece.as_chunks::<BLOCK_BYTES>();
        self.states.add(cpu, blocks);
        self.part[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    fn finish_by(&self, cpu: Cpu) -> u64 {
        let padded = (self.filled > 0).then(|| {
            let (mut states, mut part) = (self.states.clone(), self.part);
            part[self.filled..].fill(0);
            states.add(cpu, &[part]);
            states
        });
        let states = padded.as_ref().unwrap_or(&self.states);
        match cpu {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the CPU has the instructions: `cpu` says so, and every CPU with wide rounds has narrow ones.
            Cpu::Four | Cpu::Two | Cpu::One => unsafe { x86::join(states, self.bytes) },
            Cpu::Plain => plain::join(states, self.bytes),
        }
    }
}

impl States {
    fn add(&mut self, cpu: Cpu, blocks: &[[u8; BLOCK_BYTES]]) {
        match cpu {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the CPU has the instructions: `cpu` says so.
            Cpu::Four => unsafe { x86::add_by_four(self, blocks) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Cpu::Two => unsafe { x86::add_by_two(self, blocks) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Cpu::One => unsafe { x86::add_by_one(self, blocks) },
            Cpu::Plain => plain::add(self, blocks),
        }
    }
}

/// All states and the number of bytes, by `round(state, word)`; `more` constants.
#[inline(always)]
fn join_with<Word: Copy>(
    mut states: [Word; WORDS],
    bytes: Word,
    more: [Word; 3],
    round: impl Fn(Word, Word) -> Word,
) -> Word {
    let [joining, before_last, last] = more;
    let join = |a, b| round(round(a, b), joining);
    let mut left = WORDS;
    while left > 1 {
        left /= 2;
        for i in 0..left {
            states[i] = join(states[i], states[i + left]);
        }
    }
    round(round(join(states[0], bytes), before_last), last)
}

#[cfg(test)]
mod tests;
