//! One program per language, all with the same options and the same lines of output: each is what a user would copy.
use std::path::{Path, PathBuf};

use afd_tests::fixtures;
use anyhow::{Context, ensure};
use safetensors::SafeTensors;
use serde::Serialize;

use crate::built::{self, Effort};
use crate::{MODEL, pair};

/// A client's whole run: seconds, on an idle machine about one.
const RUN_LIMIT_S: u32 = 120;
/// The layer that is driven on its own.
const LAYER: u32 = 1;
/// How far hidden states may lie from the reference in f32 (`tests/fixtures/README.md`).
const TOLERANCE: f64 = 2e-4;

#[tokio::test]
async fn python_client() -> anyhow::Result<()> {
    let run = works("python", Effort::Quick, |folder| {
        vec![folder.join("venv/bin/python"), folder.join("client.py")]
    });
    let Some(lines) = run.await? else { return Ok(()) };
    // By reflection, as v1alpha: the version that Python's package speaks.
    has_line(
        &lines,
        "services: attention afd.v1.InferenceService afd.v1.MembershipService grpc.health.v1.Health",
    )?;
    has_line(&lines, "services: ffn afd.v1.FfnControlService afd.v1.LayerStageService grpc.health.v1.Health")
}

#[tokio::test]
async fn node_client() -> anyhow::Result<()> {
    works("node", Effort::Quick, |folder| vec!["node".into(), folder.join("dist/client.js")]).await.map(drop)
}

#[tokio::test]
async fn go_client() -> anyhow::Result<()> {
    works("go", Effort::Long, |folder| vec![folder.join("client")]).await.map(drop)
}

#[tokio::test]
async fn java_client() -> anyhow::Result<()> {
    let command = |folder: &Path| vec!["java".into(), "-jar".into(), folder.join("target/client.jar")];
    works("java", Effort::Long, command).await.map(drop)
}

/// Runs a client against a pair and reads its lines. `None` where it is left out.
async fn works(
    language: &str,
    effort: Effort,
    command: impl FnOnce(&Path) -> Vec<PathBuf>,
) -> anyhow::Result<Option<Vec<String>>> {
    let Some(folder) = built::folder(language, effort)? else { return Ok(None) };
    let command = command(&folder);
    let deployment = pair().await?;
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0);
    let scratch = tempfile::tempdir()?;
    let run = |reference: &Reference| {
        let file = scratch.path().join("reference.json");
        std::fs::write(&file, serde_json::to_string(reference)?)?;
        let mut arguments: Vec<_> = command[1..].iter().map(|part| part.display().to_string()).collect();
        for (option, value) in [
            ("attention", deployment.attention_addresses[0].to_string()),
            ("ffn", deployment.ffn_addresses[0].to_string()),
            ("prompt", prompt.text.clone()),
            ("max-tokens", prompt.generated_ids.len().to_string()),
            ("reference", file.display().to_string()),
        ] {
            arguments.extend([format!("--{option}"), value]);
        }
        built::run(RUN_LIMIT_S, &command[0], arguments)
    };

    let reference = Reference::of_layer(LAYER)?;
    let output = run(&reference)?;
    let stdout = String::from_utf8(output.stdout).context("its output is not UTF-8")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{language}: {}\n{stdout}\n{stderr}", output.status);
    // The text may hold line ends of its own.
    let completion = format!(
        "completion: {}\nfinished: FINISH_REASON_LENGTH, {} tokens\n",
        prompt.generated_text,
        prompt.generated_ids.len()
    );
    ensure!(stdout.contains(&completion), "{language}: not in its output: {completion}\n{stdout}");
    let lines: Vec<_> = stdout.lines().map(str::to_owned).collect();
    has_line(&lines, "health: attention SERVING")?;
    has_line(&lines, "health: ffn SERVING")?;
    has_line(&lines, "model: test, MixtralForCausalLM, 4 layers of 64")?;
    has_line(&lines, &format!("ffn: {} has shard 0 of 1, over shm", deployment.ffn_addresses[0]))?;
    // Written INVALID_ARGUMENT or InvalidArgument, as the language likes.
    let refused =
        lines.iter().find(|line| line.starts_with("refused: ")).context("no line on the refusal")?;
    ensure!(refused.replace('_', "").to_lowercase().contains("invalidargument"), "{refused}");
    ensure!(refused.contains("`stop.max_tokens` must be at least 1"), "{refused}");
    let layer = lines.iter().find(|line| line.starts_with(&format!("layer {LAYER}: ")));
    ensure!(layer.is_some_and(|line| line.ends_with("from the reference")), "{layer:?}");

    // A client that would accept anything proves nothing.
    let output = run(&Reference { tolerance: -1.0, ..reference })?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && stderr.contains("that is more than"), "{language}: {stderr}");
    Ok(Some(lines))
}

fn has_line(lines: &[String], wanted: &str) -> anyhow::Result<()> {
    ensure!(lines.iter().any(|line| line == wanted), "no line `{wanted}` in\n{}", lines.join("\n"));
    Ok(())
}

/// What goes into a layer's FFN and what the reference implementation gets out of it.
#[derive(Serialize)]
struct Reference {
    layer: u32,
    /// `[rows, hidden_size]`.
    shape: Vec<usize>,
    input: Vec<f32>,
    output: Vec<f32>,
    tolerance: f64,
}

impl Reference {
    fn of_layer(layer: u32) -> anyhow::Result<Self> {
        let path = fixtures::root().join("expected").join(format!("{MODEL}.hidden.safetensors"));
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        let values = |name: &str| -> anyhow::Result<(Vec<usize>, Vec<f32>)> {
            let tensor = tensors.tensor(&format!("layers.{layer}.{name}"))?;
            let chunks = tensor.data().as_chunks::<4>().0.iter();
            Ok((tensor.shape().to_vec(), chunks.map(|bytes| f32::from_le_bytes(*bytes)).collect()))
        };
        let (shape, input) = values("ffn_in")?;
        let (_, output) = values("ffn_out")?;
        Ok(Self { layer, shape, input, output, tolerance: TOLERANCE })
    }
}
