//! A template as minijinja's instructions, with questions to the [bounds](super::bounds) put between them: before every
//! instruction whose cost depends on the values it is given, and behind every one that makes a value. Jumps are moved
//! along.
//!
//! minijinja's compiler and machine are reached by a door that it keeps for such work and does not promise to leave as it
//! is, so the workspace names one exact version.
use std::collections::BTreeMap;
use std::sync::Arc;

use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, Vm, WhitespaceConfig, make_string_output,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, State, Value};

use super::bounds::{Bounds, excess, holds_namespace};
use super::operations;

const NAME: &str = "chat_template";
/// Filters of ours. No template can spell their names.
const IN_TIME: &str = "!in-time";
const KEEP: &str = "!keep";
const LISTED: &str = "!listed";
const MEMBER: &str = "!member";
const MULTIPLY: &str = "!multiply";
/// "Look it up every time."
const NO_CACHE: u8 = !0;

/// See the module's head.
pub(super) struct Program {
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

/// Teaches `environment` what a [`Program`] asks.
pub(super) fn add_questions(environment: &mut Environment<'static>) {
    environment.add_filter(IN_TIME, |state: &State, value: Value| {
        Bounds::of(state).work(0)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(KEEP, |state: &State, value: Value| Bounds::of(state).keep(value));
    environment.add_filter(LISTED, |state: &State, value: Value| Bounds::of(state).listed(value));
    environment.add_filter(MEMBER, |state: &State, value: Value| {
        let value = Bounds::of(state).keep(value)?;
        if holds_namespace(&value) {
            return Err(excess("it puts a namespace into a namespace".into()));
        }
        Ok(value)
    });
    environment.add_filter(MULTIPLY, operations::multiply);
    environment.set_formatter(|out, state, value| {
        Bounds::of(state).write(value)?;
        minijinja::escape_formatter(out, state, value)
    });
}

impl Program {
    /// Compiles a template, blocks trimmed as Hugging Face does.
    ///
    /// # Errors
    /// minijinja's own.
    pub(super) fn compile(source: &'static str) -> Result<Self, Error> {
        let config = TemplateConfig {
            syntax_config: SyntaxConfig,
            ws_config: WhitespaceConfig { trim_blocks: true, lstrip_blocks: true, ..Default::default() },
            default_auto_escape: Arc::new(|_| AutoEscape::None),
        };
        let compiled = CompiledTemplate::new(NAME, source, &config)?;
        let blocks = compiled.blocks.iter().map(|(name, block)| (*name, guarded(block, source)));
        Ok(Self { instructions: guarded(&compiled.instructions, source), blocks: blocks.collect() })
    }

    /// Runs it in an environment that can [answer](add_questions).
    ///
    /// # Errors
    /// minijinja's own, and what the bounds do not allow.
    pub(super) fn run(&self, environment: &Environment<'_>, variables: Value) -> Result<String, Error> {
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        Vm::new(environment).eval(&self.instructions, variables, &self.blocks, &mut out, AutoEscape::None)?;
        drop(out);
        Ok(text)
    }
}

/// The same instructions with questions between them.
fn guarded(plain: &Instructions<'static>, source: &'static str) -> Instructions<'static> {
    let num = plain.len() as u32;
    let (mut moved, mut asking) = (Vec::with_capacity(plain.len() + 1), Vec::new());
    for at in 0..num {
        moved.push(asking.len() as u32);
        let Some(instruction) = plain.get(at) else { break };
        asking.extend(ask(instruction.clone()).into_iter().map(|instruction| (at, instruction)));
    }
    moved.push(asking.len() as u32);
    let mut guarded = Instructions::new(NAME, source);
    for (at, mut instruction) in asking {
        if let Some(target) = target(&mut instruction)
            && let Some(to) = moved.get(*target as usize)
        {
            *target = *to;
        }
        // Where in the text it comes from, for errors.
        match (plain.get_span(at), plain.get_line(at)) {
            (Some(span), _) => guarded.add_with_span(instruction, span),
            (None, Some(line)) => guarded.add_with_line(instruction, line as u16),
            (None, None) => guarded.add(instruction),
        };
    }
    guarded
}

/// An instruction with the questions before and behind it.
fn ask(instruction: Instruction<'static>) -> Vec<Instruction<'static>> {
    use Instruction as I;
    let filter = |name| I::ApplyFilter(name, Some(1), NO_CACHE);
    match instruction {
        // What is written is counted where values are.
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(text)), I::Emit],
        // The text times the number is made at once, however long it gets.
        I::Mul => vec![I::ApplyFilter(MULTIPLY, Some(2), NO_CACHE)],
        // Below the namespace lies what it is to hold.
        I::SetAttr(_) => vec![I::Swap, filter(MEMBER), I::Swap, instruction],
        I::Slice => vec![instruction, filter(LISTED)],
        I::Add
        | I::StringConcat
        | I::BuildList(_)
        | I::BuildMap(_)
        | I::ApplyFilter(..)
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(_)
        | I::EndCapture => vec![instruction, filter(KEEP)],
        I::Eq
        | I::Ne
        | I::Gt
        | I::Gte
        | I::Lt
        | I::Lte
        | I::In
        | I::CompareAndPreserve(_)
        | I::PerformTest(..)
        | I::UnpackLists(_)
        | I::PushLoop(_) => vec![I::LoadConst(Value::from(())), filter(IN_TIME), I::DiscardTop, instruction],
        _ => vec![instruction],
    }
}

/// Where an instruction may go on.
fn target<'i>(instruction: &'i mut Instruction<'_>) -> Option<&'i mut u32> {
    use Instruction as I;
    match instruction {
        I::Iterate(target)
        | I::Jump(target)
        | I::JumpIfFalse(target)
        | I::JumpIfFalseOrPop(target)
        | I::JumpIfTrueOrPop(target)
        | I::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}
