//! The options of both services, and their exit codes, as tables in Markdown, made from the same definitions as `--help`.
use afd_common::process::exit::Exit;
use clap::{Arg, Args, Command, CommandFactory};

/// The tables by the names of their sections.
pub(crate) fn tables() -> [(&'static str, String); 3] {
    let attention = attention_svc::cli::Cli::command();
    let serve = attention.find_subcommand("serve").expect("the command is there").clone();
    let ffn = ffn_svc::config::ServeOptions::augment_args(Command::new("serve"));
    [("attention-svc serve", table(&serve)), ("ffn-svc serve", table(&ffn)), ("exit codes", exit_codes())]
}

/// Every option that takes a time, by its command.
pub(crate) fn times() -> Vec<(String, Arg)> {
    let attention = attention_svc::cli::Cli::command();
    let ffn = Command::new("ffn-svc")
        .subcommand(ffn_svc::config::ServeOptions::augment_args(Command::new("serve")))
        .subcommand(ffn_svc::probe::ProbeOptions::augment_args(Command::new("probe")))
        .subcommand(ffn_svc::place::PlaceOptions::augment_args(Command::new("place")));
    [attention, ffn].iter().flat_map(times_of).collect()
}

fn times_of(command: &Command) -> Vec<(String, Arg)> {
    let is_time = |arg: &&Arg| {
        let name = arg.get_long().unwrap_or_default();
        let value = arg.get_value_names().and_then(<[_]>::first).map_or("", |name| name.as_str());
        let word = value.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
        name.ends_with("-ms")
            || name.ends_with("timeout")
            || ["TIME", "MS", "US", "S", "SECONDS", "MILLISECONDS", "MINUTES"].contains(&word)
    };
    let own = command.get_arguments().filter(is_time).map(|arg| (command.get_name().to_owned(), arg.clone()));
    own.chain(command.get_subcommands().flat_map(times_of)).collect()
}

fn exit_codes() -> String {
    let row = |exit: Exit| format!("| {} | {} |", exit as u8, exit.meaning());
    let rows: Vec<String> = Exit::ALL.into_iter().map(row).collect();
    format!("| exit code | of both services and all their commands |\n| --- | --- |\n{}", rows.join("\n"))
}

fn table(command: &Command) -> String {
    let rows =
        command.get_arguments().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str())).map(row);
    ["| option | what it says | default |".to_owned(), "| --- | --- | --- |".to_owned()]
        .into_iter()
        .chain(rows)
        .collect::<Vec<_>>()
        .join("\n")
}

fn row(arg: &Arg) -> String {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default().replace('\n', " ");
    let (what, default) = match help.split_once(" [default: ") {
        Some((what, default)) => (what.to_owned(), default.trim_end_matches(']').to_owned()),
        None => match help.strip_suffix(" [required]").or(help.strip_suffix(" (required)")) {
            Some(what) => (what.to_owned(), "required".to_owned()),
            None => (help, String::new()),
        },
    };
    let shown = |name| if arg.is_require_equals_set() { format!("[={name}]") } else { format!(" {name}") };
    let value = arg.get_value_names().and_then(<[_]>::first).map(shown).unwrap_or_default();
    let option = format!("--{}{value}", arg.get_long().unwrap_or_default());
    format!(
        "| `{}` | {} | {} |",
        option.replace('|', "\\|"),
        what.replace('|', "\\|"),
        default.replace('|', "\\|")
    )
}
