//! The engine over a decoder that is exact arithmetic: whatever happens to a sequence on its way, its tokens are those of
//! the plain function, or its end is a typed error.
mod arithmetic;
mod device;
mod ends;

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use afd_common::link::Doorbell;
use tokio::sync::mpsc;

use self::arithmetic::{ArithmeticAttention, ArithmeticFfn, BOMB, Script, become_ready, reference};
use super::*;
use crate::request::*;
use crate::scheduler::StageRules;

const SOON: Duration = Duration::from_secs(20);

struct Setup {
    handle: EngineHandle,
    thread: JoinHandle<Result<(), EngineDeath>>,
    script: Arc<Mutex<Script>>,
    bell: Doorbell,
}

type Events = mpsc::UnboundedReceiver<SequenceEvent>;

fn config() -> EngineConfig {
    EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 16,
        block_size: 4,
        num_blocks: 64,
        max_queue: 100,
        max_model_len: 200,
        stages: StageRules { max_stages: 1, ..StageRules::default() },
        prefix_cache: true,
        ffn_loss_timeout: Duration::from_secs(10),
        tracing: EngineTracing::default(),
    }
}

fn start_with(config: EngineConfig, script: Script) -> Setup {
    let script = Arc::new(Mutex::new(script));
    let bell = Doorbell::default();
    let attention = ArithmeticAttention::new(config.num_blocks as usize, config.block_size);
    let ffn = ArithmeticFfn::new(Arc::clone(&script));
    let (handle, thread) = spawn(config, attention, Box::new(ffn), bell.clone(), Arc::default()).unwrap();
    Setup { handle, thread, script, bell }
}

fn start(config: EngineConfig) -> Setup {
    start_with(config, Script::default())
}

fn request(prompt: &[u32], max_tokens: u32) -> (SequenceRequest, Events) {
    let (events, receiver) = mpsc::unbounded_channel();
    let request = SequenceRequest {
        request_id: "test".into(),
        prompt: prompt.into(),
        sampling: SamplingParams::greedy(),
        stop: StopRules { max_tokens, min_tokens: 0, stop_token_ids: vec![] },
        logprobs: None,
        prompt_logprobs: None,
        deadline: None,
        trace: None,
        events,
    };
    (request, receiver)
}

fn submit(setup: &Setup, prompt: &[u32], max_tokens: u32) -> (SequenceId, Events) {
    let (request, events) = request(prompt, max_tokens);
    (setup.handle.submit(request).unwrap(), events)
}

#[derive(Debug)]
struct Outcome {
    tokens: Vec<u32>,
    end: Result<(FinishReason, Usage), SequenceError>,
}

/// Collects everything about a sequence. The last event is the last one.
fn wait(mut events: Events) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let mut tokens = Vec::new();
        loop {
            let event = tokio::time::timeout(SOON, events.recv()).await.expect("an event in time");
            let end = match event.expect("a last event") {
                SequenceEvent::Token(token) => {
                    tokens.push(token.id);
                    continue;
                }
                SequenceEvent::PromptLogprobs(_) => continue,
                SequenceEvent::Finished { reason, usage } => Ok((reason, usage)),
                SequenceEvent::Failed(error) => Err(error),
            };
            assert!(events.recv().await.is_none(), "something after the end");
            return Outcome { tokens, end };
        }
    })
}

/// Drains and checks that nothing was left behind.
fn stop(setup: Setup) -> Arc<EngineMetrics> {
    setup.handle.drain(Instant::now() + SOON);
    setup.thread.join().unwrap().unwrap();
    assert_eq!(*setup.handle.state().borrow(), EngineState::Stopped);
    let metrics = Arc::clone(setup.handle.metrics());
    assert_eq!((metrics.running.get(), metrics.waiting.get(), metrics.kv_blocks_used.get()), (0, 0, 0));
    metrics
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen in time");
        std::thread::yield_now();
    }
}

fn prompts() -> Vec<Vec<u32>> {
    let common: Vec<u32> = (0..20).map(|token| token % 48).collect();
    (0..12u32)
        .map(|index| {
            let own = (0..index * 3 + 1).map(|token| (token * 7 + index) % 48);
            let shared = if index % 2 == 0 { 20 } else { index as usize };
            common[..shared].iter().copied().chain(own).collect()
        })
        .collect()
}

#[test]
fn tokens_do_not_depend_on_blocks_chunks_prefixes_or_stages() {
    for prefix_cache in [false, true] {
        for max_stages in 1..=3 {
            let stages = StageRules { max_stages, ..StageRules::default() };
            // 24 blocks of 4 hold about one and a half of these sequences.
            let config = EngineConfig { num_blocks: 24, prefix_cache, stages, ..config() };
            let setup = start(config);
            let running: Vec<_> = prompts().iter().map(|prompt| submit(&setup, prompt, 30).1).collect();
            for (prompt, events) in prompts().iter().zip(running) {
                let outcome = wait(events);
                assert_eq!(
                    outcome.tokens,
                    reference(prompt, 30),
                    "prefix cache {prefix_cache}, {max_stages} stages"
                );
                let (reason, usage) = outcome.end.unwrap();
                assert_eq!(reason, FinishReason::Length);
                assert_eq!((usage.prompt_tokens, usage.completion_tokens), (prompt.len() as u32, 30));
            }
            let script = Arc::clone(&setup.script);
            let metrics = stop(setup);
            assert!(metrics.preemptions.get() > 0, "blocks were to run out");
            assert_eq!(metrics.prefix_hits.get() > 0, prefix_cache);
            assert_eq!(metrics.tokens_generated.get(), 12 * 30);
            let steps = &script.lock().unwrap().steps;
            assert!(steps.iter().all(|stages| stages.iter().sum::<usize>() <= 16));
            assert_eq!(steps.iter().map(Vec::len).max(), Some(max_stages));
        }
    }
}

#[test]
fn a_stop_token_ends_a_sequence_and_is_reported() {
    let setup = start(config());
    let prompt = [3, 1, 4];
    let expected = reference(&prompt, 10);
    let (mut request, events) = request(&prompt, 10);
    request.stop.stop_token_ids = vec![expected[4]];
    let until = expected.iter().position(|token| *token == expected[4]).unwrap();
    setup.handle.submit(request).unwrap();
    let outcome = wait(events);
    assert_eq!(outcome.tokens, expected[..=until]);
    assert_eq!(outcome.end.unwrap().0, FinishReason::Stop);
    stop(setup);
}

#[test]
fn a_lost_step_runs_again_and_changes_nothing() {
    let loss = FfnLoss::Unavailable { peer: "F0".into(), what: "link lost".into() };
    let faults = (0..60).map(|call| (call % 7 == 3).then(|| loss.clone())).collect();
    let stages = StageRules { max_stages: 2, ..StageRules::default() };
    let setup = start_with(EngineConfig { stages, ..config() }, Script { faults, ..Script::default() });
    let running: Vec<_> = prompts().iter().map(|prompt| submit(&setup, prompt, 10).1).collect();
    for (prompt, events) in prompts().iter().zip(running) {
        assert_eq!(wait(events).tokens, reference(prompt, 10));
    }
    assert!(stop(setup).steps_failed.get() >= 5);
}

#[test]
fn an_ffn_that_stays_lost_fails_its_sequences_and_serves_the_next() {
    let loss = FfnLoss::Unavailable { peer: "F0".into(), what: "link lost".into() };
    let setup = start_with(config(), Script { always: Some(loss), ..Script::default() });
    let (_, events) = submit(&setup, &[1, 2, 3], 10);
    let outcome = wait(events);
    assert!(
        matches!(&outcome.end, Err(SequenceError::FfnUnavailable(what)) if what == "F0: link lost"),
        "{outcome:?}"
    );
    setup.script.lock().unwrap().always = None;
    let (_, events) = submit(&setup, &[1, 2, 3], 10);
    assert_eq!(wait(events).tokens, reference(&[1, 2, 3], 10));
    stop(setup);
}

#[test]
fn sequences_wait_for_an_ffn_to_become_ready_but_not_for_ever() {
    let config = EngineConfig { ffn_loss_timeout: Duration::from_millis(300), ..config() };
    let setup = start_with(config, Script { unready: true, ..Script::default() });
    let (_, events) = submit(&setup, &[1, 2, 3], 10);
    let outcome = wait(events);
    let Err(SequenceError::FfnUnavailable(what)) = &outcome.end else { panic!("{outcome:?}") };
    assert!(what.contains("300 ms (--ffn-loss-timeout)"), "{what}");
    assert!(!setup.handle.ready());
    let (_, events) = submit(&setup, &[1, 2, 3], 10);
    become_ready(&setup.script, &setup.bell);
    assert_eq!(wait(events).tokens, reference(&[1, 2, 3], 10));
    assert!(setup.handle.ready());
    stop(setup);
}

#[test]
fn what_the_ffn_rejects_fails_alone() {
    let rejected = FfnLoss::Rejected {
        hop: Default::default(),
        peer: "F0".into(),
        what: "expert 3 is not a number".into(),
    };
    // Both are in the first step, a stage each: the second stage's first combine is the second call.
    let stages = StageRules { max_stages: 2, min_prefill_tokens: 2, ..StageRules::default() };
    let script = Script { unready: true, faults: [None, Some(rejected)].into(), ..Script::default() };
    let setup = start_with(EngineConfig { stages, ..config() }, script);
    let (_, first) = submit(&setup, &[1, 2, 3], 10);
    let (_, second) = submit(&setup, &[4, 5, 6], 10);
    become_ready(&setup.script, &setup.bell);
    assert_eq!(wait(first).tokens, reference(&[1, 2, 3], 10));
    let outcome = wait(second);
    let Err(SequenceError::Internal(what)) = &outcome.end else { panic!("{outcome:?}") };
    assert!(what.contains("stage 1") && what.contains("expert 3 is not a number"), "{what}");
    stop(setup);
}

#[test]
fn logits_that_are_not_numbers_fail_their_sequence_alone() {
    let setup = start_with(config(), Script { unready: true, ..Script::default() });
    let (mut biased, events) = request(&[1, 2, 4], 10);
    biased.sampling.logit_bias = vec![(3, f32::NAN)];
    setup.handle.submit(biased).unwrap();
    let (_, other) = submit(&setup, &[1, 2, 3], 10);
    become_ready(&setup.script, &setup.bell);
    let outcome = wait(events);
    let Err(SequenceError::Internal(what)) = &outcome.end else { panic!("{outcome:?}") };
    assert!(what.contains("token 3 is not a number"), "{what}");
    assert_eq!(wait(other).tokens, reference(&[1, 2, 3], 10));
    stop(setup);
}

#[test]
fn the_queue_is_bounded_and_what_never_fits_is_refused() {
    let setup =
        start_with(EngineConfig { max_queue: 2, ..config() }, Script { unready: true, ..Script::default() });
    let (id, first) = submit(&setup, &[1, 2, 3], 10);
    let (_, second) = submit(&setup, &[1, 2, 3], 10);
    let full = setup.handle.submit(request(&[1, 2, 3], 10).0);
    assert!(matches!(full, Err(SequenceError::QueueFull { waiting: 2 })), "{full:?}");
    let large = setup.handle.submit(request(&[1; 100], 101).0);
    assert!(matches!(large, Err(SequenceError::TooLarge { tokens: 201, limit: 200, .. })), "{large:?}");
    setup.handle.abort(id);
    assert_eq!(wait(first).end.unwrap().0, FinishReason::Cancelled);
    let (_, third) = submit(&setup, &[1, 2, 3], 10);
    become_ready(&setup.script, &setup.bell);
    assert_eq!(wait(second).tokens, wait(third).tokens);
    stop(setup);
}

#[test]
fn a_seeded_sequence_draws_the_same_alone_and_preempted_in_a_crowd() {
    let draw = |config: EngineConfig, crowd: usize| {
        let setup = start_with(config, Script { unready: true, ..Script::default() });
        let (mut seeded, events) = request(&[5, 6, 7], 30);
        seeded.sampling =
            SamplingParams { seed: Some(9), temperature: 3.0, top_p: 0.9, ..SamplingParams::default() };
        // Later than the crowd, so that it is the one to be preempted.
        let crowd: Vec<_> = (0..crowd).map(|_| submit(&setup, &[1, 2, 3], 60).1).collect();
        setup.handle.submit(seeded).unwrap();
        become_ready(&setup.script, &setup.bell);
        let tokens = wait(events).tokens;
        crowd.into_iter().for_each(|events| assert!(wait(events).end.is_ok()));
        (tokens, stop(setup).preemptions.get())
    };
    let (alone, _) = draw(config(), 0);
    let (crowded, preemptions) = draw(EngineConfig { num_blocks: 30, ..config() }, 3);
    assert_eq!(alone, crowded);
    assert!(preemptions > 0);
    assert_ne!(alone, reference(&[5, 6, 7], 30), "not greedy");
}

#[test]
fn log_probabilities_of_prompt_and_output_come_when_asked_for() {
    let setup = start(config());
    // Longer than a step, after the same prompt was cached.
    let prompt: Vec<u32> = (0..40).collect();
    wait(submit(&setup, &prompt, 2).1).end.unwrap();
    let (mut request, mut events) = request(&prompt, 3);
    request.logprobs = Some(2);
    request.prompt_logprobs = Some(0);
    setup.handle.submit(request).unwrap();
    let mut received = Vec::new();
    while let Some(event) = events.blocking_recv() {
        received.push(event);
    }
    let SequenceEvent::PromptLogprobs(told) = &received[0] else { panic!("{received:?}") };
    assert_eq!((told.len(), told[0].is_none()), (40, true));
    assert!(
        told[1..]
            .iter()
            .all(|entry| entry.as_ref().is_some_and(|entry| entry.chosen <= 0.0 && entry.top.is_empty()))
    );
    assert_eq!(received.len(), 5);
    for (event, expected) in received[1..4].iter().zip(reference(&prompt, 3)) {
        let SequenceEvent::Token(ChosenToken { id, logprobs: Some(told) }) = event else {
            panic!("{event:?}")
        };
        assert_eq!((*id, told.rank, told.top.len(), told.top[0]), (expected, 1, 2, (expected, told.chosen)));
    }
    stop(setup);
}

#[test]
fn log_probabilities_of_the_prompt_alone_are_told_before_its_first_token() {
    let setup = start(config());
    for len in 2..8 {
        let prompt: Vec<u32> = (0..len).collect();
        let (mut request, mut events) = request(&prompt, 1);
        request.prompt_logprobs = Some(0);
        setup.handle.submit(request).unwrap();
        let Some(SequenceEvent::PromptLogprobs(told)) = events.blocking_recv() else { panic!("{len}") };
        assert!(told.len() == prompt.len() && told[1..].iter().all(Option::is_some), "{len}: {told:?}");
        let Some(SequenceEvent::Token(token)) = events.blocking_recv() else { panic!("{len}") };
        assert_eq!(token.id, reference(&prompt, 1)[0]);
    }
    stop(setup);
}

#[test]
fn sizes_that_cannot_work_are_refused_by_name() {
    let refused = |config: EngineConfig| config.check().unwrap_err().option;
    assert_eq!(refused(EngineConfig { max_num_batched_tokens: 7, ..config() }), "--max-num-batched-tokens");
    assert_eq!(refused(EngineConfig { block_size: 0, ..config() }), "--block-size");
    let stages = StageRules { max_stages: 5, ..StageRules::default() };
    assert_eq!(refused(EngineConfig { stages, ..config() }), "--stages");
    assert_eq!(config().check(), Ok(()));
}
