//! Users and groups, read from `/etc/passwd` and `/etc/group` at each use.
//!
//! The binary is static, and the C library's lookups need its shared modules; nor would they see a user that was added
//! a moment ago any sooner than these two small files from the page cache.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the account files are.
#[derive(Clone, Debug)]
pub struct Accounts {
    passwd: PathBuf,
    group: PathBuf,
}

/// One user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Home directory.
    pub home: String,
    /// Login shell.
    pub shell: String,
}

impl Accounts {
    /// Accounts below `root` (`/` in a guest).
    pub fn below(root: &Path) -> Self {
        Self { passwd: root.join("etc/passwd"), group: root.join("etc/group") }
    }

    /// The user called `name`.
    pub fn user(&self, name: &str) -> io::Result<Option<User>> {
        let text = fs::read_to_string(&self.passwd)?;
        Ok(text.lines().filter_map(parse_user).find(|user| user.name == name))
    }

    /// All groups that `user` belongs to, the primary one included.
    pub fn groups_of(&self, user: &User) -> io::Result<Vec<u32>> {
        let text = fs::read_to_string(&self.group)?;
        let mut groups = vec![user.gid];
        for (gid, members) in text.lines().filter_map(parse_group).map(|(_, gid, members)| (gid, members)) {
            if gid != user.gid && members.split(',').any(|member| member == user.name) {
                groups.push(gid);
            }
        }
        Ok(groups)
    }

    /// A table from ids to names, for listings.
    pub fn names(&self) -> Names {
        // Without the files, ids are shown as numbers.
        let users = fs::read_to_string(&self.passwd).unwrap_or_default();
        let groups = fs::read_to_string(&self.group).unwrap_or_default();
        Names {
            users: users.lines().filter_map(parse_user).map(|user| (user.uid, user.name)).collect(),
            groups: groups.lines().filter_map(parse_group).map(|(name, gid, _)| (gid, name.to_owned())).collect(),
        }
    }
}

/// Names of ids.
#[derive(Debug, Default)]
pub struct Names {
    users: Vec<(u32, String)>,
    groups: Vec<(u32, String)>,
}

impl Names {
    /// The user's name, or its number.
    pub fn user(&self, uid: u32) -> String {
        name_of(&self.users, uid)
    }

    /// The group's name, or its number.
    pub fn group(&self, gid: u32) -> String {
        name_of(&self.groups, gid)
    }
}

fn name_of(table: &[(u32, String)], id: u32) -> String {
    table.iter().find(|(known, _)| *known == id).map_or_else(|| id.to_string(), |(_, name)| name.clone())
}

/// `name:password:uid:gid:comment:home:shell` (`passwd(5)`).
fn parse_user(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1)?;
    let shell = fields.next()?;
    Some(User {
        name: name.to_owned(),
        uid,
        gid,
        home: if home.is_empty() { "/" } else { home }.to_owned(),
        shell: if shell.is_empty() { "/bin/sh" } else { shell }.to_owned(),
    })
}

/// `name:password:gid:members` (`group(5)`).
fn parse_group(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let gid = fields.nth(1)?.parse().ok()?;
    Some((name, gid, fields.next()?))
}

/// `path` as `user` means it: `~` and relative paths start at the home directory; `.`, `..` and doubled slashes are
/// resolved by name, as a client that joins paths expects.
pub fn resolve_path(path: &str, user: &User) -> String {
    let joined = match path {
        "" | "~" => user.home.clone(),
        _ if path.starts_with('/') => path.to_owned(),
        _ => format!("{}/{}", user.home, path.strip_prefix("~/").unwrap_or(path)),
    };
    let mut parts = Vec::new();
    for part in joined.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn accounts() -> (tempfile::TempDir, Accounts) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let passwd = "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1000::/home/user:/bin/bash\nbare:x:7:8:::\n";
        fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        fs::write(root.path().join("etc/group"), "root:x:0:\nuser:x:1000:\nsudo:x:27:other,user\nvideo:x:44:users\n")
            .unwrap();
        let accounts = Accounts::below(root.path());
        (root, accounts)
    }

    #[test]
    fn users_are_found_by_whole_name() {
        let (_root, accounts) = accounts();
        let user = accounts.user("user").unwrap().unwrap();
        assert_eq!((user.uid, user.gid, user.home.as_str()), (1000, 1000, "/home/user"));
        assert_eq!(accounts.user("use").unwrap(), None);
        assert_eq!(accounts.user("broken").unwrap(), None);
    }

    #[test]
    fn empty_home_and_shell_have_defaults() {
        let (_root, accounts) = accounts();
        let bare = accounts.user("bare").unwrap().unwrap();
        assert_eq!((bare.home.as_str(), bare.shell.as_str()), ("/", "/bin/sh"));
    }

    #[test]
    fn groups_count_members_by_whole_name() {
        let (_root, accounts) = accounts();
        let user = accounts.user("user").unwrap().unwrap();
        assert_eq!(accounts.groups_of(&user).unwrap(), [1000, 27]);
    }

    #[test]
    fn ids_without_a_name_are_shown_as_numbers() {
        let (_root, accounts) = accounts();
        let names = accounts.names();
        assert_eq!(
            (names.user(1000), names.group(27), names.user(4242)),
            ("user".into(), "sudo".into(), "4242".into())
        );
    }

    #[test]
    fn paths_start_at_home_unless_absolute() {
        let (_root, accounts) = accounts();
        let user = accounts.user("user").unwrap().unwrap();
        for (given, resolved) in [
            ("/etc/passwd", "/etc/passwd"),
            ("notes.txt", "/home/user/notes.txt"),
            ("~/notes.txt", "/home/user/notes.txt"),
            ("~", "/home/user"),
            ("", "/home/user"),
            ("/a//b/./c/../d/", "/a/b/d"),
            ("../../../..", "/"),
        ] {
            assert_eq!(resolve_path(given, &user), resolved, "{given:?}");
        }
    }
}
