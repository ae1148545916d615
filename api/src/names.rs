//! Names and ids: what they may look like, and how new ones are made. Pure: randomness is passed in.

use thiserror::Error;

/// Longest sandbox id: `<port>-<id>` must fit in a DNS label of 63 characters.
const MAX_SANDBOX_ID: usize = 57;

/// Longest short name, and longest tag, of a snapshot.
const MAX_NAME: usize = 128;

/// Longest text that can name a template or snapshot: `team/short:tag`.
const MAX_REFERENCE: usize = 3 * MAX_NAME + 2;

/// Whether `text` can be a sandbox id: `^[a-z0-9]+$`, and short enough for a host name.
pub(crate) fn is_sandbox_id(text: &str) -> bool {
    (1..=MAX_SANDBOX_ID).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

/// Whether `text` can name a template or a snapshot at all. What it names, the catalog decides.
pub(crate) fn is_reference(text: &str) -> bool {
    (1..=MAX_REFERENCE).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// A new sandbox id: 20 letters and digits, about 103 of the 128 random bits.
pub(crate) fn new_sandbox_id(random: [u8; 16]) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut rest = u128::from_le_bytes(random);
    let mut id = String::from("s");
    while id.len() < 20 {
        id.push(char::from(DIGITS[(rest % 36) as usize]));
        rest /= 36;
    }
    id
}

/// A new access token: 64 hexadecimal digits.
pub(crate) fn new_access_token(random: [u8; 32]) -> String {
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why a text is not a snapshot's name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum NameError {
    #[error("`name` is longer than a team, a short name and a tag of {MAX_NAME} characters each")]
    TooLong,
    #[error("`name` must be `short` or `short:tag`, without a slash; `{0}` is not your team")]
    OtherTeam(String),
    #[error("`name` must be `short` or `short:tag`: the short name is 1 to {MAX_NAME} of a-z 0-9 _ -")]
    BadShort,
    #[error("`name` must be `short` or `short:tag`: the tag is 1 to {MAX_NAME} of a-z 0-9 _ - .")]
    BadTag,
}

/// A snapshot's name within its team: `short` or `short:tag`, lower-cased and trimmed. A full name with the caller's
/// own team in front is accepted too, as it is what the server answers with.
pub(crate) fn snapshot_name(text: &str, team: &str) -> Result<String, NameError> {
    if text.len() > MAX_REFERENCE + 64 {
        return Err(NameError::TooLong);
    }
    let name = text.trim().to_lowercase();
    let local = match name.split_once('/') {
        Some((prefix, rest)) if prefix == team && !rest.contains('/') => rest,
        Some((prefix, _)) => return Err(NameError::OtherTeam(prefix.to_owned())),
        None => name.as_str(),
    };
    let (short, tag) = match local.split_once(':') {
        Some((short, tag)) => (short, Some(tag)),
        None => (local, None),
    };
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'-';
    let fits = |part: &str| (1..=MAX_NAME).contains(&part.len());
    if !fits(short) || !short.bytes().all(plain) {
        return Err(NameError::BadShort);
    }
    if tag.is_some_and(|tag| !fits(tag) || !tag.bytes().all(|byte| plain(byte) || byte == b'.')) {
        return Err(NameError::BadTag);
    }
    Ok(local.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_trimmed_and_lowered() {
        assert_eq!(snapshot_name("  Base-1 ", "default"), Ok("base-1".into()));
        assert_eq!(snapshot_name("base:V1.2", "default"), Ok("base:v1.2".into()));
        assert_eq!(snapshot_name("default/base:x", "default"), Ok("base:x".into()));
    }

    #[test]
    fn bad_names_say_what_is_wrong() {
        use NameError::{BadShort, BadTag, OtherTeam, TooLong};
        for (text, error) in [
            ("other/base", OtherTeam("other".into())),
            ("default/a/b", OtherTeam("default".into())),
            ("/base", OtherTeam(String::new())),
            ("a.b", BadShort),
            ("", BadShort),
            (" ", BadShort),
            (":tag", BadShort),
            ("b a", BadShort),
            ("naïve", BadShort),
            ("base:", BadTag),
            ("base:a:b", BadTag),
            ("base:é", BadTag),
            (&"x".repeat(129), BadShort),
            (&"x".repeat(10_240), TooLong),
        ] {
            assert_eq!(snapshot_name(text, "default"), Err(error), "{text}");
        }
    }

    #[test]
    fn ids_and_references_are_bounded() {
        assert!(is_sandbox_id("s1a") && is_sandbox_id(&"a".repeat(57)));
        for bad in ["", "A", "a-b", "a.b", "a/b", "é", &"a".repeat(58)] {
            assert!(!is_sandbox_id(bad), "{bad}");
        }
        assert!(is_reference("team/short:tag"));
        assert!(!is_reference("") && !is_reference("a\nb") && !is_reference(&"x".repeat(10_240)));
    }

    proptest! {
        #[test]
        fn a_new_id_is_an_id(random: [u8; 16]) {
            let id = new_sandbox_id(random);
            prop_assert!(is_sandbox_id(&id));
            prop_assert_eq!(id.len(), 20);
        }

        #[test]
        fn a_token_shows_all_its_bits(random: [u8; 32]) {
            let token = new_access_token(random);
            prop_assert_eq!(token.len(), 64);
            let back: Vec<u8> =
                (0..32).map(|i| u8::from_str_radix(&token[2 * i..2 * i + 2], 16).expect("hex")).collect();
            prop_assert_eq!(back, random);
        }

        #[test]
        fn an_accepted_name_is_stable_and_in_the_grammar(text in "\\PC{0,12}|[a-zA-Z0-9_.:/ -]{0,20}") {
            if let Ok(name) = snapshot_name(&text, "default") {
                prop_assert_eq!(snapshot_name(&name, "default"), Ok(name.clone()));
                prop_assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-.:".contains(&b)));
            }
        }
    }
}
