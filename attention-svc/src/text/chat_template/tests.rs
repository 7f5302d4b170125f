//! What templates may do, and what they may not.
use serde_json::json;

use super::*;

/// The template, or why there is none.
fn made(source: &str) -> Result<ChatTemplate, String> {
    let settings = TextSettings {
        special_tokens: vec![("bos_token".into(), "<s>".into())],
        chat_template: Some(source.into()),
        ..TextSettings::default()
    };
    ChatTemplate::new(&settings)
}

fn template(source: &str) -> ChatTemplate {
    made(source).unwrap()
}

fn render(source: &str, extra: serde_json::Value) -> Result<String, TextError> {
    let messages = [ChatMessage { role: "user".into(), content: " Hi <b> ".into(), name: None }];
    template(source).render(&messages, true, extra.as_object().unwrap())
}

#[test]
fn one_that_runs_away_is_the_models_fault_and_one_that_refuses_is_not() {
    for runaway in [
        again_and_again(""),
        "{{ 'ab' * 99999999999 }}".into(),
        "{{ messages | tojson(indent=9999) }}".into(),
    ] {
        let why = made(&runaway).err().unwrap();
        assert!(why.starts_with("this model's chat template cannot be used: "), "{runaway}: {why}");
    }
    for usable in ["{{ raise_exception('no') }}", "{{ messages[1].role.name }}", "{{ 1 + messages }}"] {
        assert!(made(usable).is_ok(), "{usable}");
    }
    let by_length = "{% if messages[0].content | length > 5 %}{{ 'ab' * 99999999999 }}{% endif %}";
    assert!(matches!(render(by_length, json!({})), Err(TextError::Template(_))), "not every message");
}

#[test]
fn python_methods_and_blocks_work_as_in_hugging_face() {
    let source = "{{ bos_token }}{% for m in messages %}\n  {% if m['content'].strip().startswith('Hi') %}\n[{{ m.content | trim }}]{% endif %}\n{% endfor %}{{ missing }}";
    assert_eq!(render(source, json!({})).unwrap(), "<s>[Hi <b>]");
}

#[test]
fn json_is_written_as_python_writes_it() {
    let extra = json!({"x": {"b": [1, "ü<>&'"], "a": null, "e": []}});
    assert_eq!(
        render("{{ x | tojson }}", extra.clone()).unwrap(),
        r#"{"b": [1, "ü<>&'"], "a": null, "e": []}"#
    );
    assert_eq!(
        render("{{ x | tojson(indent=2) }}", extra).unwrap(),
        "{\n  \"b\": [\n    1,\n    \"ü<>&'\"\n  ],\n  \"a\": null,\n  \"e\": []\n}"
    );
}

#[test]
fn a_template_may_refuse_in_its_own_words() {
    let source =
        "{% macro check(m) %}{{ raise_exception('No ' + m.role) }}{% endmacro %}{{ check(messages[0]) }}";
    assert!(matches!(render(source, json!({})), Err(TextError::Refused(m)) if m == "No user"));
    assert!(matches!(render("{{ 1 + messages }}", json!({})), Err(TextError::Template(_))));
}

#[test]
fn a_template_that_does_not_compile_is_named() {
    let settings = TextSettings { chat_template: Some("{% if %}".into()), ..TextSettings::default() };
    assert!(ChatTemplate::new(&settings).unwrap_err().contains("chat template cannot be used"));
    assert!(ChatTemplate::new(&TextSettings::default()).unwrap_err().contains("no chat template"));
}

/// Something that makes much out of little, inside of loops that take long by themselves.
fn again_and_again(what: &str) -> String {
    let loops = "{% for i in range(9999) %}{% for j in range(9999) %}";
    format!("{{% set ns = namespace(a='ab', l=[1, 2]) %}}{loops}{what}{{% endfor %}}{{% endfor %}}")
}

#[test]
fn every_template_ends() {
    let in_loops = [
        "",
        "{{ i }}",
        "text that is written",
        "{% set x %}text that is kept{% set ns.a = ns.a %}{% endset %}",
        "{% set x = messages | tojson(indent=2) %}",
        "{% set x = messages * 9999 %}",
        "{% set x = messages == messages * 1 %}",
        "{% set x = 7 in range(9999) %}",
        "{% set x = range(9999) | sort | unique | list %}",
        "{% set ns.a = ns.a ~ ns.a %}",
        "{% set ns.a = ns.a + ns.a %}",
        "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}",
        "{% set ns.a = ns.a | replace('', 'abc') %}",
        "{% set ns.a = ns.a.replace('', ns.a) %}",
        "{% set ns.a = ns.a.join([ns.a, ns.a, ns.a]) %}",
        "{% set ns.a = ns.a | tojson %}",
        "{% set ns.a = '{0}{0}{0}'.format(ns.a) %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = ns.l * 2 %}",
        "{% set ns.l = [ns.l, ns.l] %}",
        "{% set ns.l = {'a': ns.l, 'b': ns.l} %}",
        "{% set ns.l = [ns.l] %}",
        "{% set ns.l = ns.l[0:] %}",
        "{% set ns.l = ns.l | reverse %}",
        "{% set ns.l = ns.l | chain(ns.l) %}",
        "{% set ns.l = ns.l | zip(ns.l) %}",
        "{% set ns.l = dict(a=ns.l) %}",
        "{% set ns.l = namespace(a=ns.l) %}",
    ];
    let alone = [
        "{{ 'ab' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ 99999999999 * messages }}",
        "{{ (messages * 9999 * 9999 * 9999) | length }}",
        "{{ ('ab' * 9999999).replace('a', 'cd' * 9999) }}",
        "{{ ('ab' * 9999999) | replace('a', 'cd' * 9999) }}",
        "{{ ('ab' * 9999999) | join('cd' * 9999) }}",
        "{{ ('cd' * 9999).join('ab' * 9999999) }}",
        "{{ ('ab' * 9999999).strip('ba' * 9999999) }}",
        "{{ ('ab' * 9999999) | trim('ba' * 9999999) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ '%*d' | format(99999999999, 1) }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '\n' * 999999 | indent(99999999999) }}",
        "{{ messages | batch(99999999999, 0) }}",
        "{{ messages | slice(99999999999) }}",
        "{{ messages | tojson(indent=99999999999) }}",
        "{{ (range(9999) | list * 99) | select('in', range(9999) | list * 99) | list | length }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = [{'b': ns}] %}{{ ns | tojson }}",
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for x in [[]] recursive %}{{ loop([[]]) }}{% endfor %}",
    ];
    for source in in_loops.map(again_and_again).into_iter().chain(alone.map(str::to_owned)) {
        let begun = std::time::Instant::now();
        let shown = made(&source).map(|template| {
            let message = ChatMessage { role: "user".into(), content: " Hi <b> ".into(), name: None };
            template.render(&[message], true, &serde_json::Map::new()).map(|text| text.len())
        });
        let took = begun.elapsed();
        assert!(matches!(shown, Err(_) | Ok(Err(TextError::Template(_)))), "{source}: {shown:?}");
        assert!(took < std::time::Duration::from_secs(20), "{source}: {took:?}, {shown:?}");
    }
}

#[test]
fn nothing_is_found_once_more_than_there_are_characters() {
    assert_eq!(render("{{ 'häh'.count('') }}{{ 'aab'.count('a') }}", json!({})).unwrap(), "42");
}

#[test]
fn a_long_expression_is_compiled() {
    let long = format!("{{{{ {}'' }}}}", "'' ~ ".repeat(40_000));
    assert_eq!(render(&long, json!({})).unwrap(), "");
    let filtered = format!("{{{{ 'A'{} }}}}", "|lower".repeat(30_000));
    assert_eq!(render(&filtered, json!({})).unwrap(), "a");
    let settings = TextSettings { chat_template: Some("a".repeat(300_000)), ..TextSettings::default() };
    assert!(ChatTemplate::new(&settings).unwrap_err().contains("262144"));
}

/// What minijinja makes of the same template without any question in it.
fn plainly(source: &str) -> String {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.render_str(source, json!({"x": [3, 1, 2], "m": {"a": 1, "b": [2]}, "s": "a b  c"})).unwrap()
}

#[test]
fn a_template_within_bounds_is_rendered_as_without_them() {
    for source in [
        "{{ x[::-1] }}{{ x[1:] }}{{ x[-1] }}{{ s[1:3] }}{{ (x + [4])[0:9:2] }}",
        "{{ 2 * 3 }}{{ 2 * 1.5 }}{{ true * 3 }}{{ 'ab' * 2 }}{{ 3 * [1, 'b'] }}{{ -4 * 170141183460469231731 }}",
        "{{ 1 + 2 }}{{ 'a' + 'b' }}{{ [1] + x }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 1 ~ 'a' ~ none }}",
        "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 2 in x }}{{ 9 not in x }}{{ 'a' in s }}{{ x == [3, 1, 2] }}{{ x is iterable }}",
        "{% for i in x %}{{ loop.index }}:{{ i }}{% if not loop.last %},{% endif %}{% else %}none{% endfor %}",
        "{% for i in [] %}a{% else %}none{% endfor %}{% for i in x if i > 1 %}{{ loop.length }}{{ i }}{% endfor %}",
        "{% for i in x %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}",
        "{% for i in [[1, [2, []]], []] recursive %}<{{ i if i is not sequence else loop(i) }}>{% endfor %}",
        "{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}{% for k in m %}{{ k }}{% endfor %}{{ m | items | list }}",
        "{% set ns = namespace(n=0, t='') %}{% for i in x %}{% set ns.n = ns.n + i %}{% set ns.t = ns.t ~ i %}{% endfor %}{{ ns.n }}{{ ns.t }}",
        "{% macro f(a, b=2) %}[{{ a }}{{ b }}{{ caller() if caller else '' }}]{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}{% call f(4) %}!{% endcall %}",
        "{% set t %}a{{ x }}b{% endset %}{{ t | upper }}{% filter upper %}c{{ s }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
        "{{ x | map('string') | join('-') }}{{ x | sort | list }}{{ x | select('gt', 1) | list }}{{ x | select('in', [1, 2]) | list }}",
        "{{ s.split() }}{{ s.replace('b', 'cc') }}{{ s | replace(' ', '') }}{{ s.strip('ac') }}{{ s | trim('a') }}{{ '-'.join(x) }}",
        "{{ '%s is %d' | format('a', 3) }}{{ '{} {:>4}'.format(1, 2) }}{{ 'a\nb' | indent(2) }}{{ x | batch(2, 0) | list }}{{ x | slice(2) | list }}",
        "{{ x | length }}{{ x | first }}{{ x | last }}{{ x | reverse | list }}{{ x | sum }}{{ y | default('d') }}{{ range(4) | list }}",
        "{{ 'yes' if x and m.b else 'no' }}{{ m.c is defined }}{{ m['a'] }}{{ not x }}{{ x is sequence }}{{ [1, x, 5] }}{{ dict(a=1) }}",
        "{% raw %}{{ raw }}{% endraw %}{# a comment #}\n  {%- if x %} trimmed {% endif -%}\n",
        "{% block a %}in a block {{ x }}{% endblock %}{{ self.a() }}",
    ] {
        let bounded = template(source).program.run(
            &environment(),
            Value::from_serialize(json!({"x": [3, 1, 2], "m": {"a": 1, "b": [2]}, "s": "a b  c"})),
        );
        assert_eq!(bounded.unwrap(), plainly(source), "{source}");
    }
}

#[test]
fn an_error_says_where_in_the_template_it_happened() {
    let failed =
        render("line one\nline two\n{{ messages.nothing.at_all }}", json!({})).unwrap_err().to_string();
    assert!(failed.contains("line 3") || failed.contains(":3"), "{failed}");
}
