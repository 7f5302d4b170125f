//! What every [`StepChannel`] must do, run at both ends at once: each end in its own thread or process follows the same
//! script with its own side. A scenario that breaks its channel gets a fresh one.
use half::bf16;

use crate::channel::{Form, Frame, Identity, StepChannel, StepError};
use crate::{Graph, Region, Stream};

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
}

type Outcome = Result<(), String>;

/// How much memory [`run`] needs, bytes.
pub const ARENA_BYTES: usize = 4 << 20;

/// Runs every scenario. Needs at least 2 slots, 64 rows, and rows of a multiple of 64 bytes. Allocates and frees nothing
/// on the device: with both ends on one device that would wait for the other end's wait. So the channels come back, to
/// be dropped when both ends are done.
///
/// # Errors
/// Which scenario failed, and how.
pub fn run(
    stream: &Stream,
    arena: &Region,
    side: Side,
    abilities: Abilities,
    ends: &mut dyn Ends,
) -> Result<Vec<Box<dyn StepChannel>>, String> {
    let mut used = Vec::new();
    let mut scenario = |name: &str, script: &dyn Fn(&mut End<'_>) -> Outcome| -> Outcome {
        let mut channel = ends.open(stream).map_err(|e| format!("{name}: {e}"))?;
        let mut end = End { stream, side, channel: channel.as_mut(), arena, taken: 0 };
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
    }
    Ok(used)
}

struct End<'a> {
    stream: &'a Stream,
    side: Side,
    channel: &'a mut dyn StepChannel,
    arena: &'a Region,
    /// Bytes of the arena in use.
    taken: usize,
}

fn identity(layer: u16, combine: bool) -> Identity {
    Identity { epoch: 5, layer, stage: 0, combine }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl End<'_> {
    fn row_elements(&self) -> usize {
        self.channel.limits().row_bytes / 2
    }

    fn take(&mut self, bytes: usize) -> Result<Region, String> {
        let begin = self.taken;
        self.taken = (begin + bytes).next_multiple_of(256);
        self.arena.part(begin..begin + bytes).map_err(text)
    }

    /// Rows that no other frame has.
    fn pattern(&self, rows: usize, salt: u64) -> Vec<bf16> {
        (0..(rows * self.row_elements()) as u64).map(|i| crate::random::uniform(salt, i, 1.0)).collect()
    }

    /// One exchange: attention's rows to the FFN, and other rows back.
    fn exchange(&mut self, frame: Frame, out: &Region, num: Option<&Region>) -> Result<Region, String> {
        let back = Frame { identity: Identity { combine: true, ..frame.identity }, ..frame };
        let (stream, channel) = (self.stream, &mut *self.channel);
        let landed = if self.side == Side::Attention {
            channel.put(stream, frame, out, num).map_err(text)?;
            channel.wait(stream, back).map_err(text)?
        } else {
            let landed = channel.wait(stream, frame).map_err(text)?;
            channel.put(stream, back, out, num).map_err(text)?;
            landed
        };
        Ok(landed.rows)
    }

    /// What this end sends and what it must receive, by salt.
    fn salts(&self, salt: u64) -> (u64, u64) {
        let (a, b) = (2 * salt, 2 * salt + 1);
        if self.side == Side::Attention { (a, b) } else { (b, a) }
    }

    fn exchange_and_compare(&mut self, frame: Frame, salt: u64) -> Outcome {
        let (mine, theirs) = self.salts(salt);
        let before = self.taken;
        let out = self.take((frame.rows * self.channel.limits().row_bytes).max(16))?;
        self.taken = before;
        out.write_on(self.stream, &self.pattern(frame.rows, mine)).map_err(text)?;
        let landed = self.exchange(frame, &out, None)?;
        let found: Vec<bf16> = landed.read_on(self.stream).map_err(text)?;
        self.channel.check().map_err(text)?;
        same(&found, &self.pattern(frame.rows, theirs), &frame)
    }
}

fn same(found: &[bf16], wanted: &[bf16], frame: &Frame) -> Outcome {
    let wrong = found.iter().zip(wanted).filter(|(f, w)| f.to_bits() != w.to_bits()).count();
    if wrong == 0 && found.len() >= wanted.len() {
        return Ok(());
    }
    Err(format!("{wrong} of {} elements differ, {} came, in {frame:?}", wanted.len(), found.len()))
}

fn whole(end: &mut End<'_>) -> Outcome {
    let most = end.channel.limits().max_rows;
    for (i, rows) in [1, 2, 7, 0, 33, most, 1].into_iter().enumerate() {
        for (j, form) in [Form::Packets, Form::Rows].into_iter().enumerate() {
            let frame = Frame { slot: 0, identity: identity(i as u16, false), rows, form };
            end.exchange_and_compare(frame, (100 + 2 * i + j) as u64)?;
        }
    }
    // Written by a kernel of the sender instead of by the put.
    if end.channel.direct(0).is_some() {
        let frame = Frame { slot: 0, identity: identity(9, false), rows: 5, form: Form::Rows };
        let back = Frame { identity: identity(9, true), ..frame };
        let rows = end.pattern(5, 1);
        if end.side == Side::Attention {
            let source = end.take(rows.len() * 2)?;
            source.write_on(end.stream, &rows).map_err(text)?;
            let direct = end.channel.direct(0).ok_or("direct is gone")?;
            direct.copy_from(end.stream, &source).map_err(text)?;
            end.channel.put_written(end.stream, frame, None).map_err(text)?;
            end.channel.wait(end.stream, back).map_err(text)?;
        } else {
            let landed = end.channel.wait(end.stream, frame).map_err(text)?;
            let found: Vec<bf16> = landed.rows.read_on(end.stream).map_err(text)?;
            same(&found, &rows, &frame)?;
            let num: Vec<i32> = landed.num_rows.read_on(end.stream).map_err(text)?;
            if num != [5] {
                return Err(format!("{num:?} rows are real instead of 5"));
            }
            end.channel.put_written(end.stream, back, None).map_err(text)?;
        }
        end.stream.synchronize().map_err(text)?;
    }
    end.channel.check().map_err(text)
}

fn again(end: &mut End<'_>) -> Outcome {
    for i in 0..200 {
        let form = if i % 3 == 0 { Form::Rows } else { Form::Packets };
        let frame = Frame { slot: i % 2, identity: identity(1, false), rows: 1 + i % 5, form };
        end.exchange_and_compare(frame, 1000 + i as u64)?;
    }
    Ok(())
}

fn replayed(end: &mut End<'_>) -> Outcome {
    const LAYERS: usize = 5;
    let rows = 3;
    let bytes = rows * end.channel.limits().row_bytes;
    for form in [Form::Packets, Form::Rows] {
        let (out, seen, num) = (end.take(LAYERS * bytes)?, end.take(LAYERS * bytes)?, end.take(4)?);
        num.write_on(end.stream, &[2i32]).map_err(text)?;
        let stream = end.stream;
        let mut graph = Graph::capture(stream, || -> Result<(), StepError> {
            for layer in 0..LAYERS {
                let frame = Frame { slot: 0, identity: identity(layer as u16, false), rows, form };
                let range = layer * bytes..(layer + 1) * bytes;
                let landed =
                    end.exchange(frame, &out.part(range.clone())?, Some(&num)).map_err(StepError::Lost)?;
                seen.part(range)?.copy_from(stream, &landed)?;
            }
            Ok(())
        })
        .map_err(text)?;
        for replay in 0..20u64 {
            let (mine, theirs) = end.salts(5000 + replay);
            out.write_on(stream, &end.pattern(LAYERS * rows, mine)).map_err(text)?;
            graph.launch().map_err(text)?;
            let found: Vec<bf16> = seen.read_on(stream).map_err(text)?;
            end.channel.check().map_err(text)?;
            let frame = Frame { slot: 0, identity: identity(0, false), rows: LAYERS * rows, form };
            same(&found, &end.pattern(LAYERS * rows, theirs), &frame)
                .map_err(|e| format!("replay {replay}: {e}"))?;
        }
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
    let back = frames.map(|f| Frame { identity: Identity { combine: true, ..f.identity }, ..f });
    let rows = frames.map(|f| end.pattern(4, 70 + f.slot as u64));
    if end.side == Side::Attention {
        for (frame, rows) in frames.iter().zip(&rows) {
            let source = end.take(rows.len() * 2)?;
            source.write_on(end.stream, rows).map_err(text)?;
            end.channel.put(end.stream, *frame, &source, None).map_err(text)?;
            end.stream.synchronize().map_err(text)?;
        }
        for frame in back {
            end.channel.wait(end.stream, frame).map_err(text)?;
        }
    } else {
        for (frame, rows) in frames.iter().zip(&rows) {
            let landed = end.channel.wait(end.stream, *frame).map_err(text)?;
            same(&landed.rows.read_on::<bf16>(end.stream).map_err(text)?, rows, frame)?;
        }
        let answer = end.take(4 * end.channel.limits().row_bytes)?;
        for frame in back {
            end.channel.put(end.stream, frame, &answer, None).map_err(text)?;
        }
    }
    end.stream.synchronize().map_err(text)?;
    end.channel.check().map_err(text)
}

fn refused(end: &mut End<'_>) -> Outcome {
    let limits = *end.channel.limits();
    let good = Frame { slot: 0, identity: identity(0, false), rows: 1, form: Form::Packets };
    let small = end.take(16)?;
    for frame in [
        Frame { slot: limits.num_slots, ..good },
        Frame { rows: limits.max_rows + 1, ..good },
        Frame { identity: Identity { stage: 8, ..good.identity }, ..good },
    ] {
        let refused = matches!(end.channel.wait(end.stream, frame), Err(StepError::BadFrame(_)))
            && matches!(end.channel.put(end.stream, frame, &small, None), Err(StepError::BadFrame(_)));
        if !refused {
            return Err(format!("{frame:?} was taken"));
        }
    }
    if !matches!(end.channel.put(end.stream, good, &small, None), Err(StepError::BadFrame(_))) {
        return Err("rows that are too short were taken".to_owned());
    }
    end.exchange_and_compare(good, 42)
}

fn foreign(end: &mut End<'_>) -> Outcome {
    let sent = Frame { slot: 0, identity: identity(3, false), rows: 2, form: Form::Packets };
    if end.side == Side::Attention {
        let rows = end.take(2 * end.channel.limits().row_bytes)?;
        end.channel.put(end.stream, sent, &rows, None).map_err(text)?;
        return end.stream.synchronize().map_err(text);
    }
    end.channel.wait(end.stream, Frame { identity: identity(4, false), ..sent }).map_err(text)?;
    end.stream.synchronize().map_err(text)?;
    let first = end.channel.check();
    if !matches!(first, Err(StepError::Foreign { .. })) {
        return Err(format!("{first:?} instead of a foreign frame"));
    }
    Ok(())
}

fn silent(end: &mut End<'_>) -> Outcome {
    if end.side == Side::Attention {
        return Ok(()); // and stays open: the peer's patience ends while this end waits for its script
    }
    let frame = Frame { slot: 0, identity: identity(0, false), rows: 2, form: Form::Packets };
    let patience = end.channel.limits().patience;
    let begin = std::time::Instant::now();
    end.channel.wait(end.stream, frame).map_err(text)?;
    // What is enqueued behind ends at once.
    for _ in 0..50 {
        end.channel.wait(end.stream, Frame { form: Form::Rows, ..frame }).map_err(text)?;
    }
    end.stream.mark(false).and_then(|m| m.wait(patience * 3)).map_err(text)?;
    let (waited, state) = (begin.elapsed(), end.channel.check());
    if !matches!(state, Err(StepError::Late { .. })) || waited < patience / 2 {
        return Err(format!("{state:?} after {waited:?} of {patience:?}"));
    }
    Ok(())
}
