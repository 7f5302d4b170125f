//! What holds whatever the numbers.
use afd_common::identity::SharedExpertPlacement;
use proptest::prelude::*;

use crate::plan::case::{Case, Exchange};
use crate::plan::config_reader;
use crate::plan::evaluate::{Evaluator, experts_of_rank};
use crate::plan::layout::Layout;
use crate::plan::profile::Profile;
use crate::plan::report::{self, Plan, Request};
use crate::plan::search::{self, LimitError, Limits};
use crate::plan::sweep::{self, WhatIf};
use crate::plan::tests::case;

fn limits(max_devices: u32, tpot_ms: f64) -> Limits {
    Limits { max_devices, tpot_ms, concurrency: None, max_stages: 4 }
}

fn any_case() -> impl Strategy<Value = Case> {
    let models: Vec<_> = config_reader::published_names().collect();
    let profiles: Vec<_> =
        crate::plan::profile::built_in_names().filter(|name| !name.starts_with("cpu")).collect();
    let exchanges = [Exchange::Routed, Exchange::Broadcast, Exchange::PointToPoint];
    (
        proptest::sample::select(models),
        proptest::sample::select(profiles),
        512u64..200_000,
        proptest::sample::select(exchanges.to_vec()),
        1.0f64..2.0,
        any::<bool>(),
    )
        .prop_map(|(model, profile, context, exchange, imbalance, on_attention)| {
            let mut case = case(model, profile, context);
            case.workload.exchange = exchange;
            case.workload.imbalance = imbalance;
            if on_attention && case.shape.has_shared_experts() {
                case.workload.shared_experts = SharedExpertPlacement::Attention;
            }
            case
        })
}

fn any_layout() -> impl Strategy<Value = Layout> {
    let afd = (1u32..200, 1u32..8, 1u32..=4).prop_map(|(attention, ffn, stages)| Layout::Afd {
        attention,
        ffn,
        stages,
    });
    let colocated = (1u32..8, 1u32..=2).prop_map(|(ranks, stages)| Layout::Colocated { ranks, stages });
    prop_oneof![afd, colocated]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn better_hardware_never_makes_a_step_longer(
        case in any_case(), layout in any_layout(), batch in 4.0f64..500.0, factor in 1.0f64..10.0,
    ) {
        let before = Evaluator::new(&case).step_s(layout, batch);
        for what in WhatIf::ALL {
            let factor = if what == WhatIf::LinkLatency { 1.0 / factor } else { factor };
            let better = Case { profile: what.apply(&case.profile, factor), ..case.clone() };
            let after = Evaluator::new(&better).step_s(layout, batch);
            prop_assert!(after <= before * (1.0 + 1e-12), "{what:?} × {factor}: {before} to {after}");
        }
    }

    #[test]
    fn the_parts_of_a_step_are_the_step(case in any_case(), layout in any_layout(), batch in 4.0f64..500.0) {
        let evaluator = Evaluator::new(&case);
        let outcome = evaluator.outcome(layout, batch);
        let parts = outcome.parts;
        // What attention computes while it waits takes no time of its own, but for what is beyond the wait.
        let sum = parts.attention_ms
            + parts.ffn_ms
            + parts.communication_ms
            + parts.shared_ms
            + parts.bubble_ms
            + parts.fixed_ms;
        prop_assert!((sum / outcome.step_ms - 1.0).abs() < 1e-9, "{sum} {}", outcome.step_ms);
        prop_assert!((evaluator.step_s(layout, batch) * 1e3 / outcome.step_ms - 1.0).abs() < 1e-12);
        prop_assert!((0.0..=1.0).contains(&outcome.idle_attention) && (0.0..=1.0).contains(&outcome.idle_ffn));
        prop_assert!(outcome.fill_ms >= -1e-9);
    }

    #[test]
    fn a_larger_batch_takes_longer_and_gives_more(
        case in any_case(), layout in any_layout(), batch in 4.0f64..300.0, more in 1.0f64..300.0,
    ) {
        let evaluator = Evaluator::new(&case);
        let (small, large) = (evaluator.outcome(layout, batch), evaluator.outcome(layout, batch + more));
        prop_assert!(large.step_ms >= small.step_ms * (1.0 - 1e-12));
        prop_assert!(large.tokens_per_s_per_device >= small.tokens_per_s_per_device * (1.0 - 1e-9));
        prop_assert!(large.memory.attention.total() >= small.memory.attention.total());
    }

    #[test]
    fn experts_are_dealt_out_once(num_experts in 1u32..500, ranks in 1u32..100) {
        let dealt: Vec<_> = (0..ranks).map(|rank| experts_of_rank(num_experts, ranks, rank)).collect();
        prop_assert_eq!(dealt.iter().sum::<u32>(), num_experts);
        prop_assert_eq!(dealt[0], *dealt.iter().max().unwrap());
        prop_assert!(dealt[0] - dealt.iter().min().unwrap() <= 1);
    }
}

/// The FFN does less and holds less, attention more, and nothing changes where they share their ranks.
#[test]
fn shared_experts_move_from_one_side_to_the_other() {
    let on_ffn = case("deepseek-v3", "h200", 4096);
    let mut moved = on_ffn.clone();
    moved.workload.shared_experts = SharedExpertPlacement::Attention;
    let (before, after) = (Evaluator::new(&on_ffn), Evaluator::new(&moved));
    let together = Layout::Colocated { ranks: 8, stages: 2 };
    assert_eq!(before.outcome(together, 64.0), after.outcome(together, 64.0));
    let apart = Layout::Afd { attention: 12, ffn: 4, stages: 3 };
    let (was, is) = (before.outcome(apart, 96.0), after.outcome(apart, 96.0));
    assert!(is.parts.ffn_ms < was.parts.ffn_ms && is.parts.attention_ms == was.parts.attention_ms);
    assert!(is.idle_attention < was.idle_attention, "{} {}", is.idle_attention, was.idle_attention);
    // Whole on each rank of either side: 58 layers of 3 · 7168 · 2048 bytes in fp8.
    let held = 58.0 * 3.0 * 7168.0 * 2048.0;
    let gained = is.memory.attention.weights - was.memory.attention.weights;
    let freed = was.memory.ffn.unwrap().weights - is.memory.ffn.unwrap().weights;
    assert!((gained / held - 1.0).abs() < 1e-9 && (freed / held - 1.0).abs() < 1e-9, "{gained} {freed}");
}

#[test]
fn weights_of_all_ranks_are_the_models_weights() {
    for model in config_reader::published_names() {
        let case = case(model, "gb200-nvl72", 4096);
        let evaluator = Evaluator::new(&case);
        let ffn_of = |ranks: u32| {
            let layout = Layout::Afd { attention: 3, ffn: ranks, stages: 1 };
            (0..ranks).map(|rank| evaluator.ffn_weights(layout, rank)).sum::<f64>()
        };
        let moe = case.shape.moe.unwrap();
        // Shared experts are whole on each rank; everything else is there once.
        let shared = 3.0
            * f64::from(case.shape.hidden)
            * f64::from(moe.shared_intermediate)
            * case.precision.ffn.bytes()
            * f64::from(case.shape.num_moe_layers);
        for ranks in [2, 3, 7, 8] {
            let expected = ffn_of(1) + f64::from(ranks - 1) * shared;
            assert!((ffn_of(ranks) / expected - 1.0).abs() < 1e-12, "{model} over {ranks}");
        }
        // Colocated on one device is attention rank plus FFN rank.
        let apart = evaluator.memory(Layout::Afd { attention: 1, ffn: 1, stages: 1 }, 4.0);
        let together = evaluator.memory(Layout::Colocated { ranks: 1, stages: 1 }, 4.0);
        let sum = apart.attention.weights + apart.ffn.unwrap().weights;
        assert!((together.attention.weights / sum - 1.0).abs() < 1e-12, "{model}");
    }
}

#[test]
fn published_parameter_counts_are_what_the_ranks_hold() {
    for (model, billions) in [
        ("deepseek-v2-lite", 15.7),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b-fp8", 235.0),
        ("mixtral-8x7b", 46.7),
        ("mixtral-8x22b", 141.0),
        ("deepseek-v3", 671.0),
        ("kimi-k2", 1026.0),
        ("gpt-oss-120b", 116.8),
    ] {
        let mut case = case(model, "gb200-nvl72", 1);
        // One byte an element counts elements.
        let int8 = crate::plan::shape::ElementType::Int8;
        case.precision.attention = int8;
        case.precision.ffn = int8;
        case.precision.head = int8;
        let memory = Evaluator::new(&case).memory(Layout::Colocated { ranks: 1, stages: 1 }, 1.0);
        let found = memory.attention.weights / 1e9;
        assert!((found / billions - 1.0).abs() < 0.01, "{model}: {found:.1} billion for {billions}");
    }
}

#[test]
fn more_link_bandwidth_never_lowers_the_best_throughput() {
    let limits = limits(24, 60.0);
    for exchange in [Exchange::Routed, Exchange::Broadcast, Exchange::PointToPoint] {
        let mut case = case("qwen3-235b-a22b-fp8", "h100", 16384);
        case.workload.exchange = exchange;
        let mut before = 0.0;
        for factor in [0.25, 0.5, 1.0, 2.0, 4.0] {
            let profile = WhatIf::LinkBandwidth.apply(&case.profile, factor);
            let found = search::search(&Case { profile, ..case.clone() }, &limits).unwrap();
            let best = found.afd[0].tokens_per_s_per_device;
            assert!(best >= before, "{exchange:?} × {factor}: {before} to {best}");
            before = best;
        }
    }
}

#[test]
fn free_communication_and_balanced_times_keep_two_stages_busy() {
    let mut case = case("qwen3-235b-a22b-fp8", "gb200-nvl72", 16384);
    for latency in [&mut case.profile.links.scale_up.latency, &mut case.profile.links.scale_out.latency] {
        latency.value = 0.0;
    }
    case.profile.links.scale_up.bandwidth.value = 1e300;
    let balanced = |attention_batch: f64| {
        let layout = Layout::Afd { attention: 16, ffn: 4, stages: 2 };
        Evaluator::new(&case).outcome(layout, attention_batch)
    };
    // Adding up answers in attention's memory is all that is left of the exchange; find the batch that balances the roles.
    let (mut low, mut high) = (2.0, 2000.0);
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        let parts = balanced(middle).parts;
        if parts.attention_ms > parts.ffn_ms { high = middle } else { low = middle }
    }
    let outcome = balanced(low);
    assert!(outcome.idle_attention < 0.01 && outcome.idle_ffn < 0.01, "{outcome:?}");
}

#[test]
fn a_profile_in_other_units_gives_the_same_plan() {
    let text = Profile::load("h100").unwrap().to_toml().unwrap();
    let other =
        text.replace("3.35e12 B/s", "3350 GB/s").replace("5e10 B/s", "400 Gb/s").replace("8e10 B", "80 GB");
    assert_ne!(text, other);
    let with = |text: &str| {
        let mut case = case("mixtral-8x7b", "h100", 4096);
        case.profile = Profile::from_toml("h100", text).unwrap();
        search::search(&case, &limits(16, 30.0)).unwrap()
    };
    assert_eq!(with(&text), with(&other));
}

fn request(case: Case, limits: Limits) -> Request {
    Request {
        case,
        limits,
        top: 6,
        contexts: vec![4096, 8192],
        targets_ms: vec![20.0, 40.0],
        device_counts: vec![8, 16],
        sensitivity: true,
    }
}

#[test]
fn the_order_of_options_does_not_matter() {
    let mut asked = request(case("mixtral-8x7b", "h100", 4096), limits(16, 30.0));
    let plan = Plan::make(asked.clone()).unwrap();
    asked.contexts.reverse();
    asked.device_counts.reverse();
    let reversed = Plan::make(asked).unwrap();
    let by_setting = |plan: &Plan| {
        let mut sweeps = plan.sweeps.clone();
        sweeps.sort_by(|a, b| a.setting.cmp(&b.setting));
        sweeps
    };
    assert_eq!(by_setting(&plan), by_setting(&reversed));
    assert_eq!((plan.verdict, plan.afd), (reversed.verdict, reversed.afd));
}

#[test]
fn a_printed_plan_gives_itself() {
    for (model, hardware) in
        [("deepseek-v3.2", "ascend-910c-die"), ("gpt-oss-120b", "b200"), ("mixtral-8x7b", "cpu-server")]
    {
        let plan = Plan::make(request(case(model, hardware, 4096), limits(40, 5000.0))).unwrap();
        let text = serde_json::to_string_pretty(&plan).unwrap();
        let read = Plan::from_json(&text).unwrap();
        assert_eq!(read.request, plan.request, "{model}");
        read.check().unwrap();
        let again = Plan::make(read.request.clone()).unwrap();
        assert_eq!((&again.verdict, &again.afd), (&plan.verdict, &plan.afd), "{model}");
        assert!(report::table(&plan).contains("disaggregate"));
    }
    let plan = Plan::make(request(case("mixtral-8x7b", "h100", 4096), limits(16, 30.0))).unwrap();
    let mut forged = plan;
    forged.afd[0].step_ms *= 0.9;
    assert!(forged.check().unwrap_err().to_string().contains("step_ms"));
}

#[test]
fn what_cannot_be_met_is_answered_with_the_nearest_that_can() {
    let case = case("deepseek-v3", "h100", 4096);
    let error = search::search(&case, &limits(4, 50.0)).unwrap_err();
    let LimitError::Memory { nearest, .. } = &error else { panic!("{error}") };
    let count: u32 = nearest.split_whitespace().next().unwrap().parse().unwrap();
    assert!(search::search(&case, &limits(count, 500.0)).is_ok(), "{error}");
    assert!(search::search(&case, &limits(count - 1, 500.0)).is_err(), "{error}");

    let error = search::search(&case, &limits(32, 0.5)).unwrap_err();
    let LimitError::Target { fastest_ms, .. } = error else { panic!("{error}") };
    assert!(search::search(&case, &limits(32, fastest_ms * 1.000001)).is_ok());

    for bad in
        [limits(0, 50.0), limits(8, f64::NAN), limits(8, -1.0), Limits { max_stages: 9, ..limits(8, 50.0) }]
    {
        assert!(matches!(search::search(&case, &bad), Err(LimitError::Absurd { .. })), "{bad:?}");
    }
}

#[test]
fn a_given_load_is_served_whole_or_as_far_as_the_target_lets_it() {
    let case = case("qwen3-30b-a3b", "h200", 4096);
    let wanted = Limits { concurrency: Some(96), ..limits(4, 50.0) };
    let found = search::search(&case, &wanted).unwrap();
    for outcome in found.afd.iter().chain(&found.colocated) {
        assert!(outcome.sequences <= 96.0 + 1e-9, "{outcome:?}");
    }
    assert!((found.colocated[0].sequences - 96.0).abs() < 1e-9);
}

/// Counts and prints; run with `--release --nocapture` for the time that the README may quote.
#[test]
fn ten_thousand_layouts_are_looked_at() {
    let case = case("deepseek-v3.2", "gb200-nvl72", 16384);
    let begun = std::time::Instant::now();
    let found = search::search(&case, &limits(72, 50.0)).unwrap();
    println!("{} layouts in {:?}", found.num_layouts(), begun.elapsed());
    assert!(found.num_layouts() >= 10_000, "{}", found.num_layouts());
    let points = sweep::sensitivity(&case, &limits(8, 50.0));
    // And shared experts on the other side.
    assert_eq!(points.len(), WhatIf::ALL.len() + 1);
}
