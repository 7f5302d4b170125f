//! Servers that commands ask over HTTP, this one or others: how their addresses are written, and what a refusal or a failure
//! says.
use std::error::Error;
use std::time::Duration;

use afd_common::spelling::span;
use http::StatusCode;
use serde_json::Value;

/// What rustls calls an answer that is none of TLS.
const NO_TLS: &str = "InvalidContentType";

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
pub fn failure(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// Why there is no answer after `elapsed`, as a sentence goes on behind the server's address.
pub fn no_answer(error: &reqwest::Error, elapsed: Duration) -> String {
    let (elapsed, cause) = (span(elapsed), innermost(error));
    match (error.is_timeout(), error.is_connect()) {
        (true, true) => format!("cannot be reached: no connection within {elapsed}"),
        (true, false) => format!("did not answer within {elapsed}: it may be stopped"),
        (false, true) if cause.contains(NO_TLS) => {
            "cannot be reached: it does not speak TLS there (--url with http://)".into()
        }
        (false, true) => format!("cannot be reached: {cause}"),
        (false, false) => format!("gave no answer: the connection broke after {elapsed}: {cause}"),
    }
}

/// What a library's "error sending request" was made of.
fn innermost(error: &dyn Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

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

    /// What is said of a server that does `serve` with a connection.
    async fn said<F: Future<Output = ()> + Send + 'static>(
        scheme: &str,
        serve: impl FnOnce(tokio::net::TcpStream) -> F + Send + 'static,
    ) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move { serve(listener.accept().await.unwrap().0).await });
        let client =
            reqwest::Client::builder().no_proxy().timeout(Duration::from_millis(500)).build().unwrap();
        let error = client.get(url).send().await.unwrap_err();
        serving.abort();
        no_answer(&error, Duration::from_secs(2))
    }

    #[tokio::test]
    async fn what_became_of_a_question_is_told_in_words() {
        let mute = said("http", |stream| async move {
            let _held = stream;
            std::future::pending().await
        });
        assert_eq!(mute.await, "did not answer within 2.0 s: it may be stopped");
        let broken = said("http", |mut stream| async move {
            let mut heard = [0];
            stream.read_exact(&mut heard).await.unwrap();
        });
        let broken = broken.await;
        assert!(broken.starts_with("gave no answer: the connection broke after 2.0 s: "), "{broken}");
        let plain = said("https", |mut stream| async move {
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
            let _held = stream;
            std::future::pending().await
        });
        assert_eq!(plain.await, "cannot be reached: it does not speak TLS there (--url with http://)");
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let nobody = client.get("http://127.0.0.1:1").send().await.unwrap_err();
        let nobody = no_answer(&nobody, Duration::from_secs(2));
        assert!(nobody.starts_with("cannot be reached: Connection refused"), "{nobody}");
    }
}
