//! What `kill -9` of one process does to the other's CUDA context over cuda-ipc: during puts into the dead one's memory,
//! during a wait for it, during replays. Every wait has a bail-out, and afterwards the survivor tries everything that it
//! would need to go on.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afd_gpu::channel::contract::Side;
use afd_gpu::channel::{Form, Frame, Identity, StepChannel, StepError, StepLimits};
use afd_gpu::{Device, Graph, Region};

use crate::Result;
use crate::hops::open;
use crate::peer::{Peer, Wire};

const ROWS: usize = 64;
const LIMITS: StepLimits =
    StepLimits { num_slots: 1, max_rows: 256, row_bytes: 4096, patience: Duration::from_millis(500) };

fn frame(layer: u16, combine: bool) -> Frame {
    let identity = Identity { epoch: 1, layer, stage: 0, combine };
    Frame { slot: 0, identity, rows: ROWS, form: Form::Rows }
}

fn large_frame() -> Frame {
    Frame { rows: LIMITS.max_rows, ..frame(0, false) }
}

pub(crate) fn run() -> Result<String> {
    let device = Device::open(0)?;
    // Without a second GPU the peer shares this one: the same mappings, but nothing goes over NVLink.
    let gpu = if Device::count()? > 1 { 1 } else { 0 };
    let mut text = format!("kill -9 of the peer on GPU {gpu}, cuda-ipc: what the survivor sees\n");
    for case in ["wait", "put", "copy", "replay"] {
        let line = match survive(&device, case, gpu) {
            Ok(line) => line,
            Err(e) => format!("ended with {e}"),
        };
        eprintln!("{case}: {line}");
        text += &format!("  during {case}: {line}\n");
    }
    Ok(text)
}

/// One case, from the survivor's side.
fn survive(device: &Device, case: &str, gpu: usize) -> Result<String> {
    let mut peer = Peer::start_on(&format!("loss {case}"), gpu)?;
    let stream = device.stream()?;
    let mut channel = open(device, Side::Attention, LIMITS, &mut peer.wire)?;
    let rows = Region::zeroed(device, ROWS * LIMITS.row_bytes)?;
    let large = Region::zeroed(device, LIMITS.max_rows * LIMITS.row_bytes)?;
    let mut story = Vec::new();
    let mut note = |what: &str, outcome: std::result::Result<(), String>| {
        story.push(match outcome {
            Ok(()) => format!("{what} ok"),
            Err(e) => format!("{what}: {e}"),
        });
    };
    let mut graph = None;
    let mut in_flight = false;
    if case == "replay" {
        let captured = Graph::capture(&stream, || -> std::result::Result<(), StepError> {
            for layer in 0..27 {
                channel.put(&stream, frame(layer, false), &rows, None)?;
                channel.wait(&stream, frame(layer, true))?;
            }
            Ok(())
        })?;
        graph = Some(captured);
    }
    peer.wire.meet()?;
    // Work in flight, then the kill in the middle of it.
    match (case, graph.as_mut()) {
        // Writes into the peer's memory, by our kernel or by the copy engine, whoever reads them: so fast that the host
        // launches them for as long as they are to run, and another thread kills.
        ("put" | "copy", _) => {
            let direct = channel.direct(&large_frame()).ok_or("no direct rows")?;
            let mut writes = Graph::capture(&stream, || -> std::result::Result<(), StepError> {
                for _ in 0..100 {
                    match case {
                        "put" => channel.put(&stream, large_frame(), &large, None)?,
                        _ => direct.copy_from(&stream, &large)?,
                    }
                }
                Ok(())
            })?;
            let killed = AtomicBool::new(false);
            std::thread::scope(|scope| -> Result<()> {
                let killer = scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(300));
                    let outcome = peer.kill();
                    killed.store(true, Ordering::Release);
                    outcome
                });
                let mut after = 0;
                // The queue is full all the time, and for a while after the death.
                while after < 20 {
                    after += usize::from(killed.load(Ordering::Acquire));
                    writes.launch()?;
                }
                in_flight = true;
                killer.join().map_err(|_| "the killer panicked")?
            })?;
            graph = Some(writes);
        }
        (_, Some(graph)) => {
            for _ in 0..200 {
                graph.launch()?;
            }
        }
        _ => {
            channel.wait(&stream, frame(0, true))?;
        }
    }
    if !in_flight {
        std::thread::sleep(Duration::from_millis(if case == "replay" { 20 } else { 100 }));
        in_flight = !stream.mark(false)?.is_done()?;
        peer.kill()?;
    }
    note(if in_flight { "killed with work in flight" } else { "killed after the work" }, Ok(()));
    note(
        "stream",
        stream.mark(false).and_then(|m| m.wait(Duration::from_secs(10))).map_err(|e| e.to_string()),
    );
    let state = channel.check();
    note("channel", state.map_err(|e| e.to_string()));
    // Puts into what was the dead process's memory, still mapped here.
    let written = (|| -> Result<()> {
        let direct = channel.direct(&large_frame()).ok_or("no direct rows")?;
        for _ in 0..100 {
            direct.copy_from(&stream, &large)?;
        }
        stream.mark(false)?.wait(Duration::from_secs(10))?;
        Ok(())
    })();
    note("writes to the dead peer's memory", written.map_err(|e| e.to_string()));
    let alive = (|| -> Result<()> {
        let fresh = Region::from_slice(device, &[7u32; 1024])?;
        if fresh.read::<u32>()? != [7; 1024] {
            return Err("wrong bytes".into());
        }
        Ok(())
    })();
    note("context", alive.map_err(|e| e.to_string()));
    drop(graph);
    drop(channel);
    let context = device.synchronize();
    note("unmapping", context.map_err(|e| e.to_string()));
    // A replacement, over a new channel.
    let replaced = (|| -> Result<()> {
        let mut peer = Peer::start_on("loss echo", gpu)?;
        let mut channel = open(device, Side::Attention, LIMITS, &mut peer.wire)?;
        peer.wire.meet()?;
        for layer in 0..27 {
            channel.put(&stream, frame(layer, false), &rows, None)?;
            channel.wait(&stream, frame(layer, true))?;
        }
        stream.mark(false)?.wait(Duration::from_secs(10))?;
        channel.check()?;
        peer.wire.meet()
    })();
    note("27 hops with a new peer", replaced.map_err(|e| e.to_string()));
    Ok(story.join("; "))
}

/// The one that is killed.
pub(crate) fn play(device: &Device, case: &str, wire: &mut Wire) -> Result<()> {
    let stream = device.stream()?;
    let mut channel = open(device, Side::Ffn, LIMITS, wire)?;
    let rows = Region::zeroed(device, ROWS * LIMITS.row_bytes)?;
    wire.meet()?;
    match case {
        "replay" => {
            for _ in 0..200 {
                for layer in 0..27 {
                    channel.wait(&stream, frame(layer, false))?;
                    channel.put(&stream, frame(layer, true), &rows, None)?;
                }
            }
            stream.synchronize()?;
        }
        "echo" => {
            for layer in 0..27 {
                channel.wait(&stream, frame(layer, false))?;
                channel.put(&stream, frame(layer, true), &rows, None)?;
            }
            stream.synchronize()?;
            channel.check()?;
            wire.meet()?;
        }
        _ => {}
    }
    wire.receive().map(drop)
}
