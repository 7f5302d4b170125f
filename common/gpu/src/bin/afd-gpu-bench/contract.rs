//! The contract suite between two processes on two GPUs, or on one where there is no second.
use std::time::{Duration, Instant};

use afd_gpu::Device;
use afd_gpu::channel::StepLimits;
use afd_gpu::channel::contract::{self, Abilities, Bench, Side};

use crate::Result;
use crate::peer::{Opener, Peer, Wire};

pub(crate) fn run(device: &Device) -> Result<String> {
    let mut text = String::new();
    let mut failed = false;
    // On one device kernels that wait take turns, and a meeting waits for the other's: slow, but the same promises.
    let gpu = usize::from(Device::count()? > 1);
    for kind in ["cuda-ipc", "nccl"] {
        if kind == "nccl" && gpu == 0 {
            text += "contract of step channels, nccl: skipped: it takes two GPUs\n";
            continue;
        }
        let begin = Instant::now();
        let outcome = Peer::start_on(&format!("contract {kind}"), gpu)
            .and_then(|mut peer| play(device, Side::Attention, kind, &mut peer.wire));
        failed |= outcome.is_err();
        // At once: what comes behind may outlast the machine's patience.
        eprintln!("{kind}: {outcome:?} after {:.1} s", begin.elapsed().as_secs_f64());
        text += &match outcome {
            Ok(()) => format!("contract of step channels, {kind}: kept\n"),
            Err(e) => format!("contract of step channels, {kind}: {e}\n"),
        };
    }
    if failed { Err(text.into()) } else { Ok(text) }
}

pub(crate) fn play(device: &Device, side: Side, kind: &str, wire: &mut Wire) -> Result<()> {
    let limits =
        StepLimits { num_slots: 2, max_rows: 256, row_bytes: 4096, patience: Duration::from_secs(2) };
    let bench = Bench::new(device)?;
    let abilities = Abilities { notices_silence: kind == "cuda-ipc" };
    let mut ends = Opener { device, side, kind, limits, wire };
    let begin = Instant::now();
    let used = contract::run(&bench, side, abilities, &mut ends)?;
    eprintln!("{kind}, {side:?}: every scenario kept after {:.1} s", begin.elapsed().as_secs_f64());
    wire.meet()?;
    drop(used);
    wire.meet()
}
