//! The test's side of the stand-in VMM.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use parking_lot::Mutex;
use snapyard_vmm::descriptors::inherit;
use snapyard_vmm::{MemoryImage, PageServer, Preload, PreloadChannel, Region, ServedGuest, placeholder};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::stand_in::{VARIABLE, digest};

type Pending = Arc<Mutex<HashMap<u64, oneshot::Sender<String>>>>;

/// A stand-in VMM. Dropping it kills it.
pub struct Guest {
    child: Child,
    pub channel: PreloadChannel,
    socket: Arc<OwnedFd>,
    pending: Pending,
    next: AtomicU64,
    pub size: u64,
}

/// The library that cargo built beside this test.
fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().join("libsnapyard_vmm_preload.so")
}

impl Guest {
    pub fn start(size: u64) -> Self {
        Self::start_as(size, None)
    }

    /// Starts it, under this user id if one is given.
    pub fn start_as(size: u64, uid: Option<u32>) -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let exe = File::open("/proc/self/exe").unwrap();
        // By descriptor: another user may not reach the directory of the binary.
        let mut command = Command::new(format!("/proc/self/fd/{}", exe.as_raw_fd()));
        inherit(&mut command, exe.into());
        command
            .args(["--ignored", "--exact", "stand_in_vmm", "--nocapture"])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let placeholder = placeholder(size).unwrap();
        let channel = Preload::prepare(&mut command, &library(), &placeholder).unwrap();
        let socket = inherit(&mut command, theirs);
        let memory = inherit(&mut command, placeholder);
        let child = command.env(VARIABLE, format!("{socket},{memory},{size}")).spawn().unwrap();
        drop(command);
        let socket = Arc::new(ours);
        let pending = Pending::default();
        let (reader, answers) = (Arc::clone(&socket), Arc::clone(&pending));
        std::thread::spawn(move || {
            let mut buffer = [0u8; 256];
            while let Ok(len @ 1..) = recv(reader.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                let answer = String::from_utf8(buffer[..len].to_vec()).unwrap();
                let (id, result) = answer.split_once(' ').unwrap();
                if let Some(waiter) = answers.lock().remove(&id.parse().unwrap()) {
                    let _ = waiter.send(result.to_owned());
                }
            }
            answers.lock().clear();
        });
        Self { child, channel, socket, pending, next: AtomicU64::new(0), size }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives it the image and serves it.
    pub fn attach(&self, image: &Arc<MemoryImage>) -> ServedGuest {
        let (uffd, regions) = self.channel.attach(image).unwrap();
        assert_eq!(regions.iter().map(|region| region.size).sum::<u64>(), self.size);
        serve(uffd, regions, image)
    }

    /// Sends a command, and gives what will be answered.
    pub fn begin(&self, command: impl AsRef<str>) -> oneshot::Receiver<String> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        self.pending.lock().insert(id, sender);
        let message = format!("{id} {}", command.as_ref());
        send(self.socket.as_raw_fd(), message.as_bytes(), MsgFlags::MSG_NOSIGNAL).unwrap();
        receiver
    }

    pub async fn call(&self, command: impl AsRef<str>) -> String {
        answer(self.begin(command)).await
    }

    /// Asserts that these bytes are what it reads at the offset.
    pub async fn expect(&self, offset: u64, bytes: &[u8]) {
        let found = self.call(format!("digest {offset} {}", bytes.len())).await;
        assert_eq!(found, digest(bytes), "{} bytes at {offset:#x}", bytes.len());
    }

    pub async fn fill(&self, offset: u64, len: u64, byte: u8) {
        assert_eq!(self.call(format!("fill {offset} {len} {byte}")).await, "ok");
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn serve(uffd: OwnedFd, regions: Vec<Region>, image: &Arc<MemoryImage>) -> ServedGuest {
    PageServer::serve(uffd, regions, Arc::clone(image), Handle::current()).unwrap()
}

/// An answer that has to come.
pub async fn answer(pending: oneshot::Receiver<String>) -> String {
    within(pending).await.expect("the stand-in lives")
}

/// A thing that has to happen.
pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("it happens within a minute")
}
