//! Whether company has helped, by what it came to: how long the ranks' turns are with it and without. The parts of a turn are
//! measured apart from each other (how long an execution takes, how long a rank thinks), so that company can be foreseen to
//! help where it does not; the turn itself is what counts. Pure.

/// Turns of either kind that are compared, by their median: a turn that was disturbed says nothing about company.
const TURNS: usize = 24;
/// Turns without company before any is waited for.
const FEW_TURNS: usize = 8;
/// Turns with company must be shorter by so much.
const WORTH_KEEPING: f64 = 0.97;
/// Executions until it is tried again, the first time that it did not help; each further time twice as many.
const FIRST_PAUSE: u64 = 1024;
const LONGEST_PAUSE: u64 = 64 * FIRST_PAUSE;

/// Of one amount of load.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trial {
    with: Turns,
    without: Turns,
    /// In executions.
    refused_until: u64,
    pause: u64,
}

/// The last [`TURNS`], microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Turns {
    last: [f64; TURNS],
    count: usize,
}

impl Trial {
    /// Whether company may be waited for: it is known how long turns are without it, and it was not found out lately that they
    /// are as long with it.
    pub(super) fn allows(&self, executions: u64) -> bool {
        executions >= self.refused_until && self.without.count >= FEW_TURNS
    }

    /// A rank's turn took so long, with company waited for at some time in it or never.
    pub(super) fn note(&mut self, with_company: bool, turn_us: f64, executions: u64) {
        if !with_company {
            return self.without.note(turn_us);
        }
        self.with.note(turn_us);
        if self.with.count < TURNS || self.without.count < FEW_TURNS {
            return;
        }
        if self.with.median() < WORTH_KEEPING * self.without.median() {
            self.pause = 0;
        } else {
            self.pause = (2 * self.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            self.refused_until = executions + self.pause;
        }
        self.with.count = 0;
    }
}

impl Turns {
    fn note(&mut self, turn_us: f64) {
        self.last[self.count % TURNS] = turn_us;
        self.count += 1;
    }

    /// Of one at least.
    fn median(&self) -> f64 {
        let mut sorted = self.last;
        let known = &mut sorted[..self.count.min(TURNS)];
        known.sort_unstable_by(f64::total_cmp);
        known[known.len() / 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes as many turns as are judged at once.
    fn note(trial: &mut Trial, with_company: bool, turn_us: f64, executions: u64) {
        (0..TURNS).for_each(|_| trial.note(with_company, turn_us, executions));
    }

    #[test]
    fn company_is_tried_once_it_is_known_what_turns_take_without() {
        let mut trial = Trial::default();
        for _ in 0..FEW_TURNS {
            assert!(!trial.allows(0));
            trial.note(false, 1000.0, 0);
        }
        assert!(trial.allows(0));
    }

    #[test]
    fn company_that_shortens_turns_is_kept_whatever_disturbs_some_of_them() {
        let mut trial = Trial::default();
        note(&mut trial, false, 1000.0, 0);
        for executions in 0..100 {
            for turn in 0..TURNS {
                trial.note(true, if turn % 5 == 0 { 30_000.0 } else { 900.0 }, executions);
            }
            assert!(trial.allows(executions));
        }
    }

    #[test]
    fn company_that_does_not_is_left_for_longer_each_time_until_it_does() {
        let mut trial = Trial::default();
        note(&mut trial, false, 1000.0, 0);
        let mut now = 0;
        for pause in [1, 2, 4, 8].map(|times| times * FIRST_PAUSE) {
            note(&mut trial, true, 990.0, now);
            assert!(!trial.allows(now) && !trial.allows(now + pause - 1) && trial.allows(now + pause));
            now += pause;
        }
        note(&mut trial, true, 800.0, now);
        assert!(trial.allows(now));
        // What it is like without has changed meanwhile.
        note(&mut trial, false, 700.0, now);
        note(&mut trial, true, 800.0, now);
        assert!(!trial.allows(now) && trial.allows(now + FIRST_PAUSE));
    }
}
