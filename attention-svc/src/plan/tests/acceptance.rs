//! Published and measured numbers. Each test prints how far every cell is off, so that `--nocapture` is the report.
use crate::plan::calibrate::{self, Fits, LinkName, LinkPoint, Measured, StepPoint};
use crate::plan::case::{Case, Exchange};
use crate::plan::config_reader;
use crate::plan::evaluate::Evaluator;
use crate::plan::formulas::routing;
use crate::plan::layout::Layout;
use crate::plan::outcome::{Bound, Outcome};
use crate::plan::search::{self, Limits};
use crate::plan::shape::ElementType;
use crate::plan::tests::case;
use crate::plan::verdict::{self, Answer};

/// PLANNER.md section 11 (after arXiv 2602.09721): HFU_max in percent with FP8 in, BF16 out, 1979 TFLOP/s and 50 GB/s.
#[test]
fn dead_zone_table_within_one_point() {
    let published: [(&str, &[f64]); 5] = [
        ("deepseek-v3", &[100.0, 62.0, 34.0, 23.0, 19.0, 17.0]),
        ("kimi-k2", &[100.0, 62.0, 34.0, 24.0, 19.0, 17.0]),
        ("qwen3-235b-a22b-fp8", &[93.0, 47.0, 26.0, 17.0, 14.0, 13.0]),
        ("gpt-oss-120b", &[87.0, 46.0, 32.0, 26.0, 24.0, 23.0]),
        ("mixtral-8x22b", &[100.0, 100.0, 100.0, 100.0]),
    ];
    for (model, cells) in published {
        let moe = config_reader::load(model).unwrap().moe.unwrap();
        for (index, cell) in cells.iter().enumerate() {
            let nodes = f64::from(1 << index);
            let hfu = |bandwidth: f64| {
                let sent = routing::send_fraction(moe.num_experts, moe.experts_per_token, nodes);
                let local = routing::local_experts_per_row(moe.experts_per_token, nodes, sent);
                let intensity = routing::network_intensity(moe.intermediate, local, 1.0, 2.0);
                100.0 * routing::max_hfu(bandwidth, intensity, 1979e12)
            };
            let found = hfu(50e9);
            println!("{model} N={nodes}: {found:.1} for {cell}");
            assert!((found - cell).abs() < 1.0, "{model} N={nodes}: {found} for {cell}");
            assert_eq!(hfu(450e9), 100.0, "{model} N={nodes} within an NVLink domain");
        }
    }
}

/// Context, sequences per attention GPU, and tokens/s/GPU per number of attention trays (four GPUs each; one FFN tray).
/// Qwen3-235B-A22B-FP8 on GB200 NVL72, two stages, FP8 dispatch, BF16 combine and cache: FastAFD's published sweep.
type FastAfdRow = (u64, f64, &'static [(u32, f64)]);
const FAST_AFD: [FastAfdRow; 4] = [
    (
        16,
        50.0,
        &[
            (4, 1616.0),
            (5, 1684.0),
            (6, 1671.0),
            (7, 1640.0),
            (8, 1559.0),
            (9, 1558.0),
            (10, 1481.0),
            (14, 1258.0),
        ],
    ),
    (
        32,
        25.0,
        &[
            (3, 850.0),
            (4, 871.0),
            (5, 881.0),
            (6, 912.0),
            (7, 903.0),
            (8, 892.0),
            (9, 881.0),
            (10, 867.0),
            (14, 805.0),
        ],
    ),
    (
        64,
        12.0,
        &[
            (3, 461.0),
            (4, 472.0),
            (5, 488.0),
            (6, 493.0),
            (7, 497.0),
            (8, 493.0),
            (9, 482.0),
            (10, 479.0),
            (13, 487.0),
            (14, 460.0),
        ],
    ),
    (
        128,
        6.0,
        &[
            (3, 226.0),
            (4, 240.0),
            (5, 243.0),
            (6, 244.0),
            (7, 247.0),
            (8, 246.0),
            (9, 249.0),
            (10, 248.0),
            (14, 248.0),
            (15, 251.0),
        ],
    ),
];

fn fast_afd(context_k: u64) -> Case {
    let mut case = case("qwen3-235b-a22b-fp8", "gb200-nvl72", context_k * 1024);
    case.precision.dispatch = ElementType::Fp8;
    case
}

fn trays(attention: u32) -> Layout {
    Layout::Afd { attention: 4 * attention, ffn: 4, stages: 2 }
}

/// Two points of a row, by one rule for all rows: its first cell and the one at 14 trays. From tokens/s/GPU back to the
/// step: `A/(A+1) · b / rate`.
fn calibrated_row(case: &Case, batch: f64, cells: &[(u32, f64)]) -> Case {
    let first = cells[0].0;
    let step = |(trays_a, rate): &(u32, f64)| StepPoint {
        fits: Fits::Ffn,
        layout: trays(*trays_a),
        batch_per_rank: batch,
        context: case.workload.context,
        step_ms: f64::from(*trays_a) / f64::from(trays_a + 1) * batch / rate * 1e3,
    };
    let chosen = cells.iter().filter(|cell| cell.0 == first || cell.0 == 14);
    let measured = Measured { steps: chosen.map(step).collect(), ..Measured::default() };
    assert_eq!(measured.steps.len(), 2);
    Case { profile: calibrate::calibrate(case, &measured).unwrap(), ..case.clone() }
}

#[test]
fn fast_afd_table_from_two_points_a_row() {
    for (context_k, batch, cells) in FAST_AFD {
        let case = calibrated_row(&fast_afd(context_k), batch, cells);
        let evaluator = Evaluator::new(&case);
        let rate = |attention: u32| evaluator.outcome(trays(attention), batch).tokens_per_s_per_device;
        let mut line = format!("{context_k}k:");
        for (attention, published) in cells {
            let off = rate(*attention) / published - 1.0;
            line += &format!(" {attention}: {:.0} ({:+.1} %)", rate(*attention), 100.0 * off);
            assert!(
                off.abs() < 0.08,
                "{context_k}k, {attention} trays: {} for {published}",
                rate(*attention)
            );
        }
        let best = (1..=17).max_by(|a, b| rate(*a).total_cmp(&rate(*b))).unwrap();
        println!("{line}; best {best}\n     {:?}", case.profile.calibration);
        match context_k {
            16 => assert!((4..=6).contains(&best), "{best} for 5"),
            32 => assert!((5..=7).contains(&best), "{best} for 6"),
            64 => assert!((6..=8).contains(&best), "{best} for 7"),
            // Published: 244 at 6 trays to 251 at 15, 2.8 % apart.
            _ => {
                let lowest = (6..=16).map(rate).fold(f64::INFINITY, f64::min);
                assert!(lowest > 0.95 * rate(best), "flat above 6: {lowest} to {}", rate(best));
            }
        }
    }
}

/// Not asked for: what datasheet and roofline say with nothing calibrated. They are limits, so they should be above what was
/// measured; how far above (59 % at most) is what calibration is for. At 64k and 128k they are up to 8 % below: what is
/// published there is more than reading the whole cache at the datasheet's 8 TB/s allows.
#[test]
fn fast_afd_uncalibrated_is_how_far_off() {
    for (context_k, batch, cells) in FAST_AFD {
        let case = fast_afd(context_k);
        let evaluator = Evaluator::new(&case);
        let off = |(attention, published): &(u32, f64)| {
            evaluator.outcome(trays(*attention), batch).tokens_per_s_per_device / published - 1.0
        };
        let offs: Vec<_> =
            cells.iter().map(|cell| format!("{}: {:+.0} %", cell.0, 100.0 * off(cell))).collect();
        println!("{context_k}k uncalibrated: {}", offs.join(", "));
        assert!(cells.iter().all(|cell| (-0.09..0.6).contains(&off(cell))), "{offs:?}");
    }
}

/// GPU.md: what a hop of `[T, 2048]` bf16 costs at best over NVLink, there and back, less the compute in it. Two of the four
/// points give latency and bandwidth; the others follow within 20 %.
#[test]
fn h200_hops_follow_from_two_of_them() {
    let hops_us = [(1.0, 6.2), (64.0, 9.3), (256.0, 13.7), (1024.0, 32.0)];
    let point = |(rows, us): (f64, f64)| LinkPoint {
        link: LinkName::ScaleUp,
        bytes: rows * 4096.0,
        one_way_us: us / 2.0,
    };
    let measured = Measured { links: vec![point(hops_us[0]), point(hops_us[3])], ..Measured::default() };
    let profile = calibrate::calibrate(&case("deepseek-v2-lite", "h200", 1088), &measured).unwrap();
    let link = &profile.links.scale_up;
    for (rows, us) in hops_us {
        let predicted = 2e6 * (link.latency.value + rows * 4096.0 / link.bandwidth.value);
        println!("{rows} rows: {predicted:.1} us for {us}");
        assert!((predicted / us - 1.0).abs() < 0.2, "{rows} rows: {predicted} for {us}");
    }
}

/// DeepSeek-V3.2 W8A8 on Ascend 910C dies, forced balance: tokens/s/die of EP64, 48 + 16 and 64 + 16 as the AFD plugin for
/// vLLM publishes them, with its batch per rank (16 and 28 at 16k, 8 and 14 at 32k) and its two stages.
///
/// Each FFN die holds four experts there, as in EP64: the 16 FFN dies are a quarter of a logical 64, with a quarter of the
/// attention dies. Every one of them serves as many rows as in 192 + 64 and 256 + 64, which is what is evaluated.
const PLUGIN: [(u64, f64, f64, [f64; 3]); 2] =
    [(16, 16.0, 28.0, [232.6, 220.3, 258.9]), (32, 8.0, 14.0, [168.2, 151.4, 183.3])];

fn plugin_case(context_k: u64) -> Case {
    // Outputs of 512 to 1,536 tokens: half of their mean length has been decoded on average.
    let mut case = case("deepseek-v3.2", "ascend-910c-die", context_k * 1024 + 512);
    case.precision.attention = ElementType::Int8;
    case.precision.ffn = ElementType::Int8;
    case.precision.dispatch = ElementType::Int8;
    case
}

const EP64: Layout = Layout::Colocated { ranks: 64, stages: 1 };

fn plugin_afd(attention: u32) -> Layout {
    Layout::Afd { attention: attention * 4, ffn: 64, stages: 2 }
}

/// Four numbers from six cells: attention's fixed and linear part from the AFD steps (which attention binds), the
/// colocated exchange's from the EP64 steps.
#[test]
fn plugin_signs_at_both_lengths() {
    let mut steps = Vec::new();
    for (context_k, colocated_batch, afd_batch, rates) in PLUGIN {
        let context = plugin_case(context_k).workload.context;
        let step = |fits, layout: Layout, batch: f64, rate: f64| {
            let per_device = f64::from(layout.attention_ranks()) / f64::from(layout.num_devices());
            StepPoint {
                fits,
                layout,
                batch_per_rank: batch,
                context,
                step_ms: per_device * batch / rate * 1e3,
            }
        };
        steps.push(step(Fits::Attention, plugin_afd(48), afd_batch, rates[1]));
        steps.push(step(Fits::Attention, plugin_afd(64), afd_batch, rates[2]));
        steps.push(step(Fits::Exchange, EP64, colocated_batch, rates[0]));
    }
    let measured = Measured { steps, ..Measured::default() };
    let profile = calibrate::calibrate(&plugin_case(16), &measured).unwrap();
    println!("{:?}", profile.calibration);
    for (context_k, colocated_batch, afd_batch, rates) in PLUGIN {
        let case = Case { profile: profile.clone(), ..plugin_case(context_k) };
        let evaluator = Evaluator::new(&case);
        let (ep, few, many) = (
            evaluator.outcome(EP64, colocated_batch),
            evaluator.outcome(plugin_afd(48), afd_batch),
            evaluator.outcome(plugin_afd(64), afd_batch),
        );
        for (outcome, published) in [(&ep, rates[0]), (&few, rates[1]), (&many, rates[2])] {
            let rate = outcome.tokens_per_s_per_device;
            let off = 100.0 * (rate / published - 1.0);
            println!(
                "{context_k}k {}: {rate:.1} for {published} ({off:+.1} %), {:?}",
                outcome.layout, outcome.bound
            );
            assert!(outcome.memory.fits(), "{context_k}k {}: the published batch fits", outcome.layout);
        }
        let gain = |outcome: &Outcome| outcome.tokens_per_s_per_device / ep.tokens_per_s_per_device - 1.0;
        println!("{context_k}k: {:+.1} %, {:+.1} %", 100.0 * gain(&few), 100.0 * gain(&many));
        assert!(gain(&few) < 0.0, "{context_k}k: 48 + 16 loses");
        assert!(gain(&many) > 0.0, "{context_k}k: 64 + 16 wins");
    }
}

/// DeepSeek-V2-Lite on two H200, 1,024 tokens in and 128 out: floors in ms of attention and FFN of 1A1F at each
/// concurrency, from GPU.md (all bytes over 4.56 TB/s).
#[test]
#[expect(clippy::approx_constant, reason = "6.28 ms is not a circle")]
fn h200_floors_within_three_percent() {
    let case = case("deepseek-v2-lite", "h200", 1088);
    let evaluator = Evaluator::new(&case);
    let floors = [
        (1.0, 0.26, 0.82, 1.08),
        (8.0, 0.32, 3.67, 3.99),
        (32.0, 0.49, 6.28, 6.77),
        (64.0, 0.73, 6.54, 7.27),
        (128.0, 1.21, 6.55, 7.75),
    ];
    for (concurrency, attention, ffn, sum) in floors {
        let outcome = evaluator.outcome(Layout::Afd { attention: 1, ffn: 1, stages: 1 }, concurrency);
        let parts = outcome.parts;
        let found = (parts.attention_ms + parts.fixed_ms, parts.ffn_ms);
        println!(
            "{concurrency}: attention {:.3} for {attention}, FFN {:.3} for {ffn}, sum {:.3} for {sum}; with 27 hops {:.2}",
            found.0,
            found.1,
            found.0 + found.1,
            outcome.step_ms
        );
        assert!(((found.0 + found.1) / sum - 1.0).abs() < 0.03, "{concurrency}: {found:?} for {sum}");
        assert!((found.1 / ffn - 1.0).abs() < 0.03, "{concurrency}: FFN {} for {ffn}", found.1);
        // Published with two digits: 0.26 may be 0.255.
        assert!(
            (found.0 - attention).abs() < 0.03 * attention + 0.005,
            "{concurrency}: {} for {attention}",
            found.0
        );
    }
}

#[test]
fn two_h200_are_told_not_to_disaggregate() {
    let case = case("deepseek-v2-lite", "h200", 1088);
    let evaluator = Evaluator::new(&case);
    let colocated = evaluator.outcome(Layout::Colocated { ranks: 2, stages: 1 }, 32.0);
    for stages in [1, 2] {
        let afd = evaluator.outcome(Layout::Afd { attention: 1, ffn: 1, stages }, 64.0);
        let verdict = verdict::compare(&case, &afd, &colocated);
        println!("{}", verdict.sentence);
        assert_eq!(verdict.answer, Answer::Dont);
    }
    // Believing the measured 8.0 ms of DP2 + EP2 instead of its floor, AFD's floor still does not win by enough.
    let afd = evaluator.outcome(Layout::Afd { attention: 1, ffn: 1, stages: 1 }, 64.0);
    println!(
        "1A1F at least {:.2} ms, DP2 + EP2 at least {:.2} and measured 8.0",
        afd.step_ms, colocated.step_ms
    );
    assert!(afd.step_ms > 7.3);

    let limits = Limits { max_devices: 2, tpot_ms: 20.0, concurrency: Some(64), max_stages: 4 };
    let found = search::search(&case, &limits).unwrap();
    let verdict = verdict::judge(&case, &found);
    assert_eq!(verdict.answer, Answer::Dont, "{}", verdict.sentence);
}

#[test]
fn a_slow_network_is_named_as_the_cap() {
    let mut case = case("deepseek-v3", "h100", 4096);
    case.precision.dispatch = ElementType::Fp8;
    // Eight hosts of eight: attention cannot share a domain with the experts.
    let layout = Layout::Afd { attention: 256, ffn: 32, stages: 4 };
    let (link, cap) = verdict::link_cap(&case, layout);
    assert_eq!(link, "scale-out");
    assert!((cap.unwrap() - 0.34).abs() < 0.01, "{cap:?}");
    case.workload.exchange = Exchange::Routed;
    let outcome = Evaluator::new(&case).outcome(layout, 256.0);
    assert_eq!(outcome.bound, Bound::Link, "{outcome:?}");
}

/// Few, large experts and long sequences: arXiv 2602.09721 and 2504.02263 agree that this is where it pays.
#[test]
fn coarse_experts_in_a_large_cluster_are_told_to_disaggregate() {
    let mut case = case("mixtral-8x22b", "h200", 16384);
    case.precision.dispatch = ElementType::Fp8;
    let limits = Limits { max_devices: 64, tpot_ms: 40.0, concurrency: None, max_stages: 4 };
    let found = search::search(&case, &limits).unwrap();
    let verdict = verdict::judge(&case, &found);
    println!("{}", verdict.sentence);
    assert_eq!(verdict.answer, Answer::Disaggregate, "{}", verdict.sentence);
    let few = Limits { max_devices: 8, ..limits };
    let verdict = verdict::judge(&case, &search::search(&case, &few).unwrap());
    assert_eq!(verdict.answer, Answer::Dont, "{}", verdict.sentence);
}
