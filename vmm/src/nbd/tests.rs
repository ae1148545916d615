//! The server against the clients it has to please (QEMU's own tools), and against nonsense.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::process::Output;

use async_trait::async_trait;
use proptest::prelude::*;
use tokio::net::UnixListener;
use tokio::process::Command;
use tokio::runtime::{Handle, Runtime};

use super::*;
use crate::image::FillPolicy;
use crate::source::{ChunkData, ChunkNo, Geometry, PageSource, SourceError, ZeroSource};

const SIZE: u64 = 8 << 20;

fn disk(directory: &tempfile::TempDir) -> Arc<Overlay> {
    Overlay::new(directory.path().to_owned(), SIZE, FillPolicy::default(), Handle::current()).unwrap()
}

fn zeros() -> Arc<dyn PageSource> {
    ZeroSource::new(Geometry::new(SIZE, 65536).unwrap())
}

/// Serves every connection on a socket in the directory, and gives the name by which QEMU's tools know it.
fn listen(directory: &tempfile::TempDir, overlay: &Arc<Overlay>) -> (String, JoinHandle<()>) {
    let path: PathBuf = directory.path().join("nbd.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let overlay = Arc::clone(overlay);
    let task = tokio::spawn(async move {
        let mut servers = Vec::new();
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            servers.push(DiskServer::serve(socket, Arc::clone(&overlay)));
        }
    });
    (format!("nbd+unix:///?socket={}", path.display()), task)
}

async fn tool(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output().await.unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    output
}

async fn qemu_io(url: &str, commands: &[&str]) -> String {
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(url);
    let output = tool("qemu-io", &arguments).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains("failed"), "{commands:?}: {text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn qemus_tools_read_what_they_wrote() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(zeros()).unwrap();
    let (url, server) = listen(&directory, &overlay);
    let info = tool("qemu-img", &["info", "-f", "raw", &url]).await;
    assert!(String::from_utf8_lossy(&info.stdout).contains("8388608 bytes"), "{info:?}");
    qemu_io(
        &url,
        &[
            "write -P 0x11 0 1M",
            "write -P 0x22 5000 300",
            "read -P 0x11 0 5000",
            "read -P 0x22 5000 300",
            "read -P 0x11 5300 1043276",
            "write -z 64k 64k",
            "read -P 0 64k 64k",
            "discard 256k 64k",
            "read -P 0 256k 64k",
            "flush",
            "write -f -P 0x33 7M 1M",
            "aio_write -P 0x44 2M 512k",
            "aio_write -P 0x55 3M 512k",
            "aio_flush",
            "read -P 0x44 2M 512k",
            "read -P 0x55 3M 512k",
        ],
    )
    .await;
    let frozen = overlay.freeze().await.unwrap();
    qemu_io(&url, &["write -P 0x66 0 4096", "read -P 0x33 7M 1M", "read -P 0x66 0 4096", "read -P 0x11 4096 900"])
        .await;
    match frozen.read(ChunkNo(0)).await.unwrap() {
        ChunkData::Bytes(bytes) => assert_eq!(bytes[..4096], [0x11; 4096], "the frozen disk is as it was"),
        ChunkData::Zero => panic!("not zeros"),
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_copied_in_compares_equal() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(zeros()).unwrap();
    let (url, server) = listen(&directory, &overlay);
    let raw = directory.path().join("raw");
    let bytes: Vec<u8> = (0..SIZE)
        .map(|at| if (at / 10_000) % 3 == 0 { 0 } else { (at.wrapping_mul(2_654_435_761) >> 13) as u8 })
        .collect();
    std::fs::write(&raw, &bytes).unwrap();
    let raw = raw.to_str().unwrap();
    tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", raw, &url]).await;
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", raw, &url]).await;
    assert!(overlay.read(0, SIZE).await.unwrap() == bytes);
    server.abort();
}

/// Speaks just enough of the protocol.
struct Client(UnixStream);

impl Client {
    async fn connect(overlay: &Arc<Overlay>) -> (Self, DiskServer) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = DiskServer::serve(theirs, Arc::clone(overlay));
        let mut client = Self(ours);
        let mut greeting = [0; 18];
        client.0.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        client.0.write_u32(3).await.unwrap();
        client.option(OPTION_EXPORT_NAME, b"").await;
        assert_eq!(client.0.read_u64().await.unwrap(), SIZE);
        assert_eq!(client.0.read_u16().await.unwrap(), EXPORT_FLAGS);
        (client, server)
    }

    async fn option(&mut self, option: u32, data: &[u8]) {
        self.0.write_u64(OPTION).await.unwrap();
        self.0.write_u32(option).await.unwrap();
        self.0.write_u32(data.len() as u32).await.unwrap();
        self.0.write_all(data).await.unwrap();
    }

    async fn request(&mut self, command: u16, handle: u64, offset: u64, len: u32) {
        let mut message = Vec::new();
        message.extend(REQUEST.to_be_bytes());
        message.extend(0u16.to_be_bytes());
        message.extend(command.to_be_bytes());
        message.extend(handle.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend(len.to_be_bytes());
        self.0.write_all(&message).await.unwrap();
    }

    async fn reply(&mut self) -> (u32, u64) {
        assert_eq!(self.0.read_u32().await.unwrap(), REPLY);
        (self.0.read_u32().await.unwrap(), self.0.read_u64().await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_requests_get_an_error_and_the_connection_lives() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(zeros()).unwrap();
    let (mut client, _server) = Client::connect(&overlay).await;
    client.request(COMMAND_READ, 1, SIZE - 1, 2).await;
    assert_eq!(client.reply().await, (EINVAL, 1));
    client.request(COMMAND_READ, 2, 0, MAX_PAYLOAD + 1).await;
    assert_eq!(client.reply().await, (EINVAL, 2));
    client.request(77, 3, 0, 1).await;
    assert_eq!(client.reply().await, (EINVAL, 3));
    client.request(COMMAND_FLUSH, 4, 0, 0).await;
    assert_eq!(client.reply().await, (0, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_before_the_base_is_known_are_answered_after_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    let (mut client, _server) = Client::connect(&overlay).await;
    client.request(COMMAND_READ, 1, 0, 4096).await;
    client.request(COMMAND_FLUSH, 2, 0, 0).await;
    assert_eq!(client.reply().await, (0, 2), "the read waits, others do not");
    overlay.attach(zeros()).unwrap();
    assert_eq!(client.reply().await, (0, 1));
    let mut bytes = vec![1; 4096];
    client.0.read_exact(&mut bytes).await.unwrap();
    assert_eq!(bytes, vec![0; 4096]);
}

/// A base that is lost.
struct Lost;

#[async_trait]
impl PageSource for Lost {
    fn size_bytes(&self) -> u64 {
        SIZE
    }

    fn chunk_size(&self) -> u32 {
        65536
    }

    async fn read(&self, _chunk: ChunkNo) -> Result<ChunkData, SourceError> {
        Err(SourceError::lost("the store burnt down"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_base_is_reported_and_its_reads_stay_unanswered() {
    let directory = tempfile::tempdir().unwrap();
    let overlay = disk(&directory);
    overlay.attach(Arc::new(Lost)).unwrap();
    let (mut client, server) = Client::connect(&overlay).await;
    let mut failure = server.failure();
    client.request(COMMAND_READ, 1, 65536, 4096).await;
    let fault = failure.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert!(fault.reason.contains("burnt down") && fault.reason.contains("chunk 1"), "{fault}");
    client.request(COMMAND_FLUSH, 2, 0, 0).await;
    assert_eq!(client.reply().await, (0, 2), "the read got no answer");
    server.stop().await;
    assert!(client.0.read_u32().await.is_err(), "the connection is closed");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever a client sends, the server ends the connection or answers; it neither hangs at the end of it nor panics.
    #[test]
    fn nonsense_ends_the_connection(
        head in prop_oneof![
            Just(Vec::new()),
            Just([&3u32.to_be_bytes()[..], &OPTION.to_be_bytes(), &[0, 0, 0, 1, 0, 0, 0, 0]].concat()),
            Just([&3u32.to_be_bytes()[..], &OPTION.to_be_bytes(), &[0, 0, 0, 7, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0],
                &REQUEST.to_be_bytes()].concat()),
        ],
        noise in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        Runtime::new().unwrap().block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let overlay = disk(&directory);
            overlay.attach(zeros()).unwrap();
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            let (failure, _) = watch::channel(None);
            let serving = tokio::spawn(async move { serve(theirs, overlay, &failure).await });
            // The server may have hung up already.
            let _ = ours.write_all(&head).await;
            let _ = ours.write_all(&noise).await;
            let _ = ours.shutdown().await;
            let mut answers = Vec::new();
            let _ = ours.read_to_end(&mut answers).await;
            // An error is fine, a panic is not.
            let _ = serving.await.expect("no panic");
        });
    }
}
