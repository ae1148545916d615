//! Processes: their life, their streams, and requests that make no sense.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use crate::client::{Guest, eventually, exists, start_message};

fn basic(user: &str) -> String {
    format!("Basic {}", BASE64.encode(format!("{user}:")))
}

#[tokio::test]
async fn output_and_exit_code_come_through() {
    let guest = Guest::start().await;
    let mut stream = guest.start_script("echo out; echo err >&2; exit 7", &[]).await;
    assert!(stream.pid().await > 0);
    let outcome = stream.finish().await;
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("out\n", "err\n"));
    assert_eq!(
        outcome.end,
        json!({"exitCode": 7, "exited": true, "status": "exit status 7", "error": "exit status 7"})
    );
    assert_eq!(outcome.error, Value::Null);
}

#[tokio::test]
async fn environment_is_the_sandbox_s_below_the_caller_s() {
    let guest = Guest::start().await;
    assert_eq!(guest.init(None).await.status, StatusCode::NO_CONTENT);
    let mut message = start_message("echo $FROM_INIT $MINE $USER $PWD", true);
    message["process"]["envs"] = json!({"MINE": "a b"});
    let outcome = guest.stream("Start", message, &[("authorization", &basic("root"))]).await.finish().await;
    assert_eq!(outcome.stdout, "yes a b root /tmp\n");
}

#[tokio::test]
async fn much_output_is_complete_and_in_order() {
    let guest = Guest::start().await;
    let outcome = guest.start_script("seq 1 100000", &[]).await.finish().await;
    let expected: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    assert!(outcome.stdout == expected, "{} bytes came, {} were sent", outcome.stdout.len(), expected.len());
}

#[tokio::test]
async fn a_signal_ends_the_whole_command() {
    let guest = Guest::start().await;
    let marker = guest.path("child");
    let mut stream = guest.start_script(&format!("(sleep 1000; touch {marker}) & wait; touch {marker}"), &[]).await;
    let pid = stream.pid().await;
    let kill = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"});
    assert_eq!(guest.unary("process.Process/SendSignal", kill.clone()).await.status, StatusCode::OK);
    let outcome = stream.finish().await;
    assert_eq!(outcome.end["exitCode"], -1);
    assert_eq!(outcome.end["status"], "signal: terminated");
    assert!(!exists(&marker));
    let again = guest.unary("process.Process/SendSignal", kill).await;
    assert_eq!((again.status, &again.json()["code"]), (StatusCode::NOT_FOUND, &json!("not_found")));
}

#[tokio::test]
async fn stdin_is_written_and_closed() {
    let guest = Guest::start().await;
    let mut stream = guest.start_script("cat; echo end", &[]).await;
    let pid = stream.pid().await;
    let selector = json!({"pid": pid});
    for text in ["one\n", "two\n"] {
        let input = json!({"process": selector, "input": {"stdin": BASE64.encode(text)}});
        assert_eq!(guest.unary("process.Process/SendInput", input).await.status, StatusCode::OK);
    }
    let close = json!({"process": selector});
    assert_eq!(guest.unary("process.Process/CloseStdin", close).await.status, StatusCode::OK);
    assert_eq!(stream.finish().await.stdout, "one\ntwo\nend\n");
}

#[tokio::test]
async fn input_can_be_streamed() {
    let guest = Guest::start().await;
    let mut stream = guest.start_script("head -n 2", &[]).await;
    let pid = stream.pid().await;
    let messages = [
        json!({"start": {"process": {"pid": pid}}}),
        json!({"data": {"input": {"stdin": BASE64.encode("one\n")}}}),
        json!({"keepalive": {}}),
        json!({"data": {"input": {"stdin": BASE64.encode("two\n")}}}),
    ];
    let wire: Vec<u8> = messages
        .iter()
        .flat_map(|message| snapyard_guest::connect::frame(message.to_string().as_bytes()).to_vec())
        .collect();
    let mut answer = guest.raw_stream("StreamInput", Bytes::from(wire), &[]).await;
    assert_eq!(answer.next().await, Some(json!({})), "the one answer");
    assert_eq!(answer.next().await, Some(json!({})), "the end");
    assert_eq!(stream.finish().await.stdout, "one\ntwo\n");
}

#[tokio::test]
async fn input_without_a_stdin_is_refused() {
    let guest = Guest::start().await;
    let mut stream = guest.stream("Start", start_message("sleep 1000", false), &[]).await;
    let pid = stream.pid().await;
    let input = json!({"process": {"pid": pid}, "input": {"stdin": "YQ=="}});
    let refused = guest.unary("process.Process/SendInput", input).await;
    assert_eq!(refused.json()["code"], "failed_precondition");
    let kill = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
    guest.unary("process.Process/SendSignal", kill).await;
    assert_eq!(stream.finish().await.end["status"], "signal: killed");
}

#[tokio::test]
async fn a_later_client_hears_what_comes_from_then_on() {
    let guest = Guest::start().await;
    let go = guest.path("go");
    let mut message =
        start_message(&format!("echo before; while [ ! -e {go} ]; do sleep 0.01; done; echo after"), true);
    message["tag"] = json!("mine");
    let mut stream = guest.stream("Start", message, &[]).await;
    let pid = stream.pid().await;
    assert!(stream.next().await.unwrap()["event"]["data"]["stdout"].is_string());
    let mut second = guest.stream("Connect", json!({"process": {"tag": "mine"}}), &[]).await;
    assert_eq!(second.pid().await, pid);
    std::fs::write(go, "").unwrap();
    let second = second.finish().await;
    assert_eq!((second.stdout.as_str(), &second.end["exitCode"]), ("after\n", &json!(0)));
    assert_eq!(stream.finish().await.stdout, "after\n");
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_harm_its_process() {
    let guest = Guest::start().await;
    let marker = guest.path("done");
    let go = guest.path("go");
    // More output than pipe and queues hold: unheard, it must not block.
    let script = format!("while [ ! -e {go} ]; do sleep 0.01; done; seq 1 200000; touch {marker}");
    let mut stream = guest.start_script(&script, &[]).await;
    let pid = stream.pid().await;
    drop(stream);
    let listed = guest.unary("process.Process/List", json!({})).await.json();
    assert_eq!(listed["processes"][0]["pid"], pid);
    assert_eq!(listed["processes"][0]["config"]["args"], json!(["-c", script]));
    std::fs::write(go, "").unwrap();
    eventually("the marker", || exists(&marker)).await;
    eventually("the end", || guest.agent.processes.list().is_empty()).await;
}

#[tokio::test]
async fn a_deadline_kills_the_process_and_says_so() {
    let guest = Guest::start().await;
    let marker = guest.path("late");
    let script = format!("sleep 1000; touch {marker}");
    let outcome = guest.start_script(&script, &[("connect-timeout-ms", "100")]).await.finish().await;
    assert_eq!(outcome.error["code"], "deadline_exceeded");
    assert!(guest.agent.processes.list().is_empty());
    assert!(!exists(&marker));
}

#[tokio::test]
async fn a_later_client_s_deadline_is_its_own() {
    let guest = Guest::start().await;
    let mut stream = guest.start_script("read line; echo got $line", &[]).await;
    let pid = stream.pid().await;
    let connect = json!({"process": {"pid": pid}});
    let outcome = guest.stream("Connect", connect, &[("connect-timeout-ms", "50")]).await.finish().await;
    assert_eq!(outcome.error["code"], "deadline_exceeded");
    let input = json!({"process": {"pid": pid}, "input": {"stdin": BASE64.encode("it\n")}});
    assert_eq!(guest.unary("process.Process/SendInput", input).await.status, StatusCode::OK);
    assert_eq!(stream.finish().await.stdout, "got it\n");
}

#[tokio::test]
async fn a_child_left_behind_does_not_hold_the_stream() {
    let guest = Guest::start().await;
    let marker = guest.path("wrote");
    let go = guest.path("go");
    let child = format!("(while [ ! -e {go} ]; do sleep 0.01; done; echo late; touch {marker}) &");
    let outcome = guest.start_script(&format!("{child} echo started"), &[]).await.finish().await;
    assert_eq!((outcome.stdout.as_str(), &outcome.end["exitCode"]), ("started\n", &json!(0)));
    std::fs::write(go, "").unwrap();
    eventually("the child's write, without a broken pipe", || exists(&marker)).await;
}

#[tokio::test]
async fn nothing_starts_while_the_user_is_frozen() {
    let guest = Guest::start().await;
    guest.agent.cgroup.freeze().await.unwrap();
    let marker = guest.path("ran");
    let script = format!("touch {marker}");
    let (answer, ()) = tokio::join!(guest.start_script(&script, &[]), async {
        // The request is with the agent once another one has been answered.
        guest.unary("process.Process/List", json!({})).await;
        assert!(!exists(&marker));
        guest.agent.cgroup.thaw().unwrap();
    });
    assert_eq!(answer.finish().await.end["exitCode"], 0);
    assert!(exists(&marker));
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let guest = Guest::start().await;
    let message = |cmd: &str, cwd: &str| json!({"process": {"cmd": cmd, "args": [], "cwd": cwd}});
    for (message, user, code, word) in [
        (message("/no/such/program", "/tmp"), "root", "not_found", "/no/such/program"),
        (message("no-such-program", "/tmp"), "root", "not_found", "no-such-program"),
        (message("/etc/passwd", "/tmp"), "root", "permission_denied", "/etc/passwd"),
        (message("/bin/true", "/no/such/directory"), "root", "invalid_argument", "/no/such/directory"),
        (message("/bin/true", "/tmp"), "nosuchuser", "invalid_argument", "nosuchuser"),
        (message("", "/tmp"), "root", "invalid_argument", "cmd"),
        (message("/bin/\0true", "/tmp"), "root", "invalid_argument", "NUL"),
        (json!({}), "root", "invalid_argument", "process"),
        (json!({"process": {"cmd": "/bin/true"}, "pty": {"size": {}}}), "root", "unimplemented", "terminals"),
        (json!({"process": {"cmd": 7}}), "root", "invalid_argument", "malformed"),
    ] {
        let outcome = guest.stream("Start", message, &[("authorization", &basic(user))]).await.finish().await;
        assert_eq!(outcome.error["code"], code, "{outcome:?}");
        assert!(outcome.error["message"].as_str().unwrap().contains(word), "{outcome:?}");
    }
    assert!(guest.agent.processes.list().is_empty());
}

#[tokio::test]
async fn bad_framing_is_refused() {
    let guest = Guest::start().await;
    let good = snapyard_guest::connect::frame(b"{}").to_vec();
    for (wire, code) in [
        (vec![], "invalid_argument"),
        (vec![0, 0, 0], "invalid_argument"),
        (vec![0, 0, 0, 0, 9, b'{', b'}'], "invalid_argument"),
        (vec![0, 0xff, 0xff, 0xff, 0xff, b'{', b'}'], "resource_exhausted"),
        (vec![1, 0, 0, 0, 2, b'{', b'}'], "unimplemented"),
        ([good.clone(), good].concat(), "invalid_argument"),
        (vec![0, 0, 0, 0, 2, b'[', b'{'], "invalid_argument"),
    ] {
        let outcome = guest.raw_stream("Start", Bytes::from(wire.clone()), &[]).await.finish().await;
        assert_eq!(outcome.error["code"], code, "{wire:?}");
    }
}

#[tokio::test]
async fn a_bad_timeout_header_is_refused() {
    let guest = Guest::start().await;
    let outcome = guest.start_script("true", &[("connect-timeout-ms", "soon")]).await.finish().await;
    assert_eq!(outcome.error["code"], "invalid_argument");
}

#[tokio::test]
async fn unknown_calls_are_unimplemented() {
    let guest = Guest::start().await;
    for method in ["process.Process/Nope", "nope.Nope/Nope", "process.Process/Update"] {
        let reply = guest.unary(method, json!({})).await;
        assert_eq!((reply.status, &reply.json()["code"]), (StatusCode::NOT_IMPLEMENTED, &json!("unimplemented")));
    }
}

#[tokio::test]
async fn keepalives_come_while_nothing_else_does() {
    let guest = Guest::start().await;
    let mut stream = guest.start_script("read line", &[("keepalive-ping-interval", "1")]).await;
    let pid = stream.pid().await;
    assert_eq!(stream.next().await.unwrap(), json!({"event": {"keepalive": {}}}));
    guest.unary("process.Process/CloseStdin", json!({"process": {"pid": pid}})).await;
    assert_eq!(stream.finish().await.end["exitCode"], 1);
}
