//! The stand-in VMM: what runs in the other process.
//!
//! Commands and answers are packets on an inherited socket: `ID WORDS…` in, `ID RESULT` out, in any order.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::{MsgFlags, recv, send};
use snapyard_vmm::PAGE_SIZE;

use super::source::page_bytes;

pub const VARIABLE: &str = "SNAPYARD_STAND_IN";

/// What both sides compare instead of megabytes.
pub fn digest(bytes: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    format!("{:016x}", hasher.finish())
}

/// Guest memory. It is touched through volatile page copies only.
#[derive(Clone, Copy)]
struct Memory {
    base: usize,
    size: usize,
}

impl Memory {
    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.size, "inside guest memory");
        let mut bytes = vec![0u8; len];
        // SAFETY: the range is mapped for as long as the process lives; threads that race for a page are the test's
        // own business, as a guest's are.
        unsafe { std::ptr::copy_nonoverlapping((self.base + offset) as *const u8, bytes.as_mut_ptr(), len) };
        bytes
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.size, "inside guest memory");
        // SAFETY: as for reading.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (self.base + offset) as *mut u8, bytes.len()) };
    }
}

/// The process: maps the placeholder, then obeys until the test hangs up.
pub fn run() {
    let setup = std::env::var(VARIABLE).expect("started by another test");
    let numbers: Vec<u64> = setup.split(',').map(|number| number.parse().unwrap()).collect();
    let (socket, placeholder, size) = (numbers[0] as i32, numbers[1], numbers[2] as usize);
    // SAFETY: the descriptor was inherited for this purpose, and nothing else in this process knows of it.
    let socket = Arc::new(unsafe { OwnedFd::from_raw_fd(socket) });
    let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{placeholder}")).unwrap();
    // SAFETY: a new mapping at a place that the kernel chooses.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert!(base != libc::MAP_FAILED, "map the placeholder");
    let memory = Memory { base: base as usize, size };
    let mut buffer = [0u8; 256];
    loop {
        let len = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
        if len == 0 {
            return;
        }
        let command = String::from_utf8(buffer[..len].to_vec()).unwrap();
        let socket = Arc::clone(&socket);
        std::thread::spawn(move || {
            let (id, command) = command.split_once(' ').unwrap();
            let answer = format!("{id} {}", obey(memory, command));
            // The test may have hung up already.
            let _ = send(socket.as_raw_fd(), answer.as_bytes(), MsgFlags::MSG_NOSIGNAL);
        });
    }
}

fn obey(memory: Memory, command: &str) -> String {
    let words: Vec<&str> = command.split(' ').collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    match words[0] {
        "ping" => "pong".into(),
        "digest" => digest(&memory.read(number(1) as usize, number(2) as usize)),
        "fill" => {
            memory.write(number(1) as usize, &vec![number(3) as u8; number(2) as usize]);
            "ok".into()
        }
        "hammer" => hammer(memory, number(1), number(2), number(3), number(4)),
        // Reads by the kernel, not by the processor.
        "kernel-read" => {
            let (reader, writer) = nix::unistd::pipe().unwrap();
            // SAFETY: the page is mapped as long as the process lives.
            let page = unsafe {
                std::slice::from_raw_parts((memory.base + number(1) as usize) as *const u8, PAGE_SIZE as usize)
            };
            nix::unistd::write(&writer, page).unwrap();
            let mut bytes = vec![0; PAGE_SIZE as usize];
            assert_eq!(nix::unistd::read(&reader, &mut bytes).unwrap(), bytes.len());
            digest(&bytes)
        }
        "descriptors" => std::fs::read_dir("/proc/self/fd").unwrap().count().to_string(),
        other => panic!("unknown command {other}"),
    }
}

/// So many threads read and write pages at random and check every byte. Pages of even 16-page groups are only read, all
/// others belong to one thread each, which alone reads and writes them. Says `ok` or what was wrong.
fn hammer(memory: Memory, seed: u64, random: u64, threads: u64, turns: u64) -> String {
    let workers: Vec<_> = (0..threads)
        .map(|thread| {
            std::thread::spawn(move || -> Result<(), String> {
                let pages = memory.size as u64 / PAGE_SIZE;
                let mut mine: HashMap<u64, u8> = HashMap::new();
                let mut state = random ^ thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                for _ in 0..turns {
                    // xorshift64
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let page = (state >> 16) % pages;
                    let at = (page * PAGE_SIZE) as usize;
                    let shared = (page / 16).is_multiple_of(2);
                    if !shared && page % threads != thread {
                        continue;
                    }
                    let expected = match mine.get(&page) {
                        Some(byte) => vec![*byte; PAGE_SIZE as usize],
                        None => page_bytes(seed, page),
                    };
                    if !shared && state.is_multiple_of(3) {
                        let byte = (state >> 40) as u8;
                        memory.write(at, &vec![byte; PAGE_SIZE as usize]);
                        mine.insert(page, byte);
                    } else if memory.read(at, PAGE_SIZE as usize) != expected {
                        return Err(format!("thread {thread}: page {page} is wrong"));
                    }
                }
                Ok(())
            })
        })
        .collect();
    for worker in workers {
        match worker.join() {
            Ok(Ok(())) => {}
            Ok(Err(wrong)) => return wrong,
            Err(_) => return "a thread panicked".into(),
        }
    }
    "ok".into()
}
