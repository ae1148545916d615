//! Descriptors that pass to another process: inherited by a child, or sent over a socket.
//!
//! Everything here is close-on-exec in this process; a descriptor reaches exactly the children it is meant for.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::cmsg_space;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Lets the child that `command` starts inherit `fd`, under the number that it has here and that is returned.
///
/// The command owns the descriptor from here on: drop the command after the start to let go of it in this process.
pub fn inherit(command: &mut Command, fd: OwnedFd) -> RawFd {
    let number = fd.as_raw_fd();
    let keep = move || {
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::empty())).map_err(io::Error::from)?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call and touches no memory that a lock guards.
    unsafe { command.pre_exec(keep) };
    number
}

/// Sends one message, with at most one descriptor attached, on a packet socket.
pub(crate) fn send(socket: BorrowedFd<'_>, message: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let fds: Vec<RawFd> = fd.iter().map(AsRawFd::as_raw_fd).collect();
    let attached = [ControlMessage::ScmRights(&fds)];
    let control = if fds.is_empty() { &attached[..0] } else { &attached[..] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(message)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Receives one message of at most `max_len` bytes and the descriptors attached to it. Empty: the peer is gone.
pub(crate) fn receive(socket: BorrowedFd<'_>, max_len: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; max_len];
    let mut space = cmsg_space!([RawFd; 4]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            // SAFETY: the kernel has just made these descriptors for this process, and nothing else knows them.
            fds.extend(numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }));
        }
    }
    let (len, cut) = (message.bytes, message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC));
    if cut {
        return Err(io::Error::other("a message that is too long"));
    }
    bytes.truncate(len);
    Ok((bytes, fds))
}
