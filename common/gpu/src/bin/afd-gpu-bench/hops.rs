//! A decode step's hops between two GPUs, inside one graph per process: rows to the FFN, rows back, 27 layers.
//!
//! With a small computation on both sides (norms) the results are compared bit for bit between the channels and with the
//! same computation on one GPU, whose time is subtracted: what is left is what a hop costs beyond compute.
use std::time::Duration;

use half::bf16;

use afd_gpu::channel::contract::Side;
use afd_gpu::channel::{DeviceChannel, Form, Frame, Identity, StepChannel, StepError, StepLimits};
use afd_gpu::nccl::Communicator;
use afd_gpu::ops::{Ahead, NormRows, Rows};
use afd_gpu::random::Random;
use afd_gpu::{Device, Graph, Region, Stream};

use crate::Result;
use crate::peer::{Opener, Peer, Wire};
use crate::table::{Table, us};
use crate::timing::graph_us;

const LAYERS: usize = 27;
const HIDDEN: usize = 2048;
const REPLAYS: usize = 50;

/// Rows, what to reach over cuda-ipc, then; µs.
const SIZES: [(usize, &str, &str); 7] = [
    (1, "8", "6"),
    (8, "-", "-"),
    (32, "-", "-"),
    (64, "10", "8"),
    (128, "-", "-"),
    (256, "15", "12"),
    (1024, "-", "-"),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Packets,
    Rows,
    Direct,
    Nccl,
}

const WAYS: [(Way, &str); 4] =
    [(Way::Packets, "packets"), (Way::Rows, "rows"), (Way::Direct, "direct"), (Way::Nccl, "nccl")];

pub(crate) fn run(device: &Device) -> Result<String> {
    if Device::count()? < 2 {
        return Ok("hops: skipped: they take two GPUs\n".into());
    }
    let mut peer = Peer::start_on("hops", 1)?;
    play(device, Side::Attention, &mut peer.wire)
}

/// What both sides compute with.
struct Bench<'a> {
    device: &'a Device,
    stream: Stream,
    side: Side,
    ops: Rows,
    weight: Region,
    /// The input of a step, the residual stream, and what goes out.
    input: Region,
    residual: Region,
    out: Region,
}

pub(crate) fn play(device: &Device, side: Side, wire: &mut Wire) -> Result<String> {
    let limits =
        StepLimits { num_slots: 1, max_rows: 1024, row_bytes: HIDDEN * 2, patience: Duration::from_secs(5) };
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let region = || Region::alloc(device, limits.max_rows * limits.row_bytes);
    let bench = Bench {
        device,
        side,
        ops: Rows::new(device)?,
        weight: Region::alloc(device, HIDDEN * 2)?,
        input: region()?,
        residual: region()?,
        out: region()?,
        stream,
    };
    random.fill(&bench.stream, &bench.input, 5, 1.0)?;
    random.fill(&bench.stream, &bench.weight, 6, 1.0)?;
    bench.stream.synchronize()?;
    let mut ipc = Opener { device, side, kind: "cuda-ipc", limits, wire }.ipc()?;
    let mut opener = Opener { device, side, kind: "nccl", limits, wire };
    let nccl = opener.nccl(&bench.stream);
    let raw = match &nccl {
        Ok(_) => Some(raw_pair(&mut opener)?),
        Err(_) => None,
    };
    let mut nccl = nccl.inspect_err(|e| eprintln!("nccl: {e}")).ok();

    let columns = ["rows", "compute", "packets", "rows", "direct", "nccl", "reach", "then", "bits"];
    let mut beyond = Table::new("hop (out and back) in a decode graph beyond compute, us", &columns);
    let columns = ["rows", "packets", "rows", "direct", "nccl", "raw nccl", "nccl / raw"];
    let mut bare = Table::new("out and back in a graph of 27, no compute, us", &columns);
    for (rows, reach, then) in SIZES {
        let (compute, wanted) = bench.alone(rows)?;
        let (mut hops, mut trips, mut equal) = (Vec::new(), Vec::new(), true);
        for (way, name) in WAYS {
            let mut time = |computing: bool| -> Result<Option<(f64, Vec<bf16>)>> {
                let channel: &mut dyn StepChannel = match (way, nccl.as_mut()) {
                    (Way::Nccl, None) => return Ok(None),
                    (Way::Nccl, Some(nccl)) => nccl,
                    _ => &mut ipc,
                };
                bench.step(channel, way, rows, computing, wire).map(Some)
            };
            match time(true)? {
                Some((us_step, found)) => {
                    hops.push(us((us_step - compute) / LAYERS as f64));
                    let same = found.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits());
                    if side == Side::Attention && !same {
                        eprintln!("{name}, {rows} rows: differs from one GPU");
                        equal = false;
                    }
                }
                None => hops.push("-".into()),
            }
            trips.push(time(false)?.map(|(t, _)| t / LAYERS as f64));
        }
        let raw_trip = raw.as_ref().map(|raw| bench.raw_trip(raw, rows, wire)).transpose()?;
        let text = |t: Option<f64>| t.map_or("-".to_owned(), us);
        let mut cells = vec![rows.to_string(), us(compute / LAYERS as f64)];
        cells.extend(hops);
        cells.extend([reach.into(), then.into(), if equal { "equal" } else { "DIFFER" }.into()]);
        beyond.row(cells);
        let ratio = trips[3].zip(raw_trip).map_or("-".to_owned(), |(a, b)| format!("{:.2}", a / b));
        bare.row(
            [rows.to_string()]
                .into_iter()
                .chain(trips.iter().map(|t| text(*t)))
                .chain([text(raw_trip), ratio]),
        );
    }
    wire.meet()?;
    Ok(format!("{beyond}{bare}"))
}

fn raw_pair(opener: &mut Opener<'_>) -> Result<[Communicator; 2]> {
    let ids = opener.ids()?;
    let rank = usize::from(opener.side == Side::Ffn);
    let join = |id, rank| Communicator::join(opener.device, id, rank, 2, Duration::from_secs(30));
    let (from_attention, to_attention) = (join(ids[0], rank)?, join(ids[1], 1 - rank)?);
    Ok(if rank == 0 { [from_attention, to_attention] } else { [to_attention, from_attention] })
}

impl Bench<'_> {
    fn bytes(&self, rows: usize) -> usize {
        rows * HIDDEN * 2
    }

    fn rows<'a>(&'a self, residual: &'a Region, out: &'a Region, rows: usize) -> NormRows<'a> {
        let (also, more, ahead) = (None, None, Ahead::default());
        NormRows {
            residual,
            weight: &self.weight,
            out,
            also,
            more,
            rows,
            hidden: HIDDEN,
            epsilon: 1e-6,
            ahead,
        }
    }

    fn norm(
        &self,
        delta: Option<&Region>,
        out: &Region,
        rows: usize,
    ) -> std::result::Result<(), afd_gpu::GpuError> {
        self.ops.rms_norm(&self.stream, delta, &self.rows(&self.residual, out, rows))
    }

    /// The FFN's part: keeps nothing from step to step.
    fn answer(
        &self,
        landed: &Region,
        out: &Region,
        rows: usize,
    ) -> std::result::Result<(), afd_gpu::GpuError> {
        self.ops.rms_norm(&self.stream, None, &self.rows(landed, out, rows))
    }

    /// Both sides' computations on this GPU: time of a step, µs, and its result.
    fn alone(&self, rows: usize) -> Result<(f64, Vec<bf16>)> {
        let answer = Region::alloc(self.device, self.bytes(rows))?;
        let time = graph_us(&self.stream, 20, || {
            self.residual.copy_from(&self.stream, &self.input.part(0..self.bytes(rows))?)?;
            for layer in 0..LAYERS {
                self.norm((layer > 0).then_some(&answer), &self.out, rows)?;
                self.answer(&self.out, &answer, rows)?;
            }
            self.norm(Some(&answer), &self.out, rows)
        })?;
        Ok((time, self.out.part(0..self.bytes(rows))?.read()?))
    }

    /// Time of a step, µs, and its result (which is this side's to use on the attention side only).
    fn step(
        &self,
        channel: &mut dyn StepChannel,
        way: Way,
        rows: usize,
        computing: bool,
        wire: &mut Wire,
    ) -> Result<(f64, Vec<bf16>)> {
        let stream = &self.stream;
        let input = self.input.part(0..self.bytes(rows))?;
        let form = if way == Way::Packets { Form::Packets } else { Form::Rows };
        let frame = |layer: usize, combine| {
            let identity = Identity { epoch: 1, layer: layer as u16, stage: 0, combine };
            Frame { slot: 0, identity, rows, form }
        };
        let layers = |combine| (0..LAYERS).map(|layer| frame(layer, combine)).collect::<Vec<_>>();
        let (out, into) = match self.side {
            Side::Attention => (layers(false), layers(true)),
            Side::Ffn => (layers(true), layers(false)),
        };
        wire.meet()?;
        let mut graph = Graph::capture(stream, || -> std::result::Result<(), StepError> {
            // As the services do: a step is begun as a whole, and rows are written where they are sent from.
            channel.begin(stream, &out, &into, None)?;
            let written = matches!(way, Way::Direct | Way::Nccl);
            let direct = written.then(|| channel.direct(&out[0])).flatten();
            let is_direct = direct.is_some();
            let target = direct.unwrap_or_else(|| self.out.clone());
            let send = |channel: &mut dyn StepChannel, frame| match is_direct {
                true => channel.put_written(stream, frame, None),
                false => channel.put(stream, frame, &target, None),
            };
            if self.side == Side::Attention {
                self.residual.copy_from(stream, &input)?;
                let mut landed = None;
                for layer in 0..LAYERS {
                    if computing {
                        self.norm(landed.as_ref(), &target, rows)?;
                    }
                    send(channel, frame(layer, false))?;
                    landed = Some(channel.wait(stream, frame(layer, true))?.rows);
                }
                if computing {
                    self.norm(landed.as_ref(), &self.out, rows)?;
                }
            } else {
                for layer in 0..LAYERS {
                    let landed = channel.wait(stream, frame(layer, false))?.rows;
                    if computing {
                        self.answer(&landed, &target, rows)?;
                    }
                    send(channel, frame(layer, true))?;
                }
            }
            channel.settle(stream)
        })?;
        let time = self.time(&mut graph, wire)?;
        channel.check()?;
        Ok((time, self.out.part(0..self.bytes(rows))?.read()?))
    }

    /// NCCL alone: the same trip without identities.
    fn raw_trip(
        &self,
        [outgoing, incoming]: &[Communicator; 2],
        rows: usize,
        wire: &mut Wire,
    ) -> Result<f64> {
        let stream = &self.stream;
        let (from, into) = (self.input.part(0..self.bytes(rows))?, self.out.part(0..self.bytes(rows))?);
        let send = || outgoing.group(|| outgoing.send(stream, &from, 1));
        let receive = || incoming.group(|| incoming.receive(stream, &into, 0));
        let trip = || {
            if self.side == Side::Attention {
                send().and_then(|()| receive())
            } else {
                receive().and_then(|()| send())
            }
        };
        wire.meet()?;
        trip()?; // connects
        stream.synchronize()?;
        wire.meet()?;
        let mut graph = Graph::capture(stream, || (0..LAYERS).try_for_each(|_| trip()))?;
        Ok(self.time(&mut graph, wire)? / LAYERS as f64)
    }

    /// Time of one replay, µs: the median of five runs, the same number of replays at both ends.
    fn time(&self, graph: &mut Graph, wire: &mut Wire) -> Result<f64> {
        let mut times = Vec::new();
        for run in 0..6 {
            wire.meet()?;
            let begin = self.stream.mark(true)?;
            for _ in 0..REPLAYS {
                graph.launch()?;
            }
            let end = self.stream.mark(true)?;
            end.wait(Duration::from_secs(20))?;
            if run > 0 {
                times.push(end.us_since(&begin)? / REPLAYS as f64);
            }
        }
        wire.meet()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// For `loss`: an open channel between the two processes.
pub(crate) fn open(
    device: &Device,
    side: Side,
    limits: StepLimits,
    wire: &mut Wire,
) -> Result<DeviceChannel> {
    Opener { device, side, kind: "cuda-ipc", limits, wire }.ipc()
}
