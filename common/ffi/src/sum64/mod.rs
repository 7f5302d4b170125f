//! A 64-bit checksum for bodies of frames that costs one carry-less product for sixteen bytes, half of what CRC-32C takes.
//!
//! Bytes are words of 64 bits, little-endian, a word a polynomial over two elements (bit i is x^i), continued with zeros to
//! whole vectors of eight words. Every word has a [key](KEYS). In each of a vector's four lanes the two keyed words are
//! multiplied; sixteen vectors make a block, in which the products of a lane are added up; blocks, lanes and at last the
//! number of bytes are put behind one another as the digits of a number, and what is left of it modulo
//! x^64 + x^4 + x^3 + x + 1, which is primitive, is the sum:
//!
//! ```text
//! block(b, lane)  =  Σ over its vectors v   (w[v, 2 lane] + key[v, 2 lane]) · (w[v, 2 lane + 1] + key[v, 2 lane + 1])
//! sum             =  Σ over blocks and lanes   block(b, lane) · x^(512 (last - b) + 128 (4 - lane))   +   bytes
//! ```
//! Empty bodies have the sum 0. After Lemire and Kaser, "Faster 64-bit universal hashing using carry-less multiplications",
//! 2016 (CLNH), with keys that are no secret: this finds accidents, not forgers, as CRC-32C does.
//!
//! # What it finds
//! - A change within one aligned word of eight bytes (a bit, a byte, any burst) changes one product by the change times the
//!   keyed neighbour. Both have less than 64 bits and the modulus cannot be divided, so the sum changes for certain,
//!   unless the neighbour is its key: of 2^64 values one, four NaNs in bf16 and two in f32, which sound rows do not have,
//!   and no id of anything.
//! - Two blocks in each other's place: for certain, where their own sums differ, since the powers of x repeat only after
//!   2^64 - 1. Two different words of a product in each other's place: for certain, since their keys differ.
//! - Anything else (several words changed, pieces zeroed, repeated, moved, cut off): all but one in 2^64, as long as nobody
//!   chose the damage by the keys.
//!
//! CRC-32C is certain of other things, up to three bits anywhere and bursts of 32 bits across any border, and misses one in
//! 2^32 of everything else. Here such a burst across two words is missed in one of 2^64.

#[cfg(target_arch = "x86_64")]
mod narrow;
mod plain;
#[cfg(target_arch = "x86_64")]
mod wide;

/// Words of a vector, and vectors of a block.
const WORDS: usize = 8;
const BLOCK: usize = 16;
const VECTOR_BYTES: usize = 8 * WORDS;

/// The modulus without its highest term.
const MODULUS: u64 = 0b11011;

/// Added to the words of a block. From SplitMix64, with the bits set that make a NaN of every bf16 and f32.
static KEYS: Keys = keys();

#[repr(align(64))]
struct Keys([[u64; WORDS]; BLOCK]);

const fn keys() -> Keys {
    const NAN: u64 = 0x7f81_7f81_7f81_7f81;
    let mut keys = [[0; WORDS]; BLOCK];
    let mut i = 0;
    while i < BLOCK * WORDS {
        let mut key = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        keys[i / WORDS][i % WORDS] = (key ^ (key >> 31)) | NAN;
        i += 1;
    }
    Keys(keys)
}

/// x^n modulo the modulus.
const fn power(n: u32) -> u64 {
    let (mut value, mut i) = (1u64, 0);
    while i < n {
        value = (value << 1) ^ if value >> 63 == 1 { MODULUS } else { 0 };
        i += 1;
    }
    value
}

/// What 128 bits are multiplied with to lie `bits` further on: their lower half and their upper one.
const fn distance(bits: u32) -> [u64; 2] {
    [power(bits), power(bits + 64)]
}

/// Of a block from the one behind it.
const BY_BLOCK: [u64; 2] = distance(512);
/// Of each lane from the number of bytes.
const BY_LANE: [[u64; 2]; 4] = [distance(512), distance(384), distance(256), distance(128)];

/// The sum of what comes piece by piece, in pieces of any length.
#[derive(Clone)]
pub struct Sum64 {
    lanes: Lanes,
    /// Bytes that make no whole vector yet.
    part: [u8; VECTOR_BYTES],
    filled: usize,
    bytes: u64,
}

/// What is left of whole vectors, lane by lane.
#[derive(Clone, Default)]
#[repr(align(64))]
struct Lanes {
    /// Of whole blocks, with those before them.
    blocks: [u128; 4],
    /// Of the block that is not whole, and how many vectors it has.
    block: [u128; 4],
    vectors: usize,
}

/// Which instructions there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cpu {
    /// Four products at once.
    #[cfg(target_arch = "x86_64")]
    Wide,
    /// One.
    #[cfg(target_arch = "x86_64")]
    Narrow,
    /// None.
    Plain,
}

impl Cpu {
    #[inline]
    fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq") {
                return Self::Wide;
            }
            if is_x86_feature_detected!("pclmulqdq") {
                return Self::Narrow;
            }
        }
        Self::Plain
    }
}

/// Whether this CPU multiplies polynomials itself: where it does not, another checksum is the better one.
pub fn is_fast() -> bool {
    Cpu::here() != Cpu::Plain
}

impl Default for Sum64 {
    fn default() -> Self {
        Self { lanes: Lanes::default(), part: [0; VECTOR_BYTES], filled: 0, bytes: 0 }
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
            let (taken, rest) = piece.split_at(piece.len().min(VECTOR_BYTES - self.filled));
            self.part[self.filled..][..taken.len()].copy_from_slice(taken);
            self.filled += taken.len();
            if self.filled < VECTOR_BYTES {
                return;
            }
            piece = rest;
            self.lanes.add(cpu, &[self.part]);
            self.filled = 0;
        }
        let (vectors, rest) = piece.as_chunks::<VECTOR_BYTES>();
        self.lanes.add(cpu, vectors);
        self.part[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    fn finish_by(&self, cpu: Cpu) -> u64 {
        let padded = (self.filled > 0).then(|| {
            let (mut lanes, mut part) = (self.lanes.clone(), self.part);
            part[self.filled..].fill(0);
            lanes.add(cpu, &[part]);
            lanes
        });
        let lanes = padded.as_ref().unwrap_or(&self.lanes);
        match cpu {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the CPU has the instructions: `cpu` says so, and every CPU with wide products has narrow ones.
            Cpu::Wide | Cpu::Narrow => unsafe { narrow::finish(lanes, self.bytes) },
            Cpu::Plain => finish_with(lanes, self.bytes, plain::product),
        }
    }
}

impl Lanes {
    fn add(&mut self, cpu: Cpu, mut vectors: &[[u8; VECTOR_BYTES]]) {
        while !vectors.is_empty() {
            // Up to the next border of blocks, or as many whole blocks as there are.
            let now = match self.vectors {
                0 if vectors.len() >= BLOCK => vectors.len() - vectors.len() % BLOCK,
                vectors_before => vectors.len().min(BLOCK - vectors_before),
            };
            let (these, rest) = vectors.split_at(now);
            match cpu {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the CPU has the instructions: `cpu` says so.
                Cpu::Wide => unsafe { wide::add(self, these) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Cpu::Narrow => unsafe { narrow::add(self, these) },
                Cpu::Plain => plain::add(self, these),
            }
            vectors = rest;
        }
    }
}

/// Puts lanes and the number of bytes behind one another.
#[inline(always)]
fn finish_with(lanes: &Lanes, bytes: u64, product: impl Fn(u64, u64) -> u128) -> u64 {
    let mut all = u128::from(bytes);
    for (lane, by) in BY_LANE.iter().enumerate() {
        let blocks = match lanes.vectors {
            0 => lanes.blocks[lane],
            _ => moved(lanes.blocks[lane], BY_BLOCK, &product) ^ lanes.block[lane],
        };
        all ^= moved(blocks, *by, &product);
    }
    let once = product((all >> 64) as u64, MODULUS);
    let twice = product((once >> 64) as u64, MODULUS);
    (all ^ once ^ twice) as u64
}

#[inline(always)]
fn moved(value: u128, by: [u64; 2], product: impl Fn(u64, u64) -> u128) -> u128 {
    product(value as u64, by[0]) ^ product((value >> 64) as u64, by[1])
}

#[cfg(test)]
mod tests;
