//! Pause, resume, connect, waking by a request, fork.

use http::StatusCode;
use serde_json::json;
use snapyard_proto::v1::SandboxState;
use tonic::Status;

use crate::support::World;
use crate::support::backends::SNAPSHOT;

#[tokio::test]
async fn paused_and_resumed() {
    let world = World::start().await.with_sandbox("abc");
    for path in ["/sandboxes/none/pause", "/sandboxes/none/resume", "/sandboxes/none/fork"] {
        assert_eq!(world.post(path, json!({})).await.status, 404, "{path}");
    }
    assert_eq!(world.post("/sandboxes/abc/resume", json!({})).await.status, 409, "it runs");
    assert_eq!(world.post("/sandboxes/abc/pause", json!({})).await.status, 204);
    assert_eq!(world.get("/sandboxes/abc").await.json()["state"], "paused");
    let again = world.post("/sandboxes/abc/pause", json!({})).await;
    assert_eq!(again.status, 409);
    assert!(again.error().contains("sandbox abc is paused"), "{}", again.error());
    for (path, body) in [
        ("/sandboxes/abc/snapshots", json!({})),
        ("/sandboxes/abc/rollback", json!({"snapshotID": SNAPSHOT})),
        ("/sandboxes/abc/fork", json!({})),
        ("/sandboxes/abc/timeout", json!({"timeout": 5})),
    ] {
        assert_eq!(world.post(path, body).await.status, 409, "{path}");
    }

    let resumed = world.post("/sandboxes/abc/resume", json!({"timeout": 60})).await;
    assert_eq!(resumed.status, 201);
    assert_eq!(resumed.json()["sandboxID"], "abc");
    assert_eq!(world.backends.resumed()[0].timeout_ms, 60_000);
    assert_eq!(world.post("/sandboxes/abc/resume", json!({})).await.status, 409);
    assert_eq!(world.get("/sandboxes/abc").await.json()["state"], "running");
}

#[tokio::test]
async fn a_connect_resumes_what_is_paused() {
    let world = World::start().await.with_sandbox("abc");
    for (path, timeout_ms) in [("/sandboxes/abc/connect", 300_000), ("/v2/sandboxes/abc/connect", 300_000)] {
        assert_eq!(world.post(path, json!({})).await.status, 200, "it runs");
        assert_eq!(world.post("/sandboxes/abc/pause", json!({})).await.status, 204);
        assert_eq!(world.post(path, json!({})).await.status, 201, "resumed");
        assert_eq!(world.backends.resumed().last().expect("one").timeout_ms, timeout_ms);
    }
    world.backends.change_sandbox("abc", |sandbox| sandbox.set_state(SandboxState::Pausing));
    let early = world.post("/sandboxes/abc/connect", json!({})).await;
    assert_eq!((early.status.as_u16(), early.header("should-retry")), (409, Some("true")));
}

#[tokio::test]
async fn a_failed_resume_gives_its_place_back() {
    let world = World::start().await.with_sandbox("abc");
    world.backends.change_sandbox("abc", |sandbox| sandbox.set_state(SandboxState::Paused));
    world.backends.fail("resume_sandbox", Status::internal("the guest does not start"));
    assert_eq!(world.post("/sandboxes/abc/resume", json!({})).await.status, 500);
    assert_eq!(world.backends.subjects("release"), ["r1"]);
}

#[tokio::test]
async fn a_fork_answers_in_order_each_for_itself() {
    let world = World::start().await.with_sandbox("abc");
    world.backends.change_sandbox("abc", |sandbox| {
        sandbox.access_token = "secret".into();
        sandbox.metadata.insert("k".into(), "v".into());
        sandbox.env.insert("A".into(), "b".into());
    });
    let answer = world.post("/sandboxes/abc/fork", json!({"count": 12, "timeout": 60})).await;
    assert_eq!(answer.status, 201);
    let entries = answer.json();
    let created = world.backends.created();
    assert_eq!((entries.as_array().expect("a list").len(), created.len()), (12, 12));
    let ids: Vec<&str> =
        entries.as_array().into_iter().flatten().filter_map(|e| e["sandbox"]["sandboxID"].as_str()).collect();
    assert_eq!(ids.len(), 12);
    for create in &created {
        assert!(ids.contains(&create.sandbox_id.as_str()));
        assert_eq!((create.snapshot_id.as_str(), create.timeout_ms), (SNAPSHOT, 60_000));
        assert_eq!((&create.metadata["k"], &create.env["A"]), (&"v".to_owned(), &"b".to_owned()));
        assert!(!create.access_token.is_empty() && create.access_token != "secret", "a token of its own");
    }
    assert_eq!(world.backends.subjects("discard"), [SNAPSHOT], "it goes with the last of them");
    let asked = &world.backends.asked_to_snapshot()[0];
    assert!(asked.hidden && asked.retention_ms > 0, "nobody sees what it starts from, and it goes");

    world.backends.fail("create_sandbox", Status::unavailable("full"));
    let answer = world.post("/sandboxes/abc/fork", json!({"count": 2})).await;
    assert_eq!(answer.status, StatusCode::CREATED);
    let failed = json!({"error": {"code": 503, "message": "full"}});
    assert_eq!(answer.json(), json!([failed, failed]));
}
