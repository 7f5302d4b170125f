//! Logs on stderr, as text for people or JSON for machines. Fields of the spans around an event (the request id among
//! them) are part of every line.
use std::fmt;
use std::io::{self, IsTerminal};
use std::str::FromStr;

use tracing::Subscriber;
use tracing::field::Field;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt as format};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people; coloured on a terminal.
    #[default]
    Text,
    /// One object per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("{other:?} is no log format; known are \"text\" and \"json\"")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// How lines look.
    pub format: LogFormat,
    /// A level, or levels by module: "info", "warn,ffn_svc=debug".
    pub filter: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, filter: "info".into() }
    }
}

/// Why logs cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter cannot be read.
    #[error("--log-level {filter:?}: {what}")]
    Filter {
        /// As configured.
        filter: String,
        /// What is wrong with it.
        what: String,
    },
    /// Something else installed a subscriber before.
    #[error("logs are set up already")]
    SetUpTwice,
}

/// Sends events of the whole process to stderr from now on. For `main`, once.
///
/// # Errors
/// [`LogError`].
pub fn init(config: &LogConfig) -> Result<(), LogError> {
    let colour = io::stderr().is_terminal();
    subscriber(config, io::stderr, colour)?.try_init().map_err(|_| LogError::SetUpTwice)
}

/// The subscriber behind [`init`], for any writer. Spans reach further layers (an exporter) through the same registry.
fn subscriber<W>(
    config: &LogConfig,
    writer: W,
    colour: bool,
) -> Result<impl Subscriber + Send + Sync, LogError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter =
        filter(&config.filter).map_err(|what| LogError::Filter { filter: config.filter.clone(), what })?;
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match config.format {
        LogFormat::Text => format::layer()
            .fmt_fields(debug_fn(text_field).delimited(" "))
            .with_writer(writer)
            .with_ansi(colour)
            .with_filter(filter)
            .boxed(),
        LogFormat::Json => format::layer()
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(false)
            .with_writer(writer)
            .with_filter(filter)
            .boxed(),
    };
    Ok(tracing_subscriber::registry().with(lines))
}

/// The filter, if every part of it says a level. `EnvFilter` itself takes a word alone for a module to show everything of,
/// so a misspelled level would silence all others.
fn filter(text: &str) -> Result<EnvFilter, String> {
    // Commas within the brackets of spans part nothing.
    if !text.contains('[') {
        for part in text.split(',').map(str::trim).filter(|part| !part.contains('=')) {
            LevelFilter::from_str(part).map_err(|_| {
                format!(
                    "{part:?} is no level; expected off, error, warn, info, debug or trace, or module=level"
                )
            })?;
        }
    }
    EnvFilter::try_new(text).map_err(|error| error.to_string())
}

/// A field as text. Where it ends can be seen: what has spaces in it is quoted, as strings are anyway.
fn text_field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    if field.name() == "message" {
        return write!(writer, "{value:?}");
    }
    let text = format!("{value:?}");
    let shows_its_end = text.starts_with(['"', '[', '{', '(']) || !text.contains(char::is_whitespace);
    if shows_its_end { write!(writer, "{field}={text}") } else { write!(writer, "{field}={text:?}") }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(config: &LogConfig, work: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        tracing::subscriber::with_default(subscriber(config, move || writer.clone(), false).unwrap(), work);
        let bytes = lines.0.lock().unwrap();
        String::from_utf8(bytes.clone()).unwrap()
    }

    fn work() {
        let span = tracing::info_span!("request", request_id = "r-1");
        let _entered = span.enter();
        tracing::info!(rows = 3, "served");
        tracing::debug!("not wanted");
    }

    #[test]
    fn lines_carry_the_request_id_in_both_formats() {
        let json = logged(&LogConfig { format: LogFormat::Json, ..LogConfig::default() }, work);
        let [line] = json.lines().collect::<Vec<_>>()[..] else { panic!("{json}") };
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&line["message"], &line["rows"]), (&"served".into(), &3.into()));
        assert_eq!(line["span"]["request_id"], "r-1");
        let text = logged(&LogConfig::default(), work);
        assert!(text.contains("served") && text.contains("r-1") && !text.contains("not wanted"), "{text}");
    }

    #[test]
    fn whatever_has_spaces_in_it_is_quoted() {
        let text = logged(&LogConfig::default(), || {
            let error = io::Error::other("it is gone");
            tracing::info!(%error, why = "a b", peer = %"F0", rows = 3, shapes = ?[1, 2], "no session with it");
        });
        assert!(
            text.ends_with(
                "no session with it error=\"it is gone\" why=\"a b\" peer=F0 rows=3 shapes=[1, 2]\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn a_wrong_filter_or_format_is_named() {
        let config = LogConfig { filter: "info,x=loud".into(), ..LogConfig::default() };
        let error = subscriber(&config, io::stderr, false).err().unwrap();
        assert!(error.to_string().contains("x=loud"), "{error}");
        for level in ["loud", "info,loud"] {
            let config = LogConfig { filter: level.into(), ..LogConfig::default() };
            let error = subscriber(&config, io::stderr, false).err().unwrap().to_string();
            assert!(error.contains("is no level; expected off, error, warn"), "{error}");
        }
        for level in ["off", "INFO", "warn,ffn_svc=debug", "afd_common::link=trace,warn"] {
            assert!(filter(level).is_ok(), "{level}");
        }
        assert!("xml".parse::<LogFormat>().unwrap_err().contains("xml"));
        assert_eq!("json".parse(), Ok(LogFormat::Json));
    }
}
