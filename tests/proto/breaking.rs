//! What of a protocol its users rely on, as a sorted list of facts, and which of them a change takes away.
use std::collections::BTreeMap;

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// What is named, and what is known of it: `field afd.v1.Tensor 3` is `bytes data`.
pub(crate) type Facts = BTreeMap<String, String>;

/// Every fact of a set of files. A field is known by its number, and so is a value of an enumeration.
pub(crate) fn facts(set: &FileDescriptorSet) -> Facts {
    let mut facts = Facts::new();
    for file in &set.file {
        let package = file.package();
        // Names of generated packages and classes are part of what users compile against.
        let options = file.options.clone().unwrap_or_default();
        let (go, java) = (options.go_package(), options.java_package());
        let shape = format!(
            "{} {package}, go_package `{go}`, java_package `{java}`, java_multiple_files {}",
            file.syntax(),
            options.java_multiple_files()
        );
        facts.insert(format!("file {}", file.name()), shape);
        file.message_type.iter().for_each(|item| message(&mut facts, file.name(), package, item));
        file.enum_type.iter().for_each(|item| enumeration(&mut facts, file.name(), package, item));
        for service in &file.service {
            let name = format!("{package}.{}", service.name());
            facts.insert(format!("service {name}"), format!("in {}", file.name()));
            for method in &service.method {
                let stream = |yes| if yes { "stream " } else { "" };
                let shape = format!(
                    "({}{}) returns ({}{})",
                    stream(method.client_streaming()),
                    method.input_type(),
                    stream(method.server_streaming()),
                    method.output_type()
                );
                facts.insert(format!("rpc {name}/{}", method.name()), shape);
            }
        }
    }
    facts
}

/// What a change from `old` to `new` breaks, one sentence each. A field may go when its number and its name are reserved.
pub(crate) fn broken(old: &Facts, new: &Facts) -> Vec<String> {
    let is_reserved = |name: &str, fact: &str| {
        let Some((message, number)) = name.strip_prefix("field ").and_then(|rest| rest.split_once(' '))
        else {
            return false;
        };
        let field = fact.split_whitespace().last().unwrap_or_default();
        [number, field].iter().all(|what| new.contains_key(&format!("reserved {message} {what}")))
    };
    old.iter()
        .filter_map(|(name, fact)| match new.get(name) {
            Some(now) if now == fact => None,
            Some(now) => Some(format!("{name} was `{fact}`, now it is `{now}`")),
            None if is_reserved(name, fact) => None,
            None if name.starts_with("field ") => {
                Some(format!("{name} (`{fact}`) is gone and its number and name are not both reserved"))
            }
            None => Some(format!("{name} (`{fact}`) is gone")),
        })
        .collect()
}

/// What `new` has more.
pub(crate) fn added(old: &Facts, new: &Facts) -> Vec<String> {
    let names = new.keys().filter(|name| !old.contains_key(*name));
    names.map(|name| format!("{name} (`{}`)", new[name])).collect()
}

fn message(facts: &mut Facts, file: &str, parent: &str, item: &DescriptorProto) {
    let name = format!("{parent}.{}", item.name());
    facts.insert(format!("message {name}"), format!("in {file}"));
    for field in &item.field {
        facts.insert(format!("field {name} {}", field.number()), field_shape(item, field));
    }
    for range in &item.reserved_range {
        for number in range.start()..range.end() {
            facts.insert(format!("reserved {name} {number}"), "number".into());
        }
    }
    for field in &item.reserved_name {
        facts.insert(format!("reserved {name} {field}"), "name".into());
    }
    item.nested_type.iter().for_each(|nested| message(facts, file, &name, nested));
    item.enum_type.iter().for_each(|nested| enumeration(facts, file, &name, nested));
}

fn enumeration(facts: &mut Facts, file: &str, parent: &str, item: &EnumDescriptorProto) {
    let name = format!("{parent}.{}", item.name());
    facts.insert(format!("enum {name}"), format!("in {file}"));
    for value in &item.value {
        facts.insert(format!("value {name} {}", value.number()), value.name().to_owned());
    }
}

/// As it is declared, the name last: `optional float top_p`, `oneof prompt string text`.
fn field_shape(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let oneof = field.oneof_index.and_then(|at| message.oneof_decl.get(at as usize));
    let presence = match (field.label(), oneof) {
        (Label::Repeated, _) => "repeated ".to_owned(),
        _ if field.proto3_optional() => "optional ".to_owned(),
        (_, Some(oneof)) => format!("oneof {} ", oneof.name()),
        _ => String::new(),
    };
    let kind = match field.r#type() {
        Type::Message | Type::Enum | Type::Group => field.type_name().to_owned(),
        scalar => scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    };
    let packed = field.options.as_ref().and_then(|options| options.packed);
    let packed = packed.map_or(String::new(), |packed| format!("[packed = {packed}] "));
    format!("{presence}{kind} {packed}{}", field.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = r#"syntax = "proto3"; package a.v1;
        message M { optional int32 f = 1; string g = 2; oneof o { int32 h = 3; } reserved 9; reserved "i"; }
        enum E { E_UNSPECIFIED = 0; E_ONE = 1; }
        service S { rpc R(M) returns (stream M); }"#;

    /// What breaks when `from` is written as `to`.
    fn change(from: &str, to: &str) -> Vec<String> {
        assert!(OLD.contains(from));
        let facts = |text: &str| facts(&crate::sample("a/v1/a.proto", text));
        broken(&facts(OLD), &facts(&OLD.replace(from, to)))
    }

    #[test]
    fn additions_break_nothing() {
        assert_eq!(change("string g = 2;", "string g = 2; bytes j = 4; message N {}"), [""; 0]);
        assert_eq!(change("E_ONE = 1;", "E_ONE = 1; E_TWO = 2;"), [""; 0]);
        assert_eq!(change("stream M);", "stream M); rpc Q(M) returns (M);"), [""; 0]);
        assert_eq!(change("reserved 9;", "reserved 9, 11 to 12;"), [""; 0]);
    }

    #[test]
    fn a_field_may_go_when_number_and_name_are_reserved() {
        assert_eq!(change("string g = 2;", "reserved 2; reserved \"g\";"), [""; 0]);
        let sentence = "field a.v1.M 2 (`string g`) is gone and its number and name are not both reserved";
        assert_eq!(change("string g = 2;", ""), [sentence]);
        assert_eq!(change("string g = 2;", "reserved 2;"), [sentence]);
        assert_eq!(change("string g = 2;", "string g = 4;"), [sentence]);
    }

    #[test]
    fn whatever_else_changes_is_told() {
        let was_now =
            |name: &str, was: &str, now: &str| vec![format!("{name} was `{was}`, now it is `{now}`")];
        assert_eq!(change("string g", "bytes g"), was_now("field a.v1.M 2", "string g", "bytes g"));
        assert_eq!(change("string g", "string gg"), was_now("field a.v1.M 2", "string g", "string gg"));
        assert_eq!(
            change("string g", "repeated string g"),
            was_now("field a.v1.M 2", "string g", "repeated string g")
        );
        assert_eq!(
            change("optional int32 f", "int32 f"),
            was_now("field a.v1.M 1", "optional int32 f", "int32 f")
        );
        assert_eq!(
            change("oneof o", "oneof p"),
            was_now("field a.v1.M 3", "oneof o int32 h", "oneof p int32 h")
        );
        assert_eq!(change("E_ONE", "E_EINS"), was_now("value a.v1.E 1", "E_ONE", "E_EINS"));
        assert_eq!(change("E_ONE = 1;", ""), ["value a.v1.E 1 (`E_ONE`) is gone"]);
        assert_eq!(change("reserved 9;", ""), ["reserved a.v1.M 9 (`number`) is gone"]);
        let (was, now) = ("(.a.v1.M) returns (stream .a.v1.M)", "(.a.v1.M) returns (.a.v1.M)");
        assert_eq!(change("(stream M)", "(M)"), was_now("rpc a.v1.S/R", was, now));
        assert_eq!(change("rpc R(M) returns (stream M);", ""), [format!("rpc a.v1.S/R (`{was}`) is gone")]);
    }
}
