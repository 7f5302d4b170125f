//! What every [`StepChannel`] must do, run at both ends at once: each end in its own thread or process follows the same
//! script with its own side. A scenario that breaks its channel gets a fresh one.
//!
//! Rows are made and compared on the device, each in the place that the contract gives it: what landed is looked at before
//! the answering put. Between two meetings nothing is copied from or to the host and nothing is allocated, so that both
//! ends may share one device: there such a thing may wait for whatever runs, the other end's wait included.
use crate::channel::{Form, Frame, Identity, Landed, StepChannel, StepError};
use crate::random::Random;
use crate::{Device, GpuError, Graph, HostWords, Region, Stream};

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

fn whole(end: &mut End<'_>) -> Outcome {
    let most = end.channel.limits().max_rows;
    for (i, rows) in [1, 2, 7, 0, 33, most, 1].into_iter().enumerate() {
        for (j, form) in [Form::Packets, Form::Rows].into_iter().enumerate() {
            let frame = Frame { slot: 0, identity: identity(i as u16, false), rows, form };
            end.exchange_and_compare(frame, (100 + 2 * i + j) as u64)?;
        }
    }
    end.verdict()?;
    // Written by a kernel of the sender instead of by the put.
    let Some(direct) = end.channel.direct(0) else { return Ok(()) };
    let frame = Frame { slot: 0, identity: identity(9, false), rows: 5, form: Form::Rows };
    let direct = direct.part(0..5 * end.channel.limits().row_bytes).map_err(text)?;
    let stream = &end.bench.stream;
    if end.side == Side::Attention {
        end.fill(&direct, 1)?;
        end.channel.put_written(stream, frame, None).map_err(text)?;
        end.channel.wait(stream, back(frame)).map_err(text)?;
    } else {
        let landed = end.channel.wait(stream, frame).map_err(text)?;
        end.compare(&landed.rows, 1, Some((&landed.num_rows, 5)), "rows written directly".into())?;
        end.channel.put_written(&end.bench.stream, back(frame), None).map_err(text)?;
    }
    end.verdict()
}

fn again(end: &mut End<'_>) -> Outcome {
    for i in 0..200 {
        let form = if i % 3 == 0 { Form::Rows } else { Form::Packets };
        let frame = Frame { slot: i % 2, identity: identity(1, false), rows: 1 + i % 5, form };
        end.exchange_and_compare(frame, 1000 + i as u64)?;
    }
    end.verdict()
}

fn replayed(end: &mut End<'_>) -> Outcome {
    const LAYERS: usize = 5;
    let rows = 3;
    let bytes = rows * end.channel.limits().row_bytes;
    for form in [Form::Packets, Form::Rows] {
        let (out, seen, num) = (end.take(LAYERS * bytes)?, end.take(LAYERS * bytes)?, end.take(16)?);
        end.ends.meet()?;
        num.write(&[2i32]).map_err(text)?;
        let stream = &end.bench.stream;
        let mut graph = Graph::capture(stream, || -> Result<(), StepError> {
            for layer in 0..LAYERS {
                let frame = Frame { slot: 0, identity: identity(layer as u16, false), rows, form };
                let range = layer * bytes..(layer + 1) * bytes;
                let (from, to) = (out.part(range.clone())?, seen.part(range)?);
                let keep = |end: &mut End<'_>, landed: &Landed| {
                    to.copy_from(&end.bench.stream, &landed.rows).map_err(text)
                };
                end.exchange(frame, &from, Some(&num), keep).map_err(StepError::Lost)?;
            }
            end.channel.settle(stream)
        })
        .map_err(text)?;
        stream.synchronize().map_err(text)?;
        end.ends.meet()?;
        for replay in 0..20u64 {
            let (mine, theirs) = end.salts(5000 + replay);
            end.fill(&out, mine)?;
            graph.launch().map_err(text)?;
            end.compare(&seen, theirs, None, format!("replay {replay}, {form:?}"))?;
        }
        end.verdict()?;
        // Dropping the graph waits for this device, which may be the other end's too.
        end.ends.meet()?;
    }
    Ok(())
}

fn independent(end: &mut End<'_>) -> Outcome {
    // Both slots are put before either is answered.
    let frames = [0, 1].map(|slot| Frame {
        slot,
        identity: identity(slot as u16, false),
        rows: 4,
        form: Form::Packets,
    });
    let bytes = 4 * end.channel.limits().row_bytes;
    let stream = &end.bench.stream;
    if end.side == Side::Attention {
        for frame in frames {
            let source = end.take(bytes)?;
            end.fill(&source, 70 + frame.slot as u64)?;
            end.channel.put(stream, frame, &source, None).map_err(text)?;
        }
        for frame in frames {
            end.channel.wait(stream, back(frame)).map_err(text)?;
        }
    } else {
        for frame in frames {
            let landed = end.channel.wait(stream, frame).map_err(text)?;
            end.compare(&landed.rows, 70 + frame.slot as u64, None, format!("{frame:?}"))?;
        }
        let answer = end.take(bytes)?;
        for frame in frames {
            end.channel.put(stream, back(frame), &answer, None).map_err(text)?;
        }
    }
    end.verdict()
}

fn refused(end: &mut End<'_>) -> Outcome {
    let limits = *end.channel.limits();
    let stream = &end.bench.stream;
    let good = Frame { slot: 0, identity: identity(0, false), rows: 1, form: Form::Packets };
    let small = end.take(16)?;
    for frame in [
        Frame { slot: limits.num_slots, ..good },
        Frame { rows: limits.max_rows + 1, ..good },
        Frame { identity: Identity { stage: 8, ..good.identity }, ..good },
    ] {
        let refused = matches!(end.channel.wait(stream, frame), Err(StepError::BadFrame(_)))
            && matches!(end.channel.put(stream, frame, &small, None), Err(StepError::BadFrame(_)));
        if !refused {
            return Err(format!("{frame:?} was taken"));
        }
    }
    if !matches!(end.channel.put(stream, good, &small, None), Err(StepError::BadFrame(_))) {
        return Err("rows that are too short were taken".to_owned());
    }
    end.exchange_and_compare(good, 42)?;
    end.verdict()
}

fn foreign(end: &mut End<'_>) -> Outcome {
    let stream = &end.bench.stream;
    let sent = Frame { slot: 0, identity: identity(3, false), rows: 2, form: Form::Packets };
    if end.side == Side::Attention {
        let rows = end.take(2 * end.channel.limits().row_bytes)?;
        end.channel.put(stream, sent, &rows, None).map_err(text)?;
        return end.verdict();
    }
    end.channel.wait(stream, Frame { identity: identity(4, false), ..sent }).map_err(text)?;
    end.channel.settle(stream).map_err(text)?;
    let patience = end.channel.limits().patience;
    stream.mark(false).and_then(|mark| mark.wait(patience * 3)).map_err(text)?;
    let first = end.channel.check();
    if !matches!(first, Err(StepError::Foreign { .. })) {
        return Err(format!("{first:?} instead of a foreign frame"));
    }
    Ok(())
}

/// Waits that nobody answers.
fn wait_in_vain(end: &mut End<'_>) -> Outcome {
    let frame = Frame { slot: 0, identity: identity(0, false), rows: 2, form: Form::Packets };
    end.channel.wait(&end.bench.stream, frame).map_err(text)?;
    // What is enqueued behind ends at once.
    for _ in 0..50 {
        let behind = Frame { form: Form::Rows, ..frame };
        end.channel.wait(&end.bench.stream, behind).map_err(text)?;
    }
    Ok(())
}

fn silent(end: &mut End<'_>) -> Outcome {
    if end.side == Side::Attention {
        return Ok(()); // and stays open: the peer's patience ends while this end waits for it
    }
    let patience = end.channel.limits().patience;
    let begin = std::time::Instant::now();
    wait_in_vain(end)?;
    end.bench.stream.mark(false).and_then(|m| m.wait(patience * 3)).map_err(text)?;
    let (waited, state) = (begin.elapsed(), end.channel.check());
    if !matches!(state, Err(StepError::Late { .. })) || waited < patience / 2 {
        return Err(format!("{state:?} after {waited:?} of {patience:?}"));
    }
    Ok(())
}

fn given_up(end: &mut End<'_>) -> Outcome {
    if end.side == Side::Attention {
        return Ok(());
    }
    wait_in_vain(end)?;
    end.channel.abort();
    let patience = end.channel.limits().patience;
    end.bench.stream.mark(false).and_then(|m| m.wait(patience * 3)).map_err(text)?;
    match end.channel.check() {
        Err(StepError::Aborted) => Ok(()),
        state => Err(format!("{state:?} instead of a channel given up")),
    }
}
