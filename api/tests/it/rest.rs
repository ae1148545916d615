//! The routes, each with what it calls and what it answers.

use http::{Method, Response};
use serde_json::json;
use snapyard_proto::retry::{ShouldRetry, mark};
use snapyard_proto::v1::SandboxState;
use tonic::Status;

use crate::support::World;
use crate::support::backends::SNAPSHOT;
use crate::support::guest::{full, serve_guest};

#[tokio::test]
async fn a_create_resolves_places_creates_and_releases() {
    let world = World::start().await;
    let body = json!({"templateID": "base", "timeout": 60, "metadata": {"k": "v"}, "envVars": {"A": "b"}});
    let answer = world.post("/v2/sandboxes", body).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    world.backends.called("release").await;
    assert_eq!(world.backends.calls(), ["resolve", "place", "create_sandbox", "release"]);
    assert_eq!(world.backends.subjects("release"), ["r1"]);

    let created = &world.backends.created()[0];
    assert_eq!(created.timeout_ms, 60_000);
    assert_eq!((created.snapshot_id.as_str(), created.template_id.as_str()), (SNAPSHOT, "tpl-1"));
    assert_eq!((created.reservation_id.as_str(), created.team.as_str()), ("r1", "default"));
    assert_eq!((created.metadata["k"].as_str(), created.env["A"].as_str()), ("v", "b"));
    assert_eq!(created.access_token.len(), 64, "secure by default on this route");

    let expected = json!({
        "templateID": "tpl-1", "sandboxID": created.sandbox_id, "clientID": "node1", "envdVersion": "0.5.7",
        "alias": "base", "envdAccessToken": created.access_token, "domain": "sandboxes.test",
    });
    assert_eq!(answer.json(), expected);
    let timing = answer.header("server-timing").expect("timings");
    for phase in ["place;dur=", "open;dur=1.000", "vmm;dur=2.000", "attach;dur=3.000", "load;dur=4.000"] {
        assert!(timing.contains(phase), "{timing}");
    }
    let dur = |name: &str| -> f64 {
        let start = timing.find(&format!("{name};dur=")).expect("phase") + name.len() + 5;
        timing[start..].split(',').next().expect("a number").parse().expect("a number")
    };
    assert!(dur("running") > 5.0 && dur("ready") > dur("running"), "counted from the request: {timing}");
    assert_eq!(answer.header("x-snapyard-filled-at-running"), Some("4096"));
    assert_eq!(answer.header("x-snapyard-filled-at-ready"), Some("8192"));
}

#[tokio::test]
async fn the_v1_route_is_not_secure_unless_asked_and_takes_an_own_id() {
    let world = World::start().await;
    let answer = world.post("/sandboxes", json!({"templateID": SNAPSHOT, "sandboxID": "mine1"})).await;
    assert_eq!(answer.status, 201);
    assert_eq!(answer.json()["sandboxID"], "mine1");
    assert!(answer.json().get("envdAccessToken").is_none());
    let created = &world.backends.created()[0];
    assert_eq!((created.access_token.as_str(), created.timeout_ms), ("", 300_000));
    assert_eq!(created.idempotency_key, "");

    let secure = world.post("/sandboxes", json!({"templateID": "base", "secure": true})).await;
    assert!(secure.json()["envdAccessToken"].is_string());
}

#[tokio::test]
async fn an_idempotency_key_travels_with_a_digest_of_the_body() {
    let world = World::start().await;
    for body in [r#"{"templateID": "base"}"#, r#"{"templateID":"base"}"#] {
        world.call(Method::POST, "/v2/sandboxes", &[("idempotency-key", "key-1")], body).await;
    }
    let created = world.backends.created();
    assert_eq!(created[0].idempotency_key, "key-1");
    assert_eq!(created[0].request_digest.len(), 32);
    assert_ne!(created[0].request_digest, created[1].request_digest);
}

#[tokio::test]
async fn a_create_that_fails_gives_its_place_back_and_says_whether_to_retry() {
    let world = World::start().await;
    world.backends.fail("create_sandbox", Status::unavailable("the node went away"));
    let answer = world.post("/v2/sandboxes", json!({"templateID": "base"})).await;
    assert_eq!((answer.status.as_u16(), answer.error().as_str()), (503, "the node went away"));
    assert_eq!(answer.header("should-retry"), Some("false"), "it may have happened");
    world.backends.called("release").await;

    world.backends.fail("create_sandbox", mark(Status::resource_exhausted("too many guests"), ShouldRetry::Yes));
    let answer = world.post("/v2/sandboxes", json!({"templateID": "base"})).await;
    assert_eq!((answer.status.as_u16(), answer.header("should-retry")), (429, Some("true")));
}

#[tokio::test]
async fn without_a_place_nothing_happens_and_the_client_may_come_back() {
    let world = World::start().await;
    world.backends.fail("place", Status::unavailable("all 1 compatible nodes are full"));
    let answer = world.post("/v2/sandboxes", json!({"templateID": "base"})).await;
    assert_eq!((answer.status.as_u16(), answer.error().as_str()), (503, "all 1 compatible nodes are full"));
    assert_eq!((answer.header("should-retry"), answer.header("retry-after")), (Some("true"), Some("1")));
    assert_eq!(world.backends.calls(), ["resolve", "place"]);
}

#[tokio::test]
async fn what_a_snapshot_forbids_is_refused_before_a_place_is_taken() {
    let world = World::start().await;
    let with_env = |reference: &str| json!({"templateID": reference, "envVars": {"A": "b"}});
    let answer = world.post("/sandboxes", with_env(SNAPSHOT)).await;
    assert_eq!(answer.status, 400);
    assert!(answer.error().contains("`envVars`"));
    assert_eq!(world.backends.calls(), ["resolve"]);
    assert_eq!(world.post("/sandboxes", with_env("base")).await.status, 201, "a template takes it");

    let answer = world.post("/sandboxes", json!({"templateID": "base", "allow_internet_access": false})).await;
    assert_eq!(answer.status, 501, "{}", answer.error());
}

#[tokio::test]
async fn an_unknown_template_is_404_and_says_template() {
    let world = World::start().await;
    let answer = world.post("/sandboxes", json!({"templateID": "nope"})).await;
    assert_eq!(answer.status, 404);
    assert!(answer.error().contains("template or snapshot `nope` was not found"), "{}", answer.error());
}

#[tokio::test]
async fn get_and_kill() {
    let world = World::start().await.with_sandbox("abc");
    let answer = world.get("/sandboxes/abc").await;
    assert_eq!(answer.status, 200);
    let body = answer.json();
    assert_eq!((body["state"].as_str(), body["endAt"].as_str()), (Some("running"), Some("2023-11-14T22:18:20Z")));
    assert_eq!(body["lifecycle"], json!({"autoResume": false, "onTimeout": "kill"}));

    assert_eq!(world.delete("/sandboxes/abc").await.status, 204);
    let again = world.delete("/sandboxes/abc").await;
    assert_eq!(again.status, 404);
    assert!(again.error().contains("sandbox abc was not found") && !again.error().contains("template"));
    assert_eq!(world.get("/sandboxes/abc").await.status, 404);
}

#[tokio::test]
async fn a_sandbox_that_cannot_be_deleted_now_is_409_with_a_hint() {
    let world = World::start().await.with_sandbox("abc");
    world.backends.fail("kill_sandbox", mark(Status::failed_precondition("being snapshotted"), ShouldRetry::Yes));
    let answer = world.delete("/sandboxes/abc").await;
    assert_eq!((answer.status.as_u16(), answer.header("should-retry")), (409, Some("true")));
    assert_eq!(answer.header("retry-after"), Some("1"));
}

#[tokio::test]
async fn a_lost_sandbox_is_gone_but_can_be_killed() {
    let world = World::start().await.with_sandbox("abc");
    world.backends.change_sandbox("abc", |sandbox| {
        sandbox.set_state(SandboxState::Lost);
        sandbox.lost_reason = "its node restarted".into();
    });
    let answer = world.get("/sandboxes/abc").await;
    assert_eq!(answer.status, 404);
    assert!(answer.error().contains("its node restarted"));
    assert_eq!(world.post("/sandboxes/abc/snapshots", json!({})).await.status, 404);
    assert_eq!(world.delete("/sandboxes/abc").await.status, 204);
}

#[tokio::test]
async fn timeouts_in_all_their_forms() {
    let world = World::start().await.with_sandbox("abc");
    assert_eq!(world.post("/sandboxes/abc/connect", json!({})).await.status, 200);
    assert_eq!(world.backends.timeouts().len(), 0, "v1 without a timeout keeps the one that is set");
    for (path, body, status, timeout_ms, never_shorten) in [
        ("/v2/sandboxes/abc/connect", json!({}), 200, 300_000, true),
        ("/v2/sandboxes/abc/connect", json!({"timeout": 7}), 200, 7_000, true),
        ("/sandboxes/abc/connect", json!({"timeout": -1}), 200, -1, true),
        ("/sandboxes/abc/timeout", json!({"timeout": 5}), 204, 5_000, false),
        ("/sandboxes/abc/timeout", json!({"timeout": 0}), 204, 0, false),
        ("/sandboxes/abc/refreshes", json!({"duration": 9}), 204, 9_000, true),
    ] {
        assert_eq!(world.post(path, body.clone()).await.status, status, "{path} {body}");
        let asked = world.backends.timeouts().pop().expect("asked");
        assert_eq!((asked.timeout_ms, asked.never_shorten), (timeout_ms, never_shorten), "{path} {body}");
    }
    assert_eq!(world.post("/sandboxes/abc/connect", json!({"timeout": 0})).await.status, 400);
    assert_eq!(world.post("/sandboxes/abc/timeout", json!({})).await.status, 400);
    assert_eq!(world.post("/sandboxes/nope/timeout", json!({"timeout": 1})).await.status, 404);
    assert_eq!(world.post("/sandboxes/nope/connect", json!({})).await.status, 404);
}

#[tokio::test]
async fn sandboxes_are_listed_in_pages() {
    let world = World::start().await.with_sandbox("a").with_sandbox("b").with_sandbox("c");
    world.backends.change_sandbox("b", |sandbox| sandbox.alias = "other".into());
    let first = world.get("/v2/sandboxes?limit=2&state=running&metadata=k%3Dv").await;
    assert_eq!(first.status, 200);
    assert_eq!(first.json().as_array().expect("a list").len(), 2);
    let asked = &world.backends.listed_sandboxes()[0];
    assert_eq!((asked.limit, asked.metadata["k"].as_str()), (2, "v"));
    let token = first.header("x-next-token").expect("more");
    let last = world.get(&format!("/sandboxes?limit=2&nextToken={token}")).await;
    assert_eq!(last.json()[0]["sandboxID"], "c");
    assert_eq!(last.header("x-next-token"), None);

    let filtered = world.get("/v2/sandboxes?limit=2&template=base").await;
    let ids: Vec<_> = filtered.json().as_array().expect("a list").iter().map(|s| s["sandboxID"].clone()).collect();
    assert_eq!(ids, ["a", "c"], "a page is filled although a filter left some out");
    let oldest = world.get("/v2/sandboxes?limit=2&order=asc").await;
    assert_eq!(oldest.header("x-next-token"), Some("1700000000000.b"));
}

#[tokio::test]
async fn a_snapshot_is_taken_with_its_name() {
    let world = World::start().await.with_sandbox("abc");
    let answer = world.post("/sandboxes/abc/snapshots", json!({"name": " Base:V1 "})).await;
    assert_eq!(answer.status, 201);
    assert_eq!(answer.json(), json!({"snapshotID": SNAPSHOT, "names": ["default/base:v1"]}));
    assert_eq!(world.backends.asked_to_snapshot()[0].name, "base:v1", "trimmed and lower-cased");
    let timing = answer.header("server-timing").expect("timings");
    assert!(timing.starts_with("pause;dur=12.345, total;dur="), "{timing}");

    let unnamed = world.call(Method::POST, "/sandboxes/abc/snapshots", &[], "").await;
    assert_eq!(unnamed.json(), json!({"snapshotID": SNAPSHOT, "names": []}));
    for name in ["a/b", "a b", &"x".repeat(10_240), "a:b:c"] {
        let answer = world.post("/sandboxes/abc/snapshots", json!({"name": name})).await;
        assert_eq!(answer.status, 400, "{name}");
    }
    world.backends.fail("snapshot_sandbox", Status::already_exists("default/base:v1 exists"));
    assert_eq!(world.post("/sandboxes/abc/snapshots", json!({"name": "base:v1"})).await.status, 409);
    assert_eq!(world.post("/sandboxes/abc/snapshots", json!({"memory": false})).await.status, 501);
}

#[tokio::test]
async fn snapshots_are_listed_in_pages_and_filtered() {
    let world = World::start().await;
    world.backends.add_snapshots(5);
    let mut ids = Vec::new();
    let mut path = "/snapshots?limit=2".to_owned();
    loop {
        let page = world.get(&path).await;
        assert_eq!(page.status, 200);
        ids.extend(page.json().as_array().expect("a list").iter().map(|s| s["snapshotID"].clone()));
        let Some(token) = page.header("x-next-token") else { break };
        path = format!("/snapshots?limit=2&nextToken={token}");
    }
    assert_eq!(ids, ["snap-0", "snap-1", "snap-2", "snap-3", "snap-4"]);

    world.get("/snapshots?sandboxID=abc&name=default%2FBase%3AV1").await;
    let asked = world.backends.listed_snapshots().pop().expect("asked");
    assert_eq!((asked.sandbox_id.as_str(), asked.name.as_str(), asked.limit), ("abc", "base:v1", 100));
    for nothing in ["name=other%2Fbase", "name=a%20b", "sandboxID=NOT-AN-ID"] {
        let page = world.get(&format!("/snapshots?{nothing}")).await;
        assert_eq!((page.status.as_u16(), page.json()), (200, json!([])), "{nothing}");
    }
    assert_eq!(world.get("/snapshots?limit=101").await.status, 400);
}

#[tokio::test]
async fn deleting_by_id_and_by_full_name_raw_or_encoded() {
    let world = World::start().await;
    for path in [
        format!("/templates/{SNAPSHOT}"),
        "/templates/default/short:tag".into(),
        "/templates/default%2Fshort%3Atag".into(),
        "/templates/aliases%2Fshort".into(),
    ] {
        assert_eq!(world.delete(&path).await.status, 204, "{path}");
    }
    let asked = world.backends.subjects("delete");
    assert_eq!(asked, [SNAPSHOT, "default/short:tag", "default/short:tag", "aliases/short"]);
    for path in ["/templates/unknown", "/templates/unknown/x:y"] {
        let answer = world.delete(path).await;
        assert_eq!(answer.status, 404, "{path}");
        assert!(answer.error().contains("template"), "{}", answer.error());
    }
    world.backends.fail("delete", Status::failed_precondition("2 sandboxes run from it: a, b"));
    assert_eq!(world.delete(&format!("/templates/{SNAPSHOT}")).await.status, 409);
}

#[tokio::test]
async fn templates_are_listed_and_found_by_id_and_alias() {
    let world = World::start().await;
    for path in ["/templates", "/v2/templates"] {
        assert_eq!(world.get(path).await.json()[0]["templateID"], "tpl-1", "{path}");
    }
    for path in ["/templates/tpl-1", "/templates/base", "/templates/default%2Fbase"] {
        let answer = world.get(path).await;
        assert_eq!((answer.status.as_u16(), answer.json()["builds"].clone()), (200, json!([])), "{path}");
    }
    let alias = world.get("/templates/aliases/base").await;
    assert_eq!(alias.json(), json!({"templateID": "tpl-1", "public": false}));
    assert_eq!(world.get("/templates/aliases/nope").await.status, 404);
    assert_eq!(world.get("/templates/nope").await.status, 404);
}

#[tokio::test]
async fn a_rollback_keeps_the_sandbox_and_names_the_operation() {
    let world = World::start().await.with_sandbox("abc");
    let answer = world.post("/sandboxes/abc/rollback", json!({"snapshotID": SNAPSHOT})).await;
    assert_eq!(answer.status, 200);
    let expected = json!({"sandboxID": "abc", "snapshotID": SNAPSHOT, "operationID": "op1", "status": "success"});
    assert_eq!(answer.json(), expected);
    assert!(answer.header("server-timing").expect("timings").starts_with("open;dur=1.000, "));
    let by_name = world.post("/sandboxes/abc/rollback", json!({"snapshotID": "default/short:tag"})).await;
    assert_eq!(by_name.json()["snapshotID"], SNAPSHOT);

    assert_eq!(world.post("/sandboxes/abc/rollback", json!({})).await.status, 400);
    assert_eq!(world.post("/sandboxes/nope/rollback", json!({"snapshotID": SNAPSHOT})).await.status, 404);
    world.backends.fail("rollback_sandbox", Status::not_found("snapshot x was not found"));
    let answer = world.post("/sandboxes/abc/rollback", json!({"snapshotID": "x"})).await;
    assert_eq!((answer.status.as_u16(), answer.error().as_str()), (404, "snapshot x was not found"));
}

#[tokio::test]
async fn metrics_are_the_agents_with_its_token() {
    let world = World::start().await.with_sandbox("abc");
    world.backends.change_sandbox("abc", |sandbox| sandbox.access_token = "secret".into());
    let agent = serve_guest(|request| async move {
        assert_eq!(
            (request.uri().path(), &request.headers()["x-access-token"]),
            ("/metrics", &"secret".parse().expect("v"))
        );
        Response::new(full(
            r#"{"ts": 1700000000, "cpu_count": 2, "cpu_used_pct": 1.5, "mem_total": 9, "mem_used": 8, "mem_cache": 7,
                "disk_total": 6, "disk_used": 5}"#,
        ))
    });
    world.gateway.open_port("abc", 49983, agent.await);
    let expected = json!([{
        "timestamp": "2023-11-14T22:13:20Z", "timestampUnix": 1_700_000_000, "cpuCount": 2, "cpuUsedPct": 1.5,
        "memTotal": 9, "memUsed": 8, "memCache": 7, "diskTotal": 6, "diskUsed": 5,
    }]);
    let now = world.get("/sandboxes/abc/metrics?start=1700000000").await;
    assert_eq!((now.status.as_u16(), now.json()), (200, expected));
    assert_eq!(world.get("/sandboxes/abc/metrics?end=1600000000").await.json(), json!([]), "no history is kept");
    assert_eq!(world.get("/sandboxes/abc/metrics?start=yesterday").await.status, 400);
    assert_eq!(world.get("/sandboxes/nope/metrics").await.status, 404);
}

#[tokio::test]
async fn health_and_shutdown() {
    let world = World::start().await;
    let answer = world.get("/health").await;
    assert_eq!((answer.status.as_u16(), answer.json()), (200, json!({"status": "ok"})));
    // An idle connection must not keep the server from ending.
    let _idle = tokio::net::TcpStream::connect(world.address).await.expect("connected");
    world.get("/health").await;
    crate::support::soon("shutdown", world.stop()).await;
}
