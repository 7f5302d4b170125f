//! What one GPU can show; skipped, saying so, without one. Kernels compile for Hopper wherever NVRTC is.
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use afd_gpu::channel::contract::{self, Abilities, Bench, Ends, Side};
use afd_gpu::channel::{DeviceChannel, Form, Frame, Identity, StepChannel, StepError, StepLimits};
use afd_gpu::{Device, GpuError, Region, Source, Stream};

#[test]
fn every_kernel_file_compiles_for_hopper() {
    let moe = [
        ("HIDDEN", 2048),
        ("INTER", 1408),
        ("EXPERTS", 64),
        ("TOP_K", 6),
        ("SHARED", 2),
        ("SIGMOID", 1),
        ("NORMALIZE", 0),
        ("ROUND_LOGITS", 1),
        ("MAX_ROWS", 256),
        ("OUT_F32", 1),
        ("NT", 2),
        ("WARPS_UP", 8),
        ("WARPS_DOWN", 11),
        ("STAGES_UP", 3),
        ("STAGES_DOWN", 4),
        ("THREADS_UP", 288),
        ("THREADS_DOWN", 384),
        ("STATIC_PERCENT", 60),
        ("PACE", 950),
        ("TRACE", 1),
    ];
    let whole = [&moe[..], &[("STAGES", 3)]].concat();
    let mla = [("LATENT", 512), ("ROPE", 64), ("BLOCK_SIZE", 16), ("STAGES", 5), ("VARIANT", 0)];
    let product =
        [("WIDTH", 1408), ("FEATURES", 2048), ("GATED", 0), ("EXPERTS", 64), ("TOP_K", 6), ("SHARED", 2)];
    for source in Source::ALL {
        let constants: &[_] = match source {
            Source::Moe | Source::MoeMany => &moe,
            Source::MoeWhole => &whole,
            Source::MoeProduct => &product,
            Source::Mla => &mla,
            Source::Meanwhile => &[("LISTED", 0)],
            Source::Gqa => &[("DIM", 128), ("GROUP", 8), ("BLOCK_SIZE", 16), ("STAGES", 3)],
            _ => &[],
        };
        match source.compile("sm_90a", constants) {
            Ok(image) => assert!(!image.is_empty()),
            Err(GpuError::NoLibrary { library }) => return eprintln!("skipped: {library} is not here"),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error_not_a_panic() {
    let error = Device::open(99).unwrap_err();
    assert!(matches!(error, GpuError::NoDriver | GpuError::NoDevice { ordinal: 99, .. }), "{error}");
}

/// Channels made beforehand.
struct Prepared<'a> {
    channels: Vec<DeviceChannel>,
    barrier: &'a Barrier,
}

impl Ends for Prepared<'_> {
    fn open(&mut self, _stream: &Stream) -> Result<Box<dyn StepChannel>, StepError> {
        let channel = self.channels.pop().ok_or_else(|| StepError::Lost("no channel left".to_owned()))?;
        Ok(Box::new(channel))
    }

    fn meet(&mut self) -> Result<(), String> {
        self.barrier.wait();
        Ok(())
    }
}

/// Launches everything once while nothing waits: a first launch may have to wait for what runs.
fn warm(stream: &Stream, pair: &mut (DeviceChannel, DeviceChannel)) {
    let rows = Region::zeroed(stream.device(), 4096).unwrap();
    for form in [Form::Packets, Form::Rows] {
        let identity = Identity { epoch: 1, layer: 0, stage: 0, combine: false };
        let frame = Frame { slot: 0, identity, rows: 1, form };
        pair.0.put(stream, frame, &rows, None).unwrap();
        pair.1.wait(stream, frame).unwrap();
    }
    let identity = Identity { epoch: 1, layer: 0, stage: 0, combine: false };
    let frame = Frame { slot: 1, identity, rows: 1, form: Form::Rows };
    pair.0.put_written(stream, frame, None).unwrap();
    pair.1.wait(stream, frame).unwrap();
    stream.synchronize().unwrap();
    pair.1.check().unwrap();
}

#[test]
fn both_ends_on_one_device_keep_the_contract() {
    if let Some(why) = Device::missing(1) {
        return eprintln!("{why}");
    }
    let device = Device::open(0).unwrap();
    let limits = StepLimits { num_slots: 2, max_rows: 64, row_bytes: 512, patience: Duration::from_secs(3) };
    let barrier = Barrier::new(2);
    let prepared = || Prepared { channels: Vec::new(), barrier: &barrier };
    let (mut ends_a, mut ends_b) = (prepared(), prepared());
    // One for each scenario.
    for _ in 0..9 {
        let (a, b) = DeviceChannel::local_pair(&device, limits).unwrap();
        ends_a.channels.push(a);
        ends_b.channels.push(b);
    }
    let benches = [(); 2].map(|()| Bench::new(&device).unwrap());
    warm(&device.stream().unwrap(), &mut DeviceChannel::local_pair(&device, limits).unwrap());
    let abilities = Abilities { notices_silence: true };
    let (used_a, used_b) = thread::scope(|scope| {
        let bench = &benches[0];
        let a = scope.spawn(move || {
            let used = contract::run(bench, Side::Attention, abilities, &mut ends_a);
            // An end that failed must not leave the other at a barrier: the test is lost anyway.
            if let Err(e) = &used {
                eprintln!("{e}");
                std::process::exit(101);
            }
            used
        });
        let b = contract::run(&benches[1], Side::Ffn, abilities, &mut ends_b);
        if let Err(e) = &b {
            eprintln!("{e}");
            std::process::exit(101);
        }
        (a.join().unwrap(), b)
    });
    used_a.unwrap();
    used_b.unwrap();
}
