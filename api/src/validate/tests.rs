//! What is refused, with which code and which field.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const V1: CreateDefaults = CreateDefaults { timeout_s: 300, secure: false };
const V2: CreateDefaults = CreateDefaults { timeout_s: 300, secure: true };

fn fields(body: &Value) -> Fields {
    Fields::parse(body.to_string().as_bytes()).expect("an object")
}

fn create(mut body: Value) -> Result<Create, ApiError> {
    body["templateID"] = json!("base");
    Create::from_fields(&fields(&body), V2)
}

#[test]
fn what_the_sdks_send_is_accepted() {
    let v2 = json!({
        "templateID": "base", "timeout": 60, "autoPause": false, "autoPauseMemory": true,
        "allow_internet_access": true, "metadata": {"k": "v"}, "envVars": {"A": "b"}, "mcp": null,
    });
    let parsed = Create::from_fields(&fields(&v2), V2).expect("e2b");
    assert_eq!((parsed.timeout_ms, parsed.secure, parsed.sandbox_id.as_deref()), (60_000, true, None));
    assert_eq!(parsed.metadata["k"], "v");
    assert_eq!(parsed.env["A"], "b");
    parsed.check_supported().expect("supported");

    let v1 = Create::from_fields(&fields(&json!({"templateID": "9b2e"})), V1).expect("cubesandbox");
    assert_eq!((v1.timeout_ms, v1.secure), (300_000, false));
    v1.check_from_snapshot().expect("nothing forbidden");
}

#[test]
fn timeouts_of_a_create() {
    assert_eq!(create(json!({"timeout": -1})).expect("never").timeout_ms, -1);
    assert_eq!(create(json!({"timeout": 60.0})).expect("whole").timeout_ms, 60_000);
    for bad in [json!(0), json!(-2), json!("60"), json!(1.5), json!(i64::MAX), json!(true), json!([])] {
        let error = create(json!({"timeout": bad})).expect_err("refused");
        assert_eq!(error.status(), 400, "{bad}");
        assert!(error.message().contains("`timeout`"), "{bad}: {error}");
    }
}

#[test]
fn wrong_types_and_shapes_of_a_create_name_the_field() {
    for (field, value) in [
        ("metadata", json!("x")),
        ("metadata", json!({"a": 1})),
        ("metadata", json!({"a": "x".repeat(20_000)})),
        ("envVars", json!([])),
        ("envVars", json!({"A=B": "x"})),
        ("envVars", json!({"": "x"})),
        ("envVars", json!({"A": "\0"})),
        ("secure", json!("yes")),
        ("sandboxID", json!("Not-An-Id")),
        ("sandboxID", json!(7)),
        ("autoPause", json!(1)),
        ("autoResume", json!("on")),
        ("lifecycle", json!({"onTimeout": "sleep"})),
        ("allow_internet_access", json!("no")),
    ] {
        let error = create(json!({field: value})).expect_err("refused");
        assert_eq!(error.status(), 400, "{field}: {error}");
        assert!(error.message().contains(&format!("`{field}")), "{field}: {error}");
    }
    for reference in [json!(null), json!(""), json!(5), json!("x".repeat(10_240)), json!("a\nb")] {
        let body = json!({"templateID": reference});
        let error = Create::from_fields(&fields(&body), V2).expect_err("refused");
        assert!(error.message().contains("`templateID`"), "{error}");
    }
}

#[test]
fn a_create_from_a_snapshot_may_not_change_what_was_captured() {
    for (body, field) in [
        (json!({"envVars": {"A": "b"}}), "envVars"),
        (json!({"volumeMounts": [{"name": "v", "path": "/v"}]}), "volumeMounts"),
        (json!({"image": "debian"}), "image"),
        (json!({"metadata": {"fc.zone": "x", "ok": "y"}}), "metadata.fc.zone"),
    ] {
        let error = create(body).expect("well-formed").check_from_snapshot().expect_err("forbidden");
        assert_eq!(error.status(), 400);
        assert!(error.message().contains(&format!("`{field}`")), "{error}");
    }
    let empty = json!({"envVars": {}, "volumeMounts": [], "image": "", "build": null, "metadata": {"fcx": "y"}});
    create(empty).expect("well-formed").check_from_snapshot().expect("empty counts as absent");
}

#[test]
fn what_the_server_does_not_have_is_refused_instead_of_ignored() {
    for body in [
        json!({"autoPauseMemory": false}),
        json!({"allow_internet_access": false}),
        json!({"network": {"denyOut": ["0.0.0.0/0"]}}),
        json!({"volumeMounts": [{"name": "v", "path": "/v"}]}),
        json!({"mcp": {"duckduckgo": {}}}),
        json!({"distributionScope": ["node-1"]}),
    ] {
        let error = create(body.clone()).expect("well-formed").check_supported().expect_err("unsupported");
        assert_eq!(error.status(), 501, "{body}");
    }
    let harmless = json!({
        "autoPause": false, "autoResume": {"enabled": false}, "network": {}, "volumeMounts": [], "mcp": null,
        "lifecycle": {"onTimeout": "kill", "autoResume": false}, "allow_internet_access": true,
    });
    create(harmless).expect("well-formed").check_supported().expect("nothing asked for");
}

#[test]
fn what_becomes_of_it_at_its_timeout() {
    for (body, expected) in [
        (json!({}), (false, false)),
        (json!({"autoPause": true}), (true, false)),
        (json!({"lifecycle": {"onTimeout": "pause"}}), (true, false)),
        (json!({"lifecycle": {"onTimeout": "pause", "autoResume": true}}), (true, true)),
        (json!({"autoPause": true, "autoResume": {"enabled": true}}), (true, true)),
        (json!({"autoResume": true}), (false, true)),
        (json!({"autoResume": {"enabled": false}}), (false, false)),
    ] {
        let create = create(body.clone()).expect("well-formed");
        create.check_supported().expect("supported");
        assert_eq!((create.auto_pause, create.auto_resume), expected, "{body}");
    }
}

#[test]
fn forks() {
    let fork = |body: Value| fork(&fields(&body), 300);
    assert_eq!(fork(json!({})), Ok(Fork { count: 1, timeout_ms: 300_000 }));
    assert_eq!(fork(json!({"count": 100, "timeout": -1})), Ok(Fork { count: 100, timeout_ms: -1 }));
    for bad in [json!({"count": 0}), json!({"count": 101}), json!({"count": -1}), json!({"count": "2"})] {
        assert_eq!(fork(bad.clone()).expect_err("refused").status(), 400, "{bad}");
    }
}

#[test]
fn timeouts_of_running_sandboxes() {
    let timeout = |value: Value| fields(&json!({"timeout": value}));
    assert_eq!(set_timeout(&timeout(json!(0))), Ok(0));
    assert_eq!(set_timeout(&timeout(json!(-1))), Ok(-1));
    assert_eq!(set_timeout(&timeout(json!(5))), Ok(5_000));
    assert!(set_timeout(&timeout(json!(null))).is_err());
    assert!(set_timeout(&timeout(json!(-5))).is_err());

    assert_eq!(connect(&Fields::default()), Ok(None));
    assert_eq!(connect(&timeout(json!(-1))), Ok(Some(-1)));
    assert_eq!(connect(&timeout(json!(7))), Ok(Some(7_000)));
    assert_eq!(connect(&timeout(json!(0))).expect_err("0").status(), 400);
    assert_eq!(connect(&fields(&json!({"memory": false}))).expect_err("memory").status(), 501);

    assert_eq!(refresh(&Fields::default(), 300), Ok(300_000));
    assert_eq!(refresh(&fields(&json!({"duration": 5})), 300), Ok(5_000));
    assert!(refresh(&fields(&json!({"duration": -1})), 300).is_err());
}

#[test]
fn limits_and_idempotency_keys() {
    assert_eq!(limit(None), Ok(100));
    assert_eq!(limit(Some("1")), Ok(1));
    for bad in ["0", "101", "-1", "", "x", "1.0", "99999999999999999999"] {
        assert_eq!(limit(Some(bad)).expect_err(bad).status(), 400);
    }
    let key = |text: &str| {
        let mut headers = http::HeaderMap::new();
        headers.insert("idempotency-key", text.parse().expect("a header value"));
        idempotency_key(&headers)
    };
    assert_eq!(key("a-1"), Ok("a-1".into()));
    assert_eq!(idempotency_key(&http::HeaderMap::new()), Ok(String::new()));
    assert!(key("").is_err() && key("a b").is_err() && key(&"x".repeat(256)).is_err());
}

proptest! {
    /// Every finite timeout that is accepted keeps its value, and everything else is a 400.
    #[test]
    fn timeouts_are_exact_or_refused(seconds: i64) {
        match set_timeout(&fields(&json!({"timeout": seconds}))) {
            Ok(-1) => prop_assert_eq!(seconds, -1),
            Ok(ms) => { prop_assert!(seconds >= 0); prop_assert_eq!(ms / 1000, seconds); }
            Err(error) => prop_assert_eq!(error.status(), 400),
        }
    }

    /// No body, however odd, does more than a 400 (501 comes later, from `check_supported`).
    #[test]
    fn odd_bodies_are_accepted_or_refused_with_400(
        names in prop::collection::vec(
            prop_oneof![
                Just("templateID"), Just("timeout"), Just("metadata"), Just("envVars"), Just("secure"),
                Just("autoResume"), Just("lifecycle"), Just("network"), Just("sandboxID"),
            ], 0..6),
        values in prop::collection::vec(
            prop_oneof![
                Just(json!(null)), Just(json!("")), Just(json!("base")), Just(json!(-1)), Just(json!(1e40)),
                Just(json!([])), Just(json!({"a": "b"})), Just(json!({"enabled": 3})), Just(json!(true)),
            ], 6),
    ) {
        let body: serde_json::Map<String, Value> =
            names.into_iter().map(str::to_owned).zip(values).collect();
        if let Err(error) = Create::from_fields(&fields(&Value::Object(body)), V1) {
            prop_assert_eq!(error.status(), 400);
        }
    }
}
