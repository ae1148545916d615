//! Names of snapshots, as text and as values. Pure.
//!
//! ```text
//!   short[:tag]            what a client gives, and filters by; tag `default` when absent
//!   team/short[:tag]       the full name: what is shown, and what a create or delete may say
//! ```
//!
//! Text is trimmed and lower-cased (ASCII only: a character that merely folds to ASCII is not taken for it). A name that
//! exists as a value is canonical, and safe as a part of a catalog key: it holds neither `/` nor `:`.

use std::fmt;

use crate::ids::SnapshotId;

/// The tag of a name that does not say one.
pub const DEFAULT_TAG: &str = "default";

/// The most characters that a short name, a tag or a team's name may have.
pub const MAX_PART_LEN: usize = 128;

/// A text that is no name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A part is empty, too long, or has a character that does not belong there.
    #[error("{text:?} is not a {part}: expected 1 to {MAX_PART_LEN} of {alphabet}")]
    Part {
        /// "short name", "tag" or "team name".
        part: &'static str,
        /// The characters it may have.
        alphabet: &'static str,
        /// What was given, cut to 80 characters.
        text: String,
    },
    /// The parts are put together in a way that no name is.
    #[error("{text:?} is not a snapshot name: expected short, short:tag, team/short or team/short:tag")]
    Shape {
        /// What was given, cut to 80 characters.
        text: String,
    },
    /// A name in another team.
    #[error("the name {text:?} is in team {team:?}, which is not yours")]
    OtherTeam {
        /// The name's team.
        team: String,
        /// The name, cut to 80 characters.
        text: String,
    },
    /// The team has no name, so its snapshots can have none.
    #[error("your team has no name, so its snapshots cannot be named: leave the name out")]
    TeamWithoutName,
}

fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}

fn part(text: &str, part: &'static str, dot: bool) -> Result<String, NameError> {
    let fits = (1..=MAX_PART_LEN).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-') || (dot && b == b'.'));
    if fits {
        Ok(text.to_ascii_lowercase())
    } else {
        let alphabet = if dot { "a-z, 0-9, '_', '-' and '.'" } else { "a-z, 0-9, '_' and '-'" };
        Err(NameError::Part { part, alphabet, text: cut(text) })
    }
}

/// The name of a team, the first part of full names: `[a-z0-9_-]+`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TeamName(String);

impl TeamName {
    /// Trims, lower-cases and checks.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        part(text.trim(), "team name", false).map(Self)
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TeamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a snapshot within its team. Shown as `short:tag`, with the tag, always.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotName {
    short: String,
    tag: String,
}

impl SnapshotName {
    /// Reads `short` or `short:tag`.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let text = text.trim();
        let (short, tag) = text.split_once(':').unwrap_or((text, DEFAULT_TAG));
        Ok(Self { short: part(short, "short name", false)?, tag: part(tag, "tag", true)? })
    }

    /// Reads the name that a client of `team` gives a new snapshot: `short[:tag]`, or the same with the own team in front.
    pub fn parse_own(text: &str, team: Option<&TeamName>) -> Result<Self, NameError> {
        let own = team.ok_or(NameError::TeamWithoutName)?;
        if !text.contains('/') {
            return Self::parse(text);
        }
        let full = FullName::parse(text)?;
        if full.team == *own { Ok(full.name) } else { Err(NameError::OtherTeam { team: full.team.0, text: cut(text) }) }
    }

    /// The part before the colon.
    pub fn short(&self) -> &str {
        &self.short
    }

    /// The part after the colon.
    pub fn tag(&self) -> &str {
        &self.tag
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.short, self.tag)
    }
}

/// `team/short:tag`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FullName {
    /// The team.
    pub team: TeamName,
    /// The name within the team.
    pub name: SnapshotName,
}

impl FullName {
    /// Reads `team/short` or `team/short:tag`.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let shape = || NameError::Shape { text: cut(text) };
        let (team, name) = text.trim().split_once('/').ok_or_else(shape)?;
        if name.contains('/') || team.contains(':') || team.is_empty() || name.is_empty() {
            return Err(shape());
        }
        // The whole was trimmed; a blank beside the slash is inside the name.
        Ok(Self { team: TeamName(part(team, "team name", false)?), name: inner(name)? })
    }
}

fn inner(text: &str) -> Result<SnapshotName, NameError> {
    if text.trim() == text { SnapshotName::parse(text) } else { Err(NameError::Shape { text: cut(text) }) }
}

impl fmt::Display for FullName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.team, self.name)
    }
}

/// What a listing is narrowed to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameFilter {
    /// `short`: every tag of it.
    Short(String),
    /// `short:tag`: that one.
    Exact(SnapshotName),
}

impl NameFilter {
    /// Reads `short` or `short:tag`, with or without the own team in front. A text that cannot be anybody's name, or
    /// names another team, is an error; a listing treats that as a name that nothing has.
    pub fn parse(text: &str, team: Option<&TeamName>) -> Result<Self, NameError> {
        let name = SnapshotName::parse_own(text, team)?;
        Ok(if text.contains(':') { Self::Exact(name) } else { Self::Short(name.short) })
    }
}

/// What the text that names the source of a create, or the object of a delete, can mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// A slash in it: a snapshot's full name, and nothing else.
    Name(FullName),
    /// A UUID: a snapshot first, then a template of that name. The text is kept for the latter.
    Uuid(SnapshotId, String),
    /// Anything else: a template's id or alias.
    Template(String),
}

impl Reference {
    /// Sorts `text` into one of the three. Errors only for a slash that does not make a full name.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let text = text.trim();
        if text.contains('/') {
            return FullName::parse(text).map(Self::Name);
        }
        match text.parse() {
            Ok(id) => Ok(Self::Uuid(id, text.to_owned())),
            Err(_) => Ok(Self::Template(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn team() -> TeamName {
        TeamName::parse("acme").expect("a name")
    }

    #[test]
    fn examples() {
        let name = |text: &str| SnapshotName::parse(text).map(|name| name.to_string());
        assert_eq!(name(" My_Snap-1 ").as_deref(), Ok("my_snap-1:default"));
        assert_eq!(name("a:V1.2-x_").as_deref(), Ok("a:v1.2-x_"));
        for bad in
            ["", " ", ":", "a:", ":t", "a:b:c", "a.b", "a b", "a :t", "a: t", "ä", "\u{212a}", "a/b", &"x".repeat(129)]
        {
            assert!(name(bad).is_err(), "{bad:?}");
        }
        assert!(name(&"x".repeat(128)).is_ok());
    }

    #[test]
    fn own_names() {
        let own = |text: &str| SnapshotName::parse_own(text, Some(&team())).map(|name| name.to_string());
        assert_eq!(own("a:b").as_deref(), Ok("a:b"));
        assert_eq!(own(" ACME/a ").as_deref(), Ok("a:default"));
        assert!(matches!(own("other/a"), Err(NameError::OtherTeam { .. })));
        assert!(matches!(own("acme/a/b"), Err(NameError::Shape { .. })));
        assert_eq!(SnapshotName::parse_own("a", None), Err(NameError::TeamWithoutName));
    }

    #[test]
    fn filters() {
        let filter = |text: &str| NameFilter::parse(text, Some(&team()));
        assert_eq!(filter("A"), Ok(NameFilter::Short("a".into())));
        assert_eq!(filter("acme/a"), Ok(NameFilter::Short("a".into())));
        assert_eq!(filter("a:default"), Ok(NameFilter::Exact(SnapshotName::parse("a").expect("a name"))));
        assert!(filter("a:").is_err());
    }

    #[test]
    fn references() {
        let uuid = "0B8E3D4C-6C2B-4F0F-9E63-4A1C2B3D4E5F";
        assert!(matches!(Reference::parse(uuid), Ok(Reference::Uuid(_, text)) if text == uuid));
        assert_eq!(Reference::parse("base"), Ok(Reference::Template("base".into())));
        assert_eq!(Reference::parse("short:tag"), Ok(Reference::Template("short:tag".into())));
        let Ok(Reference::Name(name)) = Reference::parse(" acme/Short ") else { panic!("a full name") };
        assert_eq!(name.to_string(), "acme/short:default");
        for bad in ["/", "a/", "/a", "a/b/c", "a:b/c", "a/b:", "a/ b", "a /b", "a//b", "../x", "a/b:c:d", "a/b:c/d"] {
            assert!(Reference::parse(bad).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn canonical_text_reads_back_as_itself(short in "[a-z0-9_-]{1,128}", tag in "[a-z0-9_.-]{1,128}", team in "[a-z0-9_-]{1,40}") {
            let name = SnapshotName::parse(&format!("{short}:{tag}")).expect("well-formed");
            prop_assert_eq!((name.short(), name.tag()), (short.as_str(), tag.as_str()));
            prop_assert_eq!(SnapshotName::parse(&name.to_string()), Ok(name.clone()));
            let full = FullName { team: TeamName::parse(&team).expect("well-formed"), name };
            prop_assert_eq!(FullName::parse(&full.to_string()), Ok(full.clone()));
            prop_assert_eq!(Reference::parse(&full.to_string()), Ok(Reference::Name(full)));
        }

        #[test]
        fn case_and_surrounding_blanks_do_not_matter(short in "[a-zA-Z0-9_-]{1,40}", blank in "[ \t]{0,3}") {
            let plain = SnapshotName::parse(&short.to_ascii_lowercase()).expect("well-formed");
            prop_assert_eq!(SnapshotName::parse(&format!("{blank}{short}{blank}")), Ok(plain));
        }

        #[test]
        fn whatever_is_accepted_is_safe_in_a_key(text in any::<String>()) {
            if let Ok(name) = SnapshotName::parse(&text) {
                prop_assert!(name.short().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-".contains(&b)));
                prop_assert!(name.tag().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-.".contains(&b)));
                prop_assert!(!name.short().is_empty() && !name.tag().is_empty());
            }
        }

        #[test]
        fn no_text_panics_and_a_slash_never_reaches_a_template(text in "[a-zA-Z0-9_:/. é-]{0,12}") {
            match Reference::parse(&text) {
                Ok(Reference::Template(name)) => prop_assert!(!name.contains('/')),
                Ok(Reference::Name(name)) => prop_assert_eq!(text.trim().matches('/').count(), 1, "{:?}", name),
                Ok(Reference::Uuid(..)) => {}
                Err(_) => prop_assert!(text.contains('/')),
            }
        }
    }
}
