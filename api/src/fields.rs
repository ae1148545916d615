//! Typed access to the fields of a JSON body, with errors that name the field.
//!
//! `null` counts as absent everywhere. Unknown fields are ignored: SDKs add some with every version.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::errors::ApiError;

/// The JSON object of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a body. An empty one is an empty object, as some clients send none where all fields are optional.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self::default());
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(other) => Err(ApiError::invalid(format!("the body must be a JSON object, not {}", kind(&other)))),
            Err(error) => Err(ApiError::invalid(format!("the body is not valid JSON: {error}"))),
        }
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field says anything: not absent, and not an empty string, list or object.
    pub(crate) fn is_given(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| match value {
            Value::String(text) => !text.is_empty(),
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            _ => true,
        })
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&str>, ApiError> {
        self.get(name).map(|value| value.as_str().ok_or_else(|| wrong(name, "a string", value))).transpose()
    }

    /// A whole number. `60.0` is one: JSON does not tell it from `60`.
    pub(crate) fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.get(name)
            .map(|value| value.as_i64().or_else(|| whole(value)).ok_or_else(|| wrong(name, "a whole number", value)))
            .transpose()
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.get(name).map(|value| value.as_bool().ok_or_else(|| wrong(name, "true or false", value))).transpose()
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields>, ApiError> {
        self.get(name)
            .map(|value| match value {
                Value::Object(fields) => Ok(Fields(fields.clone())),
                other => Err(wrong(name, "an object", other)),
            })
            .transpose()
    }

    /// An object whose values are strings.
    pub(crate) fn string_map(&self, name: &str) -> Result<HashMap<String, String>, ApiError> {
        let Some(fields) = self.object(name)? else { return Ok(HashMap::new()) };
        fields
            .0
            .into_iter()
            .map(|(key, value)| match value {
                Value::String(text) => Ok((key, text)),
                other => Err(wrong(&format!("{name}.{key}"), "a string", &other)),
            })
            .collect()
    }
}

fn whole(value: &Value) -> Option<i64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= EXACT)?;
    Some(number as i64)
}

fn wrong(name: &str, wanted: &str, found: &Value) -> ApiError {
    ApiError::invalid(format!("`{name}` must be {wanted}, not {}", kind(found)))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).expect("valid")
    }

    #[test]
    fn malformed_bodies_are_refused_with_the_reason() {
        for (body, reason) in [
            ("{", "not valid JSON"),
            ("[1]", "must be a JSON object, not a list"),
            ("\"x\"", "must be a JSON object, not a string"),
            ("{\"a\":\u{0}}", "not valid JSON"),
        ] {
            let error = Fields::parse(body.as_bytes()).expect_err(body);
            assert_eq!(error.status(), 400);
            assert!(error.message().contains(reason), "{body}: {error}");
        }
        assert!(Fields::parse(b"\xff\xfe").is_err());
        assert!(Fields::parse(&[b'['; 100_000]).is_err(), "nesting is bounded");
        assert!(Fields::parse(b" \r\n").is_ok());
    }

    #[test]
    fn a_wrong_type_names_the_field() {
        let body = fields(r#"{"s": 1, "n": "1", "f": 1.5, "b": 0, "o": [], "m": {"k": 1}, "huge": 1e300}"#);
        let message = |error: ApiError| error.message().to_owned();
        assert_eq!(message(body.string("s").expect_err("s")), "`s` must be a string, not a number");
        assert_eq!(message(body.integer("n").expect_err("n")), "`n` must be a whole number, not a string");
        assert!(body.integer("f").is_err());
        assert!(body.integer("huge").is_err());
        assert!(body.boolean("b").is_err());
        assert!(body.object("o").is_err());
        assert_eq!(message(body.string_map("m").expect_err("m")), "`m.k` must be a string, not a number");
    }

    #[test]
    fn null_and_empty_are_absent() {
        let body = fields(r#"{"n": null, "s": "", "l": [], "o": {}, "zero": 0, "no": false, "x": {"a": null}}"#);
        assert_eq!(body.string("n"), Ok(None));
        for absent in ["n", "s", "l", "o", "missing"] {
            assert!(!body.is_given(absent), "{absent}");
        }
        for given in ["zero", "no", "x"] {
            assert!(body.is_given(given), "{given}");
        }
    }

    proptest! {
        #[test]
        fn whole_numbers_are_read_exactly(number: i64) {
            prop_assert_eq!(fields(&format!("{{\"n\": {number}}}")).integer("n"), Ok(Some(number)));
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(body: Vec<u8>) {
            if let Err(error) = Fields::parse(&body) {
                prop_assert_eq!(error.status(), 400);
            }
        }
    }
}
