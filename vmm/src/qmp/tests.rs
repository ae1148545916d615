//! The client against a scripted QEMU.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::{ControlMessageOwned, recvmsg};
use tokio::io::AsyncWriteExt;

use super::*;

/// QEMU's end of the socket.
struct Peer {
    lines: BufReader<UnixStream>,
}

impl Peer {
    async fn say(&mut self, message: Value) {
        self.lines.get_mut().write_all(format!("{message}\r\n").as_bytes()).await.unwrap();
    }

    async fn hear(&mut self) -> Value {
        next_line(&mut self.lines).await.unwrap().expect("a command")
    }

    /// Answers the next command, which must be this one.
    async fn answer(&mut self, command: &str, answer: Value) {
        let heard = self.hear().await;
        assert_eq!(heard["execute"], command);
        self.say(json!({ "return": answer, "id": heard["id"] })).await;
    }
}

fn pair() -> (StdUnixStream, Peer) {
    let (ours, theirs) = StdUnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    (ours, Peer { lines: BufReader::new(UnixStream::from_std(theirs).unwrap()) })
}

const PATIENCE: Duration = Duration::from_secs(60);

async fn connected() -> (Qmp, Peer) {
    let (ours, mut peer) = pair();
    let script = async {
        peer.say(json!({ "QMP": { "version": {}, "capabilities": [] } })).await;
        peer.answer("qmp_capabilities", json!({})).await;
    };
    let (qmp, ()) = tokio::join!(Qmp::connect(ours, PATIENCE), script);
    (qmp.unwrap(), peer)
}

#[tokio::test]
async fn answers_find_their_askers_in_any_order() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        let (first, second) = (peer.hear().await, peer.hear().await);
        assert_eq!(first["arguments"]["a"], 1);
        assert!(second.get("arguments").is_none());
        peer.say(json!({ "event": "RESUME", "timestamp": {} })).await;
        peer.say(json!({ "return": second["execute"], "id": second["id"] })).await;
        peer.say(json!({ "return": first["execute"], "id": first["id"] })).await;
    };
    let (a, b, ()) = tokio::join!(qmp.execute("one", json!({ "a": 1 })), qmp.execute("two", Value::Null), script);
    assert_eq!((a.unwrap(), b.unwrap()), (json!("one"), json!("two")));
}

#[tokio::test]
async fn a_refusal_carries_the_reason() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        let heard = peer.hear().await;
        peer.say(json!({ "error": { "class": "GenericError", "desc": "no such thing" }, "id": heard["id"] })).await;
    };
    let (result, ()) = tokio::join!(qmp.execute("thing", Value::Null), script);
    let error = result.unwrap_err();
    assert!(matches!(&error, QmpError::Refused { reason, .. } if reason == "no such thing"), "{error}");
}

#[tokio::test]
async fn events_reach_subscribers_and_the_reason_of_a_shutdown_is_kept() {
    let (qmp, mut peer) = connected().await;
    let mut events = qmp.events();
    assert_eq!(qmp.shutdown_reason(), None);
    peer.say(json!({ "event": "STOP" })).await;
    peer.say(json!({ "event": "SHUTDOWN", "data": { "guest": true, "reason": "guest-reset" } })).await;
    assert_eq!(events.recv().await.unwrap(), QmpEvent { name: "STOP".into(), data: Value::Null });
    assert_eq!(events.recv().await.unwrap().data["reason"], "guest-reset");
    assert_eq!(qmp.shutdown_reason().unwrap(), "shutdown: guest-reset");
}

#[tokio::test]
async fn the_end_of_qemu_ends_every_command_now_and_later() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        peer.hear().await;
        // Half a line is no answer.
        peer.lines.get_mut().write_all(b"{\"return\": ").await.unwrap();
        drop(peer);
    };
    let (result, ()) = tokio::join!(qmp.execute("stop", Value::Null), script);
    assert!(matches!(result.unwrap_err(), QmpError::Gone { .. }));
    assert!(matches!(qmp.execute("cont", Value::Null).await.unwrap_err(), QmpError::Gone { .. }));
}

#[tokio::test(start_paused = true)]
async fn no_answer_is_an_error_after_the_deadline_and_a_late_one_is_dropped() {
    let (qmp, mut peer) = connected().await;
    let error = qmp.execute("stop", Value::Null).await.unwrap_err();
    assert!(matches!(error, QmpError::Late { waited: PATIENCE, .. }), "{error}");
    let late = peer.hear().await;
    peer.say(json!({ "return": {}, "id": late["id"] })).await;
    let script = peer.answer("cont", json!("fine"));
    let (result, ()) = tokio::join!(qmp.execute("cont", Value::Null), script);
    assert_eq!(result.unwrap(), json!("fine"));
}

#[tokio::test]
async fn what_is_not_qmp_is_refused() {
    let (ours, mut peer) = pair();
    peer.say(json!({ "hello": 1 })).await;
    let error = Qmp::connect(ours, PATIENCE).await.unwrap_err();
    assert!(matches!(error, QmpError::Channel { .. }), "{error}");

    let (ours, peer) = pair();
    drop(peer);
    assert!(matches!(Qmp::connect(ours, PATIENCE).await.unwrap_err(), QmpError::Gone { .. }));

    let (qmp, mut peer) = connected().await;
    peer.lines.get_mut().write_all(b"no json\n").await.unwrap();
    let error = qmp.execute("stop", Value::Null).await.unwrap_err();
    assert!(matches!(error, QmpError::Gone { .. }), "{error}");
}

#[tokio::test]
async fn a_descriptor_travels_with_its_command() {
    let (ours, theirs) = StdUnixStream::pair().unwrap();
    // The scripted QEMU of this test reads by hand: descriptors are lost on a reader that does not ask for them.
    let script = std::thread::spawn(move || {
        let mut theirs = theirs;
        theirs.write_all(b"{\"QMP\": {}}\n").unwrap();
        let mut received = None;
        for _ in 0..2 {
            let mut bytes = vec![0; 4096];
            let (len, fd) = {
                let mut space = nix::cmsg_space!([RawFd; 1]);
                let mut slices = [io::IoSliceMut::new(&mut bytes)];
                let message =
                    recvmsg::<()>(theirs.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::empty()).unwrap();
                let fd = message.cmsgs().unwrap().find_map(|control| match control {
                    ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
                    _ => None,
                });
                (message.bytes, fd)
            };
            let heard: Value = serde_json::from_slice(&bytes[..len]).unwrap();
            received = received.or(fd.map(|fd| (heard.clone(), fd)));
            writeln!(theirs, "{}", json!({ "return": {}, "id": heard["id"] })).unwrap();
        }
        received.expect("a descriptor")
    });
    let qmp = Qmp::connect(ours, PATIENCE).await.unwrap();
    let mut file: File = tempfile::tempfile().unwrap();
    file.write_all(b"state").unwrap();
    file.rewind().unwrap();
    qmp.give_fd("state-in", file.as_fd()).await.unwrap();
    let (heard, number) = script.join().unwrap();
    assert_eq!((&heard["execute"], &heard["arguments"]["fdname"]), (&json!("getfd"), &json!("state-in")));
    // SAFETY: the kernel made this descriptor for this process, and nothing else knows it.
    let fd: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(number) };
    let mut text = String::new();
    File::from(fd).read_to_string(&mut text).unwrap();
    assert_eq!(text, "state");
}
