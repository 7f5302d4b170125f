//! JSON as it is meant: a key that stands twice in an object says two things, and readers disagree on which counts.
use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Why a text is not read.
#[derive(Debug)]
pub(super) enum NotRead {
    /// A key stands twice; where, as in `messages[0].role`.
    Twice(String),
    /// It is no JSON.
    Malformed(serde_json::Error),
}

/// Reads a text. Nesting is bounded by the parser (128 levels).
///
/// # Errors
/// [`NotRead`].
pub(super) fn parse(text: &str) -> Result<Value, NotRead> {
    let twice = RefCell::default();
    let mut parser = serde_json::Deserializer::from_str(text);
    let parsed = Strict { twice: &twice }.deserialize(&mut parser);
    let parsed = parsed.and_then(|value| parser.end().map(|()| value));
    parsed.map_err(|error| match twice.take() {
        Some(path) => NotRead::Twice(path),
        None => NotRead::Malformed(error),
    })
}

/// Reads a value; leaves the path of a key that stands twice in `twice`.
#[derive(Clone, Copy)]
struct Strict<'a> {
    twice: &'a RefCell<Option<String>>,
}

impl Strict<'_> {
    /// An error on its way out of `place`: "key" or "[3]".
    fn within(self, place: impl FnOnce() -> String) {
        if let Some(path) = self.twice.borrow_mut().as_mut() {
            let separator = if path.starts_with('[') { "" } else { "." };
            *path = format!("{}{separator}{path}", place());
        }
    }
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        loop {
            match items.next_element_seed(self).inspect_err(|_| self.within(|| format!("[{}]", all.len())))? {
                Some(item) => all.push(item),
                None => return Ok(all.into()),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            if all.contains_key(&key) {
                *self.twice.borrow_mut() = Some(key);
                return Err(A::Error::custom("a key stands twice"));
            }
            let value = fields.next_value_seed(self).inspect_err(|_| self.within(|| key.clone()))?;
            all.insert(key, value);
        }
        Ok(all.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_once_is_read_as_ever() {
        for text in [
            r#"{"a": [1, -2, 2.5, 1e3, true, null, "x\n", {"a": {}}], "b": 18446744073709551615, "": []}"#,
            "[]",
            "\"text\"",
        ] {
            assert_eq!(parse(text).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        }
        for text in ["{", "[1] x", "{\"a\" 1}", "NaN", "{\"a\": 1e999}"] {
            let malformed = serde_json::from_str::<Value>(text).unwrap_err().to_string();
            assert!(matches!(parse(text), Err(NotRead::Malformed(error)) if error.to_string() == malformed));
        }
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(matches!(parse(&deep), Err(NotRead::Malformed(_))));
    }

    #[test]
    fn a_key_that_stands_twice_is_named_with_its_place() {
        for (text, place) in [
            (r#"{"n": 1, "m": 2, "n": 1}"#, "n"),
            (r#"{"messages": [{}, {"role": "a", "role": "b"}]}"#, "messages[1].role"),
            (r#"[[{"a": {"b": 1, "b": null}}]]"#, "[0][0].a.b"),
            (r#"{"a": 1, "\u0061": 2}"#, "a"),
        ] {
            assert!(matches!(parse(text), Err(NotRead::Twice(path)) if path == place), "{text}");
        }
    }
}
