//! What `kill -9` of one process does to the other's CUDA context over cuda-ipc: during puts into the dead one's memory,
//! during a wait for it, during replays. Every wait has a bail-out, and afterwards the survivor tries everything that it
//! would need to go on.
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

pub(crate) fn run() -> Result<String> {
    let device = Device::open(0)?;
    let mut text = String::from("kill -9 of the peer, cuda-ipc: what the survivor sees\n");
    for case in ["wait", "put", "replay"] {
        let line = match survive(&device, case) {
            Ok(line) => line,
            Err(e) => format!("ended with {e}"),
        };
        eprintln!("{case}: {line}");
        text += &format!("  during {case}: {line}\n");
    }
    Ok(text)
}

/// One case, from the survivor's side.
fn survive(device: &Device, case: &str) -> Result<String> {
    let mut peer = Peer::start(&format!("loss {case}"))?;
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
        ("put", _) => {
            // More than a second of copies into the peer's memory, whoever reads them: as graphs, because the device is
            // faster with them than the host is with enqueuing.
            let direct = channel.direct(0).ok_or("no direct rows")?;
            let mut copies = Graph::capture(&stream, || -> std::result::Result<(), StepError> {
                for _ in 0..1000 {
                    direct.copy_from(&stream, &large)?;
                }
                Ok(())
            })?;
            for _ in 0..500 {
                copies.launch()?;
            }
            graph = Some(copies);
            channel.put(&stream, frame(0, false), &rows, None)?;
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
    std::thread::sleep(Duration::from_millis(if case == "replay" { 20 } else { 100 }));
    let in_flight = !stream.mark(false)?.is_done()?;
    peer.kill()?;
    note(if in_flight { "killed with work in flight" } else { "killed after the work" }, Ok(()));
    note(
        "stream",
        stream.mark(false).and_then(|m| m.wait(Duration::from_secs(10))).map_err(|e| e.to_string()),
    );
    let state = channel.check();
    note("channel", state.map_err(|e| e.to_string()));
    // Puts into what was the dead process's memory, still mapped here.
    let written = (|| -> Result<()> {
        let direct = channel.direct(0).ok_or("no direct rows")?;
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
        let mut peer = Peer::start("loss echo")?;
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
