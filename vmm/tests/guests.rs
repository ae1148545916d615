//! Real guests in a real VMM: boot, capture, restore, fail, kill.

mod microvm;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use microvm::{Host, SHAPE, Snapshot, Switch, Switched, count, run, zeros};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use snapyard_vmm::{FillPolicy, GuestPort, RestoreFrom, RestoreTimings, Shape, Vm, VmError, VmFailure};
use tokio::net::TcpStream;

const BLOCKS: &str = "dd if=/dev/vda skip=8 bs=4096 count=3 2>/dev/null | md5sum";

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_restored_twice_and_everyone_goes_on_alone() {
    let host = Host::new().await;
    let source = host.boot().await;
    run(&source, "echo memory > /note; dd if=/bin/busybox of=/dev/vda seek=8 bs=4096 count=3 conv=fsync").await;
    let sum = run(&source, BLOCKS).await;
    let before = count(&source).await;
    let capture = source.capture().await.expect("a capture");
    println!("pause {:?}, {} bytes dirty", capture.pause, capture.dirty.dirty_bytes());
    let snapshot = Snapshot::of_booted(capture);

    host.hypervisor.prewarm(SHAPE, 2);
    host.hypervisor.warmed(SHAPE).await;
    let (first, timings) = host.restore(&snapshot).await;
    assert!(timings.pooled);
    println!("restored in {:?}: {timings:?}", timings.total());
    let (second, timings) = host.restore(&snapshot).await;
    println!("restored in {:?}: {timings:?}", timings.total());
    for (name, vm) in [("first", &first), ("second", &second)] {
        assert_eq!(run(vm, "cat /note").await, "memory");
        assert_eq!(run(vm, BLOCKS).await, sum);
        run(vm, &format!("echo {name} > /note; echo {name} | dd of=/dev/vda conv=fsync")).await;
    }
    for (name, vm) in [("first", &first), ("second", &second)] {
        assert_eq!(run(vm, "cat /note; head -n 1 /dev/vda").await, format!("{name}\n{name}"));
        let begun = count(vm).await;
        assert!(begun >= before, "{begun} {before}");
        while count(vm).await <= begun {}
    }
    assert_eq!(run(&source, "cat /note").await, "memory", "the source is on its own");

    // A snapshot of a guest that was itself restored, on top of its parent.
    let child = first.capture().await.expect("a capture of a restored guest");
    assert!(child.dirty.dirty_bytes() < SHAPE.memory_bytes / 4, "only what it wrote: {}", child.dirty.dirty_bytes());
    println!("pause {:?}, {} bytes dirty", child.pause, child.dirty.dirty_bytes());
    let child = Snapshot::on(snapshot.memory.clone(), child);
    let (grandchild, _) = host.restore(&child).await;
    assert_eq!(run(&grandchild, "cat /note; head -n 1 /dev/vda").await, "first\nfirst");
    let stats = grandchild.memory_stats().await;
    println!("{stats:?}");
    assert!(stats.faults.faults > 0 && stats.guest_private_bytes > 0, "{stats:?}");
    assert!(stats.guest_private_bytes < stats.private_bytes, "{stats:?}");
    assert!(!grandchild.touches().memory().is_empty() && !first.touches().disk().is_empty());
    host.hypervisor.shutdown().await;
    assert!(matches!(host.hypervisor.boot(SHAPE, zeros(SHAPE.disk_bytes), "").await, Err(VmError::Closed)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_that_fails_or_is_abandoned_leaves_the_guest_running() {
    let host = Host::new().await;
    let vm = host.boot().await;
    // The last step of a capture needs a place for the next disk layer.
    run(&vm, "echo one | dd of=/dev/vda conv=fsync").await;
    let run_dir = host.directory.path().join("run");
    fs::remove_dir(&run_dir).expect("an empty directory");
    let error = vm.capture().await.expect_err("no place for a layer");
    assert!(matches!(error, VmError::Disk { .. }), "{error}");
    let begun = count(&vm).await;
    while count(&vm).await <= begun {}
    fs::create_dir(&run_dir).expect("a directory");

    // Dropped at its first await, and somewhere in the middle.
    for patience in [Duration::ZERO, Duration::from_millis(3)] {
        let _ = tokio::time::timeout(patience, vm.capture()).await;
        let begun = count(&vm).await;
        while count(&vm).await <= begun {}
    }

    let capture = vm.capture_and_stay_stopped().await.expect("a capture");
    let (restored, _) = host.restore(&Snapshot::of_booted(capture)).await;
    assert_eq!(run(&restored, "head -n 1 /dev/vda").await, "one");
    vm.resume().await.expect("it may go on");
    assert_eq!(run(&vm, "head -n 1 /dev/vda").await, "one");
    assert!(vm.failed().borrow().is_none());
    vm.kill().await;
    vm.kill().await;
    assert!(matches!(vm.capture().await, Err(VmError::Driver { .. })), "a dead guest is not captured");
    assert!(vm.failed().wait_for(Option::is_some).await.is_err(), "its owner killed it: that is no failure");
}

async fn failure(vm: &Vm) -> VmFailure {
    vm.failed().wait_for(Option::is_some).await.expect("a failure").clone().expect("waited for it")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_guest_is_reported_with_its_reason() {
    let host = Host::with(|config| config.max_vms = 2).await;
    let source = host.boot().await;
    let snapshot = Snapshot::of_booted(source.capture().await.expect("a capture"));
    let (killed, timings) = host.restore(&snapshot).await;
    assert!(!timings.pooled);
    let mut timings = RestoreTimings::default();
    let full = host.hypervisor.restore(SHAPE, snapshot.from(), &mut timings).await;
    assert!(matches!(full, Err(VmError::Full { max_vms: 2 })), "{full:?}");
    run(&killed, "true").await;
    kill(Pid::from_raw(killed.pid() as i32), Signal::SIGKILL).expect("it lives");
    let reason = failure(&killed).await.to_string();
    assert!(reason.contains("SIGKILL"), "{reason}");
    let refused = killed.capture().await.expect_err("it is dead");
    assert!(matches!(refused, VmError::Failed { .. }), "{refused}");
    let address = killed.port(GuestPort::Agent);
    killed.kill().await;
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");

    let (rebooted, _) = host.restore(&snapshot).await;
    // The connection dies with the guest.
    let _ = tokio::time::timeout(Duration::from_secs(1), run(&rebooted, "reboot -f")).await;
    let reason = failure(&rebooted).await.to_string();
    assert!(reason.contains("guest-reset"), "{reason}");
    drop(rebooted);
    assert_eq!(run(&source, "echo fine").await, "fine");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_cannot_be_had_end_the_guest_and_never_read_as_zeros() {
    let host = Host::new().await;
    let source = host.boot().await;
    run(&source, "dd if=/bin/busybox of=/dev/vda bs=4096 count=200 conv=fsync; echo 3 > /proc/sys/vm/drop_caches")
        .await;
    let snapshot = Snapshot::of_booted(source.capture().await.expect("a capture"));
    let policy = FillPolicy { deadline: Duration::from_millis(300), ..FillPolicy::default() };

    let switch = Arc::new(Switch::default());
    let (vm, _) = host.restore(&snapshot.behind(&switch, policy)).await;
    run(&vm, "true").await;
    switch.off("the store burnt down");
    // Programs that have not run since the restore.
    let asked = tokio::time::timeout(Duration::from_secs(20), run(&vm, "find / -xdev | sort | sha512sum"));
    tokio::select! {
        failure = failure(&vm) => {
            assert!(matches!(&failure, VmFailure::Memory(_)), "{failure}");
            assert!(failure.to_string().contains("burnt down"), "{failure}");
        }
        answer = asked => panic!("answered without its memory: {answer:?}"),
    }
    vm.kill().await;

    let switch = Arc::new(Switch::default());
    let below = Arc::clone(&snapshot.disk);
    let disk = Arc::new(Switched { below, switch: Arc::clone(&switch) });
    let from = RestoreFrom { disk, ..snapshot.from() };
    let vm = host.hypervisor.restore(SHAPE, from, &mut RestoreTimings::default()).await.expect("a guest");
    run(&vm, "true").await;
    switch.off("the disk is lost");
    let asked = tokio::time::timeout(Duration::from_secs(20), run(&vm, "md5sum < /dev/vda"));
    tokio::select! {
        failure = failure(&vm) => {
            assert!(matches!(&failure, VmFailure::Disk(_)), "{failure}");
            assert!(failure.to_string().contains("disk is lost"), "{failure}");
        }
        answer = asked => panic!("answered without its disk: {answer:?}"),
    }
    vm.kill().await;

    // A restore in the course of which memory is lost fails; it does not hang.
    let switch = Arc::new(Switch::default());
    switch.off("nothing there");
    let lost = snapshot.behind(&switch, policy);
    let outcome = host.hypervisor.restore(SHAPE, lost.from(), &mut RestoreTimings::default()).await;
    match outcome {
        // Loading may get along without memory; then the guest runs into it at once.
        Ok(vm) => assert!(matches!(failure(&vm).await, VmFailure::Memory(_))),
        Err(error) => assert!(matches!(error, VmError::Failed { .. }), "{error}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_and_the_next_restore_works() {
    let host = Host::new().await;
    let source = host.boot().await;
    let snapshot = Snapshot::of_booted(source.capture().await.expect("a capture"));
    source.kill().await;
    let restore = async |shape: Shape, from: RestoreFrom| {
        host.hypervisor.restore(shape, from, &mut RestoreTimings::default()).await
    };
    let larger = Shape { memory_bytes: 2 * SHAPE.memory_bytes, ..SHAPE };
    assert!(matches!(restore(larger, snapshot.from()).await, Err(VmError::Unfit { .. })));
    let smaller = Shape { disk_bytes: SHAPE.disk_bytes / 2, ..SHAPE };
    assert!(matches!(restore(smaller, snapshot.from()).await, Err(VmError::Disk { .. })));
    let garbage = RestoreFrom { device_state: Bytes::from_static(b"no device state at all"), ..snapshot.from() };
    let error = restore(SHAPE, garbage).await.expect_err("garbage");
    assert!(error.to_string().contains("Not a migration stream"), "{error}");
    let cut = snapshot.device_state.slice(..snapshot.device_state.len() / 2);
    let error = restore(SHAPE, RestoreFrom { device_state: cut, ..snapshot.from() }).await.expect_err("half a state");
    assert!(matches!(error, VmError::Driver { .. }), "{error}");
    let vm = restore(SHAPE, snapshot.from()).await.expect("a guest");
    assert_eq!(run(&vm, "echo fine").await, "fine");

    let status = fs::read_to_string(format!("/proc/{}/status", vm.pid())).expect("it lives");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a field");
        line.split_whitespace().nth(1).expect("a value").to_owned()
    };
    assert_eq!((field("Seccomp:"), field("NoNewPrivs:")), ("2".into(), "1".into()));
    if nix::unistd::geteuid().is_root() {
        assert_eq!((field("Uid:"), field("Gid:")), ("65534".into(), "65534".into()));
    }
}
