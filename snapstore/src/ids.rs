//! Identifiers of everything the store names. Each is its own type, so that one can never stand where another belongs.
//!
//! Two kinds: content hashes (`ChunkId`, `PackId`), which are derived and never chosen, and names (`SnapshotId`,
//! `TemplateId`, `SandboxId`, `TeamId`, `NodeId`), whose constructors check the alphabet. A name that exists as a value is
//! therefore always safe as a part of a catalog key, an object key or a file name: no slash, no NUL, no empty string.
//!
//! Randomness is passed in (`from_random`); `SnapshotId::random` is the one convenience for the edges.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

/// A text that is not an identifier of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind}: expected {expected}")]
pub struct InvalidId {
    /// Which identifier was wanted, e.g. "snapshot id".
    pub kind: &'static str,
    /// The shape it must have, for people.
    pub expected: &'static str,
    /// What was given, cut to 80 characters.
    pub text: String,
}

impl InvalidId {
    fn new(kind: &'static str, expected: &'static str, text: &str) -> Self {
        Self { kind, expected, text: text.chars().take(80).collect() }
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

fn write_hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use fmt::Write as _;
    for byte in bytes {
        f.write_char(char::from(HEX[usize::from(byte >> 4)]))?;
        f.write_char(char::from(HEX[usize::from(byte & 15)]))?;
    }
    Ok(())
}

fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

fn parse_hex32(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let mut out = [0u8; 32];
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = (hex_digit(pair[0])? << 4) | hex_digit(pair[1])?;
    }
    Some(out)
}

macro_rules! hash_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 32]);

        impl $name {
            /// The 32 bytes of the hash.
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }

            /// Takes exactly 32 bytes; anything else is refused.
            pub fn from_slice(bytes: &[u8]) -> Result<Self, InvalidId> {
                bytes.try_into().map(Self).map_err(|_| InvalidId::new($kind, "32 bytes", &format!("{} bytes", bytes.len())))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                parse_hex32(text).map(Self).ok_or_else(|| InvalidId::new($kind, "64 lower-case hex digits", text))
            }
        }
    };
}

hash_id!(
    /// A chunk: keyed BLAKE3-256 of its plain bytes under the key of its dedup domain.
    ChunkId,
    "chunk id"
);

impl ChunkId {
    /// Stands for "all zero, of whatever length": such a chunk is stored nowhere. No content hashes to it in practice.
    pub const ZERO: Self = Self([0; 32]);

    /// Whether this is [`ChunkId::ZERO`].
    pub fn is_zero(&self) -> bool {
        *self == Self::ZERO
    }

    /// The first half.
    pub fn short(&self) -> ShortId {
        ShortId(*self.0.first_chunk().expect("16 of 32 bytes"))
    }
}

/// The first 16 bytes of a chunk's id, by which it is looked up: enough that no two chunks of a store ever share them, and
/// half the index. What is found by it is checked against the whole id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShortId(pub [u8; 16]);

impl fmt::Display for ShortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, f)
    }
}

hash_id!(
    /// A pack: BLAKE3-256 (unkeyed) of all bytes of the pack.
    PackId,
    "pack id"
);

/// Position of a chunk in an image: byte offset divided by the image's chunk size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkNo(pub u64);

impl fmt::Display for ChunkNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The secret key under which a dedup domain (a team by default) hashes its chunks. Never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DomainKey(pub [u8; 32]);

impl fmt::Debug for DomainKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DomainKey(…)")
    }
}

/// A snapshot: a UUID, written hyphenated in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId(pub Uuid);

impl SnapshotId {
    /// A version-4 UUID from 16 random bytes.
    pub fn from_random(bytes: [u8; 16]) -> Self {
        Self(uuid::Builder::from_random_bytes(bytes).into_uuid())
    }

    /// A fresh one from the system's randomness.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

impl FromStr for SnapshotId {
    type Err = InvalidId;

    /// Accepts the hyphenated form only, in either case: the other spellings of a UUID would make two keys of one id.
    fn from_str(text: &str) -> Result<Self, InvalidId> {
        text.parse::<uuid::fmt::Hyphenated>()
            .map(|id| Self(id.into_uuid()))
            .map_err(|_| InvalidId::new("snapshot id", "a hyphenated UUID", text))
    }
}

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $expected:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Checks the shape; the text is taken as it is, neither trimmed nor lower-cased.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidId> {
                let text = text.into();
                let check: fn(&str) -> bool = $check;
                if check(&text) { Ok(Self(text)) } else { Err(InvalidId::new($kind, $expected, &text)) }
            }

            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Self::new(text)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

fn label(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

name_id!(
    /// A template: `tpl-` and 16 hex digits.
    TemplateId,
    "template id",
    "tpl- and 16 lower-case hex digits",
    |text| text.strip_prefix("tpl-").is_some_and(|hex| hex.len() == 16 && hex.bytes().all(|b| hex_digit(b).is_some()))
);

impl TemplateId {
    /// From 64 random bits.
    pub fn from_random(bits: u64) -> Self {
        Self(format!("tpl-{bits:016x}"))
    }
}

name_id!(
    /// A sandbox: `^[a-z0-9]{1,64}$`, since the proxy's host name splits on `-`.
    SandboxId,
    "sandbox id",
    "1 to 64 of a-z and 0-9",
    |text| (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
);

name_id!(
    /// A team: the owner of snapshots, templates and sandboxes, and by default a dedup domain. Not its display name.
    TeamId,
    "team id",
    "1 to 64 of A-Z, a-z, 0-9, '_', '-' and '.'",
    label
);

name_id!(
    /// A node: one machine that runs guests.
    NodeId,
    "node id",
    "1 to 64 of A-Z, a-z, 0-9, '_', '-' and '.'",
    label
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_ids_round_trip_as_hex() {
        let mut bytes = [0u8; 32];
        bytes.iter_mut().zip(0u8..).for_each(|(b, i)| *b = i.wrapping_mul(37));
        let id = ChunkId(bytes);
        let text = id.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse::<ChunkId>().expect("own text parses"), id);
        assert!(text.to_uppercase().parse::<ChunkId>().is_err(), "one spelling only");
        assert!(text[1..].parse::<ChunkId>().is_err());
        assert!(PackId::from_slice(&bytes[1..]).is_err());
    }

    #[test]
    fn snapshot_ids_have_one_spelling() {
        let id = SnapshotId::from_random([7; 16]);
        let text = id.to_string();
        assert_eq!(text.parse::<SnapshotId>().expect("own text parses"), id);
        assert_eq!(text.to_uppercase().parse::<SnapshotId>().expect("either case"), id);
        assert!(text.replace('-', "").parse::<SnapshotId>().is_err());
        assert!(format!("{{{text}}}").parse::<SnapshotId>().is_err());
        assert_eq!(id.0.get_version_num(), 4);
    }

    #[test]
    fn names_refuse_what_would_break_a_key() {
        for bad in ["", "a/b", "a b", "a\0", "ü", &"x".repeat(65)] {
            assert!(TeamId::new(bad).is_err(), "{bad:?}");
            assert!(SandboxId::new(bad).is_err(), "{bad:?}");
            assert!(NodeId::new(bad).is_err(), "{bad:?}");
            assert!(TemplateId::new(bad).is_err(), "{bad:?}");
        }
        assert!(SandboxId::new("a-b").is_err());
        assert!(SandboxId::new("A").is_err());
        assert!(SandboxId::new("a0").is_ok());
        assert_eq!(TemplateId::from_random(0xab).as_str(), "tpl-00000000000000ab");
        assert!(TemplateId::new("tpl-00000000000000AB").is_err());
        assert!(TemplateId::new(TemplateId::from_random(u64::MAX).as_str()).is_ok());
    }

    #[test]
    fn a_domain_key_is_not_printed() {
        assert_eq!(format!("{:?}", DomainKey([0xaa; 32])), "DomainKey(…)");
    }
}
