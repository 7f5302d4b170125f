//! The products around decode attention by kernels of ours: checked against sums in f64, then timed beside the library's over
//! a whole model's layers, each with a weight of its own.
use half::bf16;

use afd_gpu::ops::{GemmShape, Product, ProductKernels};
use afd_gpu::random::Random;
use afd_gpu::reference::relative_error;
use afd_gpu::{Device, Region};

use crate::layer::{HIDDEN, SIZES};
use crate::table::{Table, us};
use crate::timing::graph_us;
use crate::{Result, machine};

const LAYERS: usize = 27;

/// DeepSeek-V2-Lite's, as its attention calls them.
fn shapes(rows: usize) -> [(&'static str, GemmShape); 4] {
    let linear = |inner, columns| GemmShape::linear(rows, inner, columns);
    [
        ("projection", linear(HIDDEN, SIZES.projected())),
        ("W_UK", SIZES.keys(rows)),
        ("W_UV", SIZES.values(rows)),
        ("out", linear(SIZES.attended(), HIDDEN)),
    ]
}

/// Elements that x, the weight and the result reach over.
fn elements(shape: &GemmShape) -> [usize; 3] {
    let over = |batch: usize, rows: usize, stride: usize, columns: usize| {
        (shape.batch - 1) * batch + (rows - 1) * stride + columns
    };
    [
        over(shape.x_batch, shape.rows, shape.x_stride, shape.inner),
        over(shape.weight_batch, shape.columns, shape.weight_stride, shape.inner),
        over(shape.out_batch, shape.rows, shape.out_stride, shape.columns),
    ]
}

pub(crate) fn run(device: &Device) -> Result<String> {
    let kernels = ProductKernels::new(device)?;
    let mut text = check(device, &kernels)?;
    let rate = machine::read_rate(device)?;
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let title =
        "Products, us, 27 in a graph: ours, the library's; floor: bytes of the weight over the read rate";
    let mut table = Table::new(title, &["rows", "product", "cut", "ours", "library", "floor"]);
    for rows in [1, 8, 16, 32, 64, 128] {
        for (name, shape) in shapes(rows) {
            let [x, weight, out] = elements(&shape);
            let filled = |elements: usize, seed: usize| -> Result<Region> {
                let region = Region::alloc(device, elements * 2)?;
                random.fill(&stream, &region, seed as u64, 0.1)?;
                Ok(region)
            };
            let weights = (0..LAYERS).map(|l| filled(weight, l)).collect::<Result<Vec<_>>>()?;
            let (x, out) = (filled(x, 99)?, Region::zeroed(device, out * 2)?);
            let time = |mut product: Product| -> Result<f64> {
                product.tune(&stream, &x, &weights.iter().collect::<Vec<_>>(), &out)?;
                let all = graph_us(&stream, 10, || {
                    weights.iter().try_for_each(|weight| product.enqueue(&stream, &x, weight, &out))
                })?;
                Ok(all / LAYERS as f64)
            };
            let ours = Product::new(&kernels, shape)?;
            let way = ours.way();
            let (ours, library) = (time(ours)?, time(Product::by_library(&kernels, shape)?)?);
            let floor = (shape.columns * shape.inner * shape.batch * 2) as f64 / rate;
            table.row([rows.to_string(), name.into(), way, us(ours), us(library), us(floor)]);
        }
    }
    text.push_str(&table.to_string());
    Ok(text)
}

/// Some columns of every row against sums in f64; what lies between rows must stay as it was.
fn check(device: &Device, kernels: &ProductKernels) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let title = "Products against sums in f64";
    let mut table = Table::new(title, &["rows", "product", "cut", "error", "again equal", "others kept"]);
    let mut worst = 0f64;
    for rows in [1, 8, 13, 17, 32, 33, 64, 100, 128] {
        // The inner dimension of the last is shared by two blocks instead of four.
        let by_two = ("1152 x 896", GemmShape::linear(rows, 1152, 896));
        for (name, shape) in shapes(rows).into_iter().chain([by_two]) {
            let [x_len, weight_len, out_len] = elements(&shape);
            let (x, weight) = (Region::alloc(device, x_len * 2)?, Region::alloc(device, weight_len * 2)?);
            // Behind the last row: a result that is written too far is seen.
            let out = Region::alloc(device, (out_len + 4096) * 2)?;
            random.fill(&stream, &x, (rows * 7) as u64, 1.0)?;
            random.fill(&stream, &weight, (rows * 7 + 1) as u64, 0.1)?;
            out.fill(0xff)?;
            let product = Product::new(kernels, shape)?;
            product.enqueue(&stream, &x, &weight, &out)?;
            stream.synchronize()?;
            let (xs, weights, found) = (x.read::<bf16>()?, weight.read::<bf16>()?, out.read::<bf16>()?);
            let (mut wanted, mut got) = (Vec::new(), Vec::new());
            let mut written = vec![false; found.len()];
            for product in 0..shape.batch {
                for row in 0..rows {
                    let of_row = &xs[product * shape.x_batch + row * shape.x_stride..][..shape.inner];
                    let to = product * shape.out_batch + row * shape.out_stride;
                    written[to..to + shape.columns].fill(true);
                    for column in ((row * 5 + product) % 61..shape.columns).step_by(61) {
                        let line = product * shape.weight_batch + column * shape.weight_stride;
                        let pairs = of_row.iter().zip(&weights[line..line + shape.inner]);
                        wanted.push(
                            pairs.map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum::<f64>(),
                        );
                        got.push(f64::from(found[to + column].to_f32()));
                    }
                }
            }
            let error = relative_error(got, wanted);
            // What was written nowhere is still a pattern of ones, what was written is a number.
            let kept = found.iter().zip(&written).all(|(v, w)| (v.to_bits() == 0xffff) != *w);
            let mut equal = true;
            for _ in 0..10 {
                out.fill(0xff)?;
                product.enqueue(&stream, &x, &weight, &out)?;
                equal &= out.read::<bf16>()?.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
            }
            worst = worst.max(if error.is_nan() || !equal || !kept { f64::INFINITY } else { error });
            let cells = [rows.to_string(), name.into(), product.way(), format!("{error:.1e}")];
            table.row(cells.into_iter().chain([equal.to_string(), kept.to_string()]));
        }
    }
    if worst > 1e-2 {
        return Err(format!("wrong results\n{table}").into());
    }
    Ok(table.to_string())
}
