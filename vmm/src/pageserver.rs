//! The page server of a guest: answers its page faults from the memory image that it was restored from.
//!
//! One thread per guest reads the faults and makes the mappings; it never waits for bytes. What the image lacks is
//! filled by a task on the runtime, and the thread maps it when the task rings.
//!
//! ```text
//!   fault ──▶ page present ──▶ UFFDIO_CONTINUE of the present pages around it ──▶ the guest goes on
//!         ──▶ page zero ─────▶ UFFDIO_ZEROPAGE of the zero pages around it ─────▶ the guest goes on
//!         ──▶ page missing ──▶ waits ──▶ fill ──ok──▶ as above
//!                                          └──fails for good──▶ never answered; the guest is reported failed
//! ```
//!
//! Invariants:
//! - What is mapped is decided by the state of the image, not by the kind of the fault: the presence of a page in the
//!   file proves nothing (see [`crate::image`]).
//! - A fault that cannot be answered stays unanswered. The guest waits; its owner learns the reason and kills it.
//! - Who waits is woken: an `EEXIST` does not imply a wake, so one follows.
//!
//! Crash points. A server that stops (or dies with its process) after reading a fault leaves it unanswered; a new server
//! on the same userfaultfd begins by waking everything, so the fault comes again. The guest cannot tell. The VMM keeps
//! the userfaultfd open itself, else the kernel would serve zeros between the two.
//!
//! Guest memory is never given back piecemeal (no balloon), so the kernel's remove and remap events are not asked for.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use userfaultfd::{EventBuffer, Uffd};

use crate::image::{FillError, MemoryImage, PageState};
use crate::region::Region;
use crate::source::{ChunkNo, PAGE_SIZE};
use crate::uffd::{self, Mapping};

/// How a page server serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeConfig {
    /// How many bytes around a fault are mapped with it, as far as the image has them: a power of two, at least a page.
    pub fault_around: u64,
    /// How long the kernel may refuse a mapping for want of memory before the guest is given up.
    pub patience: Duration,
}

/// How many events are read at once.
const EVENTS_AT_ONCE: usize = 64;

impl Default for ServeConfig {
    fn default() -> Self {
        Self { fault_around: 64 * 1024, patience: Duration::from_secs(30) }
    }
}

/// Why a guest's faults can no longer all be answered. The guest hangs, and has to be killed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("guest memory: {reason}")]
pub struct GuestFault {
    /// For people.
    pub reason: String,
}

/// A page server that could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The operating system refused.
    #[error("page server of {image}: {step}: {cause}")]
    Os {
        /// The name of the image.
        image: String,
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        #[source]
        cause: io::Error,
    },
    /// A region does not lie in the image, or the fault-around size is impossible.
    #[error("page server of {image}: {region:?} with {fault_around} bytes around a fault does not fit the image")]
    Region {
        /// The name of the image.
        image: String,
        /// The region.
        region: Region,
        /// The configured fault-around size.
        fault_around: u64,
    },
}

/// What a page server has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultStats {
    /// Faults read.
    pub faults: u64,
    /// Faults that had to wait for a fill.
    pub waited: u64,
    /// Bytes mapped from the image.
    pub mapped_bytes: u64,
    /// Bytes mapped as zeros.
    pub zero_bytes: u64,
}

/// Starts page servers.
#[derive(Debug, Clone, Copy)]
pub struct PageServer;

impl PageServer {
    /// Serves the faults that arrive on `uffd` for the `regions` from `image`, as configured by default. Fills run on
    /// `runtime`.
    ///
    /// Whoever waits at the start is woken, so a guest whose former server stopped or died can be adopted.
    pub fn serve(
        uffd: OwnedFd,
        regions: Vec<Region>,
        image: Arc<MemoryImage>,
        runtime: Handle,
    ) -> Result<ServedGuest, ServeError> {
        Self::serve_with(uffd, regions, image, runtime, ServeConfig::default())
    }

    /// [`PageServer::serve`], configured.
    pub fn serve_with(
        uffd: OwnedFd,
        regions: Vec<Region>,
        image: Arc<MemoryImage>,
        runtime: Handle,
        config: ServeConfig,
    ) -> Result<ServedGuest, ServeError> {
        check(&regions, &image, &config)?;
        let name = image.name().to_owned();
        let os = |step| {
            let image = name.clone();
            move |cause| ServeError::Os { image, step, cause }
        };
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let bell = bell.map_err(|errno| os("make the bell")(errno.into()))?;
        set_nonblocking(&uffd).map_err(os("set up the userfaultfd"))?;
        let uffd = uffd::adopt(uffd);
        for region in &regions {
            match uffd::wake(&uffd, region.base_host_virt_addr, region.size) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => return Err(os("wake the guest")(errno.into())),
            }
        }
        let shared = Arc::new(Shared {
            bell,
            stop: AtomicBool::new(false),
            filled: Mutex::new(Vec::new()),
            touched: Mutex::new(Touched { order: Vec::new(), seen: vec![false; image.geometry().chunks() as usize] }),
            counters: Counters::default(),
            failure: watch::Sender::new(None),
        });
        let server = Server {
            uffd,
            events: EventBuffer::new(EVENTS_AT_ONCE),
            regions,
            image,
            runtime,
            config,
            shared: Arc::clone(&shared),
            waiting: HashMap::new(),
            refused: Vec::new(),
        };
        let thread = thread::Builder::new()
            .name("page-server".into())
            .spawn(move || server.run())
            .map_err(os("start the thread"))?;
        Ok(ServedGuest { shared, thread: Some(thread) })
    }
}

fn check(regions: &[Region], image: &MemoryImage, config: &ServeConfig) -> Result<(), ServeError> {
    let around = config.fault_around;
    for region in regions {
        let aligned =
            [region.base_host_virt_addr, region.size, region.offset].iter().all(|n| n.is_multiple_of(PAGE_SIZE));
        let inside = region.offset.checked_add(region.size).is_some_and(|end| end <= image.geometry().size_bytes())
            && region.base_host_virt_addr.checked_add(region.size).is_some();
        if !aligned || !inside || !around.is_power_of_two() || around < PAGE_SIZE {
            return Err(ServeError::Region { image: image.name().to_owned(), region: *region, fault_around: around });
        }
    }
    Ok(())
}

fn set_nonblocking(uffd: &OwnedFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(uffd, FcntlArg::F_GETFL)?);
    fcntl(uffd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// A guest whose faults are answered, until this is stopped or dropped (which joins the thread).
#[derive(Debug)]
pub struct ServedGuest {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ServedGuest {
    /// Becomes `Some` when a fault of the guest can not be answered, ever. Stays so.
    pub fn failure(&self) -> watch::Receiver<Option<GuestFault>> {
        self.shared.failure.subscribe()
    }

    /// What was done so far.
    pub fn stats(&self) -> FaultStats {
        let Counters { faults, waited, mapped_bytes, zero_bytes } = &self.shared.counters;
        FaultStats {
            faults: faults.load(Ordering::Relaxed),
            waited: waited.load(Ordering::Relaxed),
            mapped_bytes: mapped_bytes.load(Ordering::Relaxed),
            zero_bytes: zero_bytes.load(Ordering::Relaxed),
        }
    }

    /// The chunks that the guest's faults touched, each once, in the order of the first touch: its working set so far.
    pub fn touched(&self) -> Vec<ChunkNo> {
        self.shared.touched.lock().order.clone()
    }

    /// Stops serving. Faults stay unanswered until there is a successor, which gets the userfaultfd from the VMM. Waits
    /// for the thread, not for fills.
    pub fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.stop.store(true, Ordering::Release);
        self.shared.ring();
        thread.join().expect("a page server does not panic");
    }
}

impl Drop for ServedGuest {
    fn drop(&mut self) {
        self.join();
    }
}

#[derive(Debug, Default)]
struct Counters {
    faults: AtomicU64,
    waited: AtomicU64,
    mapped_bytes: AtomicU64,
    zero_bytes: AtomicU64,
}

#[derive(Debug)]
struct Touched {
    order: Vec<ChunkNo>,
    seen: Vec<bool>,
}

/// What the thread, the fills and the owner share.
#[derive(Debug)]
struct Shared {
    bell: EventFd,
    stop: AtomicBool,
    filled: Mutex<Vec<(ChunkNo, Result<(), FillError>)>>,
    touched: Mutex<Touched>,
    counters: Counters,
    failure: watch::Sender<Option<GuestFault>>,
}

impl Shared {
    fn ring(&self) {
        // Fails only when 2^64 - 1 rings are pending, in which case the bell rings anyway.
        let _ = self.bell.write(1);
    }

    /// The first failure counts.
    fn fail(&self, reason: String) {
        self.failure.send_if_modified(|failure| {
            let first = failure.is_none();
            if first {
                tracing::error!(reason, "guest memory cannot be served");
                *failure = Some(GuestFault { reason });
            }
            first
        });
    }
}

/// The faults that wait for one chunk.
struct Waiting {
    addresses: Vec<u64>,
    fill: AbortHandle,
}

/// A fault that the kernel would not let us answer just now.
struct Refused {
    address: u64,
    since: Instant,
}

/// The thread's state.
struct Server {
    uffd: Uffd,
    events: EventBuffer,
    regions: Vec<Region>,
    image: Arc<MemoryImage>,
    runtime: Handle,
    config: ServeConfig,
    shared: Arc<Shared>,
    waiting: HashMap<ChunkNo, Waiting>,
    refused: Vec<Refused>,
}

impl Server {
    /// Serves until told to stop.
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            if let Err(errno) = self.turn() {
                self.shared.fail(format!("reading faults: {errno}"));
                self.wait_for_stop();
            }
        }
        for waiting in self.waiting.values() {
            waiting.fill.abort();
        }
    }

    /// One round: wait for something to do, then do all of it.
    fn turn(&mut self) -> Result<(), Errno> {
        let timeout = if self.refused.is_empty() { PollTimeout::NONE } else { PollTimeout::from(1u8) };
        let mut sources = [
            PollFd::new(self.uffd.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.shared.bell.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut sources, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        let faults = sources[0].any().unwrap_or(true);
        let rung = sources[1].any().unwrap_or(true);
        if rung {
            // Fails only when somebody drained it already.
            let _ = self.shared.bell.read();
            self.collect_fills();
        }
        for refused in std::mem::take(&mut self.refused) {
            self.answer(refused.address, refused.since);
        }
        if faults {
            for address in uffd::read_faults(&self.uffd, &mut self.events)? {
                self.shared.counters.faults.fetch_add(1, Ordering::Relaxed);
                self.note_touch(address);
                self.answer(address, Instant::now());
            }
        }
        Ok(())
    }

    /// After a failure of the descriptor itself there is nothing left to serve.
    fn wait_for_stop(&self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let mut bell = [PollFd::new(self.shared.bell.as_fd(), PollFlags::POLLIN)];
            if poll(&mut bell, PollTimeout::NONE).is_ok() {
                let _ = self.shared.bell.read();
            }
        }
    }

    fn collect_fills(&mut self) {
        let filled = std::mem::take(&mut *self.shared.filled.lock());
        for (chunk, result) in filled {
            let waiting = self.waiting.remove(&chunk);
            match result {
                Ok(()) => {
                    for address in waiting.map(|waiting| waiting.addresses).unwrap_or_default() {
                        self.answer(address, Instant::now());
                    }
                }
                Err(error) => self.shared.fail(error.to_string()),
            }
        }
    }

    /// The region of an address, and the page of the image that belongs there.
    fn locate(&self, address: u64) -> Option<(Region, u64)> {
        let region = *self.regions.iter().find(|region| region.contains(address))?;
        Some((region, (region.offset + (address - region.base_host_virt_addr)) / PAGE_SIZE))
    }

    fn note_touch(&self, address: u64) {
        let Some((_, page)) = self.locate(address) else { return };
        let chunk = self.image.geometry().chunk_at(page * PAGE_SIZE);
        let mut touched = self.shared.touched.lock();
        if !std::mem::replace(&mut touched.seen[chunk.0 as usize], true) {
            touched.order.push(chunk);
        }
    }

    /// Answers the fault at `address` if the image has its page, else has the page filled first.
    fn answer(&mut self, address: u64, since: Instant) {
        let Some((region, page)) = self.locate(address) else {
            return self.shared.fail(format!("a fault at {address:#x}, outside guest memory"));
        };
        let mapping = match self.image.page_state(page) {
            PageState::Present => Mapping::FilePages,
            PageState::Zero => Mapping::Zeros,
            PageState::Missing => return self.wait_for_chunk(address, page),
        };
        let (start, end) = self.around(region, page);
        if let Err(errno) = self.map(mapping, start, end) {
            match errno {
                Errno::EAGAIN | Errno::ENOMEM if since.elapsed() < self.config.patience => {
                    self.refused.push(Refused { address, since });
                }
                // The mapping was replaced, or the process is gone: nobody waits there any more.
                Errno::ENOENT | Errno::ESRCH => tracing::debug!(%errno, address, "a fault that is over"),
                _ => self.shared.fail(format!("mapping at {address:#x}: {errno}")),
            }
        }
    }

    fn wait_for_chunk(&mut self, address: u64, page: u64) {
        self.shared.counters.waited.fetch_add(1, Ordering::Relaxed);
        let chunk = self.image.geometry().chunk_at(page * PAGE_SIZE);
        match self.waiting.entry(chunk) {
            Entry::Occupied(mut waiting) => waiting.get_mut().addresses.push(address),
            Entry::Vacant(place) => {
                let (image, shared) = (Arc::clone(&self.image), Arc::clone(&self.shared));
                let fill = self.runtime.spawn(async move {
                    let result = image.ensure(chunk).await;
                    shared.filled.lock().push((chunk, result));
                    shared.ring();
                });
                place.insert(Waiting { addresses: vec![address], fill: fill.abort_handle() });
            }
        }
    }

    /// The addresses around a page whose pages are all in the same state as it: the fault-around window, aligned to the
    /// start of the region (which is only page-aligned itself), clipped to the region and to what the image has.
    fn around(&self, region: Region, page: u64) -> (u64, u64) {
        let first = region.offset / PAGE_SIZE;
        let window = self.config.fault_around / PAGE_SIZE;
        let low = first + (page - first) / window * window;
        let high = low.saturating_add(window).min(first + region.size / PAGE_SIZE);
        let state = self.image.page_state(page);
        let same = |other: &u64| self.image.page_state(*other) == state;
        let start = page - (low..page).rev().take_while(same).count() as u64;
        let end = page + 1 + (page + 1..high).take_while(same).count() as u64;
        let address = |page: u64| region.base_host_virt_addr + (page - first) * PAGE_SIZE;
        (address(start), address(end))
    }

    /// Maps the range, skipping what is mapped already, and wakes who waits in it.
    fn map(&self, mapping: Mapping, start: u64, end: u64) -> Result<(), Errno> {
        let counters = &self.shared.counters;
        let done_bytes = if mapping == Mapping::Zeros { &counters.zero_bytes } else { &counters.mapped_bytes };
        let mut at = start;
        let mut skipped = false;
        while at < end {
            match uffd::map(&self.uffd, mapping, at, end - at) {
                Ok(done) => {
                    done_bytes.fetch_add(done, Ordering::Relaxed);
                    at += done;
                }
                Err(Errno::EEXIST) => {
                    skipped = true;
                    at += PAGE_SIZE;
                }
                Err(errno) => return Err(errno),
            }
        }
        if skipped { uffd::wake(&self.uffd, start, end - start) } else { Ok(()) }
    }
}
