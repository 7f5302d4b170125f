//! Spans as a collector or Jaeger tells them, and what can be asked of a whole trace.
use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, ensure};

/// A span. Ids are hexadecimal, times microseconds since the Unix epoch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) service: String,
    pub(crate) name: String,
    pub(crate) trace_id: String,
    pub(crate) span_id: String,
    pub(crate) parent: Option<String>,
    pub(crate) start_us: u64,
    pub(crate) end_us: u64,
    /// Values as text.
    pub(crate) tags: BTreeMap<String, String>,
    /// Trace and span ids.
    pub(crate) links: Vec<(String, String)>,
}

impl Seen {
    pub(crate) fn tag(&self, key: &str) -> anyhow::Result<&str> {
        let tag = self.tags.get(key).map(String::as_str);
        tag.with_context(|| format!("{} of {} has no {key}: {:?}", self.name, self.service, self.tags))
    }

    pub(crate) fn number(&self, key: &str) -> anyhow::Result<f64> {
        let text = self.tag(key)?;
        text.parse().with_context(|| format!("{key} of {} is {text:?}", self.name))
    }

    pub(crate) fn duration_us(&self) -> u64 {
        self.end_us - self.start_us
    }
}

/// All spans of one trace.
#[derive(Clone, Debug)]
pub(crate) struct Trace(pub Vec<Seen>);

impl Trace {
    pub(crate) fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Seen> {
        self.0.iter().filter(move |span| span.name == name)
    }

    /// The only span of this name.
    pub(crate) fn only<'a>(&'a self, name: &'a str) -> anyhow::Result<&'a Seen> {
        let all: Vec<_> = self.named(name).collect();
        ensure!(all.len() == 1, "{} spans are named {name}:\n{}", all.len(), self.drawn());
        Ok(all[0])
    }

    pub(crate) fn children<'a>(&'a self, of: &'a Seen) -> impl Iterator<Item = &'a Seen> {
        self.0.iter().filter(move |span| span.parent.as_deref() == Some(of.span_id.as_str()))
    }

    /// Every span's id is its own, and every parent but `outside` is part of the trace.
    pub(crate) fn is_whole(&self, outside: Option<&str>) -> anyhow::Result<()> {
        let ids: HashSet<_> = self.0.iter().map(|span| span.span_id.as_str()).collect();
        ensure!(ids.len() == self.0.len(), "a span id occurs twice:\n{}", self.drawn());
        for span in &self.0 {
            let Some(parent) = span.parent.as_deref() else { continue };
            let known = ids.contains(parent) || Some(parent) == outside;
            ensure!(known, "the parent of {} ({}) is missing:\n{}", span.name, span.service, self.drawn());
        }
        Ok(())
    }

    /// Part of a span's time that its children cover together, 0 to 1.
    pub(crate) fn covered(&self, span: &Seen) -> f64 {
        let mut parts: Vec<_> = self
            .children(span)
            .map(|child| (child.start_us.max(span.start_us), child.end_us.min(span.end_us)))
            .filter(|(start, end)| start < end)
            .collect();
        parts.sort_unstable();
        let (mut sum, mut until) = (0, span.start_us);
        for (start, end) in parts {
            sum += end.saturating_sub(start.max(until));
            until = until.max(end);
        }
        sum as f64 / span.duration_us().max(1) as f64
    }

    /// For messages: the tree with times, beginning with spans without a parent here.
    pub(crate) fn drawn(&self) -> String {
        let ids: HashSet<_> = self.0.iter().map(|span| span.span_id.as_str()).collect();
        let is_root = |span: &&Seen| span.parent.as_deref().is_none_or(|parent| !ids.contains(parent));
        let mut text = String::new();
        let mut roots: Vec<_> = self.0.iter().filter(is_root).collect();
        roots.sort_by_key(|span| span.start_us);
        let begin = roots.first().map_or(0, |span| span.start_us);
        roots.iter().for_each(|root| self.draw(root, begin, 0, &mut text));
        text
    }

    fn draw(&self, span: &Seen, begin: u64, depth: usize, text: &mut String) {
        let at = |us: u64| (us as i64 - begin as i64) as f64 / 1e3;
        let place = ["afd.layer", "afd.stage"].map(|key| span.tags.get(key).map_or("", String::as_str));
        *text += &format!(
            "{:indent$}{} ({}) {:.3}..{:.3} ms {}\n",
            "",
            span.name,
            span.service,
            at(span.start_us),
            at(span.end_us),
            place.join("/"),
            indent = 2 * depth
        );
        let mut children: Vec<_> = self.children(span).collect();
        children.sort_by_key(|child| (child.start_us, child.end_us));
        children.iter().for_each(|child| self.draw(child, begin, depth + 1, text));
    }
}
