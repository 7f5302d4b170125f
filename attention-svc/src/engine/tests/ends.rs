//! How sequences and the engine itself end: given up, late, drained, dead.
use super::*;

#[test]
fn aborted_and_abandoned_sequences_free_everything_at_once() {
    let setup = start(config());
    let (id, aborted) = submit(&setup, &[1, 2, 3], 150);
    setup.handle.abort(id);
    let outcome = wait(aborted);
    let (reason, usage) = outcome.end.unwrap();
    assert_eq!((reason, usage.completion_tokens as usize), (FinishReason::Cancelled, outcome.tokens.len()));
    for _ in 0..50 {
        drop(submit(&setup, &[1, 2, 3], 150));
    }
    eventually("all cancelled", || setup.handle.metrics().finished_cancelled.get() == 51);
    let (_, events) = submit(&setup, &[1, 2, 3], 5);
    assert_eq!(wait(events).tokens, reference(&[1, 2, 3], 5));
    stop(setup);
}

/// The step of a sequence that was given up in the middle of it still writes to its blocks.
#[test]
fn a_sequence_given_up_in_the_middle_of_a_step_keeps_its_blocks_until_that_ends() {
    let lost = FfnLoss::Unavailable { peer: "F0".into(), what: "is gone".into() };
    for outcome in [None, Some(lost)] {
        let (waits, waiting) = std::sync::mpsc::channel();
        let (go_on, told) = std::sync::mpsc::channel();
        let faults = [outcome].into();
        let setup = start_with(config(), Script { wait: Some((waits, told)), faults, ..Script::default() });
        let (id, events) = submit(&setup, &[5; 30], 100);
        waiting.recv_timeout(SOON).unwrap();
        setup.handle.abort(id);
        let used = || setup.handle.metrics().kv_blocks_used.get();
        assert_eq!(setup.script.lock().unwrap().steps.len(), 1, "the step is the first");
        go_on.send(()).unwrap();
        assert!(matches!(wait(events).end, Ok((FinishReason::Cancelled, _))));
        assert_eq!(used(), 0, "told of its end, and it holds blocks");
        assert_eq!(setup.script.lock().unwrap().steps.len(), 1, "it ran on after it was given up");
        stop(setup);
    }
}

#[test]
fn a_deadline_ends_a_sequence_wherever_it_is() {
    let setup = start_with(config(), Script { unready: true, ..Script::default() });
    let (mut request, events) = request(&[1, 2, 3], 10);
    request.deadline = Some(Instant::now() + Duration::from_millis(20));
    setup.handle.submit(request).unwrap();
    let outcome = wait(events);
    assert!(matches!(outcome.end, Err(SequenceError::DeadlineExceeded { .. })), "{outcome:?}");
    stop(setup);
}

#[test]
fn draining_finishes_what_runs_refuses_what_comes_and_fails_what_is_late() {
    let setup = start(config());
    let (_, events) = submit(&setup, &[1, 2, 3], 100);
    setup.handle.drain(Instant::now() + SOON);
    let refused = setup.handle.submit(request(&[1], 1).0);
    assert!(matches!(refused, Err(SequenceError::ShuttingDown)), "{refused:?}");
    assert_eq!(wait(events).tokens.len(), 100);
    setup.thread.join().unwrap().unwrap();

    let setup = start_with(config(), Script { unready: true, ..Script::default() });
    let (_, late) = submit(&setup, &[1, 2, 3], 100);
    setup.handle.drain(Instant::now() + Duration::from_millis(20));
    assert!(matches!(wait(late).end, Err(SequenceError::ShuttingDown)));
    setup.thread.join().unwrap().unwrap();
    assert_eq!(setup.handle.metrics().kv_blocks_used.get(), 0);
}

#[test]
fn the_death_of_the_thread_reaches_everybody() {
    for bomb in [true, false] {
        let fatal = FfnLoss::Fatal { what: "the device is gone".into() };
        let script = Script { unready: true, always: (!bomb).then_some(fatal), ..Script::default() };
        let setup = start_with(config(), script);
        let (_, bystander) = submit(&setup, &[1, 2, 3], 100);
        let (_, events) = submit(&setup, &[1, if bomb { BOMB } else { 1 }], 100);
        become_ready(&setup.script, &setup.bell);
        let expected =
            if bomb { "the engine died: panic: boom" } else { "the engine died: the device is gone" };
        for events in [bystander, events] {
            let outcome = wait(events);
            assert!(
                matches!(&outcome.end, Err(SequenceError::Internal(what)) if what == expected),
                "{outcome:?}"
            );
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(setup.handle.died()), expected);
        assert!(setup.thread.join().unwrap().is_err());
        assert!(matches!(setup.handle.submit(request(&[1], 1).0), Err(SequenceError::Internal(_))));
        assert!(!setup.handle.ready());
    }
}

#[test]
fn what_runs_is_finished_with_ranks_that_are_about_to_stop_and_nothing_new_begins() {
    let (waits, waiting) = std::sync::mpsc::channel();
    let (go_on, told) = std::sync::mpsc::channel();
    let limits = EngineConfig { ffn_loss_timeout: Duration::from_millis(200), ..config() };
    let setup = start_with(limits, Script { wait: Some((waits, told)), ..Script::default() });
    let (_, running) = submit(&setup, &[5; 6], 20);
    waiting.recv_timeout(SOON).unwrap();
    setup.script.lock().unwrap().leaving = true;
    let (_, new) = submit(&setup, &[7; 6], 20);
    go_on.send(()).unwrap();
    assert_eq!(wait(running).tokens.len(), 20);
    let error = wait(new).end.unwrap_err();
    assert!(
        matches!(&error, SequenceError::FfnUnavailable(why) if why.contains("--ffn-loss-timeout")),
        "{error}"
    );
    let largest = |script: &Script| script.steps.iter().flatten().copied().max();
    assert_eq!(largest(&setup.script.lock().unwrap()), Some(6), "it was in a step");
    assert!(!setup.handle.ready());
    // Another rank has come: everything begins again.
    setup.script.lock().unwrap().leaving = false;
    setup.bell.ring();
    assert_eq!(wait(submit(&setup, &[7; 6], 20).1).tokens.len(), 20);
    stop(setup);
}

#[test]
fn who_comes_when_the_ffn_has_been_missing_too_long_is_told_at_once() {
    let setup =
        start_with(EngineConfig { ffn_loss_timeout: Duration::from_secs(2), ..config() }, Script::default());
    assert_eq!(wait(submit(&setup, &[5; 6], 3).1).tokens.len(), 3);
    setup.script.lock().unwrap().unready = true;
    setup.bell.ring();
    assert!(wait(submit(&setup, &[5; 6], 3).1).end.is_err());
    let begun = Instant::now();
    let error = wait(submit(&setup, &[5; 6], 3).1).end.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(1), "it waited {:?}", begun.elapsed());
    assert!(error.to_string().contains("have been missing for"), "{error}");
    stop(setup);
}
