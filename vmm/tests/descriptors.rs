//! Nothing is left open: alone in its binary, since it counts the descriptors of its own process.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::guest::{Guest, within};
use common::source::{TestSource, image_bytes};
use snapyard_vmm::{Backing, MemoryImage, capture_dirty};

#[test]
#[ignore = "the process that the other test starts"]
fn stand_in_vmm() {
    common::stand_in::run();
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn restores_and_captures_leave_no_descriptor_open() {
    let size = 1 << 20;
    let guest = Guest::start(size);
    let before = open_descriptors();
    let before_inside: usize = guest.call("descriptors").await.parse().unwrap();
    for round in 0..20 {
        let image = MemoryImage::new("test", TestSource::new(round, size), Backing::Memory).unwrap();
        let served = guest.attach(&image);
        guest.expect(0, &image_bytes(round, size)).await;
        guest.fill(4096, 4096, 1).await;
        let dirty = capture_dirty(guest.pid(), &guest.channel.regions().unwrap()).unwrap();
        let child = MemoryImage::child("child", image.clone(), dirty).unwrap();
        served.stop();
        let served = guest.attach(&child);
        guest.fill(8192, 1, 1).await;
        drop(served);
        drop((image, child));
        // Tasks that have just rung the page server let go of the image a moment later.
        within(async {
            while open_descriptors() > before {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let inside: usize = guest.call("descriptors").await.parse().unwrap();
        assert_eq!(inside, before_inside + 1, "round {round}: the VMM keeps one userfaultfd");
    }
}
