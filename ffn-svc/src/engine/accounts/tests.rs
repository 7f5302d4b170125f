//! What is known of steps from their plans, and what is made of the hops that were served.
use afd_common::frame::FrameHeader;

use super::*;

const LAYERS: u16 = 2;

fn plan(stages: u32) -> Planned {
    Planned { stages, ..Planned::default() }
}

/// Whether it was planned.
fn serve(accounts: &StepAccounts, step: u64, layer: u16, stage: u8) -> bool {
    let key = FrameHeader::key(step, layer, stage);
    let begun = accounts.handle_begin(key);
    accounts.handle_served(&times(key));
    begun.is_planned
}

fn times(key: HopKey) -> HopTimes {
    HopTimes {
        key,
        rows: 3,
        batch_rows: 3,
        batch_hops: 1,
        epoch: Epoch(1),
        arrived_us: 10,
        started_us: 15,
        finished_us: 35,
        sent_us: 36,
    }
}

#[test]
fn a_planned_step_is_over_after_the_last_layer_of_all_its_stages() {
    let accounts = StepAccounts::new(LAYERS, false);
    accounts.handle_plan(StepId(4), plan(2));
    for (layer, stage) in [(0, 0), (0, 1), (1, 0)] {
        assert!(serve(&accounts, 4, layer, stage));
        assert_eq!(accounts.take_finished(), None);
        assert!(accounts.under_way());
    }
    serve(&accounts, 4, 1, 1);
    let account = accounts.take_finished().unwrap();
    assert_eq!((account.step, account.num_hops, account.num_rows), (StepId(4), 4, 12));
    assert_eq!((account.queue_us, account.compute_us, account.send_us), (20, 80, 4));
    assert_eq!((account.last_layer, account.hops.len()), (LayerIdx(1), 0));
    assert!(!accounts.under_way());
}

#[test]
fn without_a_plan_the_next_step_ends_the_one_before() {
    let accounts = StepAccounts::new(LAYERS, false);
    assert!(!serve(&accounts, 1, 0, 0));
    serve(&accounts, 1, 1, 0);
    assert_eq!(accounts.take_finished(), None);
    accounts.handle_begin(FrameHeader::key(2, 0, 0));
    assert_eq!(
        accounts.take_finished().map(|account| (account.step, account.num_hops)),
        Some((StepId(1), 2))
    );
    assert_eq!(accounts.last_begun(), Some(FrameHeader::key(2, 0, 0)));
}

#[test]
fn a_profile_keeps_every_hop_and_a_late_plan_still_counts() {
    let accounts = StepAccounts::new(LAYERS, false);
    serve(&accounts, 1, 0, 0);
    accounts.handle_plan(StepId(1), Planned { profile: true, ..plan(1) });
    serve(&accounts, 1, 1, 0);
    let account = accounts.take_finished().unwrap();
    assert_eq!(account.hops.len(), 1, "from the plan on");
    assert_eq!(account.num_hops, 2);
}

#[test]
fn a_recorded_step_is_whole_however_late_its_plan_comes_and_buffers_come_back() {
    let trace = Some(TraceContext::root(&mut rand::rng(), true));
    let recorded = Planned { trace, ..plan(1) };
    for plan_after in 0..=3 {
        let accounts = StepAccounts::new(LAYERS, true);
        let num_spare = accounts.lock().spare.len();
        let mut hops = [(1, 0), (1, 1), (2, 0)].into_iter();
        for at in 0..=3 {
            if at == plan_after {
                accounts.handle_plan(StepId(1), recorded);
            }
            if let Some((step, layer)) = hops.next() {
                serve(&accounts, step, layer, 0);
            }
        }
        let step = accounts.take_traced().unwrap();
        let layers: Vec<_> = step.hops.iter().map(|hop| (hop.key.step.0, hop.key.layer.0)).collect();
        assert_eq!((layers, Some(step.trace)), (vec![(1, 0), (1, 1)], trace), "after {plan_after} hops");
        accounts.recycle(step);
        accounts.handle_plan(StepId(2), plan(1));
        serve(&accounts, 2, 1, 0);
        assert_eq!(accounts.take_traced(), None, "step 2 is not recorded");
        assert_eq!(accounts.lock().spare.len(), num_spare);
    }
}

#[test]
fn without_an_exporter_no_times_are_kept() {
    let accounts = StepAccounts::new(LAYERS, false);
    serve(&accounts, 1, 0, 0);
    let trace = Some(TraceContext::root(&mut rand::rng(), true));
    accounts.handle_plan(StepId(1), Planned { trace, ..plan(1) });
    serve(&accounts, 1, 1, 0);
    assert_eq!(accounts.take_traced(), None);
    assert!(accounts.take_finished().unwrap().hops.is_empty());
}

#[test]
fn withdrawn_and_forgotten_steps_leave_nothing() {
    let accounts = StepAccounts::new(LAYERS, false);
    for step in 0..100 {
        accounts.handle_plan(StepId(step), plan(1));
    }
    assert_eq!(accounts.lock().open.len(), MAX_OPEN);
    accounts.handle_cancel(StepId(97));
    assert_eq!(accounts.lock().open.len(), 2);
    serve(&accounts, 200, 0, 0);
    assert_eq!(accounts.take_finished(), None, "steps of which nothing came are not reported");
    assert_eq!(accounts.lock().open.len(), 1);
    for step in 201..400 {
        serve(&accounts, step, 0, 0);
    }
    assert_eq!(accounts.lock().finished.len(), MAX_FINISHED);
}

#[test]
fn a_step_whose_last_layers_go_elsewhere_is_over_when_that_is_said() {
    let accounts = StepAccounts::new(LAYERS, false);
    accounts.handle_plan(StepId(1), plan(1));
    serve(&accounts, 1, 0, 0);
    assert!(accounts.under_way());
    accounts.handle_cancel(StepId(1));
    assert!(!accounts.under_way());
    assert_eq!(accounts.take_finished().map(|account| account.num_hops), Some(1));
    // Said before the last hop was on the account.
    accounts.handle_plan(StepId(2), plan(1));
    serve(&accounts, 2, 0, 0);
    accounts.handle_begin(FrameHeader::key(2, 1, 0));
    accounts.handle_cancel(StepId(2));
    assert_eq!(accounts.take_finished(), None, "a hop of it is still computed");
    accounts.handle_served(&times(FrameHeader::key(2, 1, 0)));
    assert!(!accounts.under_way());
    assert_eq!(accounts.take_finished().map(|account| account.num_hops), Some(2));
    serve(&accounts, 3, 0, 0);
    assert!(accounts.under_way(), "another step is not");
    // Steps that were given up, whose hops were still on their way when that was said.
    accounts.handle_cancel(StepId(5));
    assert!(!accounts.under_way());
    serve(&accounts, 4, 0, 0);
    accounts.handle_begin(FrameHeader::key(5, 0, 0));
    accounts.handle_failed(StepId(5), 3, "bad rows");
    assert!(!accounts.under_way());
    let over = std::iter::from_fn(|| accounts.take_finished()).map(|account| account.step.0);
    assert_eq!(over.collect::<Vec<_>>(), [3, 4, 5]);
}

#[test]
fn what_comes_of_a_step_that_is_over_does_not_begin_it_again() {
    let accounts = StepAccounts::new(LAYERS, false);
    accounts.handle_plan(StepId(1), plan(1));
    serve(&accounts, 1, 0, 0);
    serve(&accounts, 1, 1, 0);
    // A hop that is there twice is refused the second time.
    accounts.handle_failed(StepId(1), 6, "served already");
    assert!(!accounts.under_way());
    accounts.handle_plan(StepId(1), plan(1));
    let over = std::iter::from_fn(|| accounts.take_finished()).map(|account| account.num_hops);
    assert_eq!((over.collect::<Vec<_>>(), accounts.lock().open.len()), (vec![2, 1], 0));
}

#[test]
fn the_first_failure_of_a_step_is_kept() {
    let accounts = StepAccounts::new(LAYERS, false);
    accounts.handle_begin(FrameHeader::key(1, 0, 0));
    accounts.handle_failed(StepId(1), 3, "first");
    accounts.handle_failed(StepId(1), 13, "second");
    accounts.handle_begin(FrameHeader::key(2, 0, 0));
    assert_eq!(accounts.take_finished().unwrap().error, Some((3, "first".into())));
}

#[test]
fn a_hop_of_a_warm_up_is_known_by_its_plan_and_before_it_by_the_last_one() {
    let warms = |accounts: &StepAccounts, step| {
        let begun = accounts.handle_begin(FrameHeader::key(step, 0, 0));
        (begun.is_planned, begun.is_warmup)
    };
    let made_up = Planned { is_warmup: true, ..plan(1) };
    let accounts = StepAccounts::new(LAYERS, false).warm_at_first();
    assert_eq!(warms(&accounts, 1), (false, true), "nothing was planned yet");
    accounts.handle_plan(StepId(1), made_up);
    assert_eq!(warms(&accounts, 1), (true, true));
    assert_eq!(warms(&accounts, 2), (false, true), "as the step before it");
    accounts.handle_plan(StepId(3), plan(1));
    assert_eq!(warms(&accounts, 3), (true, false));
    assert_eq!(warms(&accounts, 4), (false, false), "as the step before it");
    assert_eq!(warms(&StepAccounts::new(LAYERS, false), 1), (false, false), "a link without plans");
}
