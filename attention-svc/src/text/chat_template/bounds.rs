//! What a rendering may cost. Steps are counted by minijinja itself ([`FUEL`]), whatever a step works on; here are limits
//! on what a step can be given and can leave behind, so that each is short, and on all steps together:
//! - no value is larger than [`MAX_VALUE_BYTES`] or nested deeper than [`MAX_DEPTH`], counted as a tree: what is in it
//!   twice counts twice, since whoever writes or compares it looks at it twice;
//! - lists are lists: what would compute its items one by one, later and again, is computed once;
//! - bytes made or looked through ([`MAX_WORK_BYTES`]), bytes written ([`MAX_WRITTEN_BYTES`]) and time ([`TIME_LIMIT`]) are
//!   limited for the rendering as a whole.
//!
//! The [program](super::program) asks at every step that is not trivial.
use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use minijinja::value::{Object, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Steps of a rendering: a hundred for each of 200,000 messages, which is more than a context holds.
pub(super) const FUEL: u64 = 20_000_000;
/// Most bytes of one value: more than any body has.
const MAX_VALUE_BYTES: usize = 64 << 20;
/// Most values around a value. JSON of a request may be 128 deep.
const MAX_DEPTH: usize = 200;
/// Most bytes of all values and texts together.
const MAX_WORK_BYTES: usize = 4 << 30;
/// Most bytes written, into variables or out of the template.
const MAX_WRITTEN_BYTES: usize = 64 << 20;
/// Longest time of a rendering; the step under way is finished. Less in tests, which wait for it.
const TIME_LIMIT: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 5000 });
/// What an item of a list takes, without what it holds.
pub(super) const ITEM_BYTES: usize = 32;

/// Of one rendering. Kept where its template cannot get at it.
#[derive(Debug)]
pub(super) struct Bounds {
    until: Instant,
    worked: AtomicUsize,
    written: AtomicUsize,
}

impl Object for Bounds {}

impl Bounds {
    /// Those of the rendering under way.
    pub(super) fn of(state: &State) -> Arc<Self> {
        state.get_or_set_temp_object("bounds", || Self {
            until: Instant::now() + TIME_LIMIT,
            worked: AtomicUsize::new(0),
            written: AtomicUsize::new(0),
        })
    }

    /// Something is about to be done to this many bytes, or with a result of this many.
    pub(super) fn work(&self, bytes: usize) -> Result<(), Error> {
        if Instant::now() > self.until {
            return Err(excess(format!("it takes longer than {TIME_LIMIT:?}")));
        }
        // A rendering has one thread.
        let worked = self.worked.load(Relaxed).saturating_add(bytes);
        self.worked.store(worked, Relaxed);
        within(worked, MAX_WORK_BYTES, "of values")
    }

    /// A value of this many bytes is about to be made.
    pub(super) fn make(&self, bytes: usize) -> Result<(), Error> {
        within(bytes, MAX_VALUE_BYTES, "in one value")?;
        self.work(bytes)
    }

    /// This value is about to be written.
    pub(super) fn write(&self, value: &Value) -> Result<(), Error> {
        let bytes = weigh(value)?;
        let written = self.written.load(Relaxed).saturating_add(bytes);
        self.written.store(written, Relaxed);
        within(written, MAX_WRITTEN_BYTES, "of text")?;
        self.work(bytes)
    }

    /// A value that a step has made, if it may stay.
    pub(super) fn keep(&self, value: Value) -> Result<Value, Error> {
        let value = self.listed(value)?;
        weigh(&value)?;
        Ok(value)
    }

    /// A part of a value, or the items of several one after the other: nothing in it is nested deeper than it was.
    pub(super) fn listed(&self, value: Value) -> Result<Value, Error> {
        match value.kind() {
            ValueKind::String | ValueKind::Bytes => {
                let bytes = value.as_bytes().map_or(0, <[u8]>::len);
                self.work(bytes)?;
                within(bytes, MAX_VALUE_BYTES, "in one text").map(|()| value)
            }
            ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()? {
                    self.work(ITEM_BYTES)?;
                    within(items.len() * ITEM_BYTES, MAX_VALUE_BYTES, "in one list")?;
                    items.push(item);
                }
                Ok(Value::from(items))
            }
            _ => self.work(value.len().unwrap_or(0) * ITEM_BYTES).map(|()| value),
        }
    }
}

/// Bytes of a value with all that is in it.
pub(super) fn weigh(value: &Value) -> Result<usize, Error> {
    let mut bytes = 0;
    add_weight(value, 0, &mut bytes).map(|()| bytes)
}

fn add_weight(value: &Value, depth: usize, bytes: &mut usize) -> Result<(), Error> {
    *bytes += value.as_bytes().map_or(ITEM_BYTES, <[u8]>::len);
    within(*bytes, MAX_VALUE_BYTES, "in one value")?;
    for (key, item) in parts(value) {
        if depth == MAX_DEPTH {
            return Err(excess(format!("it nests values deeper than {MAX_DEPTH}")));
        }
        add_weight(&key, depth + 1, bytes)?;
        add_weight(&item, depth + 1, bytes)?;
    }
    Ok(())
}

fn parts(value: &Value) -> impl Iterator<Item = (Value, Value)> {
    value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

/// Whether a namespace is in a value: in one of its own members it would hold itself, without end.
pub(super) fn holds_namespace(value: &Value) -> bool {
    let is_namespace = value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"));
    is_namespace || parts(value).any(|(_, item)| holds_namespace(&item))
}

fn within(bytes: usize, most: usize, of: &str) -> Result<(), Error> {
    if bytes <= most { Ok(()) } else { Err(excess(format!("it makes more than {most} bytes {of}"))) }
}

pub(super) fn excess(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what).with_source(Excess)
}

/// Tells what is beyond a bound from other errors of a template.
#[derive(Debug, thiserror::Error)]
#[error("beyond what a chat template may do")]
pub(super) struct Excess;

/// Whether a rendering ended because it went beyond a bound.
pub(super) fn is_excess(error: &Error) -> bool {
    let out_of_fuel = |error: &Error| error.kind() == ErrorKind::OutOfFuel;
    let mut source = error.source();
    while let Some(cause) = source {
        if cause.is::<Excess>() || cause.downcast_ref().is_some_and(out_of_fuel) {
            return true;
        }
        source = cause.source();
    }
    out_of_fuel(error)
}
