//! Penalties, bias and the ban on early stop tokens: everything that changes logits whatever the temperature.
use super::SequenceSampler;

/// Whether there is anything to apply.
pub(super) fn adjusts(sequence: &SequenceSampler) -> bool {
    let none = sequence.seen.is_empty()
        && sequence.output_counts.is_empty()
        && sequence.params.logit_bias.is_empty();
    !none || bans_stops(sequence)
}

fn bans_stops(sequence: &SequenceSampler) -> bool {
    sequence.num_output < sequence.stop.min_tokens && !sequence.stop.stop_token_ids.is_empty()
}

/// The row with everything applied, in `scratch` unless there is nothing to apply.
pub(super) fn adjust<'a>(sequence: &SequenceSampler, row: &'a [f32], scratch: &'a mut Vec<f32>) -> &'a [f32] {
    let SequenceSampler { params, stop, .. } = sequence;
    if !adjusts(sequence) {
        return row;
    }
    scratch.clear();
    scratch.extend_from_slice(row);
    // An id beyond the row belongs to no token of this model; the API refuses those.
    let mut change = |token: u32, change: &dyn Fn(f32) -> f32| {
        if let Some(logit) = scratch.get_mut(token as usize) {
            *logit = change(*logit);
        }
    };

    let penalty = params.repetition_penalty;
    for &token in &sequence.seen {
        change(token, &|logit| if logit > 0.0 { logit / penalty } else { logit * penalty });
    }
    for (&token, &count) in &sequence.output_counts {
        let penalty = params.frequency_penalty * count as f32 + params.presence_penalty;
        change(token, &|logit| logit - penalty);
    }
    for &(token, bias) in &params.logit_bias {
        change(token, &|logit| logit + bias);
    }
    if bans_stops(sequence) {
        for &token in &stop.stop_token_ids {
            change(token, &|_| f32::NEG_INFINITY);
        }
    }
    scratch
}
