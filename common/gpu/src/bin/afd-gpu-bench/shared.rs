//! What a layer's shared experts cost where: on the FFN, beside the routed ones, or on attention, alone. The FFN's layers come
//! each behind a pause, as they come in a pair, where the device is idle while attention computes.
use afd_gpu::ops::{Ahead, Moe, MoeOutput, MoeShape, MoeWeights};
use afd_gpu::random::Random;
use afd_gpu::{Device, GpuError, Region, Stream};

use crate::moe::{LAYERS, LITE, input, weights};
use crate::table::{Table, us};
use crate::timing::graph_us;
use crate::{Result, machine};

/// Rows, and attention's time for a layer of them, us.
const CALLS: [(usize, u64); 6] = [(1, 21), (8, 28), (16, 32), (32, 37), (64, 50), (128, 77)];
/// As the FFN fetches while it waits.
const FETCHED_BYTES: usize = 24 << 20;

pub(crate) fn run(device: &Device) -> Result<String> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let layers = (0..LAYERS).map(|l| weights(device, &stream, &random, l)).collect::<Result<Vec<_>>>()?;
    let shared_of = layers.iter().map(shared_alone).collect::<std::result::Result<Vec<_>, GpuError>>()?;
    stream.synchronize()?;
    let title = format!(
        "shared experts of {LAYERS} layers in one graph, us a layer; read {:.0} GB/s",
        machine::read_rate(device)? / 1e3
    );
    let columns = [
        "rows",
        "pause",
        "on the FFN",
        "routed alone",
        "saved",
        "back to back",
        "alone",
        "saved",
        "shared alone",
    ];
    let mut table = Table::new(title, &columns);
    for (rows, pause) in CALLS {
        let x = (0..LAYERS)
            .map(|l| input(device, &stream, &random, rows, l as u64))
            .collect::<Result<Vec<_>>>()?;
        let out = Region::alloc(device, rows * LITE.hidden * 4)?;
        let bench = Bench { stream: &stream, random: &random, x: &x, rows, out: &out };
        let both = Moe::new(device, LITE, rows, MoeOutput::Bf16)?;
        let routed = Moe::new(device, MoeShape { num_shared: 0, ..LITE }, rows, MoeOutput::Bf16)?;
        let alone = MoeShape { num_experts: 0, top_k: 0, ..LITE };
        let alone = Moe::new(device, alone, rows, MoeOutput::F32)?;
        let behind = [bench.time(&both, &layers, pause)?, bench.time(&routed, &layers, pause)?];
        let dense = [bench.time(&both, &layers, 0)?, bench.time(&routed, &layers, 0)?];
        let shared = bench.time(&alone, &shared_of, 0)?;
        table.row([
            rows.to_string(),
            pause.to_string(),
            us(behind[0]),
            us(behind[1]),
            us(behind[0] - behind[1]),
            us(dense[0]),
            us(dense[1]),
            us(dense[0] - dense[1]),
            us(shared),
        ]);
    }
    Ok(table.to_string())
}

/// The shared experts' part of a layer's weights.
fn shared_alone(weights: &MoeWeights) -> std::result::Result<MoeWeights, GpuError> {
    let of = |region: &Region| {
        let each = region.len() / (LITE.num_experts + LITE.num_shared);
        region.part(each * LITE.num_experts..region.len())
    };
    Ok(MoeWeights {
        router: None,
        gate_up: of(&weights.gate_up)?,
        down: of(&weights.down)?,
        num_here: 0,
        ..weights.clone()
    })
}

struct Bench<'a> {
    stream: &'a Stream,
    random: &'a Random,
    x: &'a [Region],
    rows: usize,
    out: &'a Region,
}

impl Bench<'_> {
    /// A layer's time behind a pause of so many us.
    fn time(&self, moe: &Moe, layers: &[MoeWeights], pause: u64) -> Result<f64> {
        let Self { stream, random, x, rows, out } = *self;
        let is_busy = rows * LITE.top_k > 2 * LITE.num_experts;
        let all = graph_us(stream, 4, || {
            layers.iter().zip(x).try_for_each(|(layer, x)| {
                if pause > 0 {
                    let first = layer.gate_up.part(0..FETCHED_BYTES)?;
                    random.pause(stream, pause, Ahead::of(is_busy.then_some(&first)))?;
                }
                moe.enqueue(stream, layer, x, rows, None, out)
            })
        })?;
        Ok(all / LAYERS as f64 - pause as f64)
    }
}
