//! The key pair of the embedded endpoint: made at random at the first start, kept in a file that only its owner can read.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// An access key with its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyPair {
    /// The public half.
    pub access_key: String,
    /// The secret half.
    pub secret_key: String,
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyPair").field("access_key", &self.access_key).finish_non_exhaustive()
    }
}

/// Why there is no key pair.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The file cannot be read or written.
    #[error("the endpoint's keys in {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file holds something else.
    #[error("{path} does not hold an access key and a secret key, a line each")]
    Malformed {
        /// The file.
        path: PathBuf,
    },
}

fn random_hex(bytes: usize) -> io::Result<String> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl KeyPair {
    /// A fresh random pair.
    pub fn generate() -> io::Result<Self> {
        Ok(Self { access_key: format!("SY{}", random_hex(9)?), secret_key: random_hex(20)? })
    }

    /// The pair in the file; a fresh one, written there first, if there is no file. Blocks.
    pub fn load_or_create(path: &Path) -> Result<Self, CredentialsError> {
        let failed = |source| CredentialsError::Io { path: path.to_owned(), source };
        match fs::read_to_string(path) {
            Ok(text) => match text.lines().collect::<Vec<_>>().as_slice() {
                [access, secret] if !access.is_empty() && !secret.is_empty() => {
                    Ok(Self { access_key: (*access).to_owned(), secret_key: (*secret).to_owned() })
                }
                _ => Err(CredentialsError::Malformed { path: path.to_owned() }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let pair = Self::generate().map_err(failed)?;
                pair.write(path).map_err(failed)?;
                Ok(pair)
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Whole or not at all: a half-written pair would lock the operator out of the objects' owner.
    fn write(&self, path: &Path) -> io::Result<()> {
        let temporary = path.with_extension("new");
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        writeln!(file, "{}\n{}", self.access_key, self.secret_key)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_pair_is_made_once_and_only_its_owner_reads_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s3-keys");
        let pair = KeyPair::load_or_create(&path).expect("makes one");
        assert_eq!(KeyPair::load_or_create(&path).expect("reads it"), pair);
        assert_eq!(fs::metadata(&path).expect("stat").permissions().mode() & 0o777, 0o600);
        assert_ne!(KeyPair::generate().expect("random"), pair);
        assert!(!format!("{pair:?}").contains(&pair.secret_key));
    }

    #[test]
    fn a_damaged_file_is_an_error_and_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s3-keys");
        for bad in ["", "one line", "a\n\n", "a\nb\nc\n"] {
            fs::write(&path, bad).expect("writes");
            assert!(matches!(KeyPair::load_or_create(&path), Err(CredentialsError::Malformed { .. })), "{bad:?}");
            assert_eq!(fs::read_to_string(&path).expect("reads"), bad);
        }
    }
}
