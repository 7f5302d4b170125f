//! A decoder that is exact arithmetic on whole numbers: attention that reads the paged cache through block tables, an
//! FFN port with faults on demand, and the same function written without cache, batches or stages.
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, mpsc};

use afd_common::ids::{HopKey, LayerIdx, StepId};
use afd_common::link::Doorbell;
use tch::{Kind, Tensor};

use super::SOON;
use crate::engine::{AttentionError, AttentionPort, FfnLoss, FfnPort, SideTensors, StepOutline};
use crate::model::{Attended, StageBatch};

pub(super) const NUM_LAYERS: u16 = 3;
pub(super) const VOCAB_SIZE: u32 = 50;
/// Chosen tokens are below this.
const CHOSEN_BELOW: u32 = 48;
/// Attention panics when it meets this token.
pub(super) const BOMB: u32 = 49;
const MODULUS: f64 = 1009.0;

fn attention(position: usize, value: f64) -> f64 {
    (position + 1) as f64 * value
}

pub(super) fn ffn(layer: LayerIdx, input: f64) -> f64 {
    (7.0 * input + 3.0 + f64::from(layer.0)) % MODULUS
}

pub(super) fn choose(x: f64) -> u32 {
    (x % f64::from(CHOSEN_BELOW)) as u32
}

/// Greedy continuation.
pub(super) fn reference(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..num_tokens {
        let mut rows: Vec<f64> = tokens.iter().map(|token| f64::from(*token)).collect();
        for layer in (0..NUM_LAYERS).map(LayerIdx) {
            let mut sum = 0.0;
            let mut next = Vec::new();
            for (position, x) in rows.iter().enumerate() {
                sum += attention(position, *x);
                next.push(x + ffn(layer, sum % MODULUS));
            }
            rows = next;
        }
        tokens.push(choose(rows[rows.len() - 1]));
    }
    tokens.split_off(prompt.len())
}

pub(super) fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(&tensor.flatten(0, -1)).unwrap()
}

pub(super) fn rows(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).unsqueeze(1)
}

/// `x` is `[num_rows, 1]` f64.
pub(super) struct ArithmeticAttention {
    block_size: usize,
    slots: Vec<Vec<f64>>,
}

impl ArithmeticAttention {
    pub(super) fn new(num_blocks: usize, block_size: usize) -> Self {
        Self { block_size, slots: vec![vec![f64::NAN; num_blocks * block_size]; usize::from(NUM_LAYERS)] }
    }
}

impl AttentionPort for ArithmeticAttention {
    type Prepared = StageBatch;

    fn num_layers(&self) -> u16 {
        NUM_LAYERS
    }

    fn prepare(&self, batch: &StageBatch) -> Result<StageBatch, AttentionError> {
        assert!(!batch.sequences.is_empty());
        Ok(batch.clone())
    }

    fn embed(&self, input_ids: &[u32]) -> Result<Tensor, AttentionError> {
        assert!(!input_ids.contains(&BOMB), "boom");
        Ok(rows(&input_ids.iter().map(|id| f64::from(*id)).collect::<Vec<_>>()))
    }

    fn attend(&mut self, layer: LayerIdx, x: Tensor, stage: &StageBatch) -> Result<Attended, AttentionError> {
        let slots = &mut self.slots[usize::from(layer.0)];
        let x_values = values(&x);
        for (slot, value) in stage.slot_mapping.iter().zip(&x_values) {
            slots[*slot as usize] = *value;
        }
        let mut sums = Vec::new();
        for sequence in &stage.sequences {
            for context_len in sequence.context_len - sequence.len + 1..=sequence.context_len {
                let slot = |position: usize| {
                    sequence.block_table[position / self.block_size].0 as usize * self.block_size
                        + position % self.block_size
                };
                let sum: f64 =
                    (0..context_len).map(|position| attention(position, slots[slot(position)])).sum();
                sums.push(sum % MODULUS);
            }
        }
        Ok(Attended { residual: x, ffn_in: rows(&sums) })
    }

    fn side_tensors(&self, _: LayerIdx, _: &Tensor, _: &[u32]) -> Result<SideTensors, AttentionError> {
        Ok(SideTensors::None)
    }

    /// Now and then, so that both ways are gone.
    fn best(&self, x: &Tensor, rows: &[usize]) -> Result<Option<Vec<u32>>, AttentionError> {
        let x = values(x);
        let chosen = || rows.iter().map(|&row| choose(x[row])).collect();
        Ok((x.len() % 3 != 1).then(chosen))
    }

    fn logits(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, AttentionError> {
        let x = values(x);
        let mut logits = Vec::new();
        for &row in rows {
            let target = choose(x[row]) as f32;
            logits.extend((0..VOCAB_SIZE).map(|token| -(token as f32 - target).abs()));
        }
        Ok(Tensor::from_slice(&logits).view([rows.len() as i64, i64::from(VOCAB_SIZE)]))
    }
}

/// What the FFN is to do wrong, and what it saw.
#[derive(Default)]
pub(super) struct Script {
    pub(super) unready: bool,
    /// Its ranks are about to stop.
    pub(super) leaving: bool,
    /// Answers to the coming combines, before they become right again.
    pub(super) faults: VecDeque<Option<FfnLoss>>,
    /// Every combine fails like this.
    pub(super) always: Option<FfnLoss>,
    /// The next combine says that it waits, and does so until it is told to go on.
    pub(super) wait: Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>,
    /// Rows per stage of every step.
    pub(super) steps: Vec<Vec<usize>>,
    pub(super) phases: Vec<crate::scheduler::Phase>,
    /// Something is to be looked at; until it was.
    pub(super) news: bool,
}

/// Checks the contract while it serves.
pub(super) struct ArithmeticFfn {
    script: Arc<Mutex<Script>>,
    /// Some steps never begin here: a device runs them whole.
    pub(super) by_device: bool,
    open: Option<StepId>,
    outstanding: HashMap<HopKey, Vec<f64>>,
}

impl ArithmeticFfn {
    pub(super) fn new(script: Arc<Mutex<Script>>) -> Self {
        Self { script, by_device: false, open: None, outstanding: HashMap::new() }
    }
}

impl FfnPort for ArithmeticFfn {
    fn begin_step(&mut self, plan: &StepOutline) -> Result<(), FfnLoss> {
        assert!(self.open.replace(plan.step).is_none(), "the last step was not ended");
        assert!(plan.stage_rows.iter().all(|rows| *rows > 0));
        let mut script = self.script.lock().unwrap();
        assert!(!script.unready, "a step without an FFN");
        script.steps.push(plan.stage_rows.clone());
        script.phases.push(plan.phase);
        Ok(())
    }

    fn dispatch(&mut self, hop: HopKey, rows: &Tensor, _: &SideTensors) -> Result<(), FfnLoss> {
        assert_eq!(self.open, Some(hop.step));
        assert!(self.outstanding.keys().all(|other| other.stage != hop.stage), "one hop per stage");
        assert_eq!(rows.kind(), Kind::Double);
        self.outstanding.insert(hop, values(rows));
        Ok(())
    }

    fn combine(&mut self, hop: HopKey) -> Result<Tensor, FfnLoss> {
        let input = self.outstanding.remove(&hop).expect("dispatched before");
        let wait = self.script.lock().unwrap().wait.take();
        if let Some((waits, go_on)) = wait {
            waits.send(()).unwrap();
            go_on.recv_timeout(SOON).expect("told to go on");
        }
        let mut script = self.script.lock().unwrap();
        if let Some(loss) = script.faults.pop_front().flatten().or_else(|| script.always.clone()) {
            return Err(match loss {
                FfnLoss::Rejected { peer, what, .. } => FfnLoss::Rejected { hop, peer, what },
                other => other,
            });
        }
        Ok(rows(&input.into_iter().map(|input| ffn(hop.layer, input)).collect::<Vec<_>>()))
    }

    fn end_step(&mut self, step: StepId) {
        let open = self.open.take();
        assert!(open == Some(step) || open.is_none() && self.by_device, "{open:?} was open, not {step:?}");
        self.outstanding.clear();
    }

    fn ready(&self) -> bool {
        !self.script.lock().unwrap().unready
    }

    fn has_news(&self) -> bool {
        self.script.lock().unwrap().news
    }

    fn is_leaving(&self) -> bool {
        self.script.lock().unwrap().leaving
    }

    fn idle(&mut self) {
        assert!(self.open.is_none());
        self.script.lock().unwrap().news = false;
    }
}

/// Lets the FFN become ready, as an opened link would.
pub(super) fn become_ready(script: &Mutex<Script>, bell: &Doorbell) {
    script.lock().unwrap().unready = false;
    bell.ring();
}
