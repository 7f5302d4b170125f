//! Typed access to the fields of a JSON object. A value of another type than asked for is refused by the field's name;
//! `null` counts as absent, as it does in the reference implementation's files. What was asked for is kept, so that what
//! nobody asked for can be named.
use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::ConfigError;
use super::harmless::is_harmless;

/// No dimension of a served model comes near this; products of two of them fit 64 bits.
const MAX_SIZE: usize = 1 << 28;

/// Names of the fields that were asked for, whether they were there or not; those of objects like `rope_scaling.factor`.
#[derive(Default)]
pub(super) struct Asked(RefCell<BTreeSet<String>>);

impl Asked {
    fn contains(&self, field: &str) -> bool {
        self.0.borrow().contains(field)
    }
}

/// A JSON object and where it stands in its file (`rope_scaling.`), for messages.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: &'static str,
    asked: &'a Asked,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, prefix: &'static str, asked: &'a Asked) -> Self {
        Self { map, prefix, asked }
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.asked.0.borrow_mut().insert(format!("{}{name}", self.prefix));
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Fields of this object, and of the objects in it that were read, that have a value, were not asked for, and might
    /// matter.
    pub(super) fn unknown(&self) -> Vec<String> {
        let mut unknown = Vec::new();
        let mut look = |field: String, value: &Value| {
            if !value.is_null() && !self.asked.contains(&field) && !is_harmless(&field) {
                unknown.push(field);
            }
        };
        for (name, value) in self.map {
            match value {
                Value::Object(inner) if self.asked.contains(name) => {
                    inner.iter().for_each(|(inner, value)| look(format!("{name}.{inner}"), value));
                }
                _ => look(name.clone(), value),
            }
        }
        unknown
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(super) fn missing(&self, name: &str) -> ConfigError {
        ConfigError::Missing { field: format!("{}{name}", self.prefix) }
    }

    /// The refusal of `name`'s value.
    pub(super) fn refuse(&self, name: &str, what: impl Into<String>) -> ConfigError {
        ConfigError::Field { field: format!("{}{name}", self.prefix), what: what.into() }
    }

    pub(super) fn object(&self, name: &str, prefix: &'static str) -> Result<Option<Fields<'a>>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields::new(map, prefix, self.asked))),
            Some(other) => Err(self.refuse(name, format!("{other} is not an object"))),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.refuse(name, format!("{other} is not a string"))),
        }
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.refuse(name, format!("{other} is not true or false"))),
        }
    }

    /// A finite number.
    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if number.is_finite() => Ok(Some(number)),
                _ => Err(self.refuse(name, format!("{value} is not a finite number"))),
            },
        }
    }

    /// A finite number above zero.
    pub(super) fn positive(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        match self.number(name)? {
            Some(number) if number <= 0.0 => Err(self.refuse(name, format!("{number} is not above 0"))),
            other => Ok(other),
        }
    }

    /// A whole number, `least` or more. `64.0` counts: some writers put it so.
    pub(super) fn size(&self, name: &str, least: usize) -> Result<Option<usize>, ConfigError> {
        let Some(number) = self.number(name)? else { return Ok(None) };
        if number.fract() != 0.0 || number < least as f64 || number > MAX_SIZE as f64 {
            return Err(
                self.refuse(name, format!("{number} is not a whole number from {least} to {MAX_SIZE}"))
            );
        }
        Ok(Some(number as usize))
    }

    /// A whole number from 1 that has to be there.
    pub(super) fn required_size(&self, name: &str) -> Result<usize, ConfigError> {
        self.size(name, 1)?.ok_or_else(|| self.missing(name))
    }

    /// A list of whole numbers.
    pub(super) fn sizes(&self, name: &str) -> Result<Vec<usize>, ConfigError> {
        let fail = |value: &Value| self.refuse(name, format!("{value} is not a list of whole numbers"));
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(value @ Value::Array(items)) => items
                .iter()
                .map(|item| item.as_u64().map(|number| number as usize).ok_or_else(|| fail(value)))
                .collect(),
            Some(other) => Err(fail(other)),
        }
    }

    /// One token id, or a list of them.
    pub(super) fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, ConfigError> {
        let id = |value: &Value| {
            value
                .as_u64()
                .and_then(|number| u32::try_from(number).ok())
                .ok_or_else(|| self.refuse(name, format!("{value} is not a token id")))
        };
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(items)) => items.iter().map(id).collect::<Result<_, _>>().map(Some),
            Some(single) => Ok(Some(vec![id(single)?])),
        }
    }

    /// Refuses every value of a field but the given one; absent is as good.
    pub(super) fn only(&self, name: &str, accepted: &Value) -> Result<(), ConfigError> {
        match self.get(name) {
            Some(found) if !same(found, accepted) => {
                Err(self.refuse(name, format!("{found} is not served, only {accepted}")))
            }
            _ => Ok(()),
        }
    }
}

/// Equal as JSON, or as numbers (1 and 1.0).
fn same(a: &Value, b: &Value) -> bool {
    a == b || matches!((a.as_f64(), b.as_f64()), (Some(a), Some(b)) if a == b)
}
