//! The engine over a device that runs whole decode steps, in arithmetic: one step behind another, with what only the device
//! knows when it is launched.
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use afd_common::ids::LayerIdx;
use afd_common::link::Doorbell;
use tch::Tensor;

use super::arithmetic::*;
use super::*;
use crate::model::{Attended, StageBatch};
use crate::scheduler::Phase;

/// What the device is to do, and what it saw.
#[derive(Default)]
struct Orders {
    /// There are no kernels for the model.
    is_bare: bool,
    /// Made-up prompts are to come first.
    warms: bool,
    /// Which of the coming steps are lost.
    lost: VecDeque<bool>,
    turns: Vec<DecodeTurn>,
}

struct DeviceAttention {
    inner: ArithmeticAttention,
    orders: Arc<Mutex<Orders>>,
    /// Of every stage the residual stream and its tokens.
    launched: VecDeque<Vec<(Tensor, Vec<u32>)>>,
}

impl DeviceAttention {
    /// All layers of a stage, with token ids that may be others than the batch's.
    fn run(&mut self, batch: &StageBatch, ids: &[u32]) -> (Tensor, Vec<u32>) {
        let mut x = self.inner.embed(ids).unwrap();
        for layer in (0..NUM_LAYERS).map(LayerIdx) {
            let Attended { residual, ffn_in } = self.inner.attend(layer, x, batch).unwrap();
            let out: Vec<f64> = values(&ffn_in).into_iter().map(|input| ffn(layer, input)).collect();
            x = residual + rows(&out);
        }
        let tokens = values(&x).into_iter().map(choose).collect();
        (x, tokens)
    }
}

impl AttentionPort for DeviceAttention {
    type Prepared = StageBatch;

    fn enter_thread(&mut self) -> Result<Box<dyn Any>, AttentionError> {
        self.inner.enter_thread()
    }

    fn num_layers(&self) -> u16 {
        NUM_LAYERS
    }

    fn prepare(&self, batch: &StageBatch) -> Result<StageBatch, AttentionError> {
        self.inner.prepare(batch)
    }

    fn embed(&self, input_ids: &[u32]) -> Result<Tensor, AttentionError> {
        self.inner.embed(input_ids)
    }

    fn attend(&mut self, layer: LayerIdx, x: Tensor, stage: &StageBatch) -> Result<Attended, AttentionError> {
        self.inner.attend(layer, x, stage)
    }

    fn side_tensors(&self, _: LayerIdx, _: &Tensor, _: &[u32]) -> Result<SideTensors, AttentionError> {
        Ok(SideTensors::None)
    }

    fn warms_prompts(&self) -> Option<usize> {
        self.orders.lock().unwrap().warms.then_some(VOCAB_SIZE as usize - 1)
    }

    fn launch(
        &mut self,
        _: &mut dyn FfnPort,
        _: &StepOutline,
        stages: &[DecodeStage<'_>],
        turn: DecodeTurn,
    ) -> Result<DecodeLaunch, FfnLoss> {
        let mut orders = self.orders.lock().unwrap();
        if orders.is_bare {
            return Ok(DecodeLaunch::Eager(EagerReason::Model));
        }
        orders.turns.push(turn);
        drop(orders);
        let ahead = self.launched.back().filter(|_| turn == DecodeTurn::Behind);
        let ids: Vec<Vec<u32>> = match ahead {
            Some(ahead) => ahead.iter().map(|(_, tokens)| tokens.clone()).collect(),
            None => stages.iter().map(|stage| stage.batch.input_ids.clone()).collect(),
        };
        let run = stages.iter().zip(&ids).map(|(stage, ids)| self.run(stage.batch, ids)).collect();
        self.launched.push_back(run);
        Ok(DecodeLaunch::Launched { replayed: true })
    }

    fn is_over(&self) -> bool {
        self.launched.is_empty()
    }

    fn finish(&mut self, _: &mut dyn FfnPort, num_rows: &[usize]) -> Result<DecodeEnd, FfnLoss> {
        let stages = self.launched.pop_front().expect("launched before");
        if self.orders.lock().unwrap().lost.pop_front() == Some(true) {
            self.launched.clear();
            return Err(FfnLoss::Unavailable { peer: "F0".into(), what: "gone".into() });
        }
        let chosen = |token: u32| DeviceChoice { token: Some(token), below: 0.0, upto: 0.0 };
        let outputs = stages.into_iter().zip(num_rows).map(|((x, tokens), &rows)| {
            assert_eq!(tokens.len(), rows);
            StageOutput { x, chosen: Some(tokens.into_iter().map(chosen).collect()) }
        });
        let on_device = Duration::from_millis(1);
        Ok(DecodeEnd { outputs: outputs.collect(), on_device, idle: Some(Duration::from_micros(3)) })
    }

    fn logits(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, AttentionError> {
        self.inner.logits(x, rows)
    }
}

fn start_on_device(config: EngineConfig, orders: Orders) -> (Setup, Arc<Mutex<Orders>>) {
    let (orders, script) = (Arc::new(Mutex::new(orders)), Arc::default());
    let bell = Doorbell::default();
    let inner = ArithmeticAttention::new(config.num_blocks as usize, config.block_size);
    let attention = DeviceAttention { inner, orders: Arc::clone(&orders), launched: VecDeque::new() };
    let mut ffn = ArithmeticFfn::new(Arc::clone(&script));
    ffn.by_device = true;
    let (handle, thread) = spawn(config, attention, Box::new(ffn), bell.clone(), Arc::default()).unwrap();
    (Setup { handle, thread, script, bell }, orders)
}

fn behind(orders: &Mutex<Orders>) -> usize {
    orders.lock().unwrap().turns.iter().filter(|turn| **turn == DecodeTurn::Behind).count()
}

#[test]
fn a_step_behind_another_changes_no_token() {
    for (prefix_cache, max_stages) in [(false, 1), (true, 2)] {
        let stages = StageRules { max_stages, ..StageRules::default() };
        let (setup, orders) =
            start_on_device(EngineConfig { prefix_cache, stages, ..config() }, Orders::default());
        for crowd in [1, 5] {
            let all = prompts();
            let waiting: Vec<_> = all[..crowd]
                .iter()
                .enumerate()
                .map(|(index, prompt)| submit(&setup, prompt, 40 + index as u32).1)
                .collect();
            for ((index, prompt), events) in all.iter().enumerate().zip(waiting) {
                assert_eq!(wait(events).tokens, reference(prompt, 40 + index), "{prompt:?} among {crowd}");
            }
        }
        let num_behind = behind(&orders);
        assert!(num_behind > 50, "{num_behind} steps behind another");
        let metrics = stop(setup);
        assert_eq!(metrics.graph_replays.get(), metrics.decode_steps.get());
        assert!(
            metrics.decode_gaps.get() > 0 && metrics.decode_idle_us.get() == 3 * metrics.decode_gaps.get()
        );
    }
}

#[test]
fn a_stop_token_ends_a_sequence_though_the_next_step_has_a_row_of_it() {
    let (setup, orders) = start_on_device(config(), Orders::default());
    let prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]];
    let all: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let full = reference(prompt, 60);
            // A token that comes for the first time well into the text.
            let at = (10..60).find(|&at| !full[..at].contains(&full[at])).unwrap();
            let (mut request, events) = request(prompt, 60);
            request.stop.stop_token_ids = vec![full[at]];
            setup.handle.submit(request).unwrap();
            (full[..=at].to_vec(), events)
        })
        .collect();
    for (expected, events) in all {
        let outcome = wait(events);
        assert_eq!((outcome.tokens, outcome.end.unwrap().0), (expected, FinishReason::Stop));
    }
    let num_behind = behind(&orders);
    assert!(num_behind > 4, "{num_behind} steps behind another");
    stop(setup);
}

#[test]
fn a_step_that_is_lost_takes_the_one_behind_it_along_and_both_run_again() {
    let lost = (0..40).map(|step| step % 7 == 3).collect();
    let (setup, orders) = start_on_device(config(), Orders { lost, ..Orders::default() });
    let (_, one) = submit(&setup, &[1, 2, 3], 50);
    let (_, other) = submit(&setup, &[9, 8], 50);
    assert_eq!(wait(one).tokens, reference(&[1, 2, 3], 50));
    assert_eq!(wait(other).tokens, reference(&[9, 8], 50));
    assert!(behind(&orders) > 10);
    assert_eq!(stop(setup).steps_failed.get(), 6);
}

#[test]
fn whoever_comes_or_goes_while_a_step_is_behind_another_is_served_or_freed() {
    let (setup, orders) = start_on_device(config(), Orders::default());
    let (first, long) = submit(&setup, &[1, 2, 3], 190);
    let (_, other) = submit(&setup, &[4, 5], 190);
    eventually("a step behind another", || behind(&orders) > 2);
    setup.handle.abort(first);
    let (_, late) = submit(&setup, &[7, 7, 7], 20);
    assert_eq!(wait(long).end.unwrap().0, FinishReason::Cancelled);
    assert_eq!(wait(late).tokens, reference(&[7, 7, 7], 20));
    assert_eq!(wait(other).tokens, reference(&[4, 5], 190));
    stop(setup);
}

#[test]
fn news_of_ranks_and_the_limit_of_a_drain_are_looked_at_though_steps_follow_one_another() {
    let (setup, orders) = start_on_device(
        EngineConfig { max_model_len: 100_000, num_blocks: 30_000, ..config() },
        Orders::default(),
    );
    let (_, endless) = submit(&setup, &[1, 2, 3], 90_000);
    for _ in 0..3 {
        let before = behind(&orders);
        setup.script.lock().unwrap().news = true;
        eventually("a look", || !setup.script.lock().unwrap().news);
        eventually("steps that go on behind one another", || behind(&orders) > before + 2);
    }
    setup.handle.drain(Instant::now() + Duration::from_millis(20));
    assert!(matches!(wait(endless).end, Err(SequenceError::ShuttingDown)));
    setup.thread.join().unwrap().unwrap();
}

#[test]
fn decode_steps_without_kernels_are_counted_by_that_reason() {
    let (setup, _) = start_on_device(config(), Orders { is_bare: true, ..Orders::default() });
    let (_, events) = submit(&setup, &[1, 2, 3], 10);
    assert_eq!(wait(events).tokens, reference(&[1, 2, 3], 10));
    let metrics = stop(setup);
    let at = EagerReason::ALL.iter().position(|reason| *reason == EagerReason::Model).unwrap();
    // The prompt's step gives the first token.
    assert_eq!((metrics.eager_steps[at].get(), metrics.decode_steps.get()), (9, 0));
}

#[test]
fn made_up_prompts_of_every_size_come_before_the_first_request() {
    let config = EngineConfig { max_num_batched_tokens: 64, ..config() };
    let (setup, _) = start_on_device(config, Orders { warms: true, ..Orders::default() });
    let (_, events) = submit(&setup, &[1, 2, 3], 10);
    assert_eq!(wait(events).tokens, reference(&[1, 2, 3], 10));
    let script = Arc::clone(&setup.script);
    let metrics = stop(setup);
    let script = script.lock().unwrap();
    // Prompts, then one beside sequences that decode, and at last whoever asked.
    let rows: Vec<usize> = script.steps.iter().map(|stages| stages.iter().sum()).collect();
    assert_eq!(rows, [64, 32, 16, 64, 64, 64, 3]);
    use Phase::{Mixed, Prefill};
    assert_eq!(script.phases, [Prefill, Prefill, Prefill, Mixed, Mixed, Mixed, Prefill]);
    assert_eq!((metrics.steps.get(), metrics.tokens_prefilled.get()), (10, 3));
}
