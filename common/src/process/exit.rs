//! Exit codes: one table for both services and all their commands. A supervisor needs to know one thing: whether starting
//! the same command again may help.
use std::error::Error;
use std::process::ExitCode;

/// How a process ends; the number is its exit code. A command line that cannot be parsed ends with that of
/// [`Unusable`](Self::Unusable) too: the parser sees to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It did what it was asked for.
    Done = 0,
    /// It could not, this time.
    Failed = 1,
    /// It cannot: what it was asked for would have to be another thing.
    Unusable = 2,
}

impl Exit {
    /// The table.
    pub const ALL: [Self; 3] = [Self::Done, Self::Failed, Self::Unusable];

    /// For people.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Done => "all went well; a service was told to end (SIGTERM, Ctrl-C), and did",
            Self::Failed => {
                "it did not work this time: a port in use, a peer that is missing or refuses, a device or an engine that \
                 failed; of probe and doctor: not all is well"
            }
            Self::Unusable => {
                "it cannot work as asked: an option, the configuration file, or a file that they name (checkpoint, \
                 placement, token, certificate); starting it again alike does not help"
            }
        }
    }

    /// Ends `program` with this, or says in one line what went wrong and ends as that does.
    pub fn end<E: AsRef<dyn Error + Send + Sync>>(
        program: &str,
        outcome: Result<Self, E>,
        exit_of: impl Fn(&E) -> Self,
    ) -> ExitCode {
        let exit = outcome.unwrap_or_else(|error| {
            eprintln!("{program}: {}", one_line(error.as_ref()));
            exit_of(&error)
        });
        ExitCode::from(exit as u8)
    }
}

/// The error and its causes, without those that it has told already.
fn one_line(error: &(dyn Error + 'static)) -> String {
    let (mut line, mut next) = (error.to_string(), error.source());
    while let Some(cause) = next {
        let said = cause.to_string();
        if !line.contains(&said) {
            line = format!("{line}: {said}");
        }
        next = cause.source();
    }
    line
}

/// The table for the end of `--help`.
pub fn help() -> String {
    let line = |exit: &Exit| format!("\n  {}  {}", *exit as u8, exit.meaning());
    format!("Exit codes:{}", Exit::ALL.iter().map(line).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Cause(&'static str, #[source] Option<Box<Cause>>);

    #[test]
    fn a_cause_is_told_once() {
        let refused = || Some(Box::new(Cause("refused", None)));
        assert_eq!(one_line(&Cause("F0: refused", refused())), "F0: refused");
        assert_eq!(one_line(&Cause("connecting", refused())), "connecting: refused");
    }

    #[test]
    fn the_table_has_a_line_for_each_code() {
        let help = help();
        let codes: Vec<_> = help.lines().skip(1).filter_map(|line| line.trim().split("  ").next()).collect();
        assert_eq!(codes, ["0", "1", "2"]);
    }
}
