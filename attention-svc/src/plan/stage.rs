//! The times of one stage of one layer, from a case's terms: the formulas, or what was measured instead.
use super::case::{Case, Exchange, Terms};
use super::formulas::{exchange, ffn, pipeline::StageTimes, roofline_s, routing};
use super::layout::Layout;

/// What decides a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Reading weights or cache.
    Memory,
    /// Matrix products.
    Compute,
    /// A measured line, whose cause is not known.
    Measured,
}

/// A layer's FFN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// A mixture of experts.
    Moe,
    /// One gated MLP.
    Dense,
}

/// Computes stage times of one case under any layout.
#[derive(Debug)]
pub struct Stages<'a> {
    case: &'a Case,
    terms: Terms,
}

impl<'a> Stages<'a> {
    /// Prepares a case.
    pub fn new(case: &'a Case) -> Self {
        Self { case, terms: Terms::of(case) }
    }

    /// What all layouts share.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// `x` rows per attention rank and stage.
    pub fn times(&self, layout: Layout, kind: LayerKind, rows: f64) -> StageTimes {
        let pool = rows * f64::from(layout.attention_ranks());
        let transfer = self.exchange(layout, kind, rows, pool);
        StageTimes {
            attention: self.attention(rows).0,
            shared: self.shared(layout, kind, rows),
            ffn: self.ffn(layout, kind, pool).0,
            dispatch: transfer.latency + transfer.dispatch,
            combine: transfer.latency + transfer.combine + transfer.adding_up,
            // AFD sends one way and receives the other; colocated ranks do both in both directions.
            link: match layout {
                Layout::Afd { .. } => transfer.dispatch.max(transfer.combine),
                Layout::Colocated { .. } => transfer.dispatch + transfer.combine,
            },
        }
    }

    /// `T_A = t0_A + max(x · F_att / P_A, (w_A · b_w + x · S · kv) / BW)`, s.
    pub fn attention(&self, rows: f64) -> (f64, Resource) {
        let terms = &self.terms;
        let kv_s = rows * terms.kv_read / terms.memory_bandwidth;
        let calibration = &self.case.profile.calibration;
        if let Some(line) = &calibration.attention {
            return (line.at(rows) + kv_s, Resource::Measured);
        }
        let flop = rows * terms.attention_flop;
        let bytes = terms.attention_weights + rows * terms.kv_read;
        let roofline = roofline_s(flop, terms.attention_rate, bytes, terms.memory_bandwidth);
        let at_most = calibration.attention_at_most.map_or(1.0, |ratio| ratio.0);
        let compute_binds = flop / terms.attention_rate >= roofline;
        let resource = if compute_binds { Resource::Compute } else { Resource::Memory };
        ((terms.attention_fixed + roofline) * at_most, resource)
    }

    /// `T_S = max(x · n_s · d · 6 · h / P_F, n_s · 3 · h · d · b_w / BW)`, s: the shared experts of a stage, where attention has
    /// them. Their launches are in `t0_A`.
    pub fn shared(&self, layout: Layout, kind: LayerKind, rows: f64) -> f64 {
        if kind != LayerKind::Moe || !self.case.shared_on_attention(layout) {
            return 0.0;
        }
        let terms = &self.terms;
        roofline_s(rows * terms.shared_flop, terms.ffn_rate, terms.shared_weights, terms.memory_bandwidth)
    }

    /// `T_F = t0_F + max(X · … / P_F, (…) / BW) · λ` of the fullest rank, s.
    pub fn ffn(&self, layout: Layout, kind: LayerKind, pool: f64) -> (f64, Resource) {
        let (terms, shape) = (&self.terms, &self.case.shape);
        let share = self.ffn_share(layout, kind);
        // Measured lines are of the layers that make up the model: mixtures, or MLPs where there are none.
        let measured = kind == LayerKind::Moe || shape.moe.is_none();
        if let (Some(line), true) = (&self.case.profile.calibration.ffn, measured) {
            return (line.at(share, pool) * self.case.workload.imbalance, Resource::Measured);
        }
        let (flop, bytes, imbalance) = match (kind, &self.case.moe_on_ffn(layout)) {
            (LayerKind::Moe, Some(moe)) => {
                let ranks = layout.ffn_ranks();
                let experts = ffn::experts_on_fullest_rank(moe.num_experts, ranks);
                let weight_bytes = self.case.precision.ffn.bytes();
                (
                    ffn::moe_flop(moe, shape.hidden, pool, experts, ranks),
                    ffn::moe_weights_read(moe, shape.hidden, pool, experts) * weight_bytes
                        + self.gate_on_ffn(),
                    self.case.workload.imbalance,
                )
            }
            // Colocated ranks run their own rows through the whole MLP: share 1 of the weights, X/R of the rows.
            _ => (pool / f64::from(layout.ffn_ranks()) * terms.dense_flop, share * terms.dense_weights, 1.0),
        };
        let time = roofline_s(flop, terms.ffn_rate, bytes, terms.memory_bandwidth);
        let compute_binds = flop / terms.ffn_rate >= time;
        (terms.ffn_fixed + time * imbalance, if compute_binds { Resource::Compute } else { Resource::Memory })
    }

    /// Part of a layer's FFN weights on the fullest rank.
    pub fn ffn_share(&self, layout: Layout, kind: LayerKind) -> f64 {
        match (layout, kind, &self.case.shape.moe) {
            (_, LayerKind::Moe, Some(moe)) => {
                ffn::experts_on_fullest_rank(moe.num_experts, layout.ffn_ranks()) / f64::from(moe.num_experts)
            }
            (Layout::Afd { ffn, .. }, ..) => 1.0 / f64::from(ffn),
            (Layout::Colocated { .. }, ..) => 1.0,
        }
    }

    /// Router weights an FFN rank reads, B.
    pub fn gate_on_ffn(&self) -> f64 {
        match self.case.workload.exchange {
            Exchange::Routed => 0.0,
            Exchange::Broadcast | Exchange::PointToPoint => self.terms.gate_weights,
        }
    }

    /// Answers per row that attention adds up.
    pub fn answers_per_row(&self, layout: Layout) -> f64 {
        let Layout::Afd { ffn, .. } = layout else { return 1.0 };
        match self.case.workload.exchange {
            Exchange::PointToPoint => 1.0,
            Exchange::Broadcast => f64::from(ffn),
            Exchange::Routed => self.send_fraction(f64::from(ffn)) * f64::from(ffn),
        }
    }

    /// B of one answer: partial sums of several shards travel as f32 when every shard answers every row.
    pub fn answer_bytes(&self, layout: Layout) -> f64 {
        let partial_sums = self.case.workload.exchange == Exchange::Broadcast && layout.ffn_ranks() > 1;
        if partial_sums { self.terms.row_out.max(4.0 * self.terms.hidden) } else { self.terms.row_out }
    }

    /// `P_send` for `owners` equal owners of the experts; every owner has a part of a dense layer.
    fn send_fraction(&self, owners: f64) -> f64 {
        match &self.case.shape.moe {
            Some(moe) => routing::send_fraction(moe.num_experts, moe.experts_per_token, owners),
            None => 1.0,
        }
    }

    fn exchange(&self, layout: Layout, kind: LayerKind, rows: f64, pool: f64) -> Transfer {
        let none_needed = match layout {
            Layout::Afd { .. } => false,
            Layout::Colocated { ranks, .. } => ranks == 1 || kind == LayerKind::Dense,
        };
        if none_needed {
            return Transfer::default();
        }
        if let Some(line) = &self.case.profile.calibration.exchange {
            let occupied = line.per_row.0 * rows;
            return Transfer { latency: line.fixed.0, dispatch: occupied, combine: occupied, adding_up: 0.0 };
        }
        match layout {
            Layout::Afd { attention, ffn, .. } => {
                self.afd_exchange(attention, ffn, kind, rows, pool, self.answer_bytes(layout))
            }
            Layout::Colocated { ranks, .. } => self.colocated_exchange(f64::from(ranks), rows),
        }
    }

    fn afd_exchange(&self, a: u32, f: u32, kind: LayerKind, rows: f64, pool: f64, row_out: f64) -> Transfer {
        let (links, row_in) = (&self.case.profile.links, self.terms.row_in);
        let near = a + f <= links.scale_up.devices;
        let (bandwidth, latency) = match near {
            true => (links.scale_up.bandwidth.value, links.scale_up.latency.value),
            false => (links.scale_out.bandwidth.value, links.scale_out.latency.value),
        };
        let ffn_ranks = f64::from(f);
        if self.case.workload.exchange == Exchange::PointToPoint {
            let within = if f <= links.scale_up.devices { links.scale_up.bandwidth.value } else { bandwidth };
            let one_way = |row: f64| {
                exchange::to_one(rows, pool, row, ffn_ranks).occupancy_s(bandwidth)
                    + exchange::among_ffn_s(pool, row, ffn_ranks, within)
            };
            return Transfer {
                latency,
                dispatch: one_way(row_in),
                combine: one_way(row_out),
                adding_up: 0.0,
            };
        }
        // In one domain the targets are ranks. Across, they are hosts whose cards share the load (and whose fast links
        // spread the rows inside, which is not counted).
        let hosts = f64::from(f.div_ceil(self.case.profile.devices_per_host));
        let (targets, per_target) = if near { (ffn_ranks, 1.0) } else { (hosts, ffn_ranks / hosts) };
        let to_all = self.case.workload.exchange == Exchange::Broadcast || kind == LayerKind::Dense;
        let sent = if to_all { 1.0 } else { self.send_fraction(targets) };
        let one_way = |row: f64| {
            exchange::to_targets(rows, pool, row, sent, targets, per_target).occupancy_s(bandwidth)
        };
        let adding_up = exchange::combine_s(rows, row_out, sent * targets, self.terms.memory_bandwidth);
        Transfer { latency, dispatch: one_way(row_in), combine: one_way(row_out), adding_up }
    }

    /// A row goes to each other rank that owns one of its experts: over the fast link within the domain, over the network
    /// card beyond; both at once.
    fn colocated_exchange(&self, ranks: f64, rows: f64) -> Transfer {
        let links = &self.case.profile.links;
        let copies = exchange::copies_to_others(self.send_fraction(ranks), ranks);
        let in_domain = ranks.min(f64::from(links.scale_up.devices));
        let far = copies * (ranks - in_domain) / (ranks - 1.0);
        let one_way = |row: f64| {
            let near_s = (copies - far) * rows * row / links.scale_up.bandwidth.value;
            near_s.max(far * rows * row / links.scale_out.bandwidth.value)
        };
        let latency = if far > 0.0 { &links.scale_out.latency } else { &links.scale_up.latency };
        let adding_up = exchange::combine_s(rows, self.terms.row_out, copies, self.terms.memory_bandwidth);
        Transfer {
            latency: latency.value,
            dispatch: one_way(self.terms.row_in),
            combine: one_way(self.terms.row_out),
            adding_up,
        }
    }
}

/// One exchange, s.
#[derive(Clone, Copy, Debug, Default)]
struct Transfer {
    /// `α`, one way.
    latency: f64,
    /// Occupancy towards the FFN.
    dispatch: f64,
    /// Occupancy back.
    combine: f64,
    /// On attention, after the answers came.
    adding_up: f64,
}
