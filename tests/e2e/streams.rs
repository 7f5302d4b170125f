//! Streams through the real engine: put together they are the unary answer, byte for byte, with characters that are split
//! over tokens and stop texts that begin and end anywhere.
use afd_common::proto::v1;
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use anyhow::{Context, ensure};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
/// Four bytes, three bytes, two bytes, a joined sequence, and plain letters.
const CHARACTERS: &str = "🙂你好é👩‍👧 ab";
const PROMPT: [u32; 3] = [5, 6, 7];
const NEW_TOKENS: u32 = 60;

async fn local(model: &str) -> anyhow::Result<Deployment> {
    Deployment::start(DeploymentSpec::new(fixtures::checkpoint(model), Ffn::Local)).await
}

/// Answers at random, always the same ones, out of the tokens of [`CHARACTERS`]: whole characters and broken ones.
async fn request(deployment: &Deployment) -> anyhow::Result<Value> {
    let body = json!({"prompt": CHARACTERS, "add_special_tokens": false});
    let (_, ids) = deployment.post(0, "/tokenize", &body).await?;
    let ids = ids["tokens"].as_array().context("no tokens")?;
    let bias: serde_json::Map<String, Value> = ids.iter().map(|id| (id.to_string(), 100.into())).collect();
    Ok(json!({
        "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 1, "seed": 11, "logit_bias": bias,
        "ignore_eos": true, "return_token_ids": true,
    }))
}

fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Text and finish reason in one piece.
async fn unary(deployment: &Deployment, body: &Value) -> anyhow::Result<(String, String, Value)> {
    let (status, answer) = deployment.post(0, COMPLETIONS, body).await?;
    ensure!(status == 200, "{answer}");
    let choice = &answer["choices"][0];
    let text = |value: &Value| value.as_str().map(str::to_owned).context("no text");
    Ok((text(&choice["text"])?, text(&choice["finish_reason"])?, answer))
}

/// The same from server-sent events.
async fn streamed(deployment: &Deployment, body: &Value) -> anyhow::Result<(String, String)> {
    let body = with(body, json!({"stream": true}));
    let answer =
        deployment.client().post(deployment.url(0, COMPLETIONS)).json(&body).send().await?.text().await?;
    let events: Vec<&str> = answer.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    ensure!(events.last() == Some(&"[DONE]"), "{answer}");
    let (mut text, mut reason) = (String::new(), String::new());
    for event in &events[..events.len() - 1] {
        let event: Value = serde_json::from_str(event)?;
        ensure!(reason.is_empty(), "something came after the finish reason: {answer}");
        text += event["choices"][0]["text"].as_str().context("no text")?;
        reason = event["choices"][0]["finish_reason"].as_str().unwrap_or_default().to_owned();
    }
    Ok((text, reason))
}

/// The same over gRPC.
async fn over_grpc(deployment: &Deployment, body: &Value) -> anyhow::Result<(String, String)> {
    let logit_bias = body["logit_bias"].as_object().context("no bias")?;
    let request = v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds { ids: PROMPT.to_vec() })),
        sampling: Some(v1::SamplingParams {
            temperature: Some(1.0),
            seed: Some(11),
            logit_bias: logit_bias
                .keys()
                .map(|id| Ok((id.parse()?, 100.0)))
                .collect::<anyhow::Result<_>>()?,
            ..Default::default()
        }),
        stop: Some(v1::StopConditions {
            max_tokens: Some(NEW_TOKENS),
            ignore_eos: Some(true),
            stop: body["stop"].as_str().map(str::to_owned).into_iter().collect(),
            include_stop_in_output: body["include_stop_str_in_output"].as_bool(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut stream = deployment.grpc(0).await?.generate(request).await?.into_inner();
    let (mut text, mut reason) = (String::new(), String::new());
    while let Some(piece) = stream.message().await? {
        ensure!(reason.is_empty(), "something came after the finish reason");
        text += &piece.text;
        reason = match piece.finish_reason() {
            v1::FinishReason::Stop => "stop".into(),
            v1::FinishReason::Length => "length".into(),
            _ => String::new(),
        };
    }
    Ok((text, reason))
}

/// Where each token's text ends, in characters.
async fn ends(deployment: &Deployment, ids: &[Value]) -> anyhow::Result<Vec<usize>> {
    let mut ends = Vec::new();
    for count in 1..=ids.len() {
        let (_, answer) = deployment.post(0, "/detokenize", &json!({"tokens": ids[..count]})).await?;
        ends.push(answer["prompt"].as_str().context("no text")?.chars().count());
    }
    Ok(ends)
}

async fn whole_and_in_pieces(model: &str) -> anyhow::Result<()> {
    let deployment = local(model).await?;
    let body = request(&deployment).await?;
    let (text, reason, answer) = unary(&deployment, &body).await?;
    let is_long = |character: char| character.len_utf8() > 1 && character != '\u{fffd}';
    ensure!(text.contains(is_long) && text.contains('\u{fffd}'), "{model}: {text}");
    ensure!(reason == "length", "{model}: {reason}");
    for stream in [streamed(&deployment, &body).await?, over_grpc(&deployment, &body).await?] {
        ensure!(stream == (text.clone(), reason.clone()), "{model}: {stream:?}, expected {text:?}");
    }

    let ids = answer["choices"][0]["token_ids"].as_array().context("no token ids")?;
    let ends = ends(&deployment, ids).await?;
    let characters: Vec<char> = text.chars().collect();
    let mut over_three = 0;
    for (start, len) in
        (0..characters.len()).step_by(7).flat_map(|start| [(start, 1), (start, 3), (start, 6)])
    {
        let Some(window) = characters.get(start..start + len) else { continue };
        let stop: String = window.iter().collect();
        let inside = ends.iter().filter(|end| (start + 1..start + len).contains(*end)).count();
        over_three += usize::from(inside >= 2);
        let at = text.find(&stop).context("it is part of the text")?;
        for (keep, expected) in [(false, &text[..at]), (true, &text[..at + stop.len()])] {
            let body = with(&body, json!({"stop": stop, "include_stop_str_in_output": keep}));
            let (found, reason, _) = unary(&deployment, &body).await?;
            let expected = (expected.to_owned(), "stop".to_owned());
            ensure!(
                (found, reason) == expected,
                "{model}: stop {stop:?} gives something else than {expected:?}"
            );
            for stream in [streamed(&deployment, &body).await?, over_grpc(&deployment, &body).await?] {
                ensure!(stream == expected, "{model}: stop {stop:?}: {stream:?}, expected {expected:?}");
            }
        }
    }
    ensure!(over_three >= 3, "{model}: only {over_three} stop texts span three tokens");
    Ok(())
}

#[tokio::test]
async fn streams_equal_the_whole_answer_byte_for_byte() -> anyhow::Result<()> {
    // Tokens that are bytes, and tokens that are text with bytes to fall back on.
    for model in ["tiny-llama", "tiny-mixtral"] {
        whole_and_in_pieces(model).await?;
    }
    Ok(())
}

#[tokio::test]
async fn usage_is_right_when_a_stop_text_ends_the_answer() -> anyhow::Result<()> {
    let deployment = local("tiny-llama").await?;
    let prompt: Vec<u32> = (20..70).collect();
    let body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let (text, _, first) = unary(&deployment, &body).await?;
    ensure!(first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "{first}");
    let stop: String = text.chars().skip(text.chars().count() / 2).take(1).collect();
    let (_, reason, again) = unary(&deployment, &with(&body, json!({"stop": stop}))).await?;
    let usage = &again["usage"];
    ensure!(reason == "stop" && usage["prompt_tokens"] == 50, "{again}");
    ensure!(usage["prompt_tokens_details"]["cached_tokens"] == 48, "three blocks of 16: {again}");
    let generated = usage["completion_tokens"].as_u64().context("no count")?;
    ensure!((1..12).contains(&generated), "{again}");
    Ok(())
}
