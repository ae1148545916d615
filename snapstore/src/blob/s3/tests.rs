//! The S3 client against the embedded endpoint, and against a peer that misbehaves by script.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::*;

/// Answers each connection's one request with the next of its canned answers, and the last one for ever.
async fn scripted(answers: Vec<Canned>) -> S3Blobs {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    tokio::spawn(async move {
        for turn in 0.. {
            let (socket, _) = listener.accept().await.expect("accept");
            let answer = answers[turn.min(answers.len() - 1)].clone();
            tokio::spawn(answer_one(socket, answer));
        }
    });
    let config = S3Config::new(Some(format!("http://{address}")), "us-east-1", "bucket", "key", "secret");
    S3Blobs::new(S3Config { attempt_timeout: Duration::from_millis(400), max_attempts: 2, ..config })
}

#[derive(Clone)]
enum Canned {
    /// These bytes, then the connection ends.
    Bytes(String),
    /// These bytes, and then nothing, with the connection left open.
    Stall(String),
    /// The connection ends without an answer.
    Hangup,
}

fn status(line: &str, code: &str) -> Canned {
    let body = format!("<Error><Code>{code}</Code><Message>scripted</Message></Error>");
    Canned::Bytes(format!("HTTP/1.1 {line}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
}

fn body(stated: usize, sent: &str) -> String {
    format!("HTTP/1.1 206 Partial Content\r\nconnection: close\r\ncontent-length: {stated}\r\n\r\n{sent}")
}

async fn answer_one(mut socket: TcpStream, answer: Canned) {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let Ok(read @ 1..) = socket.read(&mut buffer).await else { return };
        request.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&request);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let wanted = head
            .to_lowercase()
            .lines()
            .find_map(|line| line.strip_prefix("content-length:").and_then(|len| len.trim().parse::<usize>().ok()));
        if body.len() >= wanted.unwrap_or(0) {
            break;
        }
    }
    match answer {
        Canned::Bytes(bytes) => {
            // The client may have given up already.
            let _ = socket.write_all(bytes.as_bytes()).await;
        }
        Canned::Stall(bytes) => {
            let _ = socket.write_all(bytes.as_bytes()).await;
            std::future::pending::<()>().await;
        }
        Canned::Hangup => {}
    }
}

async fn put(answers: Vec<Canned>, mode: PutMode) -> Result<PutOutcome, BlobError> {
    scripted(answers).await.put("packs/a", Bytes::from_static(b"content"), mode).await
}

async fn get(answers: Vec<Canned>) -> Result<Bytes, BlobError> {
    scripted(answers).await.get_range("packs/a", 0..10).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_conforms() {
    let dir = tempfile::tempdir().expect("dir");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let keys = crate::s3d::KeyPair { access_key: "key".into(), secret_key: "secret".into() };
    let config =
        S3Config::new(Some(format!("http://{address}")), "us-east-1", "bucket", &keys.access_key, &keys.secret_key);
    let (stop, stopped) = oneshot::channel::<()>();
    let served = dir.path().to_owned();
    let server = tokio::spawn(async move {
        let stopped = async { stopped.await.unwrap_or_default() };
        crate::s3d::serve(listener, &served, &keys, stopped).await
    });
    let blobs = S3Blobs::new(config);
    blobs.ensure_bucket().await.expect("create");
    blobs.ensure_bucket().await.expect("it is there");
    crate::blob::conformance::run(&blobs).await;
    let missing = S3Blobs::new(S3Config { bucket: "nowhere".into(), ..blobs.config.clone() });
    let refused = missing.put("packs/a", Bytes::from_static(b"x"), PutMode::Overwrite).await;
    assert!(matches!(refused, Err(BlobError::Refused { .. })), "{refused:?}");
    stop.send(()).expect("the server runs");
    server.await.expect("joined").expect("served");
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_may_have_happened() {
    for answer in [status("500 Internal Server Error", "InternalError"), Canned::Hangup, Canned::Stall(String::new())] {
        let error = put(vec![answer], PutMode::Overwrite).await.expect_err("no success");
        assert!(error.may_have_happened() && error.is_transient(), "{error}");
    }
}

#[tokio::test]
async fn a_write_that_was_turned_away_did_not_happen() {
    let busy = put(vec![status("503 Slow Down", "SlowDown")], PutMode::Overwrite).await.expect_err("busy");
    assert!(matches!(busy, BlobError::Unavailable { .. }), "{busy}");
    let denied = put(vec![status("403 Forbidden", "AccessDenied")], PutMode::Overwrite).await.expect_err("denied");
    assert!(matches!(denied, BlobError::Refused { .. }) && !denied.is_transient(), "{denied}");
    let conflict = put(vec![status("409 Conflict", "ConditionalRequestConflict")], PutMode::IfAbsent).await;
    assert!(matches!(conflict, Err(BlobError::Unavailable { .. })), "{conflict:?}");
}

#[tokio::test]
async fn a_write_is_repeated_after_a_passing_failure() {
    let ok = Canned::Bytes("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".into());
    let outcome = put(vec![status("503 Slow Down", "SlowDown"), ok], PutMode::Overwrite).await;
    assert_eq!(outcome, Ok(PutOutcome::Written));
    // The first attempt took effect, its answer was lost: the object found is our own.
    let found = vec![Canned::Hangup, status("412 Precondition Failed", "PreconditionFailed")];
    assert_eq!(put(found, PutMode::IfAbsent).await, Ok(PutOutcome::AlreadyThere));
}

#[tokio::test]
async fn a_read_that_breaks_off_is_read_again() {
    let good = Canned::Bytes(body(10, "0123456789"));
    for broken in [Canned::Bytes(body(10, "01234")), Canned::Stall(body(10, "01234")), Canned::Hangup] {
        let read = get(vec![broken, good.clone()]).await;
        assert_eq!(read, Ok(Bytes::from_static(b"0123456789")));
    }
}

#[tokio::test]
async fn a_read_that_keeps_breaking_is_unavailable_not_short() {
    for broken in [Canned::Bytes(body(10, "01234")), Canned::Stall(body(10, "01234"))] {
        let error = get(vec![broken]).await.expect_err("never whole");
        assert!(matches!(error, BlobError::Unavailable { .. }) && !error.may_have_happened(), "{error}");
    }
}

#[tokio::test]
async fn an_answer_of_another_length_is_refused() {
    let error = get(vec![Canned::Bytes(body(5, "01234"))]).await.expect_err("five of ten");
    assert!(matches!(error, BlobError::BadAnswer { .. }), "{error}");
    let endless = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", u64::MAX / 2);
    let error = scripted(vec![Canned::Stall(endless)]).await.get("packs/a", 100).await.expect_err("over the cap");
    assert!(matches!(error, BlobError::BadAnswer { .. }), "{error}");
}

#[test]
fn the_secret_is_not_printed() {
    let config = S3Config::new(None, "us-east-1", "bucket", "key", "very secret");
    assert!(!format!("{config:?}").contains("secret"));
}
