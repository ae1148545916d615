//! Object keys as relative paths, one to one.
//!
//! ```text
//!   key        packs/0a1b     a/b/c       a//b        ../x          ü            a/
//!   path       packs+/0a1b    a+/b+/c     a+/%+/b     %2E.+/x       %C3%BC       a+/%
//! ```
//!
//! A key is cut at its slashes. Every part but the last is a directory and ends in `+`, so that the keys `a` and `a/b` can
//! both exist; an empty part is a lone `%`; bytes other than letters, digits and `-_.=~,@` are `%XX`, and so is a leading
//! dot. So no path leaves its directory, nothing is hidden, and every path reads back as the key it was made of.
//!
//! A part may not be longer than [`MAX_PART_LEN`] bytes when written so (file systems allow 255): S3 would allow it, we say
//! that the key is too long.

use std::path::PathBuf;

/// The longest a part may be in a path, without its `+`.
pub(super) const MAX_PART_LEN: usize = 250;

const DIRECTORY: char = '+';

/// The key has a part that is too long for a file name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PartTooLong;

/// The path of a key.
pub(super) fn path_of(key: &str) -> Result<PathBuf, PartTooLong> {
    let mut path = PathBuf::new();
    let (directories, name) = split(key);
    for part in directories {
        path.push(directory_name(part)?);
    }
    path.push(encode(name)?);
    Ok(path)
}

/// The directory that holds every key which begins with `prefix`, and only those if `prefix` ends in a slash; with the part
/// of `prefix` that it stands for.
pub(super) fn directory_of(prefix: &str) -> Result<(PathBuf, &str), PartTooLong> {
    let (directories, name) = split(prefix);
    let mut path = PathBuf::new();
    for part in directories {
        path.push(directory_name(part)?);
    }
    Ok((path, &prefix[..prefix.len() - name.len()]))
}

fn split(key: &str) -> (impl Iterator<Item = &str>, &str) {
    let (directories, name) = match key.rsplit_once('/') {
        Some((directories, name)) => (Some(directories), name),
        None => (None, key),
    };
    (directories.into_iter().flat_map(|directories| directories.split('/')), name)
}

fn directory_name(part: &str) -> Result<String, PartTooLong> {
    let mut name = encode(part)?;
    name.push(DIRECTORY);
    Ok(name)
}

fn encode(part: &str) -> Result<String, PartTooLong> {
    let mut name = String::with_capacity(part.len());
    if part.is_empty() {
        name.push('%');
    }
    for (i, byte) in part.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || b"-_=~,@".contains(&byte) || (byte == b'.' && i > 0);
        if plain {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    if name.len() <= MAX_PART_LEN { Ok(name) } else { Err(PartTooLong) }
}

/// What a name in a directory adds to a key: `part/` for a directory, `part` for an object. `None`: nothing that this
/// module made.
pub(super) fn part_of(name: &str) -> Option<String> {
    match name.strip_suffix(DIRECTORY) {
        Some(directory) => decode(directory).map(|part| part + "/"),
        None => decode(name),
    }
}

fn decode(name: &str) -> Option<String> {
    let mut part = Vec::with_capacity(name.len());
    if name != "%" {
        let mut bytes = name.bytes();
        while let Some(byte) = bytes.next() {
            if byte == b'%' {
                let digits = [bytes.next()?, bytes.next()?];
                part.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
            } else {
                part.push(byte);
            }
        }
    }
    let part = String::from_utf8(part).ok()?;
    (encode(&part).as_deref() == Ok(name)).then_some(part)
}

#[cfg(test)]
mod tests {
    use std::path::Component;

    use proptest::prelude::*;

    use super::*;

    fn key_of(path: &std::path::Path) -> String {
        path.components().map(|part| part_of(part.as_os_str().to_str().expect("text")).expect("ours")).collect()
    }

    #[test]
    fn examples() {
        for (key, path) in [
            ("packs/0a1b", "packs+/0a1b"),
            ("a/b/c", "a+/b+/c"),
            ("a//b", "a+/%+/b"),
            ("../x", "%2E.+/x"),
            ("..", "%2E."),
            ("/etc/passwd", "%+/etc+/passwd"),
            ("ü", "%C3%BC"),
            ("a/", "a+/%"),
            ("a+", "a%2B"),
            ("%", "%25"),
            ("a\0b", "a%00b"),
        ] {
            let made = path_of(key).expect("short enough");
            assert_eq!(made.to_str(), Some(path), "{key:?}");
            assert_eq!(key_of(&made), key);
        }
        assert_eq!(path_of(&"x".repeat(251)), Err(PartTooLong));
        assert_eq!(path_of(&"ü".repeat(42)), Err(PartTooLong));
        assert_eq!(
            directory_of("a/b").map(|(path, part)| (path, part.to_owned())),
            Ok((PathBuf::from("a+"), "a/".into()))
        );
        assert_eq!(directory_of("a").map(|(path, part)| (path, part.to_owned())), Ok((PathBuf::new(), String::new())));
    }

    #[test]
    fn foreign_names_are_not_read() {
        for foreign in ["", ".hidden", "a b", "%2e.", "a%2", "%41", "a+b", "%FF", "lost+found"] {
            assert_eq!(part_of(foreign), None, "{foreign:?}");
        }
    }

    proptest! {
        #[test]
        // At most 20 characters of 4 bytes, each `%XX`: what a part has room for.
        fn every_key_reads_back_and_stays_inside(key in "([a-z./%+~ äÄ\\\\\u{0}]|\u{10ffff}){1,20}") {
            let path = path_of(&key).expect("short enough");
            prop_assert!(path.components().all(|part| matches!(part, Component::Normal(_))), "{:?}", path);
            prop_assert!(path.components().all(|part| !part.as_os_str().to_str().expect("text").starts_with('.')));
            prop_assert_eq!(key_of(&path), key);
        }

        #[test]
        fn a_key_is_never_where_another_has_a_directory(a in "[a/]{1,6}", b in "[a/]{1,6}") {
            let (a_path, b_path) = (path_of(&a).expect("short"), path_of(&b).expect("short"));
            prop_assert_eq!(a == b, a_path == b_path);
            prop_assert!(a_path == b_path || !b_path.starts_with(&a_path), "{:?} {:?}", a_path, b_path);
        }
    }
}
