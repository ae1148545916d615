//! A scripted agent behind a real HTTP connection: what is sent to it, and what becomes of its answers.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use clap::Parser as _;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::*;
use crate::cli::{Cli, Command, SandboxCommand};

/// Requests as they arrived: path, headers, body.
type Log = Arc<Mutex<Vec<(String, HeaderMap, Vec<u8>)>>>;

/// Serves `GET /sandboxes/…` and answers every call of the agent with `stream`; gives back its URL and its log.
async fn scripted(stream: Vec<u8>) -> (String, Log) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let log = Log::default();
    let requests = log.clone();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let (requests, stream) = (requests.clone(), stream.clone());
            let service = service_fn(move |request: Request<Incoming>| {
                let (requests, stream) = (requests.clone(), stream.clone());
                async move {
                    let (head, body) = request.into_parts();
                    let body = body.collect().await.expect("whole request").to_bytes().to_vec();
                    let path = head.uri.path().to_owned();
                    let answer = match path.strip_prefix("/sandboxes/") {
                        Some("gone") => Response::builder()
                            .status(404)
                            .body(Full::<Bytes>::from(r#"{"code":404,"message":"sandbox gone was not found"}"#)),
                        Some(_) => Response::builder().body(Full::from(r#"{"envdAccessToken":"t0ken"}"#)),
                        None => Response::builder().body(Full::from(stream)),
                    };
                    requests.lock().expect("not poisoned").push((path, head.headers, body));
                    Ok::<_, Infallible>(answer.expect("valid response"))
                }
            });
            tokio::spawn(
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(connection), service),
            );
        }
    });
    (url, log)
}

fn events(events: &[&str]) -> Vec<u8> {
    let mut stream: Vec<u8> = events.iter().flat_map(|event| connect::encode(event.as_bytes())).collect();
    let mut end = connect::encode(b"{}");
    end[0] = 0x02;
    stream.extend(end);
    stream
}

fn args(words: &[&str]) -> ExecArgs {
    let words = ["snapyard", "sandbox", "exec"].into_iter().chain(words.iter().copied());
    match Cli::try_parse_from(words).expect("valid command line").command {
        Command::Sandbox(SandboxCommand::Exec(args)) => args,
        other => panic!("exec was parsed, not {other:?}"),
    }
}

#[tokio::test]
async fn the_exit_code_is_passed_on() {
    let stream = events(&[
        r#"{"event":{"start":{"pid":7}}}"#,
        r#"{"event":{"data":{"stdout":"aGkK"}}}"#,
        r#"{"event":{"keepalive":{}}}"#,
        r#"{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3"}}}"#,
    ]);
    let (url, log) = scripted(stream).await;
    let api = Api::new(&url).expect("an address");
    let words = ["-u", "root", "-C", "/tmp", "-e", "A=1", "--timeout", "2s", "abc", "echo hi"];
    assert_eq!(run(&api, args(&words)).await.expect("it ran"), 3);

    let log = log.lock().expect("not poisoned");
    let (path, headers, body) = &log[1];
    assert_eq!(path, "/process.Process/Start");
    assert_eq!(headers["e2b-sandbox-id"], "abc");
    assert_eq!(headers["e2b-sandbox-port"], "49983");
    assert_eq!(headers["x-access-token"], "t0ken");
    assert_eq!(headers["authorization"], "Basic cm9vdDo=");
    assert_eq!(headers["connect-timeout-ms"], "2000");
    let mut decoder = Decoder::default();
    decoder.push(body);
    let Ok(Some(Frame::Message(message))) = decoder.next_frame() else { panic!("one frame was sent") };
    let sent: Value = serde_json::from_slice(&message).expect("JSON");
    let process = json!({"cmd": "/bin/bash", "args": ["-l", "-c", "echo hi"], "envs": {"A": "1"}, "cwd": "/tmp"});
    assert_eq!(sent, json!({"process": process, "stdin": false}));
}

#[test]
fn several_words_are_a_program_and_its_arguments() {
    let request = start_request(&args(&["abc", "ls", "-l", "a b"]));
    assert_eq!(request["process"]["cmd"], "ls");
    assert_eq!(request["process"]["args"], json!(["-l", "a b"]));
    assert_eq!(request["process"].get("cwd"), None);
}

#[tokio::test]
async fn a_sandbox_that_is_gone_is_not_found() {
    let (url, _log) = scripted(Vec::new()).await;
    let failure = run(&Api::new(&url).expect("an address"), args(&["gone", "true"])).await.expect_err("no sandbox");
    assert_eq!(failure.kind, Kind::NotFound);
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_no_success() {
    let (url, _log) = scripted(connect::encode(br#"{"event":{"start":{"pid":7}}}"#)).await;
    let failure = run(&Api::new(&url).expect("an address"), args(&["abc", "true"])).await.expect_err("no end");
    assert_eq!(failure.kind, Kind::Unreachable);
    assert!(failure.to_string().contains("process 7"), "{failure}");
}

#[tokio::test]
async fn an_error_of_the_agent_is_told() {
    let mut stream = connect::encode(br#"{"error":{"code":"not_found","message":"no user nobody2"}}"#);
    stream[0] = 0x02;
    let (url, _log) = scripted(stream).await;
    let failure = run(&Api::new(&url).expect("an address"), args(&["abc", "true"])).await.expect_err("refused");
    assert_eq!(failure.kind, Kind::NotFound);
    assert!(failure.to_string().contains("no user nobody2"), "{failure}");
}
