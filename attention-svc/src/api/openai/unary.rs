//! Answers in one piece: the updates of every sequence, put together.
use super::super::error::ApiError;
use super::super::generation::Generation;
use super::frame::{Finished, Frame};

/// Waits for every sequence of a request, and adds their usage up in its frame.
///
/// # Errors
/// The first failure.
pub(super) async fn collect(
    generation: &mut Generation,
    frame: &mut Frame,
) -> Result<Vec<Finished>, ApiError> {
    let mut sequences: Vec<Finished> = Vec::new();
    sequences.resize_with(generation.prompts().len() * frame.n, Finished::default);
    while let Some(update) = generation.next().await {
        let update = update?;
        let sequence = &mut sequences[update.index];
        sequence.text.push_str(&update.text);
        sequence.tokens.extend(update.token);
        if update.prompt_logprobs.is_some() {
            sequence.prompt_logprobs = update.prompt_logprobs;
        }
        if let Some((reason, usage)) = update.finished {
            sequence.reason = Some(reason);
            frame.add(update.index, usage);
        }
    }
    Ok(sequences)
}
