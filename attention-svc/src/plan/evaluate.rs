//! One layout with one batch: how long a step takes, what it is made of, what binds it, what it holds.
use super::case::Case;
use super::formulas::pipeline::{self, StageTimes};
use super::formulas::{ffn, memory, roofline_s};
use super::layout::Layout;
use super::outcome::{Bound, Outcome, Parts, RankMemory, RoleMemory};
use super::stage::{LayerKind, Stages};

/// Evaluates layouts of one case.
#[derive(Debug)]
pub struct Evaluator<'a> {
    case: &'a Case,
    stages: Stages<'a>,
}

impl<'a> Evaluator<'a> {
    /// Prepares a case.
    pub fn new(case: &'a Case) -> Self {
        Self { case, stages: Stages::new(case) }
    }

    /// The case.
    pub fn case(&self) -> &'a Case {
        self.case
    }

    /// Stage times, for calibration.
    pub fn stages(&self) -> &Stages<'a> {
        &self.stages
    }

    /// What is outside of the layers, s: the head over the rank's `b` rows, and what a step costs anyway.
    pub fn fixed_s(&self, batch: f64) -> f64 {
        let terms = self.stages.terms();
        roofline_s(batch * terms.head_flop, terms.head_rate, terms.head, terms.memory_bandwidth)
            + terms.step_fixed
    }

    /// `T_iter = Σ_layers T_layer + fixed`, s, without the rest of an outcome.
    pub fn step_s(&self, layout: Layout, batch: f64) -> f64 {
        let (stages, rows) = (f64::from(layout.stages()), batch / f64::from(layout.stages()));
        let layers = |(kind, layers)| layers * cycle(layout, &self.stages.times(layout, kind, rows), stages);
        self.layer_kinds().map(layers).sum::<f64>() + self.fixed_s(batch)
    }

    /// Number of layers of one kind and the part of a step they take, s.
    pub fn layer_seconds(&self, layout: Layout, batch: f64, kind: LayerKind) -> (f64, f64) {
        let (stages, rows) = (f64::from(layout.stages()), batch / f64::from(layout.stages()));
        let layers = self.layer_kinds().find(|(known, _)| *known == kind).map_or(0.0, |(_, layers)| layers);
        (layers, layers * cycle(layout, &self.stages.times(layout, kind, rows), stages))
    }

    /// Layers of each kind, the more numerous first.
    fn layer_kinds(&self) -> impl Iterator<Item = (LayerKind, f64)> + use<> {
        let terms = self.stages.terms();
        let kinds = [(LayerKind::Moe, terms.moe_layers), (LayerKind::Dense, terms.dense_layers)];
        kinds.into_iter().filter(|(_, layers)| *layers > 0.0)
    }

    /// `batch` sequences per attention rank, at least one per stage.
    pub fn outcome(&self, layout: Layout, batch: f64) -> Outcome {
        let (stages, rows) = (f64::from(layout.stages()), batch / f64::from(layout.stages()));
        let fixed_s = self.fixed_s(batch);
        let (mut parts, mut step_s) = (Parts { fixed_ms: fixed_s * 1e3, ..Parts::default() }, fixed_s);
        let (mut layer_s, mut shared_ms, mut fill_s, mut bound) = (0.0, 0.0, 0.0f64, None);
        for (kind, layers) in self.layer_kinds() {
            let times = self.stages.times(layout, kind, rows);
            let cycle_s = cycle(layout, &times, stages);
            parts.attention_ms += layers * times.attention * 1e3;
            parts.ffn_ms += layers * times.ffn * 1e3;
            parts.communication_ms += layers * (times.dispatch + times.combine) * 1e3;
            parts.shared_ms += layers * (times.shared - times.away()).max(0.0) * 1e3;
            shared_ms += layers * times.shared * 1e3;
            parts.bubble_ms += layers * (cycle_s - times.round_trip()).max(0.0) * 1e3;
            layer_s += layers * cycle_s;
            let alone_s = pipeline::step_alone(&times, longest_service(layout, &times), stages, layers);
            fill_s = fill_s.max(alone_s - layers * cycle_s);
            bound = bound.or(Some(self.bound(layout, kind, &times, stages, rows)));
        }
        step_s += layer_s;
        let busy = |ms: f64| (1.0 - stages * ms / 1e3 / layer_s).max(0.0);
        let both = parts.attention_ms + parts.ffn_ms;
        let (idle_attention, idle_ffn) = match layout {
            Layout::Afd { .. } => (busy(parts.attention_ms + shared_ms), busy(parts.ffn_ms)),
            Layout::Colocated { .. } => (busy(both), busy(both)),
        };
        let sequences = batch * f64::from(layout.attention_ranks());
        let tpot_s = step_s / self.case.workload.tokens_per_step;
        Outcome {
            layout,
            batch_per_rank: batch,
            sequences,
            step_ms: step_s * 1e3,
            tpot_ms: tpot_s * 1e3,
            tokens_per_s_per_device: sequences / tpot_s / f64::from(layout.num_devices()),
            parts,
            idle_attention,
            idle_ffn,
            fill_ms: fill_s * 1e3,
            bound: bound.unwrap_or(Bound::RoundTrip),
            memory: self.memory(layout, batch),
        }
    }

    fn bound(&self, layout: Layout, kind: LayerKind, times: &StageTimes, stages: f64, rows: f64) -> Bound {
        let cycle_s = cycle(layout, times, stages);
        let pool = rows * f64::from(layout.attention_ranks());
        let busy_all_the_time = |service_s: f64| stages * service_s >= cycle_s * (1.0 - 1e-9);
        let longer_is_attention = times.on_attention() >= times.ffn;
        let role = if longer_is_attention {
            Bound::Attention(self.stages.attention(rows).1)
        } else {
            Bound::Ffn(self.stages.ffn(layout, kind, pool).1)
        };
        let role_s = match layout {
            Layout::Afd { .. } => times.on_attention().max(times.ffn),
            Layout::Colocated { .. } => times.attention + times.ffn,
        };
        // With one stage the round trip is the cycle; the longest part of it is the more useful answer.
        let part_of_round_trip = layout.stages() == 1 && role_s >= times.dispatch + times.combine;
        match () {
            () if busy_all_the_time(role_s) || part_of_round_trip => role,
            () if busy_all_the_time(times.link) => Bound::Link,
            () => Bound::RoundTrip,
        }
    }

    /// Memory of the fullest rank of each role with `batch` sequences per attention rank.
    pub fn memory(&self, layout: Layout, batch: f64) -> RoleMemory {
        let usable = self.case.profile.memory.size.value * self.case.profile.memory.usable.value;
        let mut attention = self.attention_memory(layout, batch);
        let ffn_buffers = self.ffn_buffers(layout, batch);
        let ffn_weights = self.ffn_weights(layout, 0);
        let ffn = match layout {
            Layout::Afd { .. } => {
                Some(RankMemory { weights: ffn_weights, kv_cache: 0.0, buffers: ffn_buffers })
            }
            Layout::Colocated { .. } => {
                attention.weights += ffn_weights;
                attention.buffers += ffn_buffers;
                None
            }
        };
        RoleMemory { attention, ffn, usable }
    }

    fn attention_memory(&self, layout: Layout, batch: f64) -> RankMemory {
        let terms = self.stages.terms();
        let layers = terms.moe_layers + terms.dense_layers;
        let gate = terms.gate_weights - self.stages.gate_on_ffn();
        let shared = if self.case.shared_on_attention(layout) { terms.shared_weights } else { 0.0 };
        let landing = memory::attention_landing(
            batch,
            1.0,
            terms.row_in,
            self.stages.answer_bytes(layout),
            self.stages.answers_per_row(layout),
        );
        RankMemory {
            weights: terms.attention_weights * layers
                + (gate + shared) * terms.moe_layers
                + terms.embedding_and_head,
            kv_cache: memory::kv_cache(batch, terms.kv_held, layers),
            buffers: landing + memory::logits(batch, f64::from(self.case.shape.vocab)),
        }
    }

    fn ffn_buffers(&self, layout: Layout, batch: f64) -> f64 {
        let terms = self.stages.terms();
        let reach = self.stages.answers_per_row(layout) / f64::from(layout.ffn_ranks());
        let rows = batch * f64::from(layout.attention_ranks()) * reach.min(1.0);
        memory::ffn_landing(rows, 1.0, terms.row_in, self.stages.answer_bytes(layout))
    }

    /// FFN weights of a rank, B. Experts are dealt so that ranks differ by one at most and rank 0 is among the fullest;
    /// shared experts are whole on every rank, unless attention has them; dense layers are sliced under AFD and whole with colocation.
    pub fn ffn_weights(&self, layout: Layout, rank: u32) -> f64 {
        let (terms, shape) = (self.stages.terms(), &self.case.shape);
        let mixtures = self.case.moe_on_ffn(layout).map_or(0.0, |moe| {
            let experts = experts_of_rank(moe.num_experts, layout.ffn_ranks(), rank);
            let held = ffn::moe_weights_held(&moe, shape.hidden, f64::from(experts));
            terms.moe_layers * (held * self.case.precision.ffn.bytes() + self.stages.gate_on_ffn())
        });
        let slice = self.stages.ffn_share(layout, LayerKind::Dense);
        mixtures + terms.dense_layers * terms.dense_weights * slice
    }
}

/// Experts of one of `ranks` ranks: all of them together are all experts, once.
pub fn experts_of_rank(num_experts: u32, ranks: u32, rank: u32) -> u32 {
    num_experts / ranks + u32::from(rank < num_experts % ranks)
}

fn cycle(layout: Layout, times: &StageTimes, stages: f64) -> f64 {
    match layout {
        Layout::Afd { .. } => pipeline::afd_cycle(times, stages),
        Layout::Colocated { .. } => pipeline::colocated_cycle(times, stages),
    }
}

fn longest_service(layout: Layout, times: &StageTimes) -> f64 {
    match layout {
        Layout::Afd { .. } => times.on_attention().max(times.ffn).max(times.link),
        Layout::Colocated { .. } => (times.attention + times.ffn).max(times.link),
    }
}
