//! What an `/init` leaves behind: the machine id for programs, and the whole request for the next agent.
//!
//! Both files are in memory, and held open: looking a path up, making a file, and above all writing to a disk are code
//! that a restored guest runs for the first time, which an emulator must translate and a lazy restore page in.
//! In the root file system `/etc/machine-id` is a link to the first, and `/etc/hostname` one to the kernel's own name.
//! Should something have put a file in a link's place, the link comes back with the next snapshot ([`Keep::mend`]): two
//! guests of it must not have one machine id.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The machine id, in the runtime directory; everybody may read it.
pub const MACHINE_ID: &str = "machine-id";
/// The last `/init`, in the runtime directory: its length (8 bytes, little-endian) and its body. Only for root, since a
/// token is in it.
const SESSION: &str = "session";

/// The files.
pub struct Keep {
    machine_id_path: PathBuf,
    /// `/etc/machine-id`; `None` outside a guest.
    link: Option<PathBuf>,
    machine_id: Mutex<File>,
    session: File,
}

impl Keep {
    /// Opens the files in `runtime`, or makes them. `link`: what is to lead to the machine id.
    pub fn open(runtime: &Path, link: Option<&Path>) -> io::Result<Self> {
        let machine_id_path = runtime.join(MACHINE_ID);
        let machine_id = Mutex::new(open(&machine_id_path, 0o644)?);
        let session = open(&runtime.join(SESSION), 0o600)?;
        Ok(Self { machine_id_path, link: link.map(Path::to_owned), machine_id, session })
    }

    /// Puts the file and the link back where programs look for them, if they are not there.
    pub fn mend(&self) -> io::Result<()> {
        let mut machine_id = self.machine_id.lock().unwrap_or_else(PoisonError::into_inner);
        let held = machine_id.metadata()?;
        if !fs::symlink_metadata(&self.machine_id_path).is_ok_and(|found| found.ino() == held.ino()) {
            remove(&self.machine_id_path)?;
            let fresh = open(&self.machine_id_path, 0o644)?;
            let mut text = [0; 33];
            machine_id.read_exact_at(&mut text, 0).or_else(not_written_yet)?;
            fresh.write_all_at(&text, 0)?;
            *machine_id = fresh;
        }
        let Some(link) = &self.link else { return Ok(()) };
        if !fs::read_link(link).is_ok_and(|target| target == self.machine_id_path) {
            remove(link)?;
            symlink(&self.machine_id_path, link)?;
        }
        Ok(())
    }

    /// Makes 16 bytes the machine id (`machine-id(5)`: 32 hexadecimal digits and a line feed).
    pub fn set_machine_id(&self, id: &[u8; 16]) -> io::Result<()> {
        let digit = |nibble: u8| b"0123456789abcdef"[usize::from(nibble)];
        let mut text = [b'\n'; 33];
        for (pair, byte) in text.chunks_exact_mut(2).zip(id) {
            pair.copy_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
        }
        self.machine_id.lock().unwrap_or_else(PoisonError::into_inner).write_all_at(&text, 0)
    }

    /// Keeps the body of an `/init`.
    pub fn remember(&self, wire: &[u8]) -> io::Result<()> {
        let kept = [&(wire.len() as u64).to_le_bytes(), wire].concat();
        self.session.write_all_at(&kept, 0)?;
        // No end of a longer one stays.
        if self.session.metadata()?.len() > kept.len() as u64 {
            self.session.set_len(kept.len() as u64)
        } else {
            Ok(())
        }
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

fn open(path: &Path, mode: u32) -> io::Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(false).mode(mode).open(path)?;
    // Whatever the umask is.
    file.set_permissions(Permissions::from_mode(mode))?;
    Ok(file)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Before the first `/init` the file is empty.
fn not_written_yet(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::UnexpectedEof { Ok(()) } else { Err(error) }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_several_sessions_is_kept() {
        let runtime = tempfile::tempdir().unwrap();
        let keep = Keep::open(runtime.path(), None).unwrap();
        assert_eq!(keep.recall().unwrap(), None);
        for wire in [&b"a long first one"[..], b"short", b""] {
            keep.remember(wire).unwrap();
            let next = Keep::open(runtime.path(), None).unwrap();
            assert_eq!(next.recall().unwrap().as_deref(), Some(wire));
        }
    }

    #[test]
    fn a_session_that_is_cut_off_is_an_error() {
        let runtime = tempfile::tempdir().unwrap();
        let keep = Keep::open(runtime.path(), None).unwrap();
        keep.remember(b"0123456789").unwrap();
        keep.session.set_len(12).unwrap();
        assert_eq!(keep.recall().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_programs_see_is_what_is_written_after_a_mend() {
        let runtime = tempfile::tempdir().unwrap();
        let link = runtime.path().join("etc-machine-id");
        let keep = Keep::open(runtime.path(), Some(&link)).unwrap();
        keep.mend().unwrap();
        keep.set_machine_id(&[1; 16]).unwrap();
        assert_eq!(fs::read_to_string(&link).unwrap(), format!("{}\n", "01".repeat(16)));
        // A file in place of each, as `sed -i` and package scripts leave one.
        for path in [&link, &runtime.path().join(MACHINE_ID)] {
            fs::remove_file(path).unwrap();
            fs::write(path, "theirs\n").unwrap();
            keep.mend().unwrap();
            keep.set_machine_id(&[2; 16]).unwrap();
            assert_eq!(fs::read_to_string(&link).unwrap(), format!("{}\n", "02".repeat(16)));
        }
    }

    #[test]
    fn only_root_reads_the_session_and_everybody_the_machine_id() {
        let runtime = tempfile::tempdir().unwrap();
        let keep = Keep::open(runtime.path(), None).unwrap();
        keep.set_machine_id(&[0x0f; 16]).unwrap();
        let mode = |name: &str| std::fs::metadata(runtime.path().join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(MACHINE_ID), mode(SESSION)), (0o644, 0o600));
        let text = std::fs::read_to_string(runtime.path().join(MACHINE_ID)).unwrap();
        assert_eq!(text, format!("{}\n", "0f".repeat(16)));
    }
}
