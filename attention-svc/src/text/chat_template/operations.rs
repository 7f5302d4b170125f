//! Operations that can make much out of little, or never end, with the [bounds](super::bounds) asked beforehand:
//! multiplication, and those of Jinja's filters and Python's methods of which that is true. The others make little more
//! than they are given.
use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, StringInput, ValueKind, from_args};
use minijinja::{Environment, Error, State, Value, filters, tests};
use minijinja_contrib::pycompat;

use super::bounds::{Bounds, ITEM_BYTES, excess, weigh};

/// Longest number in a format: widths and precisions are filled up.
const MAX_FORMAT_DIGITS: usize = 4;
/// Widest indentation.
const MAX_INDENT: usize = 1000;

/// Puts them in the place of minijinja's.
pub(super) fn add_bounded(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("trim", trim);
    environment.add_filter("indent", indent);
    environment.add_filter("format", format);
    environment.add_filter("batch", batch);
    environment.add_filter("slice", slice);
    environment.add_test("in", is_in);
    // Writes all there is, for whoever makes a template.
    environment.remove_global("debug");
}

/// `a * b`: numbers, or a text or a list so many times.
pub(super) fn multiply(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    let is_many =
        |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable);
    let (many, times) = if is_many(a) { (a, b) } else { (b, a) };
    if !is_many(many) {
        return multiply_numbers(a, b);
    }
    let bounds = Bounds::of(state);
    // As in Python nothing is left of less than one time.
    let times = match times.as_usize() {
        Some(times) => times,
        None if times.as_i64().is_some_and(i64::is_negative) => 0,
        None => return Err(cannot_multiply(a, b)),
    };
    if let Some(text) = many.as_str() {
        bounds.make(text.len().saturating_mul(times))?;
        return bounds.keep(Value::from(text.repeat(times)));
    }
    let items: Vec<Value> = many.try_iter()?.collect();
    bounds.make(items.len().saturating_mul(times).saturating_mul(ITEM_BYTES))?;
    let all = items.iter().cycle().take(items.len() * times).cloned().collect::<Vec<_>>();
    bounds.keep(Value::from(all))
}

fn multiply_numbers(a: &Value, b: &Value) -> Result<Value, Error> {
    let is_whole = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    let failed = || cannot_multiply(a, b);
    if is_whole(a) && is_whole(b) {
        let (a, b) = (i128::try_from(a.clone())?, i128::try_from(b.clone())?);
        let product = a.checked_mul(b).ok_or_else(failed)?;
        return Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from));
    }
    let float = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(f64::from(value.is_true())),
        _ => f64::try_from(value.clone()).ok(),
    };
    Ok(Value::from(float(a).ok_or_else(failed)? * float(b).ok_or_else(failed)?))
}

fn cannot_multiply(a: &Value, b: &Value) -> Error {
    excess(format!("{} and {} cannot be multiplied", a.kind(), b.kind()))
}

fn replace(
    state: &State,
    value: StringInput<'_>,
    from: StringInput<'_>,
    to: StringInput<'_>,
) -> Result<Value, Error> {
    Bounds::of(state).make(replaced_bytes(value.as_str(), from.as_str(), to.as_str()))?;
    filters::replace(state, value, from, to)
}

fn replaced_bytes(text: &str, from: &str, to: &str) -> usize {
    text.len().saturating_add(text.matches(from).count().saturating_mul(to.len()))
}

fn join(state: &State, value: &Value, joiner: Option<StringInput<'_>>) -> Result<Value, Error> {
    let between = joiner.as_ref().map_or(0, |joiner| joiner.as_str().len());
    Bounds::of(state).make(joined_bytes(value, between))?;
    filters::join(state, value, joiner)
}

/// Of what stands between the items; what they are themselves is there already.
fn joined_bytes(items: &Value, between: usize) -> usize {
    items.len().unwrap_or(0).saturating_mul(between)
}

fn trim(state: &State, value: StringInput<'_>, chars: Option<Cow<'_, str>>) -> Result<Value, Error> {
    // Every character may be compared to each.
    Bounds::of(state)
        .work(value.as_str().len().saturating_mul(chars.as_ref().map_or(1, |chars| chars.len())))?;
    Ok(filters::trim(value, chars))
}

fn indent(state: &State, value: StringInput<'_>, args: Rest<Value>) -> Result<Value, Error> {
    let (width, first, blank, kwargs) =
        from_args::<(Option<usize>, Option<bool>, Option<bool>, Kwargs)>(&args)?;
    let width = match width {
        Some(width) => Some(width),
        None => kwargs.get("width")?,
    };
    let (of_line, lines) = (width.unwrap_or(0), value.as_str().matches('\n').count() + 1);
    if of_line > MAX_INDENT {
        return Err(excess(format!("it indents by more than {MAX_INDENT}")));
    }
    Bounds::of(state).make(lines.saturating_mul(of_line))?;
    filters::indent(value, width, first, blank, kwargs)
}

fn format(state: &State, text: &Value, args: Rest<Value>) -> Result<Value, Error> {
    check_format(&Bounds::of(state), text.as_str().unwrap_or_default(), &args)?;
    filters::format(state, text, args)
}

/// A format may name every argument as often as it likes, and fill each up to a width.
fn check_format(bounds: &Bounds, text: &str, args: &[Value]) -> Result<(), Error> {
    let most = 10usize.pow(MAX_FORMAT_DIGITS as u32);
    let longest = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    // `*` takes a width from the arguments.
    let wide = |value: &Value| value.is_number() && value.as_usize().is_some_and(|number| number > most);
    if longest > MAX_FORMAT_DIGITS || (text.contains('*') && args.iter().any(wide)) {
        return Err(excess(format!("a format with a number beyond {most}")));
    }
    let args = args.iter().map(weigh).sum::<Result<usize, Error>>()?;
    let fields = text.matches(['%', '{']).count();
    // A field without a width takes what its argument takes.
    let width = if longest > 0 || text.contains('*') { most } else { 0 };
    bounds.make(fields.saturating_mul(args.saturating_add(width)))
}

fn batch(state: &State, value: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
    Bounds::of(state).make(count.saturating_mul(ITEM_BYTES))?;
    filters::batch(state, value, count, fill)
}

fn slice(state: &State, value: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
    Bounds::of(state).make(count.saturating_mul(ITEM_BYTES))?;
    filters::slice(state, value, count, fill)
}

/// As a test it is asked for every item of a list.
fn is_in(state: &State, value: &Value, container: &Value) -> Result<bool, Error> {
    Bounds::of(state).work(container.as_bytes().map_or_else(|| container.len().unwrap_or(0), <[u8]>::len))?;
    tests::is_in(state, value, container)
}

/// A method of Python's.
fn method(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        let bounds = Bounds::of(state);
        let arg = |at: usize| args.get(at).and_then(Value::as_str).unwrap_or_default();
        match method {
            "replace" => bounds.make(replaced_bytes(text, arg(0), arg(1)))?,
            "join" => bounds.make(args.first().map_or(0, |items| joined_bytes(items, text.len())))?,
            "strip" | "lstrip" | "rstrip" => bounds.work(text.len().saturating_mul(arg(0).len().max(1)))?,
            "format" => check_format(&bounds, text, args)?,
            // Nothing is found everywhere, for ever.
            "count" if args.len() == 1 && args[0].as_str() == Some("") => {
                return Ok(Value::from(text.chars().count() + 1));
            }
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, method, args)
}
