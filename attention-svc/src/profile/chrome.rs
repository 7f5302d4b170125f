//! Times of both sides as lanes of one timeline, in Chrome's trace format. Pure.
//!
//! A process is a rank. Of attention: one lane for what the engine's thread does, where there is a GPU one for what its
//! stream does, by its own marks, and one for the hops of each stage to each shard. A step tells how long the engine waited for
//! the FFN and how much of the FFN's time was hidden. Of an FFN rank: a lane for each stage, where a hop waits, is computed and
//! is sent back. The FFN's times are on its own clock: on several hosts they lie where these clocks put them.
use std::time::Instant;

use serde_json::{Value, json};

use crate::engine::ProfiledStep;
use crate::remote_ffn::stats::FfnReport;

/// One moment on both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// On the engine's.
    pub now: Instant,
    /// On the wall, microseconds since the Unix epoch.
    pub now_us: u64,
}

impl Clock {
    fn at(&self, moment: Instant) -> f64 {
        let ago = self.now.saturating_duration_since(moment).as_secs_f64();
        let ahead = moment.saturating_duration_since(self.now).as_secs_f64();
        self.now_us as f64 + (ahead - ago) * 1e6
    }
}

/// A lane: process and thread.
type Lane = (u32, u32);

/// The engine's own lane.
const ENGINE: u32 = 0;
/// Shards a stage has lanes for.
const MAX_SHARDS: u32 = 64;
/// What attention's stream does; behind the lanes of hops.
const DEVICE: u32 = 1 + 4 * MAX_SHARDS;

/// A timeline of attention rank `rank` and of whoever reported.
pub fn timeline(rank: u32, steps: &[ProfiledStep], reports: &[FfnReport], clock: &Clock) -> Value {
    let attention = format!("A{rank} attention");
    let mut lanes = Lanes::default();
    let pid = lanes.process(&attention);
    lanes.name((pid, ENGINE), "engine");
    let mut events = Vec::new();
    for step in steps {
        add_step(&mut events, &mut lanes, pid, step, clock);
    }
    for report in reports {
        add_report(&mut events, &mut lanes, report);
    }
    events.extend(lanes.named);
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}

fn add_step(events: &mut Vec<Value>, lanes: &mut Lanes, pid: u32, step: &ProfiledStep, clock: &Clock) {
    let (from, to) = (clock.at(step.begun), clock.at(step.ended));
    let args = json!({
        "step": step.step.0, "rows": step.rows, "stages": step.stages, "phase": format!("{:?}", step.phase),
        "ffn_wait_us": step.ffn_wait.as_micros() as u64, "ffn_hidden_us": step.ffn_hidden.as_micros() as u64,
    });
    events.push(slice((pid, ENGINE), format!("step {}", step.step.0), from, to, args));
    let worker = if step.on_device { DEVICE } else { ENGINE };
    if step.on_device {
        lanes.name((pid, DEVICE), "device");
    }
    for attend in &step.attends {
        let (layer, stage) = (attend.hop.layer.0, attend.hop.stage.0);
        let (from, to) = (clock.at(attend.begun), clock.at(attend.ended));
        let args = json!({"step": step.step.0, "layer": layer, "stage": stage});
        let name = format!("{} L{layer} s{stage}", attend.work.name());
        events.push(slice((pid, worker), name, from, to, args));
    }
    for hop in &step.hops {
        let (layer, stage, shard) = (hop.key.layer.0, hop.key.stage.0, hop.shard);
        let lane = (pid, 1 + u32::from(stage) * MAX_SHARDS + shard.min(MAX_SHARDS - 1));
        lanes.name(lane, &format!("stage {stage}, hops to shard {shard}"));
        let to = hop.arrived.or(hop.combined).unwrap_or(step.ended);
        let args = json!({
            "step": step.step.0, "layer": layer, "rows": hop.rows, "link": hop.link.to_string(), "sends": hop.sends,
        });
        events.push(slice(lane, format!("L{layer}"), clock.at(hop.begun), clock.at(to), args));
        if let Some(begun) = hop.combine_begun.filter(|begun| *begun < to) {
            let args = json!({"step": step.step.0, "shard": shard});
            events.push(slice(
                (pid, worker),
                format!("wait L{layer} s{stage}"),
                clock.at(begun),
                clock.at(to),
                args,
            ));
        }
    }
}

fn add_report(events: &mut Vec<Value>, lanes: &mut Lanes, report: &FfnReport) {
    let pid = lanes.process(&format!("{} (shard {})", report.peer, report.shard));
    for hop in &report.report.hops {
        let lane = (pid, hop.stage);
        lanes.name(lane, &format!("stage {}", hop.stage));
        let args = json!({"step": report.report.step_id, "layer": hop.layer, "rows": hop.rows});
        let times =
            [hop.arrived_at_us, hop.started_at_us, hop.finished_at_us, hop.sent_at_us].map(|us| us as f64);
        for (what, ends) in ["queue", "compute", "send"].into_iter().zip(times.windows(2)) {
            events.push(slice(lane, format!("{what} L{}", hop.layer), ends[0], ends[1], args.clone()));
        }
    }
}

fn slice((pid, tid): Lane, name: String, from: f64, to: f64, args: Value) -> Value {
    let dur = (to - from).max(0.0);
    json!({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": from, "dur": dur, "args": args})
}

/// Names of processes and lanes, each said once.
#[derive(Default)]
struct Lanes {
    processes: Vec<String>,
    known: Vec<Lane>,
    named: Vec<Value>,
}

impl Lanes {
    fn process(&mut self, name: &str) -> u32 {
        if let Some(at) = self.processes.iter().position(|known| known == name) {
            return at as u32 + 1;
        }
        self.processes.push(name.to_owned());
        let pid = self.processes.len() as u32;
        self.named.push(json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}));
        self.named
            .push(json!({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}));
        pid
    }

    fn name(&mut self, lane: Lane, name: &str) {
        if !self.known.contains(&lane) {
            self.known.push(lane);
            let (pid, tid) = lane;
            self.named.push(
                json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use afd_common::frame::FrameHeader;
    use afd_common::ids::{Epoch, Shard, StepId};
    use afd_common::link::LinkKind;
    use afd_common::proto::v1;

    use super::*;
    use crate::engine::{AttendRecord, HopRecord, Work};
    use crate::scheduler::Phase;

    #[test]
    fn every_rank_stage_and_shard_has_a_lane_and_times_are_on_one_clock() {
        let now = Instant::now();
        let ago = |micros: u64| now - Duration::from_micros(micros);
        let hop = FrameHeader::key(7, 2, 1);
        let record = |shard| HopRecord {
            key: hop,
            shard,
            rows: 3,
            link: LinkKind::Shm,
            epoch: Epoch(1),
            sends: 1,
            begun: ago(70),
            sent: ago(65),
            combine_begun: Some(ago(50)),
            arrived: Some(ago(20)),
            combined: Some(ago(20)),
        };
        let step = ProfiledStep {
            step: StepId(7),
            phase: Phase::Decode,
            rows: 3,
            stages: 2,
            ffn_wait: Duration::from_micros(30),
            ffn_hidden: Duration::from_micros(15),
            on_device: false,
            begun: ago(100),
            ended: ago(10),
            attends: vec![
                AttendRecord { work: Work::Attention, hop, begun: ago(90), ended: ago(70) },
                AttendRecord { work: Work::SharedExperts, hop, begun: ago(65), ended: ago(50) },
            ],
            hops: vec![record(0), record(1)],
        };
        let timing = v1::HopTiming {
            layer: 2,
            stage: 1,
            rows: 3,
            arrived_at_us: 935,
            started_at_us: 940,
            finished_at_us: 970,
            sent_at_us: 972,
        };
        let report = FfnReport {
            peer: "F1 at h:1".into(),
            shard: Shard::new(1, 2).unwrap(),
            report: v1::StepReport { step_id: 7, hops: vec![timing], ..Default::default() },
        };
        let on_device = ProfiledStep { step: StepId(8), on_device: true, ..step.clone() };
        let timeline = timeline(0, &[step, on_device], &[report], &Clock { now, now_us: 1000 });
        let events = timeline["traceEvents"].as_array().unwrap();
        let find = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
        let times = |event: &Value| {
            (event["ts"].as_f64().unwrap().round() as u64, event["dur"].as_f64().unwrap().round() as u64)
        };
        assert_eq!(times(find("step 7")[0]), (900, 90));
        let args = &find("step 7")[0]["args"];
        assert_eq!((&args["ffn_wait_us"], &args["ffn_hidden_us"]), (&json!(30), &json!(15)));
        assert_eq!(times(find("attention L2 s1")[0]), (910, 20));
        assert_eq!(times(find("shared experts L2 s1")[0]), (935, 15));
        assert_eq!(times(find("wait L2 s1")[0]), (950, 30));
        assert_eq!(times(find("compute L2")[0]), (940, 30));
        let hops = find("L2");
        assert_eq!(hops.len(), 4);
        let attends = find("attention L2 s1");
        assert_ne!(attends[0]["tid"], attends[1]["tid"], "the device has a lane of its own");
        assert_ne!(hops[0]["tid"], hops[1]["tid"], "a lane a shard");
        let names: Vec<&str> = events
            .iter()
            .filter(|event| event["ph"] == "M")
            .filter_map(|event| event["args"]["name"].as_str())
            .collect();
        for name in [
            "device",
            "A0 attention",
            "F1 at h:1 (shard 1/2)",
            "engine",
            "stage 1, hops to shard 0",
            "stage 1",
        ] {
            assert!(names.contains(&name), "{name} in {names:?}");
        }
    }
}
