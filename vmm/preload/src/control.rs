//! The control thread: obeys the node, one request at a time, until the node is gone.
//!
//! It owns the userfaultfd of the present mapping. When the node goes away the thread ends but the descriptor stays open,
//! so the guest waits instead of reading zeros.

use core::ffi::{c_int, c_void};
use core::fmt::Write;
use core::mem::{MaybeUninit, size_of, zeroed};
use core::ptr::null_mut;
use core::sync::atomic::Ordering;

use crate::{CONTROL, NOTHING, abi, attach, errno, regions};

const PAGE_SIZE: u64 = 4096;
const MAX_REQUEST: usize = 64;
const MAX_ANSWER: usize = 2048;

/// Room for one descriptor in a control message, aligned as the kernel wants it.
#[repr(C, align(8))]
struct ControlSpace([u8; 64]);

/// Starts the thread, with all signals blocked: those are for the VMM's own threads.
pub(crate) fn start() -> bool {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    // SAFETY: fills the set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: both sets are places for one; the first is filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: the function is a thread's main function that ignores its argument; the handle is a place for one.
    let result = unsafe { libc::pthread_create(thread.as_mut_ptr(), core::ptr::null(), run, NOTHING) };
    // SAFETY: the set was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    if result == 0 {
        // SAFETY: the call succeeded, so the handle is filled.
        let thread = unsafe { thread.assume_init() };
        // SAFETY: nobody else joins or detaches this thread.
        unsafe { libc::pthread_detach(thread) };
    }
    result == 0
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    // SAFETY: names this thread by a C string.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"snapyard-memory".as_ptr()) };
    let control = CONTROL.load(Ordering::Relaxed);
    let mut uffd = -1;
    let mut request = [0u8; MAX_REQUEST];
    while let Some((len, fd)) = receive(control, &mut request) {
        let mut answer = Answer::new();
        let attached = obey(&request[..len], fd, &mut uffd, &mut answer);
        if let Some(fd) = fd {
            abi::close(fd);
        }
        if !send(control, answer.bytes(), attached) {
            break;
        }
    }
    null_mut()
}

/// Does what was asked, writes the answer, and says which descriptor to attach to it.
fn obey(request: &[u8], fd: Option<c_int>, uffd: &mut c_int, answer: &mut Answer) -> Option<c_int> {
    match (request, fd) {
        (b"attach", Some(image)) => match attach(image) {
            Ok(new) => {
                // The mapping of the old one is gone, so nothing can turn into zeros.
                if *uffd >= 0 {
                    abi::close(*uffd);
                }
                *uffd = new;
                answer.regions();
                Some(new)
            }
            Err((step, errno)) => {
                answer.error(format_args!("{step}: errno {errno}"));
                None
            }
        },
        (b"regions", None) => {
            answer.regions();
            None
        }
        (b"uffd", None) if *uffd >= 0 => {
            answer.regions();
            Some(*uffd)
        }
        (b"uffd", None) => {
            answer.error(format_args!("no image is attached"));
            None
        }
        _ => {
            answer.error(format_args!("unknown request"));
            None
        }
    }
}

/// Text in a fixed buffer; what does not fit is a formatting error, and the answer is then not valid JSON.
struct Answer {
    bytes: [u8; MAX_ANSWER],
    len: usize,
}

impl Write for Answer {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.len + text.len();
        let place = self.bytes.get_mut(self.len..end).ok_or(core::fmt::Error)?;
        place.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

impl Answer {
    fn new() -> Self {
        Self { bytes: [0; MAX_ANSWER], len: 0 }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn error(&mut self, reason: core::fmt::Arguments<'_>) {
        // The buffer is larger than any reason in this file.
        let _ = write!(self, "{{\"error\":\"{reason}\"}}");
    }

    fn regions(&mut self) {
        for (index, region) in regions().iter().enumerate() {
            // The buffer is larger than the most regions there can be.
            let _ = write!(
                self,
                "{}{{\"base_host_virt_addr\":{},\"size\":{},\"offset\":{},\"page_size\":{PAGE_SIZE}}}",
                if index == 0 { '[' } else { ',' },
                region.base(),
                region.size(),
                region.offset(),
            );
        }
        let _ = self.write_str("]");
    }
}

/// One request and the descriptor attached to it; `None` when the node is gone.
fn receive(control: c_int, request: &mut [u8; MAX_REQUEST]) -> Option<(usize, Option<c_int>)> {
    let mut space = ControlSpace([0; 64]);
    let mut slice = libc::iovec { iov_base: request.as_mut_ptr().cast(), iov_len: MAX_REQUEST };
    // SAFETY: a msghdr of zeros is an empty one.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut slice;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut space).cast();
    message.msg_controllen = size_of::<ControlSpace>();
    let len = loop {
        // SAFETY: the message points to a buffer and a control space of the lengths that it tells, which outlive the call.
        let len = unsafe { libc::recvmsg(control, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if len >= 0 || errno() != libc::EINTR {
            break len;
        }
    };
    let len = usize::try_from(len).ok().filter(|len| *len > 0)?;
    // SAFETY: the kernel filled the message.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return Some((len, None));
    }
    // SAFETY: not null, so it points into the control space, which the kernel filled and which is aligned for it.
    let copy = unsafe { header.read() };
    if copy.cmsg_level != libc::SOL_SOCKET || copy.cmsg_type != libc::SCM_RIGHTS {
        return Some((len, None));
    }
    // SAFETY: the header is valid; its data follows it.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: a message of this kind holds at least one descriptor; it need not be aligned.
    let fd = unsafe { data.cast::<c_int>().read_unaligned() };
    Some((len, Some(fd)))
}

/// Sends an answer, with a descriptor attached if there is one; false when the node is gone.
fn send(control: c_int, answer: &[u8], fd: Option<c_int>) -> bool {
    let mut space = ControlSpace([0; 64]);
    let mut slice = libc::iovec { iov_base: answer.as_ptr().cast_mut().cast(), iov_len: answer.len() };
    // SAFETY: a msghdr of zeros is an empty one.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut slice;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = (&raw mut space).cast();
        // SAFETY: arithmetic only.
        message.msg_controllen = (unsafe { libc::CMSG_SPACE(size_of::<c_int>() as u32) }) as usize;
        // SAFETY: the message has a control space, with room for a header.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        // SAFETY: arithmetic only.
        let header_len = (unsafe { libc::CMSG_LEN(size_of::<c_int>() as u32) }) as usize;
        let filled = libc::cmsghdr { cmsg_len: header_len, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
        // SAFETY: the header points into the control space, which is aligned for it.
        unsafe { header.write(filled) };
        // SAFETY: the header is valid; its data follows it.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: the control space has room for one descriptor behind the header.
        unsafe { data.cast::<c_int>().write_unaligned(fd) };
    }
    loop {
        // SAFETY: the message points to a buffer and a control space of the lengths that it tells, which outlive the call.
        let sent = unsafe { libc::sendmsg(control, &raw const message, libc::MSG_NOSIGNAL) };
        if sent >= 0 || errno() != libc::EINTR {
            return sent >= 0;
        }
    }
}
