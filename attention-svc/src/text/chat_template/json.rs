//! `tojson` as Python's `json.dumps` writes it.
use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

use super::bounds::excess;

/// Most bytes of one `tojson`.
const MAX_JSON_BYTES: usize = 16 << 20;
/// Widest indentation of a level.
const MAX_INDENT: usize = 100;

/// A space after `,` and `:`, characters as they are, nothing escaped for HTML.
pub(super) fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    if indent.is_some_and(|width| width > MAX_INDENT) {
        return Err(excess(format!("tojson with an indent of more than {MAX_INDENT}")));
    }
    let value = serde_json::to_value(value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, "tojson").with_source(e))?;
    let mut text = String::new();
    write_json(&mut text, &value, indent, 0)?;
    Ok(Value::from_safe_string(text))
}

fn write_json(out: &mut String, value: &Json, indent: Option<usize>, depth: usize) -> Result<(), Error> {
    if out.len() > MAX_JSON_BYTES {
        // JSON of JSON of JSON doubles each time.
        return Err(excess(format!("tojson of more than {MAX_JSON_BYTES} bytes")));
    }
    let newline = |out: &mut String, depth: usize| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let separator = if indent.is_some() { "," } else { ", " };
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                newline(out, depth + 1);
                write_json(out, item, indent, depth + 1)?;
            }
            newline(out, depth);
            out.push(']');
        }
        Json::Object(fields) if !fields.is_empty() => {
            out.push('{');
            for (i, (name, item)) in fields.iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                newline(out, depth + 1);
                out.push_str(&Json::from(name.as_str()).to_string());
                out.push_str(": ");
                write_json(out, item, indent, depth + 1)?;
            }
            newline(out, depth);
            out.push('}');
        }
        simple => out.push_str(&simple.to_string()),
    }
    Ok(())
}
