//! Servers that commands ask over HTTP, this one or others: how their addresses are written, and what a refusal or a failure
//! says.
use http::StatusCode;
use serde_json::Value;

/// `--url`: with its scheme, without a slash at its end.
///
/// # Errors
/// What would do.
pub fn url(text: &str) -> Result<String, String> {
    let text = text.trim_end_matches('/');
    let rest = ["http://", "https://"].iter().find_map(|scheme| text.strip_prefix(scheme));
    match rest {
        Some(rest) if !rest.is_empty() => Ok(text.to_owned()),
        _ => Err("expected a URL such as http://127.0.0.1:8000".into()),
    }
}

/// A refusal in the server's own words: the message of an error in OpenAI's shape, or else all of it.
pub fn refusal(status: StatusCode, body: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|body| body["error"]["message"].as_str());
    format!("{status}: {}", message.unwrap_or(body.trim()))
}

/// Why there is no answer, with what caused that, in one line.
pub fn failure(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_its_scheme() {
        assert_eq!(url("http://a:1/"), Ok("http://a:1".into()));
        for wrong in ["a:1", "127.0.0.1:8000", "ftp://a", "http://", ""] {
            assert!(url(wrong).unwrap_err().contains("http://127.0.0.1:8000"), "{wrong}");
        }
    }

    #[test]
    fn a_refusal_is_told_by_its_message() {
        let body = r#"{"error": {"message": "no such thing", "code": 7}}"#;
        assert_eq!(refusal(StatusCode::NOT_FOUND, body), "404 Not Found: no such thing");
        assert_eq!(refusal(StatusCode::BAD_GATEWAY, "<html>\n"), "502 Bad Gateway: <html>");
    }
}
