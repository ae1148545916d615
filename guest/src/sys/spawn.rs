//! Starting a program: user, working directory, descriptors and cgroup in one `clone3`.
//!
//! `std::process` cannot start a child *in* a cgroup; moving it there afterwards takes a lock in the kernel that waits
//! for a whole RCU grace period, tens of milliseconds in an emulated guest. `CLONE_INTO_CGROUP` costs nothing.
//!
//! ```text
//! parent ── clone3(VFORK | PIDFD | INTO_CGROUP) ── sleeps ──────────────► reads the slot: started, or stage and errno
//!              └─ child: setsid, dup2, ids, chdir, execve ─┬─ runs the program
//!                                                          └─ fails: writes the slot, _exit(127)
//! ```
//!
//! The child has its own copy of the address space (no `CLONE_VM`), and between `clone3` and `execve` makes nothing but
//! system calls: any lock of the parent's other threads may be held there for ever. The slot is one shared page.
//!
//! Invariant: never called while the target cgroup is frozen: the child would freeze before its `execve`, and the
//! parent would sleep until somebody else thaws it.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// `CLONE_INTO_CGROUP` of `linux/sched.h`; the constant of `libc` has a type that is too small for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// `idtype_t` for a pid descriptor (`waitid(2)`).
const P_PIDFD: libc::idtype_t = 3;
/// Descriptors are first moved here, so that putting one in its place cannot overwrite another.
const SAFE_FD: libc::c_int = 64;
/// Most descriptors that a child is given.
const FDS_MAX: usize = 8;

/// What to start.
pub struct Plan<'a> {
    /// Absolute path of the program.
    pub program: &'a CStr,
    /// Arguments, the program's own name first.
    pub args: &'a [CString],
    /// Environment as `NAME=value`.
    pub env: &'a [CString],
    /// Working directory, entered as the new user.
    pub cwd: &'a CStr,
    /// User, group and supplementary groups; `None` leaves them as they are.
    pub ids: Option<Ids<'a>>,
    /// The child's descriptors 0, 1, 2, …; all others close on exec.
    pub fds: &'a [BorrowedFd<'a>],
    /// Directory of the cgroup to start in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// Numeric identity of a child.
#[derive(Clone, Copy)]
pub struct Ids<'a> {
    /// User.
    pub uid: libc::uid_t,
    /// Primary group.
    pub gid: libc::gid_t,
    /// Supplementary groups.
    pub groups: &'a [libc::gid_t],
}

/// A started child.
pub struct Child {
    /// Its process id, which is also its session and process group.
    pub pid: i32,
    /// Readable once it has ended (`pidfd_open(2)`).
    pub pidfd: OwnedFd,
}

/// The step at which a child failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Stage {
    /// `clone3`: no child came to be.
    Clone = 1,
    /// Session or descriptors.
    Descriptors = 2,
    /// User or groups.
    Identity = 3,
    /// Working directory.
    Directory = 4,
    /// `execve`.
    Exec = 5,
}

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
#[error("{stage:?}: {cause}")]
pub struct SpawnError {
    /// The step that failed.
    pub stage: Stage,
    /// Its cause.
    pub cause: io::Error,
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It returned this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

struct Slot {
    stage: AtomicI32,
    errno: AtomicI32,
}

static SLOT: OnceLock<&'static Slot> = OnceLock::new();
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Starts `plan`, and returns once the program runs.
pub fn spawn(plan: &Plan<'_>) -> Result<Child, SpawnError> {
    let before = |cause| SpawnError { stage: Stage::Clone, cause };
    if plan.fds.len() > FDS_MAX {
        return Err(before(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors")));
    }
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = slot().map_err(before)?;
    slot.stage.store(0, Ordering::SeqCst);
    slot.errno.store(0, Ordering::SeqCst);

    let args = pointers(plan.args);
    let env = pointers(plan.env);
    let mut fds = [-1; FDS_MAX];
    for (to, from) in fds.iter_mut().zip(plan.fds) {
        *to = from.as_raw_fd();
    }
    let child = ChildSide { plan, args: args.as_ptr(), env: env.as_ptr(), fds, count: plan.fds.len(), slot };

    let mut pidfd: RawFd = -1;
    // SAFETY: `clone_args` is plain numbers: all zero means "nothing asked for".
    let mut request: libc::clone_args = unsafe { std::mem::zeroed() };
    request.flags = (libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64;
    if let Some(cgroup) = plan.cgroup {
        request.flags |= CLONE_INTO_CGROUP;
        request.cgroup = cgroup.as_raw_fd() as u64;
    }
    request.pidfd = (&raw mut pidfd) as u64;
    request.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: the request asks for no new stack and no shared memory, so this is a `fork`: the child goes on with a copy
    // of everything. It calls only `ChildSide::run`, which makes system calls and never returns.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const request, size_of::<libc::clone_args>()) };
    if pid == 0 {
        child.run();
    }
    if pid < 0 {
        return Err(before(io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let pid = i32::try_from(pid).expect("a process id fits");
    let stage = match slot.stage.load(Ordering::SeqCst) {
        0 => return Ok(Child { pid, pidfd }),
        2 => Stage::Descriptors,
        3 => Stage::Identity,
        4 => Stage::Directory,
        _ => Stage::Exec,
    };
    let cause = io::Error::from_raw_os_error(slot.errno.load(Ordering::SeqCst));
    // It is dead or dying: take its status, so that no zombie stays.
    let _ = wait(&pidfd, 0);
    Err(SpawnError { stage, cause })
}

/// The status of the child behind `pidfd`, once it has ended; `None` while it runs.
pub fn try_wait(pidfd: &OwnedFd) -> io::Result<Option<Exit>> {
    wait(pidfd, libc::WNOHANG)
}

fn wait(pidfd: &OwnedFd, flags: libc::c_int) -> io::Result<Option<Exit>> {
    // SAFETY: `siginfo_t` is plain data: all zero is the documented "nothing happened".
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let id = pidfd.as_raw_fd().cast_unsigned();
    loop {
        // SAFETY: `info` is valid for writing, `id` is an open pid descriptor.
        let result = unsafe { libc::waitid(P_PIDFD, id, &raw mut info, libc::WEXITED | flags) };
        if result == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: after a successful `waitid` the child variant of the union is the one that is filled, or all is zero.
    let pid = unsafe { info.si_pid() };
    if pid == 0 {
        return Ok(None);
    }
    // SAFETY: as above.
    let status = unsafe { info.si_status() };
    Ok(Some(if info.si_code == libc::CLD_EXITED { Exit::Code(status) } else { Exit::Signal(status) }))
}

fn slot() -> io::Result<&'static Slot> {
    if let Some(slot) = SLOT.get() {
        return Ok(slot);
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping, owned by nobody else and never unmapped.
    let page = unsafe { libc::mmap(ptr::null_mut(), size_of::<Slot>(), protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned, zeroed, at least as large as a `Slot`, lives for ever, and is only accessed
    // through atomics.
    let slot = unsafe { &*page.cast::<Slot>() };
    Ok(SLOT.get_or_init(|| slot))
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Everything that the child needs, prepared before it exists.
struct ChildSide<'a> {
    plan: &'a Plan<'a>,
    args: *const *const libc::c_char,
    env: *const *const libc::c_char,
    fds: [RawFd; FDS_MAX],
    count: usize,
    slot: &'static Slot,
}

impl ChildSide<'_> {
    fn run(mut self) -> ! {
        let stage = self.prepare();
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        self.slot.errno.store(errno, Ordering::SeqCst);
        self.slot.stage.store(stage as i32, Ordering::SeqCst);
        // SAFETY: ends this process without running anything of the parent's.
        unsafe { libc::_exit(127) }
    }

    /// Returns only if something failed, with `errno` as it left it.
    fn prepare(&mut self) -> Stage {
        // SAFETY: no argument.
        if unsafe { libc::setsid() } < 0 {
            return Stage::Descriptors;
        }
        if !self.arrange_fds() {
            return Stage::Descriptors;
        }
        self.reset_signals();
        if let Some(ids) = self.plan.ids
            && !become_user(ids)
        {
            return Stage::Identity;
        }
        // SAFETY: no memory is passed.
        unsafe { libc::umask(0o022) };
        // SAFETY: a NUL-terminated path.
        if unsafe { libc::chdir(self.plan.cwd.as_ptr()) } != 0 {
            return Stage::Directory;
        }
        // SAFETY: a NUL-terminated path and two null-terminated arrays of NUL-terminated strings.
        unsafe { libc::execve(self.plan.program.as_ptr(), self.args, self.env) };
        Stage::Exec
    }

    fn arrange_fds(&mut self) -> bool {
        let count = self.count.min(FDS_MAX);
        for fd in &mut self.fds[..count] {
            // SAFETY: plain numbers.
            *fd = unsafe { libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, SAFE_FD) };
            if *fd < 0 {
                return false;
            }
        }
        for (target, fd) in (0..).zip(&self.fds[..count]) {
            // SAFETY: plain numbers. The copy does not close on exec.
            if unsafe { libc::dup2(*fd, target) } < 0 {
                return false;
            }
        }
        true
    }

    /// The runtime ignores SIGPIPE and may block signals; a program expects neither.
    fn reset_signals(&self) {
        // SAFETY: restores a default action.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        // SAFETY: all zero is the empty set.
        let none: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `none` is valid for reading, no old set is asked for.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) };
    }
}

/// Raw system calls: the C library's wrappers would try to change all the threads that it believes to exist.
fn become_user(ids: Ids<'_>) -> bool {
    // SAFETY: pointer and length of a valid slice.
    if unsafe { libc::syscall(libc::SYS_setgroups, ids.groups.len(), ids.groups.as_ptr()) } != 0 {
        return false;
    }
    // SAFETY: plain numbers.
    if unsafe { libc::syscall(libc::SYS_setresgid, ids.gid, ids.gid, ids.gid) } != 0 {
        return false;
    }
    // SAFETY: plain numbers.
    unsafe { libc::syscall(libc::SYS_setresuid, ids.uid, ids.uid, ids.uid) == 0 }
}
