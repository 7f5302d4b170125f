//! Whether everything a client can name is explained where it is declared.
use std::collections::HashSet;

use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet};

/// What has no comment, by full name.
pub(crate) fn missing(set: &FileDescriptorSet) -> Vec<String> {
    set.file.iter().flat_map(|file| Walk::new(file).file(file)).collect()
}

// Numbers of the lists in descriptor.proto, of which a location's path is made.
const MESSAGES: i32 = 4;
const ENUMS: i32 = 5;
const SERVICES: i32 = 6;
const FIELDS_METHODS_VALUES: i32 = 2;
const NESTED_MESSAGES: i32 = 3;
const NESTED_ENUMS: i32 = 4;
const ONEOFS: i32 = 8;

struct Walk {
    commented: HashSet<Vec<i32>>,
    missing: Vec<String>,
}

impl Walk {
    fn new(file: &FileDescriptorProto) -> Self {
        let locations = file.source_code_info.iter().flat_map(|info| &info.location);
        let has_words = |text: &str| text.chars().any(char::is_alphanumeric);
        let commented = locations
            .filter(|location| {
                has_words(location.leading_comments()) || has_words(location.trailing_comments())
            })
            .map(|location| location.path.clone())
            .collect();
        Self { commented, missing: Vec::new() }
    }

    fn file(mut self, file: &FileDescriptorProto) -> Vec<String> {
        let package = file.package();
        for (at, message) in (0..).zip(&file.message_type) {
            self.message(&[MESSAGES, at], package, message);
        }
        for (at, item) in (0..).zip(&file.enum_type) {
            self.enumeration(&[ENUMS, at], package, item);
        }
        for (at, service) in (0..).zip(&file.service) {
            let (path, name) = ([SERVICES, at], format!("{package}.{}", service.name()));
            self.look(&path, &[], &name);
            for (at, method) in (0..).zip(&service.method) {
                self.look(&path, &[FIELDS_METHODS_VALUES, at], &format!("{name}.{}", method.name()));
            }
        }
        self.missing
    }

    fn message(&mut self, path: &[i32], parent: &str, message: &DescriptorProto) {
        if message.options.as_ref().is_some_and(|options| options.map_entry()) {
            return;
        }
        let name = format!("{parent}.{}", message.name());
        self.look(path, &[], &name);
        for (at, field) in (0..).zip(&message.field) {
            self.look(path, &[FIELDS_METHODS_VALUES, at], &format!("{name}.{}", field.name()));
        }
        for (at, oneof) in (0..).zip(&message.oneof_decl) {
            // An `optional` field is a oneof of its own that nobody wrote.
            if !oneof.name().starts_with('_') {
                self.look(path, &[ONEOFS, at], &format!("{name}.{}", oneof.name()));
            }
        }
        for (at, nested) in (0..).zip(&message.nested_type) {
            self.message(&[path, &[NESTED_MESSAGES, at]].concat(), &name, nested);
        }
        for (at, nested) in (0..).zip(&message.enum_type) {
            self.enumeration(&[path, &[NESTED_ENUMS, at]].concat(), &name, nested);
        }
    }

    fn enumeration(&mut self, path: &[i32], parent: &str, item: &EnumDescriptorProto) {
        let name = format!("{parent}.{}", item.name());
        self.look(path, &[], &name);
        for (at, value) in (0..).zip(&item.value) {
            self.look(path, &[FIELDS_METHODS_VALUES, at], &format!("{name}.{}", value.name()));
        }
    }

    fn look(&mut self, path: &[i32], rest: &[i32], name: &str) {
        if !self.commented.contains(&[path, rest].concat()) {
            self.missing.push(format!("{name} has no comment"));
        }
    }
}

#[test]
fn whatever_has_none_is_named() {
    let set = crate::sample(
        "a/v1/a.proto",
        r#"syntax = "proto3"; package a.v1;
        message M { optional int32 f = 1; oneof o { int32 g = 2; } message N {} enum I { I_UNSPECIFIED = 0; } map<int32, int32> m = 3; }
        enum E { E_UNSPECIFIED = 0; }
        service S { rpc R(M) returns (M); }
        // ---
        message Ruled {}
        // Explained.
        message Explained {
          int32 behind = 1; // Explained as well.
        }"#,
    );
    let names = [
        "M",
        "M.f",
        "M.g",
        "M.m",
        "M.o",
        "M.N",
        "M.I",
        "M.I.I_UNSPECIFIED",
        "Ruled",
        "E",
        "E.E_UNSPECIFIED",
        "S",
        "S.R",
    ];
    assert_eq!(missing(&set), names.map(|name| format!("a.v1.{name} has no comment")));
}
