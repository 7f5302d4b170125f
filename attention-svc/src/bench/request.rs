//! One request, timed as its answer streams in.
use std::time::{Duration, Instant};

use afd_common::net::tls::ClientTls;
use futures::StreamExt;
use serde_json::{Value, json};

use super::BenchError;
use crate::served::{failure, refusal};

/// A server and what to ask it for.
#[derive(Clone, Debug)]
pub(super) struct Target {
    client: reqwest::Client,
    url: String,
    model: String,
    key: Option<String>,
    /// For FFN ranks, whose metrics are read too.
    join_token: Option<String>,
}

/// What to ask.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    pub(super) output_len: usize,
}

/// How an answer came.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    /// From the request to the first token.
    pub(super) first: Duration,
    /// From the request to the last token.
    pub(super) last: Duration,
    /// Between pieces of the answer.
    pub(super) gaps: Vec<Duration>,
    /// Tokens of the answer, as the server counts them.
    pub(super) tokens: usize,
    /// Tokens of the prompt, as the server counts them.
    pub(super) prompt_tokens: usize,
}

impl Target {
    /// Looks at the server; the model is the first it lists unless given.
    pub(super) async fn find(
        url: &str,
        model: Option<String>,
        [key, join_token]: [Option<String>; 2],
        tls: Option<&ClientTls>,
        timeout: Duration,
    ) -> Result<Self, BenchError> {
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let failed = |what: String| BenchError::Server { url: url.clone(), what };
        let mut client = reqwest::Client::builder().timeout(timeout).tcp_nodelay(true).no_proxy();
        if let Some(tls) = tls {
            client = client.use_preconfigured_tls((*tls.config()).clone());
        }
        let client = client.build().map_err(|e| failed(failure(&e)))?;
        let mut target = Self { client, model: String::new(), key, join_token, url: url.clone() };
        target.model = match model {
            Some(model) => model,
            None => {
                let request = target.authorized(target.client.get(format!("{url}/v1/models")));
                let answer = request.send().await.map_err(|e| failed(failure(&e)))?;
                let (status, text) = (answer.status(), answer.text().await.map_err(|e| failed(failure(&e)))?);
                if !status.is_success() {
                    return Err(failed(refusal(status, &text)));
                }
                let list: Value = serde_json::from_str(&text).unwrap_or_default();
                let id = list["data"][0]["id"].as_str();
                id.ok_or_else(|| failed(format!("/v1/models lists no model: {text}")))?.to_owned()
            }
        };
        Ok(target)
    }

    /// What `/metrics` says, if there is such a thing.
    pub(super) async fn metrics(&self) -> Option<String> {
        let request = self.authorized(self.client.get(format!("{}/metrics", self.url)));
        request.send().await.ok()?.error_for_status().ok()?.text().await.ok()
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// `/metrics` of the server.
    pub(super) async fn own_metrics(&self) -> Result<String, String> {
        let url = format!("{}/metrics", self.url);
        page(self.authorized(self.client.get(&url))).await.map_err(|what| format!("{url}: {what}"))
    }

    /// The same of an FFN rank of its deployment, which knows another token.
    pub(super) async fn ffn_metrics(&self, address: &str) -> Result<String, String> {
        let scheme = if self.url.starts_with("https") { "https" } else { "http" };
        let url = format!("{scheme}://{address}/metrics");
        let request = self.client.get(&url);
        let request = match &self.join_token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        page(request).await.map_err(|what| format!("{url}: {what} (--join-token-file)"))
    }

    /// The request for a prompt, ready to be sent: writing it takes as long as a few tokens, which are not the server's.
    pub(super) fn write(&self, prompt: &Prompt) -> Vec<u8> {
        let body = json!({
            "model": self.model,
            "prompt": prompt.ids,
            "max_tokens": prompt.output_len,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        body.to_string().into_bytes()
    }

    /// Sends what was [written](Self::write) and waits for the whole answer, saying when its first token is there; on a
    /// failure says why.
    pub(super) async fn ask(&self, body: Vec<u8>, on_first: impl FnOnce()) -> Result<Answer, String> {
        let request = self.client.post(format!("{}/v1/completions", self.url));
        let request = request.header(reqwest::header::CONTENT_TYPE, "application/json").body(body);
        let begun = Instant::now();
        let answer = self.authorized(request).send().await.map_err(|e| failure(&e))?;
        if !answer.status().is_success() {
            let (status, text) = (answer.status(), answer.text().await.unwrap_or_default());
            return Err(refusal(status, &text));
        }
        let mut bytes = answer.bytes_stream();
        let (mut events, mut timing) = (Events::default(), Timing::default());
        let mut on_first = Some(on_first);
        while let Some(chunk) = bytes.next().await {
            let now = begun.elapsed();
            for data in events.push(&chunk.map_err(|e| failure(&e))?) {
                timing.handle(&data, now)?;
            }
            if let Some(on_first) = on_first.take_if(|_| timing.first.is_some()) {
                on_first();
            }
        }
        timing.finish()
    }
}

async fn page(request: reqwest::RequestBuilder) -> Result<String, String> {
    let answer = request.send().await.map_err(|e| failure(&e))?;
    let answer = answer.error_for_status().map_err(|e| failure(&e))?;
    answer.text().await.map_err(|e| failure(&e))
}

/// Splits a stream of bytes into the payloads of server-sent events.
#[derive(Default)]
struct Events {
    partial: Vec<u8>,
}

impl Events {
    fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.partial.extend_from_slice(bytes);
        let mut payloads = Vec::new();
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            if let Some(payload) = line.trim_end().strip_prefix("data:") {
                payloads.push(payload.trim_start().to_owned());
            }
        }
        payloads
    }
}

/// Times of an answer so far.
#[derive(Default)]
struct Timing {
    first: Option<Duration>,
    last: Duration,
    gaps: Vec<Duration>,
    usage: Option<(usize, usize)>,
    done: bool,
}

impl Timing {
    fn handle(&mut self, payload: &str, now: Duration) -> Result<(), String> {
        if payload == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(payload).map_err(|e| format!("{e}: {payload}"))?;
        if !event["error"].is_null() {
            return Err(event["error"].to_string());
        }
        let count = |name: &str| event["usage"][name].as_u64().map(|n| n as usize);
        if let Some(usage) = count("completion_tokens").zip(count("prompt_tokens")) {
            self.usage = Some(usage);
        }
        let says_something = event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty());
        if says_something {
            match self.first {
                None => self.first = Some(now),
                Some(_) => self.gaps.push(now - self.last),
            }
            self.last = now;
        }
        Ok(())
    }

    fn finish(self) -> Result<Answer, String> {
        if !self.done {
            return Err("the stream ended without [DONE]".into());
        }
        let first = self.first.ok_or("the answer has no text")?;
        let (tokens, prompt_tokens) = self.usage.ok_or("the answer has no usage")?;
        Ok(Answer { first, last: self.last, gaps: self.gaps, tokens, prompt_tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_timed_by_its_events_wherever_the_network_cuts_them() {
        let (mut events, mut timing) = (Events::default(), Timing::default());
        let ms = Duration::from_millis;
        let parts: [(&[u8], u64); 4] = [
            (b"data: {\"choices\": [{\"text\": \"a\"}]}\n\ndata: {\"cho", 10),
            (b"ices\": [{\"text\": \"b\"}]}\n\n", 30),
            (b"data: {\"choices\": [], \"usage\": {\"completion_tokens\": 2, \"prompt_tokens\": 5}}\n\n", 40),
            (b"data: [DONE]\n\n", 41),
        ];
        for (bytes, at) in parts {
            for payload in events.push(bytes) {
                timing.handle(&payload, ms(at)).unwrap();
            }
        }
        let expected =
            Answer { first: ms(10), last: ms(30), gaps: vec![ms(20)], tokens: 2, prompt_tokens: 5 };
        assert_eq!(timing.finish(), Ok(expected));
    }

    #[test]
    fn a_stream_that_breaks_off_or_fails_is_no_answer() {
        assert!(Timing::default().finish().is_err());
        let error = Timing::default().handle("{\"error\": {\"message\": \"gone\"}}", Duration::ZERO);
        assert!(error.unwrap_err().contains("gone"));
    }
}
