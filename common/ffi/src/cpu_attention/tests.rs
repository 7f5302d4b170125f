//! The kernel against the textbook: scores, softmax, weighted sum, in f64, with every kind of vectors this CPU has.
use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use super::kernel::{self, Dims, RowState};
use super::{CacheView, PagedRow, PagedRows, paged_attention};
use crate::Crew;
use crate::simd::{Element, Isa, Simd};

/// Deterministic values in [-1, 1).
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

struct Case {
    num_kv_heads: usize,
    group: usize,
    key_dim: usize,
    value_dim: usize,
    block_size: usize,
}

/// `[heads, value_dim]` of one row.
#[allow(clippy::too_many_arguments)] // The equation's terms.
fn textbook(
    case: &Case,
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    strides: (usize, usize),
    table: &[u32],
    tokens: usize,
    scale: f64,
) -> Vec<f64> {
    let mut out = Vec::new();
    for head in 0..case.num_kv_heads * case.group {
        let kv = head / case.group;
        let slot = |t: usize| table[t / case.block_size] as usize * case.block_size + t % case.block_size;
        let scores: Vec<f64> = (0..tokens)
            .map(|t| {
                let key = &keys[slot(t) * strides.0 + kv * case.key_dim..][..case.key_dim];
                let query = &queries[head * case.key_dim..][..case.key_dim];
                scale * query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..case.value_dim {
            let value = |t: usize| f64::from(values[slot(t) * strides.1 + kv * case.value_dim + d]);
            out.push((0..tokens).map(|t| weights[t] * value(t)).sum::<f64>() / sum);
        }
    }
    out
}

fn close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*a) - b).abs() <= tolerance, "{what}: element {i} is {a}, expected {b}");
    }
}

/// Blocks in an order that is not the cache's.
fn shuffled(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 7 + 3) % 11 + 11 * (i / 11)).collect()
}

#[test]
fn any_shape_is_the_textbook_s() {
    tch::no_grad(|| {
        let shapes = [
            (3, 3, 64, 64, 16),
            (1, 1, 8, 8, 1),
            (2, 5, 24, 24, 7),
            (1, 9, 33, 17, 16),
            (2, 2, 13, 13, 3),
            (4, 1, 80, 80, 16),
            (1, 7, 1, 1, 5),
        ];
        for (num_kv_heads, group, key_dim, value_dim, block_size) in shapes {
            let case = Case { num_kv_heads, group, key_dim, value_dim, block_size };
            let heads = num_kv_heads * group;
            let num_blocks = 22usize;
            let slots = num_blocks * block_size;
            let keys = noise(slots * num_kv_heads * key_dim, 1);
            let values = noise(slots * num_kv_heads * value_dim, 2);
            let queries = noise(4 * heads * key_dim, 3);
            let table = shuffled(num_blocks);
            let most = slots - 3 * (block_size > 3) as usize;
            let rows = PagedRows {
                blocks: table.iter().chain(&[5, 4]).copied().collect(),
                rows: vec![
                    PagedRow { row: 2, table: 0..num_blocks, num_tokens: most },
                    PagedRow { row: 0, table: 0..num_blocks, num_tokens: 1 },
                    PagedRow { row: 3, table: num_blocks..num_blocks + 2, num_tokens: 2 * block_size },
                ],
            };
            let shape =
                |heads: usize, dim: usize| [num_blocks as i64, block_size as i64, heads as i64, dim as i64];
            let k = Tensor::from_slice(&keys).view(shape(num_kv_heads, key_dim));
            let v = Tensor::from_slice(&values).view(shape(num_kv_heads, value_dim));
            let q = Tensor::from_slice(&queries).view([4, heads as i64, key_dim as i64]);
            let cache = CacheView { keys: &k, values: &v, num_kv_heads, key_dim, value_dim };
            // Results lie head by head, as the absorbed form wants them.
            let out = Tensor::full([heads as i64, 4, value_dim as i64], 7.0, (Kind::Float, Device::Cpu));
            paged_attention(&[&q], &cache, &rows, 0.4, &out.transpose(0, 1), &Crew::new(2).unwrap()).unwrap();
            for row in &rows.rows {
                let expected = textbook(
                    &case,
                    &queries[row.row * heads * key_dim..],
                    &keys,
                    &values,
                    (num_kv_heads * key_dim, num_kv_heads * value_dim),
                    &rows.blocks[row.table.clone()],
                    row.num_tokens,
                    0.4,
                );
                let found: Vec<f32> =
                    Vec::try_from(out.select(1, row.row as i64).contiguous().view(-1)).unwrap();
                close(&found, &expected, 3e-6, &format!("{:?}", cache.keys.size()));
            }
            let untouched: Vec<f32> = Vec::try_from(out.select(1, 1).contiguous().view(-1)).unwrap();
            assert!(untouched.iter().all(|&x| x == 7.0), "a row that was not asked for was written");
        }
    });
}

#[test]
fn queries_in_parts_over_a_latent_cache_in_f32_and_bf16() {
    tch::no_grad(|| {
        let case = Case { num_kv_heads: 1, group: 5, key_dim: 40, value_dim: 32, block_size: 16 };
        let latent = noise(6 * 16 * 40, 4);
        let queries = noise(2 * 5 * 40, 5);
        for (kind, tolerance) in [(Kind::Float, 2e-6), (Kind::BFloat16, 8e-3)] {
            let cache = Tensor::from_slice(&latent).view([6, 16, 40]).to_kind(kind);
            let q = Tensor::from_slice(&queries).view([2, 5, 40]).to_kind(kind);
            let view =
                CacheView { keys: &cache, values: &cache, num_kv_heads: 1, key_dim: 40, value_dim: 32 };
            let rows = PagedRows {
                blocks: vec![3, 0, 5],
                rows: vec![
                    PagedRow { row: 0, table: 0..3, num_tokens: 33 },
                    PagedRow { row: 1, table: 1..3, num_tokens: 20 },
                ],
            };
            let out = Tensor::zeros([2, 5, 32], (kind, Device::Cpu));
            let parts = [q.narrow(2, 0, 32), q.narrow(2, 32, 8)];
            paged_attention(&[&parts[0], &parts[1]], &view, &rows, 0.3, &out, &Crew::new(1).unwrap())
                .unwrap();
            let rounded: Vec<f32> = Vec::try_from(cache.to_kind(Kind::Float).view(-1)).unwrap();
            let q: Vec<f32> = Vec::try_from(q.to_kind(Kind::Float).view(-1)).unwrap();
            for row in &rows.rows {
                let table = &rows.blocks[row.table.clone()];
                let expected = textbook(
                    &case,
                    &q[row.row * 200..],
                    &rounded,
                    &rounded,
                    (40, 40),
                    table,
                    row.num_tokens,
                    0.3,
                );
                let found: Vec<f32> =
                    Vec::try_from(out.get(row.row as i64).to_kind(Kind::Float).view(-1)).unwrap();
                close(&found, &expected, tolerance, &format!("{kind:?}"));
            }
        }
    });
}

#[test]
fn a_row_cut_over_threads_gives_the_same() {
    tch::no_grad(|| {
        let (num_blocks, dim) = (800i64, 64i64);
        let keys = Tensor::from_slice(&noise(800 * 16 * 64, 6)).view([num_blocks, 16, 1, dim]);
        let q = Tensor::from_slice(&noise(2 * 64 * 64, 7)).view([2, 64, dim]) * 3.0;
        let cache = CacheView { keys: &keys, values: &keys, num_kv_heads: 1, key_dim: 64, value_dim: 64 };
        let rows = PagedRows {
            blocks: (0..800).rev().collect(),
            rows: (0..2).map(|row| PagedRow { row, table: 0..800, num_tokens: 12_000 + 777 * row }).collect(),
        };
        let run = |threads| {
            let out = Tensor::zeros([2, 64, dim], (Kind::Float, Device::Cpu));
            paged_attention(&[&q], &cache, &rows, 0.125, &out, &Crew::new(threads).unwrap()).unwrap();
            out
        };
        let alone = run(1);
        for threads in [2, 3, 7] {
            let worst = (run(threads) - &alone).abs().max().double_value(&[]);
            assert!(worst < 2e-6, "{threads} threads differ by {worst:e}");
        }
    });
}

#[test]
fn every_kind_of_vectors_gives_the_same() {
    let dims = Dims {
        num_kv_heads: 2,
        group: 3,
        key_dim: 37,
        value_dim: 51,
        key_stride: 74,
        value_stride: 102,
        block_size: 4,
    };
    let (keys, values) = (noise(30 * 4 * 74, 8), noise(30 * 4 * 102, 9));
    let table: Vec<u32> = (0..30).rev().collect();
    let mut kinds = vec![Isa::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            kinds.push(Isa::Avx2);
        }
        if Isa::best() == Isa::Avx512 {
            kinds.push(Isa::Avx512);
        }
    }
    let results: Vec<Vec<f32>> = kinds
        .iter()
        .map(|&isa| {
            let mut state = RowState::new(&dims);
            state.queries.copy_from_slice(&noise(6 * 37, 10));
            // SAFETY: 30 blocks of 4 tokens, of the strides above, are what the slices hold; the CPU was asked.
            unsafe { kernel::attend(isa, &dims, keys.as_ptr(), values.as_ptr(), &table, 3..117, &mut state) };
            state
                .acc
                .chunks(51)
                .zip(&state.sum)
                .flat_map(|(acc, sum)| acc.iter().map(move |x| x / sum))
                .collect()
        })
        .collect();
    for (kind, result) in kinds.iter().zip(&results) {
        for (a, b) in result.iter().zip(&results[0]) {
            assert!((a - b).abs() < 2e-6, "{kind:?}: {a} and {b}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    tch::no_grad(|| {
        let cache = Tensor::zeros([4, 16, 2, 8], (Kind::Float, Device::Cpu));
        let view = CacheView { keys: &cache, values: &cache, num_kv_heads: 2, key_dim: 8, value_dim: 8 };
        let q = Tensor::zeros([1, 4, 8], (Kind::Float, Device::Cpu));
        let out = q.zeros_like();
        let row = |block, num_tokens| PagedRows {
            blocks: vec![block],
            rows: vec![PagedRow { row: 0, table: 0..1, num_tokens }],
        };
        let refused = |q: &Tensor, rows: PagedRows, out: &Tensor| {
            paged_attention(&[q], &view, &rows, 1.0, out, &Crew::new(1).unwrap()).unwrap_err().to_string()
        };
        assert_eq!(refused(&q, row(4, 1), &out), "block 4 of 4");
        assert!(refused(&q, row(0, 17), &out).contains("17 tokens in 1 blocks of 16"));
        assert!(refused(&q.narrow(2, 0, 7), row(0, 1), &out).contains("queries of 7 elements"));
        assert!(refused(&q, row(0, 1), &q).contains("overlap the queries"));
        assert!(refused(&q, row(0, 1), &out.to_kind(Kind::Double)).contains("expected Float"));
        let broadcast = Tensor::zeros([1, 1, 8], (Kind::Float, Device::Cpu)).expand([1, 4, 8], false);
        assert!(refused(&q, row(0, 1), &broadcast).contains("overlap one another"));
        assert!(
            refused(&q, PagedRows { rows: [row(0, 1).rows, row(0, 1).rows].concat(), ..row(0, 1) }, &out)
                .contains("twice")
        );
    });
}

thread_local! {
    /// How often each element was read, by its address.
    static READS: RefCell<BTreeMap<usize, usize>> = const { RefCell::new(BTreeMap::new()) };
}

/// An f32 that notes by whom it is read.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Counted(f32);

impl Element for Counted {
    unsafe fn load<S: Simd>(from: *const Self) -> S::Vector {
        READS.with_borrow_mut(|reads| {
            for lane in 0..S::LANES {
                *reads.entry(from.wrapping_add(lane) as usize).or_default() += 1;
            }
        });
        // SAFETY: the caller's promise is the same; `Counted` is a transparent `f32`.
        unsafe { S::load(from.cast()) }
    }

    fn to_f32(self) -> f32 {
        panic!("a single element is read past the counter")
    }

    fn from_f32(_: f32) -> Self {
        panic!("the cache is only read")
    }
}

/// At DeepSeek-V2-Lite's dimensions a token's entry is 512 + 64 elements: these are read, four times from the processor's
/// cache for 16 heads, and nothing else is.
#[test]
fn latent_decode_reads_the_compressed_cache_of_its_tokens_and_not_a_byte_more() {
    let (latent, rope, heads, block_size) = (512, 64, 16, 16);
    let entry = latent + rope;
    let dims = Dims {
        num_kv_heads: 1,
        group: heads,
        key_dim: entry,
        value_dim: latent,
        key_stride: entry,
        value_stride: entry,
        block_size,
    };
    let cache: Vec<Counted> = noise(8 * block_size * entry, 9).into_iter().map(Counted).collect();
    let (table, tokens) = ([6u32, 1, 4, 0, 3], 70);
    let mut state = RowState::new(&dims);
    state.queries.copy_from_slice(&noise(heads * entry, 10));
    READS.take();
    // SAFETY: every block is in the cache, the table has room for the tokens, and the state was made for these dims.
    unsafe {
        kernel::attend(Isa::best(), &dims, cache.as_ptr(), cache.as_ptr(), &table, 0..tokens, &mut state)
    };
    let reads = READS.take();

    let bytes_per_token = reads.len() * size_of::<f32>() / tokens;
    assert_eq!((bytes_per_token, reads.len() % tokens), (entry * size_of::<f32>(), 0));
    for token in 0..tokens {
        let slot = table[token / block_size] as usize * block_size + token % block_size;
        for element in 0..entry {
            let address = &raw const cache[slot * entry + element] as usize;
            // Scores read the whole entry, weighted sums its latent part: each once per four heads.
            let expected = if element < latent { 2 * heads / 4 } else { heads / 4 };
            assert_eq!(reads.get(&address), Some(&expected), "token {token}, element {element}");
        }
    }
}
