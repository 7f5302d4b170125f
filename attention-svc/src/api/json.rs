//! A JSON request read strictly: every field is taken once with its type, nulls count as absent, and what is left over
//! is refused by name.
use afd_common::spelling::shown;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::strict_json::{self, NotRead};
use super::validate::FieldError;

/// The fields of an object not taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Put before names in errors, such as `messages[0].`.
    prefix: String,
}

impl Fields {
    /// Parses a body. Nesting is bounded by the parser (128 levels).
    ///
    /// # Errors
    /// [`ApiError::Malformed`]; [`ApiError::Field`] where the syntax error is the value of a field (`NaN`), or a field is
    /// given twice.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|e| {
            ApiError::Malformed(format!("the body is not UTF-8 from byte {}", e.valid_up_to()))
        })?;
        match strict_json::parse(text) {
            Ok(Value::Object(map)) => Ok(Self { map, prefix: String::new() }),
            Ok(_) => Err(ApiError::Malformed("the body is not a JSON object".into())),
            Err(NotRead::Twice(field)) => Err(FieldError::new(field, "is given twice").into()),
            Err(NotRead::Malformed(error)) => Err(match field_at(text, &error) {
                Some(name) => FieldError::new(name, format!("is not valid JSON: {error}")).into(),
                None => ApiError::Malformed(format!("the body is not valid JSON: {error}")),
            }),
        }
    }

    /// Reads an object inside the body.
    ///
    /// # Errors
    /// [`FieldError`] when it is not an object.
    pub(super) fn nested(value: Value, path: &str) -> Result<Self, FieldError> {
        match value {
            Value::Object(map) => Ok(Self { map, prefix: format!("{path}.") }),
            other => Err(FieldError::new(path, format!("must be an object, got {}", brief(&other)))),
        }
    }

    /// Full name of a field, for errors.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn wrong(&self, name: &str, wanted: &str, found: &Value) -> FieldError {
        FieldError::new(self.path(name), format!("must be {wanted}, got {}", brief(found)))
    }

    /// The value as it is; `None` when absent or null.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Whether the field is there, null or not.
    pub(super) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// `true` or `false`.
    ///
    /// # Errors
    /// [`FieldError`] for anything else; so below.
    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, FieldError> {
        self.take(name).map(|v| v.as_bool().ok_or_else(|| self.wrong(name, "true or false", &v))).transpose()
    }

    /// A number.
    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f64>, FieldError> {
        self.take(name).map(|v| v.as_f64().ok_or_else(|| self.wrong(name, "a number", &v))).transpose()
    }

    /// A whole number.
    pub(crate) fn integer(&mut self, name: &str) -> Result<Option<i64>, FieldError> {
        self.take(name)
            .map(|v| whole(&v).ok_or_else(|| self.wrong(name, "a whole number below 2^63", &v)))
            .transpose()
    }

    /// A text.
    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, FieldError> {
        self.take(name)
            .map(|v| match v {
                Value::String(text) => Ok(text),
                other => Err(self.wrong(name, "a string", &other)),
            })
            .transpose()
    }

    /// A text or a list of texts.
    pub(super) fn strings(&mut self, name: &str) -> Result<Vec<String>, FieldError> {
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(items)) => items
                .into_iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text),
                    other => Err(self.wrong(name, "a string or a list of strings", &other)),
                })
                .collect(),
            Some(other) => Err(self.wrong(name, "a string or a list of strings", &other)),
        }
    }

    /// A list of whole numbers.
    pub(super) fn integers(&mut self, name: &str) -> Result<Vec<i64>, FieldError> {
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => items
                .iter()
                .map(|v| whole(v).ok_or_else(|| self.wrong(name, "a list of whole numbers", v)))
                .collect(),
            Some(other) => Err(self.wrong(name, "a list of whole numbers", &other)),
        }
    }

    /// Takes a field that would change the answer but is not served; it may only have the value that changes nothing.
    pub(super) fn unsupported(
        &mut self,
        name: &str,
        harmless: impl Fn(&Value) -> bool,
    ) -> Result<(), FieldError> {
        match self.take(name) {
            Some(value) if !harmless(&value) => Err(FieldError::new(
                self.path(name),
                format!("is not supported here (got {})", brief(&value)),
            )),
            _ => Ok(()),
        }
    }

    /// Drops fields that cannot change the answer.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.map.remove(*name)));
    }

    /// All fields must have been taken.
    pub(crate) fn finish(self) -> Result<(), FieldError> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(name) => Err(FieldError::new(self.path(name), "is not a known field")),
        }
    }
}

/// A whole number, also when written `2.0` or `2e3`.
fn whole(value: &Value) -> Option<i64> {
    let integral = |x: f64| (x.fract() == 0.0 && x.abs() < 9e15).then_some(x as i64);
    value.as_i64().or_else(|| if value.is_f64() { integral(value.as_f64()?) } else { None })
}

/// A value for an error message, cut short.
pub(super) fn brief(value: &Value) -> String {
    shown(&value.to_string())
}

/// The field whose value the parser stumbled over: the error stands right after `"name":`.
fn field_at<'a>(text: &'a str, error: &serde_json::Error) -> Option<&'a str> {
    let line = text.split('\n').nth(error.line().checked_sub(1)?)?;
    let mut end = error.column().min(line.len());
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    let colon = line[..end].rfind(':')?;
    let token = &line[colon + 1..end];
    if token.contains(['"', '{', '[', ',', '}', ']']) {
        return None;
    }
    let name = line[..colon].trim_end().strip_suffix('"')?;
    name.rsplit('"').next().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Fields, ApiError> {
        Fields::parse(text.as_bytes())
    }

    #[test]
    fn what_is_not_json_is_named_where_it_can_be() {
        let param = |text: &str| match parse(text) {
            Err(ApiError::Field(error)) => error.param,
            other => panic!("{other:?}"),
        };
        assert_eq!(param(r#"{"prompt": "a", "temperature": NaN, "n": 1}"#), "temperature");
        assert_eq!(param("{\"a\": 1,\n \"top_p\" : -Infinity}"), "top_p");
        assert_eq!(param(r#"{"seed": 1e999}"#), "seed");
        assert_eq!(param(r#"{"n": 1, "messages": [{"role": "user", "role": "user"}]}"#), "messages[0].role");
        for text in ["", "{", "[1]", r#"{"a": "x" "b"}"#, "nonsense", "{\"a\": \"\\ud800\"}"] {
            assert!(parse(text).is_err(), "{text}");
        }
        for text in [r#"{"prompt": "a", "max_tokens": 1} and more"#, r#"{"prompt": [1]} x"#] {
            let said = parse(text).unwrap_err().to_string();
            assert!(said.starts_with("the body is not valid JSON: trailing characters"), "{said}");
        }
        assert!(
            matches!(Fields::parse(b"{\"a\": \"\xff\"}"), Err(ApiError::Malformed(m)) if m.contains("byte 7"))
        );
        assert!(parse(&format!("{{\"a\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000))).is_err());
    }

    #[test]
    fn types_are_exact_and_leftovers_refused() {
        let mut fields =
            parse(r#"{"i": 2.5, "j": 2.0, "b": 1, "s": [1], "n": null, "big": 9223372036854775808, "x": 0}"#)
                .unwrap();
        assert_eq!(
            fields.integer("i").unwrap_err().to_string(),
            "`i` must be a whole number below 2^63, got 2.5"
        );
        assert_eq!(fields.integer("j"), Ok(Some(2)));
        assert!(fields.boolean("b").is_err());
        assert!(fields.strings("s").is_err());
        assert_eq!(fields.number("n"), Ok(None));
        assert!(fields.integer("big").is_err());
        assert_eq!(fields.finish().unwrap_err().param, "x");
    }
}
