//! The scenarios of the suite, in the order in which it runs them.
use super::{End, Outcome, Side, back, identity, text};
use crate::Graph;
use crate::channel::{Form, Frame, Identity, Landed, StepError};

pub(super) fn whole(end: &mut End<'_>) -> Outcome {
    let most = end.channel.limits().max_rows;
    for (i, rows) in [1, 2, 7, 0, 33, most, 1].into_iter().enumerate() {
        for (j, form) in [Form::Packets, Form::Rows].into_iter().enumerate() {
            let frame = Frame { slot: 0, identity: identity(i as u16, false), rows, form };
            end.exchange_and_compare(frame, (100 + 2 * i + j) as u64)?;
        }
    }
    end.verdict()?;
    // Written by a kernel of the sender instead of by the put.
    let frame = Frame { slot: 0, identity: identity(9, false), rows: 5, form: Form::Rows };
    let Some(direct) = end.channel.direct(&frame) else { return Ok(()) };
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

pub(super) fn again(end: &mut End<'_>) -> Outcome {
    for i in 0..200 {
        let form = if i % 3 == 0 { Form::Rows } else { Form::Packets };
        let frame = Frame { slot: i % 2, identity: identity(1, false), rows: 1 + i % 5, form };
        end.exchange_and_compare(frame, 1000 + i as u64)?;
    }
    end.verdict()
}

pub(super) fn replayed(end: &mut End<'_>) -> Outcome {
    const LAYERS: usize = 5;
    let rows = 3;
    let bytes = rows * end.channel.limits().row_bytes;
    for form in [Form::Packets, Form::Rows] {
        let (out, seen, num) = (end.take(LAYERS * bytes)?, end.take(LAYERS * bytes)?, end.take(16)?);
        // Writing waits for the device, which may be the other end's too: not while that captures.
        num.write(&[2i32]).map_err(text)?;
        end.ends.meet()?;
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

/// Steps of several hops, each begun as a whole; every other hop's rows are written where they are sent from, if that can be.
pub(super) fn begun(end: &mut End<'_>) -> Outcome {
    const LAYERS: u16 = 4;
    let bytes = 6 * end.channel.limits().row_bytes;
    let (num, out) = (end.take(16)?, end.take(bytes)?);
    num.write(&[5i32]).map_err(text)?;
    end.ends.meet()?;
    for step in 0..3u64 {
        let frame = |layer| Frame { slot: 1, identity: identity(layer, false), rows: 6, form: Form::Rows };
        let to: Vec<Frame> = (0..LAYERS).map(frame).collect();
        let answers: Vec<Frame> = to.iter().map(|frame| back(*frame)).collect();
        let is_attention = end.side == Side::Attention;
        let (out_frames, into, real) =
            if is_attention { (&to, &answers, Some(&num)) } else { (&answers, &to, None) };
        end.channel.begin(&end.bench.stream, out_frames, into, real).map_err(text)?;
        for (layer, (&dispatch, &combine)) in to.iter().zip(&answers).enumerate() {
            let (mine, theirs) = end.salts(9000 + 10 * step + layer as u64);
            let own = if is_attention { dispatch } else { combine };
            let direct = end.channel.direct(&own).filter(|_| layer % 2 == 0);
            let put = |end: &mut End<'_>| match &direct {
                Some(direct) => {
                    end.fill(direct, mine)?;
                    end.channel.put_written(&end.bench.stream, own, real).map_err(text)
                }
                None => {
                    end.fill(&out, mine)?;
                    end.channel.put(&end.bench.stream, own, &out, real).map_err(text)
                }
            };
            if is_attention {
                put(end)?;
            }
            let expected = if is_attention { combine } else { dispatch };
            let landed = end.channel.wait(&end.bench.stream, expected).map_err(text)?;
            let count = (!is_attention).then_some((&landed.num_rows, 5));
            end.compare(&landed.rows, theirs, count, format!("step {step}, {expected:?}"))?;
            if !is_attention {
                put(end)?;
            }
        }
        end.channel.settle(&end.bench.stream).map_err(text)?;
    }
    end.verdict()
}

pub(super) fn independent(end: &mut End<'_>) -> Outcome {
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

pub(super) fn refused(end: &mut End<'_>) -> Outcome {
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

pub(super) fn foreign(end: &mut End<'_>) -> Outcome {
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

pub(super) fn silent(end: &mut End<'_>) -> Outcome {
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

pub(super) fn given_up(end: &mut End<'_>) -> Outcome {
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
