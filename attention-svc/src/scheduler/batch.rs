//! From the items of a step to the rows of its stages: token ids, positions, cache slots, block tables.
use super::sequence::Sequence;
use super::{Scheduler, StageRules, Step, StepItem};
use crate::model::{SequenceRows, StageBatch};

/// One stage of a step.
#[derive(Debug)]
pub struct Stage {
    /// Whose rows they are: one entry per entry of `batch.sequences`.
    pub items: Vec<StepItem>,
    /// The rows.
    pub batch: StageBatch,
}

impl Scheduler {
    /// The step's rows, split as the rules say. At least one stage, none empty.
    pub fn stages(&self, step: &Step, rules: &StageRules) -> Vec<Stage> {
        let rows: Vec<usize> = step.items.iter().map(|item| item.tokens.len()).collect();
        let stage =
            |items: Vec<usize>| self.stage(items.into_iter().map(|item| step.items[item].clone()).collect());
        rules.split(step.phase(), &rows).into_iter().map(stage).collect()
    }

    fn stage(&self, items: Vec<StepItem>) -> Stage {
        let mut batch = StageBatch::default();
        for item in &items {
            if let Some(sequence) = self.running.get(&item.sequence) {
                push_rows(&mut batch, sequence, item, self.pool.block_size());
            }
        }
        Stage { items, batch }
    }
}

fn push_rows(batch: &mut StageBatch, sequence: &Sequence, item: &StepItem, block_size: usize) {
    let start = batch.input_ids.len();
    // Those of a step ahead are not known here yet.
    let known = sequence.tokens.len().clamp(item.tokens.start, item.tokens.end);
    batch.input_ids.extend_from_slice(&sequence.tokens[item.tokens.start.min(known)..known]);
    batch.input_ids.extend((known..item.tokens.end).map(|_| 0));
    batch.positions.extend(item.tokens.clone().map(|position| position as u32));
    batch.slot_mapping.extend(item.tokens.clone().map(|position| sequence.table.slot(position, block_size)));
    let num_blocks = item.tokens.end.div_ceil(block_size);
    batch.sequences.push(SequenceRows {
        start,
        len: item.tokens.len(),
        context_len: item.tokens.end,
        block_table: sequence.table.blocks()[..num_blocks].to_vec(),
    });
}
