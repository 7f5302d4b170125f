//! Our loops for few rows beside libtorch's products of the same shapes, and beside the rate at which memory can be read.
//! Run with `cargo bench -p afd-tests --bench few_rows [-- THREADS]`; not a test: the numbers are for reading. They say up
//! to how many rows the loops are the better way on a CPU. Both sides alternate, lower quartiles are printed, and every call
//! has another matrix, so that all of it comes from memory as in the model.
use std::hint::black_box;
use std::time::Instant;

use afd_ffi::Crew;
use afd_ffi::cpu_linear::{StoredMatrix, linear};
use afd_ffi::cpu_mlp::{MlpRows, StoredMlp, gated_mlps};
use tch::{Device, Kind, Tensor};

/// Of SmolLM2-135M: queries, keys and values; output of attention; head.
const SHAPES: [(&str, i64, i64); 3] = [("qkv", 960, 576), ("out", 576, 576), ("head", 49_152, 576)];
const MLP: (i64, i64) = (576, 1536);
const ROWS: [i64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Matrices of a shape take up so much together: far more than a processor's cache.
const BYTES: usize = 192 << 20;
const ROUNDS: usize = 5;

fn main() {
    let _no_grad = tch::no_grad_guard();
    // Cargo passes `--bench` too.
    let threads = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(tch::get_num_threads());
    tch::set_num_threads(threads);
    let crew = Crew::new(threads as usize).expect("threads");
    println!("{threads} threads; bf16 products by the CPU: {}", afd_ffi::multiplies_bf16());
    println!("memory: {:.1} GB/s read", memory_rate(&crew));
    for kind in [Kind::BFloat16, Kind::Float] {
        println!("\n{kind:?}, µs a call (GB/s of weights): loops | libtorch | ratio");
        for (what, rows, columns) in SHAPES {
            let weights: Vec<Tensor> =
                (0..copies(rows * columns, kind)).map(|_| random(rows, columns, kind)).collect();
            let stored: Vec<_> =
                weights.iter().map(|weight| StoredMatrix::new(weight).expect("fits")).collect();
            for num_rows in ROWS {
                let x = random(num_rows, columns, kind);
                let ours =
                    |at: usize| drop(black_box(linear(&x, &stored[at], None, kind, &crew).expect("fits")));
                let theirs = |at: usize| drop(black_box(x.linear(&weights[at], None::<Tensor>)));
                line(what, num_rows, rows * columns, kind, weights.len(), ours, theirs);
            }
        }
        let (hidden, width) = MLP;
        let mlps: Vec<[Tensor; 3]> = (0..copies(3 * hidden * width, kind))
            .map(|_| [random(width, hidden, kind), random(width, hidden, kind), random(hidden, width, kind)])
            .collect();
        let stored: Vec<_> =
            mlps.iter().map(|[gate, up, down]| StoredMlp::new(gate, up, down).expect("fits")).collect();
        for num_rows in ROWS {
            let x = random(num_rows, hidden, kind);
            let (rows, scales): (Vec<i64>, _) = ((0..num_rows).collect(), vec![1.0; num_rows as usize]);
            let ours = |at: usize| {
                let mlp = MlpRows { mlp: &stored[at], rows: &rows, scales: &scales };
                drop(black_box(gated_mlps(&x, &[mlp], &crew).expect("fits")));
            };
            let theirs = |at: usize| {
                let [gate, up, down] = &mlps[at];
                let none = None::<&Tensor>;
                drop(black_box((x.linear(gate, none).silu() * x.linear(up, none)).linear(down, none)));
            };
            line("mlp", num_rows, 3 * hidden * width, kind, mlps.len(), ours, theirs);
        }
    }
}

fn copies(elements: i64, kind: Kind) -> usize {
    BYTES.div_ceil(elements as usize * kind.elt_size_in_bytes()).max(2)
}

fn random(rows: i64, columns: i64, kind: Kind) -> Tensor {
    (Tensor::rand([rows, columns], (Kind::Float, Device::Cpu)) - 0.5).to_kind(kind)
}

fn line(
    what: &str,
    num_rows: i64,
    elements: i64,
    kind: Kind,
    copies: usize,
    ours: impl Fn(usize),
    theirs: impl Fn(usize),
) {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        each(copies, &ours, &mut a);
        each(copies, &theirs, &mut b);
    }
    let (a, b) = (lower_quartile(a), lower_quartile(b));
    let rate = |us: f64| elements as f64 * kind.elt_size_in_bytes() as f64 * 1e-3 / us;
    println!(
        "  {what:<5} {num_rows:>4} rows: {a:>8.1} ({:>5.1}) | {b:>8.1} ({:>5.1}) | {:.2}",
        rate(a),
        rate(b),
        b / a
    );
}

/// Notes the µs of each call.
fn each(count: usize, call: &impl Fn(usize), times: &mut Vec<f64>) {
    for at in 0..count {
        let start = Instant::now();
        call(at);
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
}

/// What it takes when nothing else is in the way.
fn lower_quartile(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 4]
}

/// GB/s, of the crew's threads together.
fn memory_rate(crew: &Crew) -> f64 {
    const CHUNK: usize = 8 << 10;
    let words: Vec<u64> = (0..BYTES as u64 / 8).collect();
    let rate = |_| {
        let start = Instant::now();
        crew.run(words.len() / CHUNK, &|chunk| {
            let words = &words[chunk * CHUNK..][..CHUNK];
            black_box(words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
        });
        words.len() as f64 * 8e-9 / start.elapsed().as_secs_f64()
    };
    -lower_quartile((0..ROUNDS).map(|round| -rate(round)).collect())
}
