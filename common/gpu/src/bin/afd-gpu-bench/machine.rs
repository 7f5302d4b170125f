//! What is here, and its ceiling: how fast it reads.
use std::fmt::Write as _;

use afd_gpu::random::Random;
use afd_gpu::{Device, Region, nccl};

use crate::Result;
use crate::timing::graph_us;

/// Bytes per µs that this device reads in the best case, of `bytes` much larger than its cache.
pub(crate) fn read_rate(device: &Device) -> Result<f64> {
    let stream = device.stream()?;
    let random = Random::new(device)?;
    let (large, sink) = (Region::alloc(device, 8 << 30)?, Region::zeroed(device, 4)?);
    random.fill(&stream, &large, 1, 1.0)?;
    let us = graph_us(&stream, 2, || random.read(&stream, &large, &sink))?;
    Ok(large.len() as f64 / us)
}

pub(crate) fn run(device: &Device) -> Result<String> {
    let mut text = String::new();
    let (major, minor) = device.arch();
    let count = Device::count()?;
    writeln!(
        text,
        "{count} x {}, {} multiprocessors, compute {major}.{minor}",
        device.name()?,
        device.num_multiprocessors()
    )?;
    match nccl::version() {
        Ok(version) => writeln!(text, "NCCL {version}")?,
        Err(e) => writeln!(text, "NCCL: {e}")?,
    }
    writeln!(text, "reads {:.0} GB/s (plain loads, 8 GiB)", read_rate(device)? / 1e3)?;
    Ok(text)
}
