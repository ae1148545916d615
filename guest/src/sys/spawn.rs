//! Starting a program: user, working directory, descriptors and cgroup in one `clone3`.
//!
//! `std::process` cannot start a child *in* a cgroup; moving it there afterwards takes a lock in the kernel that waits
//! for a whole RCU grace period, tens of milliseconds in an emulated guest. `CLONE_INTO_CGROUP` costs nothing.
//!
//! ```text
//! parent ── clone3(VM | VFORK | PIDFD | INTO_CGROUP) ── sleeps ─────────► looks: started, or stage and errno
//!              └─ child: setsid, dup2, ids, chdir, execve ─┬─ runs the program
//!                                                          └─ fails: notes stage and errno, _exit(127)
//! ```
//!
//! The child runs in the parent's memory, on a stack of its own, while the parent's thread sleeps (`vfork(2)`): nothing is
//! copied, neither page tables nor, afterwards, the pages that both write. Between `clone3` and `execve` it makes nothing
//! but system calls: any lock of the parent's other threads may be held meanwhile. Signals are blocked from before the
//! `clone3`, and the child has no handlers, so none can run in the shared memory.
//!
//! Invariant: never called while the target cgroup is frozen: the child would freeze before its `execve`, and the
//! parent would sleep until somebody else thaws it.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// `CLONE_INTO_CGROUP` of `linux/sched.h`; the constant of `libc` has a type that is too small for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// `CLONE_CLEAR_SIGHAND` of `linux/sched.h`: the child has no signal handlers.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
/// The child's stack. It calls nothing that is deep.
const STACK: usize = 64 * 1024;
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

/// Stacks are made once, and used by one child at a time.
static CHILD_STACK: Mutex<Vec<u8>> = Mutex::new(Vec::new());

/// Starts `plan`, and returns once the program runs.
pub fn spawn(plan: &Plan<'_>) -> Result<Child, SpawnError> {
    let before = |cause| SpawnError { stage: Stage::Clone, cause };
    if plan.fds.len() > FDS_MAX {
        return Err(before(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors")));
    }
    let args = pointers(plan.args);
    let env = pointers(plan.env);
    let mut fds = [-1; FDS_MAX];
    for (to, from) in fds.iter_mut().zip(plan.fds) {
        *to = from.as_raw_fd();
    }
    let count = plan.fds.len();
    let mut child = ChildSide { plan, args: args.as_ptr(), env: env.as_ptr(), fds, count, failed: None };

    let mut stack = CHILD_STACK.lock().unwrap_or_else(PoisonError::into_inner);
    stack.resize(STACK, 0);
    let mut pidfd: RawFd = -1;
    // SAFETY: `clone_args` is plain numbers: all zero means "nothing asked for".
    let mut request: libc::clone_args = unsafe { std::mem::zeroed() };
    request.flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64 | CLONE_CLEAR_SIGHAND;
    if let Some(cgroup) = plan.cgroup {
        request.flags |= CLONE_INTO_CGROUP;
        request.cgroup = cgroup.as_raw_fd() as u64;
    }
    request.pidfd = (&raw mut pidfd) as u64;
    request.exit_signal = libc::SIGCHLD as u64;
    // A stack ends, and begins to be used, at a multiple of 16 (System V ABI).
    request.stack = stack.as_mut_ptr() as u64;
    request.stack_size = ((stack.as_ptr() as u64 + STACK as u64) & !15) - request.stack;
    let blocked = SignalsBlocked::new();
    // SAFETY: the stack is the child's alone until this returns; `child` and all that it points to live until then, as
    // the parent sleeps until the child has another memory or is gone.
    let result = unsafe { clone_on_stack(&request, ChildSide::run, (&raw mut child).cast()) };
    drop(blocked);
    drop(stack);
    if result < 0 {
        let errno = i32::try_from(-result).unwrap_or(libc::EINVAL);
        return Err(before(io::Error::from_raw_os_error(errno)));
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let pid = i32::try_from(result).expect("a process id fits");
    // SAFETY: a live, aligned field; volatile, since it was written from behind the compiler's back.
    let failed = unsafe { ptr::read_volatile(&raw const child.failed) };
    let Some((stage, errno)) = failed else { return Ok(Child { pid, pidfd }) };
    // It is dead or dying: take its status, so that no zombie stays.
    let _ = wait(&pidfd, 0);
    Err(SpawnError { stage, cause: io::Error::from_raw_os_error(errno) })
}

/// `clone3(2)`. In the parent: the child's id, or a negative errno. In the child: `entry(argument)` on the new stack.
///
/// # Safety
/// `request` asks for a new stack, and whatever `entry` does with the memory that it then shares is allowed.
unsafe fn clone_on_stack(
    request: &libc::clone_args,
    entry: unsafe extern "C" fn(*mut libc::c_void) -> !,
    argument: *mut libc::c_void,
) -> i64 {
    let result: i64;
    // SAFETY: the system call changes rax, rcx and r11. The parent goes on behind the block as if nothing had happened;
    // the child has the same registers and an empty stack, and never comes out of the block.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {argument}",
            "call {entry}",
            "ud2",
            "2:",
            argument = in(reg) argument,
            entry = in(reg) entry,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") request,
            in("rsi") size_of::<libc::clone_args>(),
            out("rcx") _,
            out("r11") _,
        );
    }
    result
}

/// All signals blocked in this thread, as long as it lives.
struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    fn new() -> Self {
        // SAFETY: all zero is a set.
        let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `all` is valid for writing.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: one set is valid for reading, the other for writing.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
        Self { before }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set is valid for reading, no old one is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
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
    /// Why no program came of it.
    failed: Option<(Stage, i32)>,
}

impl ChildSide<'_> {
    /// # Safety
    /// `side` is a `ChildSide` that nobody else uses until this process is gone or runs a program.
    unsafe extern "C" fn run(side: *mut libc::c_void) -> ! {
        // SAFETY: see above.
        let side = unsafe { &mut *side.cast::<ChildSide<'_>>() };
        let stage = side.prepare();
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        // SAFETY: a live, aligned field; volatile, since the reader is the parent.
        unsafe { ptr::write_volatile(&raw mut side.failed, Some((stage, errno))) };
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

    /// The runtime ignores SIGPIPE, and all signals are blocked; a program expects neither.
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
