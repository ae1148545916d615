//! Nothing is left: processes, descriptors, files, control groups. Alone in its binary, since it counts what its own
//! process has.

mod microvm;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use microvm::{Host, SHAPE, Snapshot, run};

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

fn children() -> BTreeSet<String> {
    let tasks = fs::read_dir("/proc/self/task").expect("threads").flatten();
    tasks
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|children| children.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

fn groups(below: &Path, found: &mut Vec<PathBuf>) {
    let mine = format!("snapyard-vm.{}.", std::process::id());
    for entry in fs::read_dir(below).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if entry.file_name().to_string_lossy().starts_with(&mine) {
                found.push(entry.path());
            }
            groups(&entry.path(), found);
        }
    }
}

fn own_groups() -> Vec<PathBuf> {
    let mut found = Vec::new();
    groups(Path::new("/sys/fs/cgroup"), &mut found);
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_guest_leaves_nothing() {
    let host = Host::new().await;
    let run_dir = host.directory.path().join("run");
    let snapshot = {
        let vm = host.boot().await;
        run(&vm, "echo x | dd of=/dev/vda conv=fsync").await;
        let snapshot = Snapshot::of_booted(vm.capture().await.expect("a capture"));
        vm.kill().await;
        snapshot
    };
    let before = descriptors();
    for _ in 0..5 {
        host.hypervisor.prewarm(SHAPE, 1);
        host.hypervisor.warmed(SHAPE).await;
        let (vm, _) = host.restore(&snapshot).await;
        run(&vm, "true").await;
        drop(vm.capture().await.expect("a capture"));
        assert!(!children().is_empty());
        assert_eq!(fs::read_dir(&run_dir).expect("a directory").count(), 0, "files without names");
        vm.kill().await;
        drop(vm);
        host.hypervisor.prewarm(SHAPE, 0);
        // Whatever the pool had started or was starting.
        while !children().is_empty() {
            tokio::task::yield_now().await;
        }
    }
    host.hypervisor.shutdown().await;
    // Sockets of tasks that were told to end close a moment later. Threads of the runtime have none.
    let closed = async {
        while descriptors() > before {
            tokio::task::yield_now().await;
        }
    };
    let closed = tokio::time::timeout(Duration::from_secs(10), closed).await;
    assert!(closed.is_ok(), "{} descriptors, {before} before", descriptors());
    assert_eq!(children(), BTreeSet::new());
    assert_eq!(own_groups(), Vec::<PathBuf>::new());
    assert_eq!(fs::read_dir(&run_dir).expect("a directory").count(), 0);
}
