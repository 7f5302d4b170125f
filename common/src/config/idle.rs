//! Options that were given and have no effect beside the others: whoever gives one expects something of it, so that it is
//! named in a warning at the start. Where more than that is at stake, the option is refused where it is read.
use std::fmt;

/// An option that was given and has no effect; one line that names it and the option that takes its effect away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idle {
    /// As on the command line.
    option: &'static str,
    /// As the sentence goes on behind "has no effect".
    because: &'static str,
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} has no effect {}", self.option, self.because)
    }
}

/// What takes their effect away from some options.
#[derive(Clone, Copy, Debug)]
pub struct Rule<'a> {
    /// Whether it is so here.
    pub holds: bool,
    /// As the sentence goes on behind "has no effect"; names an option.
    pub because: &'static str,
    /// Each with whether it was given, on the command line or in the file.
    pub options: &'a [(&'static str, bool)],
}

/// Options that have no effect by these rules, each once.
pub fn idle(rules: &[Rule<'_>]) -> Vec<Idle> {
    let mut all: Vec<Idle> = Vec::new();
    for Rule { because, options, .. } in rules.iter().filter(|rule| rule.holds) {
        for (option, _) in options.iter().filter(|(_, is_given)| *is_given) {
            if all.iter().all(|idle| idle.option != *option) {
                all.push(Idle { option, because });
            }
        }
    }
    all
}

/// Says so in the log.
pub fn warn(idle: &[Idle]) {
    for option in idle {
        tracing::warn!("{option}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_named_once_where_it_was_given_and_a_rule_holds() {
        let rule = |holds, because, options| Rule { holds, because, options };
        let all = idle(&[
            rule(false, "without --a", &[("--never", true)]),
            rule(true, "without --b", &[("--given", true), ("--not-given", false)]),
            rule(true, "with --c", &[("--given", true), ("--too", true)]),
        ]);
        let said: Vec<String> = all.iter().map(Idle::to_string).collect();
        assert_eq!(said, ["--given has no effect without --b", "--too has no effect with --c"]);
    }
}
