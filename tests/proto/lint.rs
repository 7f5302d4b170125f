//! The rules of buf's STANDARD category that can be broken here, over the compiled files, so that they hold on a machine
//! that has no buf. Where buf is there, `tests/clients` runs it too (`deploy/clients.sh buf`).
use std::collections::{HashMap, HashSet};

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet, ServiceDescriptorProto,
};

/// Every broken rule, by the rule's name in buf.
pub(crate) fn complaints(set: &FileDescriptorSet) -> Vec<String> {
    let mut lint = Lint::default();
    for file in &set.file {
        lint.file(file);
        file.message_type.iter().for_each(|message| lint.message(file.package(), message));
        file.enum_type.iter().for_each(|item| lint.enumeration(file.package(), item));
        file.service.iter().for_each(|service| lint.service(file.package(), service));
    }
    lint.shared_messages(set);
    lint.unused_imports(set);
    lint.found
}

#[derive(Default)]
struct Lint {
    found: Vec<String>,
}

impl Lint {
    fn expect(&mut self, holds: bool, rule: &str, name: impl std::fmt::Display) {
        if !holds {
            self.found.push(format!("{rule}: {name}"));
        }
    }

    fn file(&mut self, file: &FileDescriptorProto) {
        let (name, package) = (file.name(), file.package());
        self.expect(file.syntax() == "proto3", "SYNTAX_SPECIFIED", name);
        self.expect(file.public_dependency.is_empty(), "IMPORT_NO_PUBLIC", name);
        let (folder, leaf) = name.rsplit_once('/').unwrap_or(("", name));
        self.expect(is_lower_snake(leaf.trim_end_matches(".proto")), "FILE_LOWER_SNAKE_CASE", name);
        self.expect(!package.is_empty(), "PACKAGE_DEFINED", name);
        self.expect(package.replace('.', "/") == folder, "PACKAGE_DIRECTORY_MATCH", name);
        self.expect(package.split('.').all(is_lower_snake), "PACKAGE_LOWER_SNAKE_CASE", name);
        let version = package.rsplit('.').next().and_then(|last| last.strip_prefix('v'));
        let versioned = version.is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()));
        self.expect(versioned, "PACKAGE_VERSION_SUFFIX", name);
    }

    fn message(&mut self, parent: &str, message: &DescriptorProto) {
        if message.options.as_ref().is_some_and(|options| options.map_entry()) {
            return;
        }
        let name = format!("{parent}.{}", message.name());
        self.expect(is_pascal(message.name()), "MESSAGE_PASCAL_CASE", &name);
        for field in &message.field {
            self.expect(
                is_lower_snake(field.name()),
                "FIELD_LOWER_SNAKE_CASE",
                format!("{name}.{}", field.name()),
            );
            let reserved_word = field.name().to_lowercase() == "descriptor";
            self.expect(!reserved_word, "FIELD_NO_DESCRIPTOR", format!("{name}.{}", field.name()));
        }
        for oneof in &message.oneof_decl {
            let written = oneof.name().trim_start_matches('_');
            self.expect(
                is_lower_snake(written),
                "ONEOF_LOWER_SNAKE_CASE",
                format!("{name}.{}", oneof.name()),
            );
        }
        message.nested_type.iter().for_each(|nested| self.message(&name, nested));
        message.enum_type.iter().for_each(|nested| self.enumeration(&name, nested));
    }

    fn enumeration(&mut self, parent: &str, item: &EnumDescriptorProto) {
        let name = format!("{parent}.{}", item.name());
        self.expect(is_pascal(item.name()), "ENUM_PASCAL_CASE", &name);
        let aliases = item.options.as_ref().is_some_and(|options| options.allow_alias());
        self.expect(!aliases, "ENUM_NO_ALLOW_ALIAS", &name);
        let prefix = format!("{}_", upper_snake(item.name()));
        for value in &item.value {
            let full = format!("{name}.{}", value.name());
            self.expect(value.name() == value.name().to_uppercase(), "ENUM_VALUE_UPPER_SNAKE_CASE", &full);
            self.expect(value.name().starts_with(&prefix), "ENUM_VALUE_PREFIX", &full);
            let suffixed = value.number() != 0 || value.name().ends_with("_UNSPECIFIED");
            self.expect(suffixed, "ENUM_ZERO_VALUE_SUFFIX", &full);
        }
        let first = item.value.first().map(|value| value.number());
        self.expect(first == Some(0), "ENUM_FIRST_VALUE_ZERO", &name);
    }

    fn service(&mut self, package: &str, service: &ServiceDescriptorProto) {
        let name = format!("{package}.{}", service.name());
        self.expect(is_pascal(service.name()), "SERVICE_PASCAL_CASE", &name);
        self.expect(service.name().ends_with("Service"), "SERVICE_SUFFIX", &name);
        for method in &service.method {
            let full = format!("{name}.{}", method.name());
            self.expect(is_pascal(method.name()), "RPC_PASCAL_CASE", &full);
            let is_named = |type_name: &str, ending: &str| {
                let leaf = type_name.rsplit('.').next().unwrap_or_default();
                let plain = format!("{}{ending}", method.name());
                leaf == plain || leaf == format!("{}{plain}", service.name())
            };
            self.expect(is_named(method.input_type(), "Request"), "RPC_REQUEST_STANDARD_NAME", &full);
            self.expect(is_named(method.output_type(), "Response"), "RPC_RESPONSE_STANDARD_NAME", &full);
        }
    }

    fn shared_messages(&mut self, set: &FileDescriptorSet) {
        let mut seen = HashSet::new();
        for method in set.file.iter().flat_map(|file| &file.service).flat_map(|service| &service.method) {
            for name in [method.input_type(), method.output_type()] {
                self.expect(seen.insert(name.to_owned()), "RPC_REQUEST_RESPONSE_UNIQUE", name);
            }
        }
    }

    /// Imports of files outside the set are not judged.
    fn unused_imports(&mut self, set: &FileDescriptorSet) {
        let declared: HashMap<_, _> = set.file.iter().map(|file| (file.name(), declared(file))).collect();
        for file in &set.file {
            let used = used(file);
            for import in &file.dependency {
                let is_used = declared.get(import.as_str()).is_none_or(|names| !names.is_disjoint(&used));
                self.expect(is_used, "IMPORT_USED", format!("{} imports {import}", file.name()));
            }
        }
    }
}

fn declared(file: &FileDescriptorProto) -> HashSet<String> {
    let mut names = HashSet::new();
    let scope = format!(".{}", file.package());
    names.extend(file.enum_type.iter().map(|item| format!("{scope}.{}", item.name())));
    for message in all_messages(file) {
        names.insert(message.0.clone());
        names.extend(message.1.enum_type.iter().map(|item| format!("{}.{}", message.0, item.name())));
    }
    names
}

fn used(file: &FileDescriptorProto) -> HashSet<String> {
    let fields = all_messages(file).into_iter().flat_map(|(_, message)| &message.field);
    let methods = file.service.iter().flat_map(|service| &service.method);
    fields
        .map(|field| field.type_name().to_owned())
        .chain(methods.flat_map(|method| [method.input_type().to_owned(), method.output_type().to_owned()]))
        .collect()
}

/// With full names that begin with a dot, as references are written.
fn all_messages(file: &FileDescriptorProto) -> Vec<(String, &DescriptorProto)> {
    let mut found = Vec::new();
    let mut open: Vec<_> =
        file.message_type.iter().map(|message| (format!(".{}", file.package()), message)).collect();
    while let Some((parent, message)) = open.pop() {
        let name = format!("{parent}.{}", message.name());
        open.extend(message.nested_type.iter().map(|nested| (name.clone(), nested)));
        found.push((name, message));
    }
    found
}

fn is_lower_snake(name: &str) -> bool {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(good) && !name.contains("__")
}

fn is_pascal(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_uppercase()) && name.chars().all(|c| c.is_ascii_alphanumeric())
}

fn upper_snake(name: &str) -> String {
    let mut snake = String::new();
    for (at, c) in name.char_indices() {
        if at > 0 && c.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(c.to_ascii_uppercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_can_be_broken() {
        let set = crate::sample(
            "Bad/File.proto",
            r#"syntax = "proto3"; package bad.Things;
            message lower { int32 Field = 1; int32 descriptor = 3; oneof Choice { int32 g = 2; } enum Inner { OTHER = 0; } }
            enum Colour { option allow_alias = true; COLOUR_red = 0; COLOUR_ROT = 0; }
            service Things { rpc run(lower) returns (lower); }"#,
        );
        let found = complaints(&set);
        for rule in [
            "FILE_LOWER_SNAKE_CASE: Bad/File.proto",
            "PACKAGE_DIRECTORY_MATCH: Bad/File.proto",
            "PACKAGE_LOWER_SNAKE_CASE: Bad/File.proto",
            "PACKAGE_VERSION_SUFFIX: Bad/File.proto",
            "MESSAGE_PASCAL_CASE: bad.Things.lower",
            "FIELD_LOWER_SNAKE_CASE: bad.Things.lower.Field",
            "FIELD_NO_DESCRIPTOR: bad.Things.lower.descriptor",
            "ONEOF_LOWER_SNAKE_CASE: bad.Things.lower.Choice",
            "ENUM_VALUE_PREFIX: bad.Things.lower.Inner.OTHER",
            "ENUM_ZERO_VALUE_SUFFIX: bad.Things.Colour.COLOUR_red",
            "ENUM_VALUE_UPPER_SNAKE_CASE: bad.Things.Colour.COLOUR_red",
            "ENUM_NO_ALLOW_ALIAS: bad.Things.Colour",
            "SERVICE_SUFFIX: bad.Things.Things",
            "RPC_PASCAL_CASE: bad.Things.Things.run",
            "RPC_REQUEST_STANDARD_NAME: bad.Things.Things.run",
            "RPC_RESPONSE_STANDARD_NAME: bad.Things.Things.run",
            "RPC_REQUEST_RESPONSE_UNIQUE: .bad.Things.lower",
        ] {
            assert!(found.iter().any(|complaint| complaint == rule), "{rule} is not in {found:#?}");
        }
    }

    #[test]
    fn an_import_that_nothing_uses_is_found() {
        let file = |name: &str, dependency: &[&str], message: &str, uses: &str| FileDescriptorProto {
            name: Some(name.into()),
            package: Some("a.v1".into()),
            dependency: dependency.iter().map(|name| (*name).to_owned()).collect(),
            message_type: vec![DescriptorProto {
                name: Some(message.into()),
                field: vec![prost_types::FieldDescriptorProto {
                    name: Some("f".into()),
                    type_name: Some(uses.into()),
                    ..Default::default()
                }],
                ..Default::default()
            }],
            ..Default::default()
        };
        let unused = |uses: &str| {
            let file = [file("a.proto", &["b.proto"], "A", uses), file("b.proto", &[], "B", "")].to_vec();
            let found = complaints(&FileDescriptorSet { file });
            found.iter().any(|complaint| complaint == "IMPORT_USED: a.proto imports b.proto")
        };
        assert!(unused(".a.v1.A"));
        assert!(!unused(".a.v1.B"));
    }
}
