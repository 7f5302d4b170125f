//! Sampled tokens, checked from outside: the engine logs the uniform number of every draw, and the chosen token's part of
//! the distribution, computed anew here in f64 from the monolith's logits, must hold that number, alone and in a batch.
use std::sync::{Arc, Mutex, OnceLock};

use afd_common::config::model::ModelConfig;
use afd_common::identity::GatePlacement;
use afd_common::weights::Weights;
use afd_tests::fixtures;
use afd_tests::monolith::Monolith;
use attention_svc::engine::EngineConfig;
use attention_svc::request::SamplingParams;
use tch::{IndexOp, Kind};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::serving::{Running, tokens};

/// How far a uniform number may lie outside the chosen token's part.
const TOLERANCE: f64 = 1e-3;

const MODEL: &str = "tiny-mixtral";
const NEW_TOKENS: u32 = 48;

/// A logged draw.
#[derive(Clone, Debug, Default, PartialEq)]
struct Drawn {
    request_id: String,
    index: u64,
    token: u64,
    uniform: f64,
    below: f64,
    upto: f64,
}

impl Visit for Drawn {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match field.name() {
            "uniform" => self.uniform = value,
            "below" => self.below = value,
            "upto" => self.upto = value,
            _ => {}
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "index" => self.index = value,
            "token" => self.token = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "request_id" {
            self.request_id = format!("{value:?}");
        }
    }
}

/// Every draw that this process has logged.
type Log = Arc<Mutex<Vec<Drawn>>>;

struct Recorder(Log);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Recorder {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().fields().field("uniform").is_some() {
            let mut drawn = Drawn::default();
            event.record(&mut drawn);
            self.0.lock().unwrap().push(drawn);
        }
    }
}

/// The log that the engine's thread writes to.
fn log() -> Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    let install = || {
        let log = Log::default();
        let subscriber = tracing_subscriber::registry().with(Recorder(Arc::clone(&log)));
        tracing::subscriber::set_global_default(subscriber).unwrap();
        log
    };
    Arc::clone(LOG.get_or_init(install))
}

/// Probabilities of all tokens, as the sampler's module describes them, written out with sorts.
fn distribution(logits: &[f64], params: &SamplingParams) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut weights: Vec<f64> =
        logits.iter().map(|logit| ((logit - largest) / f64::from(params.temperature)).exp()).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    if let Some(k) = params.top_k {
        order.truncate(k as usize);
    }
    let total: f64 = order.iter().map(|&token| weights[token]).sum();
    let mut sum = 0.0;
    let in_nucleus = |&token: &usize| {
        let is_needed = params.top_p == 1.0 || sum < f64::from(params.top_p) * total;
        sum += weights[token];
        is_needed
    };
    order = order.into_iter().take_while(in_nucleus).collect();
    order.retain(|&token| weights[token] >= f64::from(params.min_p));
    for (token, weight) in weights.iter_mut().enumerate() {
        *weight *= f64::from(u8::from(order.contains(&token)));
    }
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

fn check(monolith: &Monolith, prompt: &[u32], emitted: &[u32], params: &SamplingParams, draws: &[Drawn]) {
    assert_eq!(draws.len(), emitted.len(), "one draw for each token");
    let forced: Vec<u32> = prompt.iter().chain(&emitted[..emitted.len() - 1]).copied().collect();
    let logits = monolith.logits(&forced, prompt.len() - 1).unwrap().to_kind(Kind::Double);
    for (position, (drawn, &token)) in draws.iter().zip(emitted).enumerate() {
        assert_eq!((drawn.index, drawn.token), (position as u64, u64::from(token)));
        let row = Vec::<f64>::try_from(logits.i(position as i64)).unwrap();
        let probabilities = distribution(&row, params);
        let below: f64 = probabilities[..token as usize].iter().sum();
        let upto = below + probabilities[token as usize];
        let what = format!("{drawn:?}, computed anew {below}..{upto}, {params:?}");
        assert!((0.0..1.0).contains(&drawn.uniform), "{what}");
        assert!(drawn.uniform > below - TOLERANCE && drawn.uniform < upto + TOLERANCE, "{what}");
        assert!((drawn.below - below).abs() < TOLERANCE && (drawn.upto - upto).abs() < TOLERANCE, "{what}");
    }
}

#[test]
fn every_draw_falls_into_its_tokens_part_alone_and_in_a_batch() {
    let log = log();
    let folder = fixtures::checkpoint(MODEL);
    let model = ModelConfig::load(&folder).unwrap();
    let weights = Weights::open(&folder, &model, Kind::Float).unwrap();
    let monolith = Monolith::from_weights(model.clone(), &weights).unwrap();
    let prompts = fixtures::expected(MODEL).unwrap().prompts;
    let base = |seed| SamplingParams { seed: Some(seed), ..SamplingParams::default() };
    let cases = [
        ("plain", base(1)),
        ("cold", SamplingParams { temperature: 0.3, ..base(2) }),
        ("hot", SamplingParams { temperature: 3.0, ..base(3) }),
        ("top-k", SamplingParams { top_k: Some(7), temperature: 2.0, ..base(4) }),
        ("top-p", SamplingParams { top_p: 0.8, temperature: 2.0, ..base(5) }),
        ("min-p", SamplingParams { min_p: 0.05, temperature: 2.0, ..base(6) }),
        ("all", SamplingParams { top_k: Some(20), top_p: 0.9, min_p: 0.02, temperature: 2.5, ..base(7) }),
        ("unseeded", SamplingParams { seed: None, temperature: 2.0, ..base(0) }),
    ];
    let config = EngineConfig { max_model_len: 512, max_num_seqs: 8, ..EngineConfig::default() };
    let running = Running::start(&model, &weights, config, 1, GatePlacement::Ffn);
    let submit = |run: &str, at: usize| {
        let (name, params) = &cases[at];
        running.submit(
            &format!("{run}/{name}"),
            &prompts[at % prompts.len()].input_ids,
            NEW_TOKENS,
            params.clone(),
        )
    };
    let alone: Vec<Vec<u32>> = (0..cases.len()).map(|at| tokens(submit("alone", at))).collect();
    let batch: Vec<_> = (0..cases.len()).map(|at| submit("batch", at)).collect();
    let batch: Vec<Vec<u32>> = batch.into_iter().map(tokens).collect();
    running.end();

    let log = log.lock().unwrap().clone();
    let draws = |run: &str, name: &str| -> Vec<Drawn> {
        let id = format!("{run}/{name}");
        log.iter().filter(|drawn| drawn.request_id.trim_matches('"') == id).cloned().collect()
    };
    for (at, (name, params)) in cases.iter().enumerate() {
        let prompt = &prompts[at % prompts.len()].input_ids;
        for (run, emitted) in [("alone", &alone[at]), ("batch", &batch[at])] {
            check(&monolith, prompt, emitted, params, &draws(run, name));
        }
        let uniforms = |run| draws(run, name).iter().map(|drawn| drawn.uniform).collect::<Vec<_>>();
        assert_eq!(uniforms("alone") == uniforms("batch"), params.seed.is_some(), "{name}");
    }
}

#[test]
fn greedy_draws_nothing() {
    let log = log();
    let folder = fixtures::checkpoint(MODEL);
    let model = ModelConfig::load(&folder).unwrap();
    let weights = Weights::open(&folder, &model, Kind::Float).unwrap();
    let running = Running::start(
        &model,
        &weights,
        EngineConfig { max_model_len: 64, ..EngineConfig::default() },
        1,
        GatePlacement::Ffn,
    );
    assert_eq!(tokens(running.submit("greedy", &[5, 6], 3, SamplingParams::greedy())).len(), 3);
    running.end();
    assert!(log.lock().unwrap().iter().all(|drawn| !drawn.request_id.contains("greedy")));
}
