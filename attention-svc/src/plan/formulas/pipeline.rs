//! Stages that take turns on two roles and the links between them.
//!
//! A layer's *cycle* is the time from one layer to the next in steady state; a step takes `L` of them. Times are of one
//! stage of one layer, s.

/// The times of one stage of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTimes {
    /// `T_A`, s.
    pub attention: f64,
    /// `T_S`, what attention computes of the FFN while it would wait for the answer, s: its shared experts, or nothing.
    pub shared: f64,
    /// `T_F`, s.
    pub ffn: f64,
    /// `T_C` towards the FFN, s: latency and occupancy.
    pub dispatch: f64,
    /// `T_C` back, s.
    pub combine: f64,
    /// Occupancy of the busier direction of the busiest link, s; at most the larger of the two above.
    pub link: f64,
}

impl StageTimes {
    /// `T_A + max(T_F + 2 T_C, T_S)`, a stage's way through a layer when nothing is in its way, s.
    pub fn round_trip(&self) -> f64 {
        self.attention + self.away().max(self.shared)
    }

    /// `T_F + 2 T_C`, from a stage's rows leaving attention until its answer is there, s.
    pub fn away(&self) -> f64 {
        self.ffn + self.dispatch + self.combine
    }

    /// `T_A + T_S`, what attention does for a stage, s.
    pub fn on_attention(&self) -> f64 {
        self.attention + self.shared
    }
}

/// `max(m · (T_A + T_S), m · T_F, m · T_link, T_A + max(T_F + 2 T_C, T_S))`, s: each role and each link serves the `m` stages one after the
/// other, and no stage is faster than its round trip. With `m = 1` it is the round trip. Sources: MegaScale-Infer section
/// 4 for the roles; the link's term is what its bandwidth adds.
pub fn afd_cycle(times: &StageTimes, stages: f64) -> f64 {
    (stages * times.on_attention().max(times.ffn).max(times.link)).max(times.round_trip())
}

/// The same where attention and experts share a device, s: `max(m · (T_A + T_F), m · T_link, T_A + T_F + 2 T_C)`; `m = 2`
/// is what others call dual-batch overlap.
pub fn colocated_cycle(times: &StageTimes, stages: f64) -> f64 {
    (stages * (times.attention + times.ffn).max(times.link)).max(times.round_trip())
}

/// `1 − m · T / T_layer`, the part of the time a role waits.
pub fn idle(stage_s: f64, stages: f64, cycle_s: f64) -> f64 {
    (1.0 - stages * stage_s / cycle_s).max(0.0)
}

/// `(T_A + T_F + 2 T_C) + T_f · (m · L − 1)`, one step alone from the first row in to the last row out, s: what a step
/// takes when nothing of the next one may begin before it has ended. `bottleneck` is the longest of a stage's services.
/// Source: MegaScale-Infer, equation 4; the maximum extends it to a cycle bound by the round trip.
pub fn step_alone(times: &StageTimes, bottleneck: f64, stages: f64, layers: f64) -> f64 {
    let bound_by_service = times.round_trip() + bottleneck * (stages * layers - 1.0);
    let bound_by_round_trip = layers * times.round_trip() + bottleneck * (stages - 1.0);
    bound_by_service.max(bound_by_round_trip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balanced(exchange: f64) -> StageTimes {
        StageTimes { attention: 1.0, shared: 0.0, ffn: 1.0, dispatch: exchange, combine: exchange, link: 0.0 }
    }

    #[test]
    fn what_attention_does_while_it_waits_is_free_until_it_would_not_wait() {
        let with = |shared: f64, stages: f64| afd_cycle(&StageTimes { shared, ..balanced(0.25) }, stages);
        // Alone, a stage is away for 1.5.
        assert_eq!([with(0.0, 1.0), with(1.5, 1.0), with(2.0, 1.0)], [2.5, 2.5, 3.0]);
        // Beside another one attention waits for half of that.
        assert_eq!([with(0.25, 2.0), with(0.5, 2.0)], [2.5, 3.0]);
    }

    #[test]
    fn two_stages_without_exchange_keep_both_roles_busy() {
        let times = balanced(0.0);
        let cycle = afd_cycle(&times, 2.0);
        assert_eq!((idle(times.attention, 2.0, cycle), idle(times.ffn, 2.0, cycle)), (0.0, 0.0));
        assert_eq!(afd_cycle(&times, 1.0), 2.0, "one stage leaves each role idle half of the time");
    }

    #[test]
    fn with_exchange_two_stages_reach_one_over_one_plus_its_share() {
        for share in [0.1, 0.25, 0.5] {
            let cycle = afd_cycle(&balanced(share), 2.0);
            assert!((2.0 / cycle - 1.0 / (1.0 + share)).abs() < 1e-12);
        }
    }

    /// `m ≥ 2 · (1 + T_C / T_f)`, `T_f = max(T_A, T_F)`: stages that hide the exchange when both roles take `T_f`. `None` when
    /// `T_C ≥ T_f`, where no number helps. Source: MegaScale-Infer, equation 3.
    fn stages_to_hide(one_way_s: f64, stage_s: f64) -> Option<u32> {
        let needed = 2.0 * (1.0 + one_way_s / stage_s);
        // Rounding noise must not ask for a stage more than the formula does.
        (one_way_s < stage_s).then(|| (needed - 1e-9).ceil() as u32)
    }

    #[test]
    fn as_many_stages_as_the_rule_asks_for_hide_it_and_one_less_does_not() {
        for exchange in [0.01, 0.3, 0.5, 0.7, 0.99] {
            let stages = stages_to_hide(exchange, 1.0).unwrap();
            let idle_with = |stages: u32| {
                let stages = f64::from(stages);
                idle(1.0, stages, afd_cycle(&balanced(exchange), stages))
            };
            assert!(idle_with(stages) < 1e-9 && idle_with(stages - 1) > 1e-3, "{exchange}: {stages}");
        }
        assert_eq!(stages_to_hide(0.5, 1.0), Some(3));
        assert_eq!(stages_to_hide(1.0, 1.0), None);
    }

    #[test]
    fn a_full_link_is_not_hidden_by_stages() {
        let times = StageTimes { dispatch: 1.5, combine: 1.5, link: 1.5, ..balanced(0.0) };
        assert_eq!(afd_cycle(&times, 4.0), 6.0);
    }

    #[test]
    fn a_step_alone_is_never_shorter_than_its_cycles() {
        for exchange in [0.0, 0.2, 0.6, 1.4] {
            for stages in [1.0, 2.0, 3.0, 4.0] {
                let times = balanced(exchange);
                let alone = step_alone(&times, 1.0, stages, 60.0);
                assert!(alone >= 60.0 * afd_cycle(&times, stages) - 1e-9, "{exchange} {stages}");
            }
            assert!(
                (step_alone(&balanced(exchange), 1.0, 1.0, 60.0) - 60.0 * (2.0 + 2.0 * exchange)).abs()
                    < 1e-9
            );
        }
    }
}
