//! What an `/init` leaves behind: the machine id for programs, and the whole request for the next agent.
//!
//! Both files are in memory, and held open: looking a path up, making a file, and above all writing to a disk are code
//! that a restored guest runs for the first time, which an emulator must translate and a lazy restore page in.
//! In the root file system `/etc/machine-id` is a link to the first, and `/etc/hostname` one to the kernel's own name.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// The machine id, in the runtime directory; everybody may read it.
pub const MACHINE_ID: &str = "machine-id";
/// The last `/init`, in the runtime directory: its length (8 bytes, little-endian) and its body. Only for root, since a
/// token is in it.
const SESSION: &str = "session";

/// The files.
pub struct Keep {
    machine_id: File,
    session: File,
}

impl Keep {
    /// Opens the files in `runtime`, or makes them.
    pub fn open(runtime: &Path) -> io::Result<Self> {
        let open = |name: &str, mode: u32| {
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).mode(mode).open(runtime.join(name))?;
            // Whatever the umask is.
            file.set_permissions(Permissions::from_mode(mode))?;
            Ok::<_, io::Error>(file)
        };
        Ok(Self { machine_id: open(MACHINE_ID, 0o644)?, session: open(SESSION, 0o600)? })
    }

    /// Makes 16 bytes the machine id (`machine-id(5)`: 32 hexadecimal digits and a line feed).
    pub fn set_machine_id(&self, id: &[u8; 16]) -> io::Result<()> {
        let digit = |nibble: u8| b"0123456789abcdef"[usize::from(nibble)];
        let mut text = [b'\n'; 33];
        for (pair, byte) in text.chunks_exact_mut(2).zip(id) {
            pair.copy_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
        }
        self.machine_id.write_all_at(&text, 0)
    }

    /// Keeps the body of an `/init`.
    pub fn remember(&self, wire: &[u8]) -> io::Result<()> {
        self.session.write_all_at(&[&(wire.len() as u64).to_le_bytes(), wire].concat(), 0)
    }

    /// What was kept last; `None` before the first `/init`.
    pub fn recall(&self) -> io::Result<Option<Vec<u8>>> {
        let mut len = [0; 8];
        match self.session.read_exact_at(&mut len, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let held = self.session.metadata()?.len().saturating_sub(8);
        let len = u64::from_le_bytes(len);
        if len > held {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the kept session is cut off"));
        }
        let mut wire = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        self.session.read_exact_at(&mut wire, 8)?;
        Ok(Some(wire))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_several_sessions_is_kept() {
        let runtime = tempfile::tempdir().unwrap();
        let keep = Keep::open(runtime.path()).unwrap();
        assert_eq!(keep.recall().unwrap(), None);
        for wire in [&b"a long first one"[..], b"short", b""] {
            keep.remember(wire).unwrap();
            let next = Keep::open(runtime.path()).unwrap();
            assert_eq!(next.recall().unwrap().as_deref(), Some(wire));
        }
    }

    #[test]
    fn a_session_that_is_cut_off_is_an_error() {
        let runtime = tempfile::tempdir().unwrap();
        let keep = Keep::open(runtime.path()).unwrap();
        keep.remember(b"0123456789").unwrap();
        keep.session.set_len(12).unwrap();
        assert_eq!(keep.recall().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn only_root_reads_the_session_and_everybody_the_machine_id() {
        let runtime = tempfile::tempdir().unwrap();
        let keep = Keep::open(runtime.path()).unwrap();
        keep.set_machine_id(&[0x0f; 16]).unwrap();
        let mode = |name: &str| std::fs::metadata(runtime.path().join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(MACHINE_ID), mode(SESSION)), (0o644, 0o600));
        let text = std::fs::read_to_string(runtime.path().join(MACHINE_ID)).unwrap();
        assert_eq!(text, format!("{}\n", "0f".repeat(16)));
    }
}
