//! Options of both roles: the one error that refuses an option, and what both roles read alike.
use std::path::Path;

use super::file::FileError;
use super::threads;
use crate::net::AccessError;
use crate::net::tls::{ClientTls, Identity};
use crate::net::{TlsFiles, is_address};

/// An option that cannot be used; one line that names it and its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// A file of options.
    #[error(transparent)]
    File(#[from] FileError),
    /// An option, from the command line or the file.
    #[error("{option} {what}")]
    Option {
        /// As on the command line.
        option: &'static str,
        /// Found and expected, as the sentence goes on behind the option.
        what: String,
    },
    /// Several options, or a file that one of them names.
    #[error("{0}")]
    Whole(String),
}

impl From<AccessError> for OptionError {
    fn from(error: AccessError) -> Self {
        Self::Option { option: error.option, what: error.what }
    }
}

/// Refuses an option.
///
/// # Errors
/// Always.
pub fn refuse<T>(option: &'static str, what: impl Into<String>) -> Result<T, OptionError> {
    Err(OptionError::Option { option, what: what.into() })
}

/// `--model`: a folder that is there.
///
/// # Errors
/// [`OptionError`].
pub fn model_folder(given: Option<&Path>) -> Result<&Path, OptionError> {
    match given {
        None => refuse("--model", "is missing: give a checkpoint folder"),
        Some(folder) if folder.is_dir() => Ok(folder),
        Some(folder) if folder.exists() => refuse("--model", format!("{} is no folder", folder.display())),
        Some(folder) => refuse("--model", format!("{} is not there", folder.display())),
    }
}

/// `--deployment`.
///
/// # Errors
/// [`OptionError`].
pub fn deployment(given: Option<&str>) -> Result<String, OptionError> {
    let name = given.unwrap_or("default");
    if !(1..=128).contains(&name.chars().count()) {
        return refuse("--deployment", format!("is {name:?}; expected 1 to 128 characters"));
    }
    Ok(name.to_owned())
}

/// `--threads`, or all cores.
///
/// # Errors
/// [`OptionError`].
pub fn tensor_threads(given: Option<usize>) -> Result<usize, OptionError> {
    threads::tensor_threads(given, threads::cores()).or_else(|expected| {
        let found = given.unwrap_or_default();
        refuse("--threads", format!("is {found}; expected {expected}"))
    })
}

/// A number that is `least` or more.
///
/// # Errors
/// [`OptionError`].
pub fn at_least<N: PartialOrd + std::fmt::Display>(
    option: &'static str,
    least: N,
    number: N,
) -> Result<N, OptionError> {
    if number < least {
        return refuse(option, format!("is {number}; expected at least {least}"));
    }
    Ok(number)
}

/// Every name of a list is `host:port`.
///
/// # Errors
/// [`OptionError`] names the first that is none.
pub fn addresses<'a>(
    option: &'static str,
    names: impl IntoIterator<Item = &'a String>,
) -> Result<(), OptionError> {
    match names.into_iter().find(|name| !is_address(name)) {
        Some(name) => refuse(option, format!("is {name:?}; expected host:port")),
        None => Ok(()),
    }
}

/// `--join-token-file`: the secret without the white space around it.
///
/// # Errors
/// [`OptionError`] when the file cannot be read or nothing is in it.
pub fn join_token(file: Option<&Path>) -> Result<Option<String>, OptionError> {
    let Some(path) = file else { return Ok(None) };
    let refuse = |what| refuse("--join-token-file", format!("{}: {what}", path.display()));
    match std::fs::read_to_string(path) {
        Ok(token) if token.trim().is_empty() => refuse("nothing is in it".into()),
        Ok(token) => Ok(Some(token.trim().to_owned())),
        Err(error) => refuse(error.to_string()),
    }
}

/// The certificate of `--tls-cert` and `--tls-key`, shown where this process dials.
///
/// # Errors
/// [`OptionError`] when one of the two is missing.
pub fn own_certificate(files: &TlsFiles) -> Result<Option<Identity>, OptionError> {
    let identity = Identity::of(files.certificate.clone(), files.key.clone(), ["--tls-cert", "--tls-key"]);
    identity.or_else(|(option, what)| refuse(option, what))
}

/// What is trusted where this process dials: the CA that `option` names; and what is shown there. `None`: it dials in the
/// clear.
///
/// # Errors
/// [`OptionError`] names the file that cannot be used.
pub fn client_tls(
    option: &'static str,
    ca: Option<&Path>,
    identity: Option<Identity>,
) -> Result<Option<ClientTls>, OptionError> {
    let load = |ca: &Path| ClientTls::load(ca.to_owned(), identity).or_else(|what| refuse(option, what));
    ca.map(load).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_goes_on_behind_the_option() {
        let said = |result: Result<(), OptionError>| result.unwrap_err().to_string();
        assert_eq!(said(model_folder(None).map(drop)), "--model is missing: give a checkpoint folder");
        assert_eq!(
            said(model_folder(Some(Path::new("/nowhere"))).map(drop)),
            "--model /nowhere is not there"
        );
        assert_eq!(
            said(deployment(Some("")).map(drop)),
            "--deployment is \"\"; expected 1 to 128 characters"
        );
        assert!(said(tensor_threads(Some(0)).map(drop)).starts_with("--threads is 0; expected 1 to "));
        assert_eq!(said(at_least("--max-queue", 1, 0).map(drop)), "--max-queue is 0; expected at least 1");
        assert_eq!(
            said(addresses("--peers", &["a:1".into(), "b".into()])),
            "--peers is \"b\"; expected host:port"
        );
        assert!(
            said(join_token(Some(Path::new("/nowhere"))).map(drop))
                .starts_with("--join-token-file /nowhere: ")
        );
    }
}
