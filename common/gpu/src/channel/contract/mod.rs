//! What every [`StepChannel`] must do, run at both ends at once: each end in its own thread or process follows the same
//! script with its own side. A scenario that breaks its channel gets a fresh one.
//!
//! Rows are made and compared on the device, each in the place that the contract gives it: what landed is looked at before
//! the answering put. Between two meetings nothing is copied from or to the host and nothing is allocated, so that both
//! ends may share one device: there such a thing may wait for whatever runs, the other end's wait included.
use crate::channel::{Frame, Identity, Landed, StepChannel, StepError};
use crate::random::Random;
use crate::{Device, GpuError, HostWords, Region, Stream};

mod scenarios;

use scenarios::*;

/// Which end this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Puts first.
    Attention,
    /// Answers.
    Ffn,
}

/// What an implementation can show.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// A peer that stays silent is noticed by the wait itself.
    pub notices_silence: bool,
}

/// Everything the suite needs of an implementation at one end: fresh channels, made at both ends in the same order.
pub trait Ends {
    /// The next channel.
    ///
    /// # Errors
    /// As the implementation's constructor.
    fn open(&mut self, stream: &Stream) -> Result<Box<dyn StepChannel>, StepError>;

    /// Returns when the other end is here too.
    ///
    /// # Errors
    /// Why it is not.
    fn meet(&mut self) -> Result<(), String>;
}

type Outcome = Result<(), String>;

/// Memory for rows, bytes.
const ARENA_BYTES: usize = 4 << 20;
/// Comparisons of a scenario.
const VERDICTS: usize = 512;
/// Rows hold numbers up to this.
const SCALE: f32 = 1.0;

/// What an end needs beside its channels, made before anything waits.
pub struct Bench {
    stream: Stream,
    arena: Region,
    random: Random,
    verdicts: HostWords,
}

impl Bench {
    /// Makes it and launches its kernels once: a first launch may have to wait for what runs.
    ///
    /// # Errors
    /// [`GpuError`].
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let bench = Self {
            stream: device.stream()?,
            arena: Region::zeroed(device, ARENA_BYTES)?,
            random: Random::new(device)?,
            verdicts: HostWords::new(device, VERDICTS)?,
        };
        bench.random.fill(&bench.stream, &bench.arena, 0, SCALE)?;
        bench.random.check(&bench.stream, (&bench.arena, 0, SCALE), None, (&bench.verdicts, 0))?;
        bench.stream.synchronize()?;
        Ok(bench)
    }
}

/// Runs every scenario. Needs at least 2 slots, 64 rows, and rows of a multiple of 64 bytes. The channels come back, to be
/// dropped when both ends are done.
///
/// # Errors
/// Which scenario failed, and how.
pub fn run(
    bench: &Bench,
    side: Side,
    abilities: Abilities,
    ends: &mut dyn Ends,
) -> Result<Vec<Box<dyn StepChannel>>, String> {
    let mut used = Vec::new();
    let mut scenario = |name: &str, script: &dyn Fn(&mut End<'_>) -> Outcome| -> Outcome {
        let mut channel = ends.open(&bench.stream).map_err(|e| format!("{name}: {e}"))?;
        ends.meet().map_err(|e| format!("{name}: {e}"))?;
        let mut end = End { bench, side, channel: channel.as_mut(), ends, taken: 0, compared: Vec::new() };
        let outcome = script(&mut end).map_err(|e| format!("{name}, {side:?}: {e}"));
        used.push(channel);
        outcome
    };
    scenario("rows arrive whole, by every form and size", &whole)?;
    scenario("a slot is used again and again", &again)?;
    scenario("replays of a graph carry fresh rows", &replayed)?;
    scenario("slots are independent", &independent)?;
    scenario("wrong frames are refused and nothing is enqueued", &refused)?;
    scenario("frames that were announced carry their rows, written or copied", &begun)?;
    scenario("a frame of another hop is caught", &foreign)?;
    if abilities.notices_silence {
        scenario("a silent peer is noticed", &silent)?;
        scenario("a wait can be given up", &given_up)?;
    }
    Ok(used)
}

struct End<'a> {
    bench: &'a Bench,
    side: Side,
    channel: &'a mut dyn StepChannel,
    ends: &'a mut dyn Ends,
    /// Bytes of the arena in use.
    taken: usize,
    /// What was compared since the last verdict.
    compared: Vec<String>,
}

fn identity(layer: u16, combine: bool) -> Identity {
    Identity { epoch: 5, layer, stage: 0, combine }
}

fn back(frame: Frame) -> Frame {
    Frame { identity: Identity { combine: true, ..frame.identity }, ..frame }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl End<'_> {
    fn take(&mut self, bytes: usize) -> Result<Region, String> {
        let begin = self.taken;
        self.taken = (begin + bytes).next_multiple_of(256);
        self.bench.arena.part(begin..begin + bytes).map_err(text)
    }

    /// Rows that no other frame has.
    fn fill(&self, rows: &Region, salt: u64) -> Outcome {
        self.bench.random.fill(&self.bench.stream, rows, salt, SCALE).map_err(text)
    }

    /// Enqueues a comparison with what the other end's `fill` makes of `salt`.
    fn compare(&mut self, found: &Region, salt: u64, rows: Option<(&Region, i32)>, what: String) -> Outcome {
        let Bench { stream, random, verdicts, .. } = self.bench;
        let verdict = (verdicts, self.compared.len());
        random.check(stream, (found, salt, SCALE), rows, verdict).map_err(text)?;
        self.compared.push(what);
        Ok(())
    }

    /// Waits for everything enqueued, and says what did not compare equal.
    fn verdict(&mut self) -> Outcome {
        let patience = self.channel.limits().patience;
        self.channel.settle(&self.bench.stream).map_err(text)?;
        self.bench.stream.mark(false).and_then(|mark| mark.wait(patience * 3)).map_err(text)?;
        self.channel.check().map_err(text)?;
        for (index, what) in self.compared.drain(..).enumerate() {
            match self.bench.verdicts.get(index) {
                Some(1) => {}
                found => return Err(format!("{what}: {found:?} instead of 1 (no difference)")),
            }
        }
        Ok(())
    }

    /// What this end sends and what it must receive, by salt.
    fn salts(&self, salt: u64) -> (u64, u64) {
        let (a, b) = (2 * salt, 2 * salt + 1);
        if self.side == Side::Attention { (a, b) } else { (b, a) }
    }

    /// One exchange: attention's rows to the FFN, and other rows back. `look` sees what landed before it is answered.
    fn exchange(
        &mut self,
        frame: Frame,
        out: &Region,
        num: Option<&Region>,
        look: impl FnOnce(&mut Self, &Landed) -> Outcome,
    ) -> Outcome {
        let stream = &self.bench.stream;
        if self.side == Side::Attention {
            self.channel.put(stream, frame, out, num).map_err(text)?;
            let landed = self.channel.wait(stream, back(frame)).map_err(text)?;
            look(self, &landed)
        } else {
            let landed = self.channel.wait(stream, frame).map_err(text)?;
            look(self, &landed)?;
            self.channel.put(&self.bench.stream, back(frame), out, num).map_err(text)
        }
    }

    fn exchange_and_compare(&mut self, frame: Frame, salt: u64) -> Outcome {
        let (mine, theirs) = self.salts(salt);
        let before = self.taken;
        let out = self.take((frame.rows * self.channel.limits().row_bytes).max(16))?;
        self.taken = before;
        self.fill(&out, mine)?;
        self.exchange(frame, &out, None, |end, landed| {
            let rows = Some((&landed.num_rows, frame.rows as i32));
            end.compare(&landed.rows, theirs, rows, format!("{frame:?}"))
        })
    }
}
