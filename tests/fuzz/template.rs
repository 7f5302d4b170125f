//! Chat templates: a checkpoint's may be broken or endless, and a conversation may try to break a good one.
use attention_svc::text::settings::TextSettings;
use attention_svc::text::{ChatMessage, ChatTemplate};

use crate::driver::fuzz;

const TEMPLATES: [&str; 4] = [
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m.content | trim }}{% endfor %}",
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}\
     {%- for message in messages -%}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
     {{ raise_exception('roles must alternate') }}{% endif %}[{{ loop.index }}] {{ message.content.strip() }}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "{% macro say(x, n=3) %}{{ x * n }}{% endmacro %}{% for i in range(3) %}{{ say(messages | tojson(indent=2)) }}{% endfor %}\
     {{ strftime_now('%d %b %Y') | length }}",
    "{% for m in messages %}{% for n in messages %}{{ m.content.split(' ')[0] ~ n.role.upper() }}{% endfor %}{% endfor %}",
];

fn settings(template: &str) -> TextSettings {
    TextSettings {
        special_tokens: vec![("bos_token".into(), "<s>".into())],
        add_bos_token: None,
        chat_template: Some(template.to_owned()),
    }
}

fn conversation() -> Vec<ChatMessage> {
    let say =
        |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into(), name: None };
    vec![
        say("system", "Be brief."),
        say("user", "Hi \u{1f600} {{ 1 }}"),
        say("assistant", ""),
        say("user", "Why?"),
    ]
}

#[test]
fn a_template_renders_or_is_refused_and_always_ends() -> anyhow::Result<()> {
    let words = [
        "{% for i in range(999) %}",
        "{% endfor %}",
        "{{",
        "}}",
        "{%",
        "%}",
        "| tojson",
        ".join(",
        "[1:]",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "(",
        "not ",
        "messages",
        "| list",
        "namespace(a=1)",
        "%",
        "//",
        "strftime_now('%Y')",
        "~",
        " * 99999999",
        ".count('')",
        ".replace('', messages | tojson)",
        "{% set ns = namespace(a='ab') %}",
        "{% set ns.a = ns.a ~ ns.a %}",
        "{% set ns.a = [ns.a, ns.a] %}",
        "{% set ns.a = ns.a[0:] %}",
        "{% set ns.a %}",
        "{% endset %}",
        "| sort",
        "| map('string')",
        "range(*messages)",
    ];
    let seeds = TEMPLATES.map(|template| template.as_bytes().to_vec()).to_vec();
    let messages = conversation();
    fuzz("template", seeds, &words, |input| {
        let source = String::from_utf8_lossy(input);
        match ChatTemplate::new(&settings(&source)) {
            Err(what) => what.split(['(', '`', '\'']).next().unwrap_or("").to_owned(),
            Ok(template) => match template.render(&messages, true, &serde_json::Map::new()) {
                Ok(text) => {
                    assert!(text.len() <= 64 << 20, "{} bytes", text.len());
                    "rendered".into()
                }
                Err(error) => error.to_string().split(['(', '`', '\'']).next().unwrap_or("").to_owned(),
            },
        }
    })
}

#[test]
fn a_conversation_breaks_no_template() -> anyhow::Result<()> {
    let templates: Result<Vec<_>, _> =
        TEMPLATES.iter().map(|source| ChatTemplate::new(&settings(source))).collect();
    let templates = templates.map_err(anyhow::Error::msg)?;
    let seeds = ["user\u{0}Hi there\u{0}assistant\u{0}Hello", "system\u{0}{{ x }}\u{0}user\u{0}\u{0}"];
    let seeds = seeds.map(|text| text.as_bytes().to_vec()).to_vec();
    fuzz(
        "conversation",
        seeds,
        &["{{ x }}", "{% for i in y %}", "\u{0}user\u{0}", "\u{0}system\u{0}", "\u{2028}"],
        |input| {
            let text = String::from_utf8_lossy(input);
            let parts: Vec<&str> = text.split('\u{0}').take(64).collect();
            let messages: Vec<ChatMessage> = parts
                .chunks(2)
                .map(|pair| {
                    let content = pair.get(1).copied().unwrap_or_default().to_owned();
                    ChatMessage { role: pair[0].to_owned(), content, name: None }
                })
                .collect();
            let answer =
                |template: &ChatTemplate| match template.render(&messages, true, &serde_json::Map::new()) {
                    Ok(_) => "rendered".to_owned(),
                    Err(error) => error.to_string(),
                };
            templates.iter().map(answer).collect()
        },
    )
}
