//! Which ranks of a role something is told of already: what attention says of the same ranks is then no news, and one cause is one
//! sentence. Pure.
use afd_common::proto::v1;

use super::look::Seen;

/// See the module's head.
pub(super) struct Told<'a> {
    /// Where ranks of the role were asked for.
    given: Vec<&'a str>,
    told: Vec<String>,
}

impl<'a> Told<'a> {
    /// Nothing yet, of what was seen where ranks of `role` should be.
    pub(super) fn nothing(seen: &'a [Seen], role: v1::Role) -> Self {
        let given = seen.iter().filter(|seen| seen.expected == role);
        Self { given: given.map(|seen| seen.address.as_str()).collect(), told: Vec::new() }
    }

    /// Something is told of the rank at an address.
    pub(super) fn add(&mut self, address: &str) {
        self.told.push(address.to_owned());
    }

    /// Whether something is told of the rank at an address that attention says, which may be told under a name.
    pub(super) fn has(&self, resolved: &str) -> bool {
        let is_told = |address: &str| self.told.iter().any(|told| told == address);
        if is_told(resolved) {
            return true;
        }
        // Of several names with one port it is not known whose the address is.
        let mut names = self.given.iter().filter(|given| is_same(resolved, given)).peekable();
        names.peek().is_some() && names.all(|name| is_told(name))
    }
}

/// An attention rank tells the address it resolved; a name is compared by its port alone.
pub(super) fn is_same(resolved: &str, given: &str) -> bool {
    let parts = |address: &str| {
        let (host, port) = address.rsplit_once(':')?;
        Some((host.trim_start_matches("http://").to_owned(), port.to_owned()))
    };
    match (parts(resolved), parts(given)) {
        (Some((host, port)), Some((given_host, given_port))) => {
            let is_name = given_host.parse::<std::net::IpAddr>().is_err() && !given_host.starts_with('[');
            port == given_port && (is_name || host == given_host)
        }
        _ => false,
    }
}
