//! One control group per VMM: bounds what a runaway VMM can take from its neighbours.
//!
//! Best effort, by design: a node that may not create control groups runs without them and says so once. Version 2
//! (a directory delegated to the node) and version 1 (controllers `memory` and `pids`, below the node's own group) work.
//!
//! Left-overs: a group is removed after its process was reaped. Groups of a node that was killed are empty by then and
//! are swept at the next start (their names carry the node's process id).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where control groups are made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CgroupMode {
    /// Wherever it is possible.
    #[default]
    Auto,
    /// Nowhere.
    Off,
    /// Below this version 2 directory, which is delegated to the node and holds no process.
    Below(PathBuf),
}

/// The most that one VMM may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Memory in bytes, guest memory included.
    pub memory_bytes: u64,
    /// Threads.
    pub tasks: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Parent {
    V2(PathBuf),
    V1 { memory: Option<PathBuf>, pids: Option<PathBuf> },
}

/// The place below which this node makes its groups.
#[derive(Debug, Clone)]
pub struct Cgroups {
    parent: Parent,
    next: Arc<AtomicU64>,
}

const PREFIX: &str = "snapyard-vm";

impl Cgroups {
    /// Looks for a place; `None` if there is none or none is wanted. Touches the file system.
    pub fn find(mode: &CgroupMode) -> Option<Self> {
        let parent = match mode {
            CgroupMode::Off => return None,
            CgroupMode::Below(directory) => enable(directory).then(|| Parent::V2(directory.clone())),
            CgroupMode::Auto => {
                let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
                let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
                automatic(&own, &mounts)
            }
        };
        let Some(parent) = parent else {
            tracing::info!(?mode, "no control groups for VMMs here");
            return None;
        };
        let found = Self { parent, next: Arc::new(AtomicU64::new(1)) };
        found.directories().for_each(sweep);
        // What cannot hold a group is noticed now, not at the first guest.
        match found.create(Limits { memory_bytes: 1 << 30, tasks: 64 }) {
            Ok(_) => Some(found),
            Err(cause) => {
                tracing::info!(%cause, "no control groups for VMMs here");
                None
            }
        }
    }

    fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        match &self.parent {
            Parent::V2(directory) => vec![directory],
            Parent::V1 { memory, pids } => memory.iter().chain(pids).collect(),
        }
        .into_iter()
    }

    /// Makes a group for one VMM.
    pub fn create(&self, limits: Limits) -> io::Result<VmCgroup> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}.{}.{number}", std::process::id());
        let mut group = VmCgroup { directories: Vec::new() };
        for parent in self.directories() {
            let directory = parent.join(&name);
            fs::create_dir(&directory)?;
            group.directories.push(directory);
        }
        let (memory, tasks) = (limits.memory_bytes.to_string(), limits.tasks.to_string());
        let settings: Vec<(PathBuf, &str)> = match &self.parent {
            Parent::V2(parent) => {
                vec![(parent.join(&name).join("memory.max"), &memory), (parent.join(&name).join("pids.max"), &tasks)]
            }
            Parent::V1 { memory: memory_parent, pids } => {
                let limit = |parent: &PathBuf, file: &str| parent.join(&name).join(file);
                let memory_file = memory_parent.as_ref().map(|p| (limit(p, "memory.limit_in_bytes"), memory.as_str()));
                let tasks_file = pids.as_ref().map(|p| (limit(p, "pids.max"), tasks.as_str()));
                memory_file.into_iter().chain(tasks_file).collect()
            }
        };
        for (file, value) in settings {
            fs::write(file, value)?;
        }
        Ok(group)
    }
}

/// The group of one VMM. Dropped (after the process was reaped), it is removed.
#[derive(Debug)]
pub struct VmCgroup {
    directories: Vec<PathBuf>,
}

impl VmCgroup {
    /// Puts a process into the group. A failure costs the limit, not the guest.
    pub fn enter(&self, pid: u32) {
        for directory in &self.directories {
            if let Err(cause) = fs::write(directory.join("cgroup.procs"), pid.to_string()) {
                tracing::warn!(pid, directory = %directory.display(), %cause, "a VMM runs outside its control group");
            }
        }
    }
}

impl Drop for VmCgroup {
    fn drop(&mut self) {
        for directory in &self.directories {
            if let Err(cause) = fs::remove_dir(directory) {
                tracing::warn!(directory = %directory.display(), %cause, "a control group was not removed");
            }
        }
    }
}

/// Lets the children of a version 2 directory have limits.
fn enable(directory: &Path) -> bool {
    fs::write(directory.join("cgroup.subtree_control"), "+memory +pids").is_ok()
}

fn automatic(own: &str, mounts: &str) -> Option<Parent> {
    let v1 = |controller: &str| {
        let mount = mount_point(mounts, "cgroup", Some(controller))?;
        let group = own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let controllers = fields.next()?;
            controllers.split(',').any(|name| name == controller).then(|| fields.next())?
        })?;
        let directory = mount.join(group.trim_start_matches('/'));
        directory.is_dir().then_some(directory)
    };
    let (memory, pids) = (v1("memory"), v1("pids"));
    if memory.is_some() || pids.is_some() {
        return Some(Parent::V1 { memory, pids });
    }
    let mount = mount_point(mounts, "cgroup2", None)?;
    let group = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let directory = mount.join(group.trim_start_matches('/'));
    enable(&directory).then_some(Parent::V2(directory))
}

fn mount_point(mountinfo: &str, kind: &str, option: Option<&str>) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let fits = right.next() == Some(kind)
            && option.is_none_or(|option| right.nth(1).is_some_and(|all| all.split(',').any(|one| one == option)));
        fits.then(|| left.split(' ').nth(4).map(PathBuf::from))?
    })
}

/// Removes the groups of nodes that are dead. A group with a process in it cannot be removed, so nothing is at risk.
fn sweep(parent: &PathBuf) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let owner = rest.trim_start_matches('.').split('.').next().unwrap_or_default();
        if !Path::new("/proc").join(owner).exists() && fs::remove_dir(entry.path()).is_ok() {
            tracing::info!(group = %entry.path().display(), "removed the control group of a dead node");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 23 0:27 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids
32 23 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn mounts_are_found_by_kind_and_controller() {
        assert_eq!(mount_point(MOUNTS, "cgroup", Some("pids")), Some("/sys/fs/cgroup/pids".into()));
        assert_eq!(mount_point(MOUNTS, "cgroup", Some("memory")), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(mount_point(MOUNTS, "cgroup", Some("cpu")), None);
        assert_eq!(mount_point(MOUNTS, "cgroup2", None), Some("/sys/fs/cgroup/unified".into()));
    }

    #[test]
    fn without_any_controller_there_is_no_place() {
        assert_eq!(automatic("", ""), None);
        assert_eq!(automatic("0::/nowhere", "32 23 0:28 / /nonexistent rw - cgroup2 cgroup2 rw\n"), None);
    }

    #[test]
    fn groups_are_made_below_a_directory_and_go_away() {
        let directory = tempfile::tempdir().expect("a directory");
        let parent = Parent::V2(directory.path().to_owned());
        let groups = Cgroups { parent, next: Arc::new(AtomicU64::new(1)) };
        // On an ordinary file system the limits are ordinary files, which is all that can be looked at here.
        let group = groups.create(Limits { memory_bytes: 4096, tasks: 7 }).expect("a group");
        let made = group.directories[0].clone();
        assert_eq!(fs::read_to_string(made.join("memory.max")).expect("a limit"), "4096");
        assert_eq!(fs::read_to_string(made.join("pids.max")).expect("a limit"), "7");
        group.enter(123);
        assert_eq!(fs::read_to_string(made.join("cgroup.procs")).expect("members"), "123");
        for file in ["memory.max", "pids.max", "cgroup.procs"] {
            fs::remove_file(made.join(file)).expect("the kernel does this by itself");
        }
        drop(group);
        assert!(!made.exists());
    }

    #[test]
    fn groups_of_dead_nodes_are_swept_and_others_stay() {
        let directory = tempfile::tempdir().expect("a directory");
        let dead = directory.path().join(format!("{PREFIX}.4294967295.1"));
        let mine = directory.path().join(format!("{PREFIX}.{}.1", std::process::id()));
        let other = directory.path().join("somebody-else");
        for group in [&dead, &mine, &other] {
            fs::create_dir(group).expect("a directory");
        }
        sweep(&directory.path().to_owned());
        assert_eq!([dead.exists(), mine.exists(), other.exists()], [false, true, true]);
    }
}
