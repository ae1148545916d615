//! The endpoint over TCP, with the client that the store uses.

use std::net::SocketAddr;
use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::{BehaviorVersion, Credentials, Region, RequestChecksumCalculation, retry::RetryConfig};
use aws_sdk_s3::error::{ProvideErrorMetadata as _, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;

struct Server {
    address: SocketAddr,
    pair: KeyPair,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Server {
    async fn start(dir: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let pair = KeyPair::generate().expect("random");
        let (stop, stopped) = oneshot::channel::<()>();
        let (dir, own) = (dir.to_owned(), pair.clone());
        let task = tokio::spawn(async move {
            serve(listener, &dir, &own, async move {
                let _ = stopped.await;
            })
            .await
        });
        Self { address, pair, stop, task }
    }

    fn client_with(&self, pair: &KeyPair, checksums: RequestChecksumCalculation) -> Client {
        let credentials = Credentials::new(&pair.access_key, &pair.secret_key, None, None, "test");
        let config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .endpoint_url(format!("http://{}", self.address))
            .region(Region::new("local"))
            .credentials_provider(credentials)
            .request_checksum_calculation(checksums)
            .retry_config(RetryConfig::disabled())
            .force_path_style(true);
        Client::from_conf(config.build())
    }

    fn client(&self) -> Client {
        self.client_with(&self.pair, RequestChecksumCalculation::WhenRequired)
    }

    async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.expect("no panic").expect("served");
    }
}

async fn ready() -> (tempfile::TempDir, Server, Client) {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::start(&dir.path().join("s3")).await;
    let client = server.client();
    client.create_bucket().bucket("snapyard").send().await.expect("creates");
    (dir, server, client)
}

async fn put(client: &Client, key: &str, bytes: Vec<u8>) {
    let put = client.put_object().bucket("snapyard").key(key).body(ByteStream::from(bytes));
    put.send().await.unwrap_or_else(|error| panic!("{key:?}: {error:?}"));
}

async fn get(client: &Client, key: &str) -> Option<Vec<u8>> {
    match client.get_object().bucket("snapyard").key(key).send().await {
        Ok(answer) => Some(answer.body.collect().await.expect("a whole body").to_vec()),
        Err(error) => {
            assert_eq!((status(&error), error.code()), (404, Some("NoSuchKey")), "{key:?}");
            None
        }
    }
}

fn status<E>(error: &SdkError<E>) -> u16 {
    error.raw_response().expect("an answer").status().as_u16()
}

fn noise(len: usize) -> Vec<u8> {
    let mut hash = blake3::Hasher::new();
    hash.update(b"noise");
    let mut bytes = vec![0; len];
    hash.finalize_xof().fill(&mut bytes);
    bytes
}

#[tokio::test]
async fn objects_are_what_was_put() {
    let (_dir, server, client) = ready().await;
    for len in [0, 1, 4096, INLINE + 1, 5 << 20] {
        let bytes = noise(len);
        put(&client, "packs/x", bytes.clone()).await;
        assert_eq!(get(&client, "packs/x").await, Some(bytes), "{len} bytes");
        let head = client.head_object().bucket("snapyard").key("packs/x").send().await.expect("there");
        assert_eq!(head.content_length(), i64::try_from(len).ok());
        assert!(head.e_tag().is_some_and(|etag| !etag.is_empty()) && head.last_modified().is_some());
    }
    assert_eq!(get(&client, "packs/y").await, None);
    let head = client.head_object().bucket("snapyard").key("packs/y").send().await.expect_err("absent");
    assert_eq!(status(&head), 404);
    for _ in 0..2 {
        client.delete_object().bucket("snapyard").key("packs/x").send().await.expect("idempotent");
        assert_eq!(get(&client, "packs/x").await, None);
    }
    server.stop().await;
}

const INLINE: usize = 1 << 20;

#[tokio::test]
async fn ranges() {
    let (_dir, server, client) = ready().await;
    let bytes = noise(3 * INLINE);
    put(&client, "p", bytes.clone()).await;
    let last = bytes.len() - 1;
    for (range, expected) in [
        ("bytes=0-0".to_owned(), &bytes[..1]),
        ("bytes=100-65635".to_owned(), &bytes[100..65636]),
        (format!("bytes={last}-{last}"), &bytes[last..]),
        (format!("bytes={last}-"), &bytes[last..]),
        (format!("bytes=5-{}", 10 * bytes.len()), &bytes[5..]),
        (format!("bytes=7-{}", 2 * INLINE), &bytes[7..=2 * INLINE]),
        ("bytes=-10".to_owned(), &bytes[bytes.len() - 10..]),
        (format!("bytes=-{}", 10 * bytes.len()), &bytes[..]),
    ] {
        let answer = client.get_object().bucket("snapyard").key("p").range(&range).send().await.expect("in range");
        let start = bytes.len() - expected.len();
        assert!(answer.content_range().is_some_and(|text| text.ends_with(&format!("/{}", bytes.len()))), "{start}");
        assert_eq!(answer.content_length(), i64::try_from(expected.len()).ok(), "{range}");
        assert_eq!(answer.body.collect().await.expect("a whole body").to_vec(), expected, "{range}");
    }
    for range in [format!("bytes={}-", bytes.len()), "bytes=-0".to_owned()] {
        let error = client.get_object().bucket("snapyard").key("p").range(&range).send().await.expect_err("outside");
        assert_eq!((status(&error), error.code()), (416, Some("InvalidRange")), "{range}");
    }
    put(&client, "empty", Vec::new()).await;
    let error = client.get_object().bucket("snapyard").key("empty").range("bytes=0-1").send().await.expect_err("empty");
    assert_eq!(status(&error), 416);
    server.stop().await;
}

#[tokio::test]
async fn an_object_is_created_once() {
    let (dir, server, client) = ready().await;
    let create = async |bytes: &'static [u8]| {
        let put = client.put_object().bucket("snapyard").key("manifests/1").if_none_match("*");
        put.body(ByteStream::from_static(bytes)).send().await
    };
    create(b"first").await.expect("new");
    let error = create(b"second").await.expect_err("exists");
    assert_eq!((status(&error), error.code()), (412, Some("PreconditionFailed")));
    assert_eq!(get(&client, "manifests/1").await.as_deref(), Some(&b"first"[..]));
    put(&client, "manifests/1", b"third".to_vec()).await;
    assert_eq!(get(&client, "manifests/1").await.as_deref(), Some(&b"third"[..]), "unless that is asked for");
    client.delete_object().bucket("snapyard").key("manifests/1").send().await.expect("deletes");
    create(b"fourth").await.expect("new again");
    assert_eq!(std::fs::read_dir(dir.path().join("s3/tmp")).expect("lists").count(), 0);

    let racing = (0..8).map(|_| {
        let put = client.put_object().bucket("snapyard").key("raced").if_none_match("*");
        put.body(ByteStream::from_static(b"x")).send()
    });
    let outcomes = futures::future::join_all(racing).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    server.stop().await;
}

#[tokio::test]
async fn listings_in_pages() {
    let (_dir, server, client) = ready().await;
    let mut expected = Vec::new();
    for i in 0..23 {
        let key = format!("packs/{i:02x}");
        put(&client, &key, vec![0; i]).await;
        expected.push((key, i64::try_from(i).ok()));
    }
    for other in ["manifests/a", "packs", "packs!", "packs0", "packs/0a/deeper", "z ü&<+%.."] {
        put(&client, other, Vec::new()).await;
    }
    expected.insert(11, ("packs/0a/deeper".into(), Some(0)));
    for size in [1, 5, 24, 1000] {
        let (mut found, mut token) = (Vec::new(), None);
        loop {
            let list = client.list_objects_v2().bucket("snapyard").prefix("packs/").max_keys(size);
            let page = list.set_continuation_token(token).send().await.expect("lists");
            assert_eq!(page.key_count(), i32::try_from(page.contents().len()).ok());
            found.extend(page.contents().iter().map(|object| (object.key().expect("a key").to_owned(), object.size())));
            token = page.next_continuation_token().map(str::to_owned);
            assert_eq!(page.is_truncated(), Some(token.is_some()));
            if token.is_none() {
                break;
            }
        }
        assert_eq!(found, expected, "pages of {size}");
    }
    let keys = async |prefix: &str, after: &str| -> Vec<String> {
        let list = client.list_objects_v2().bucket("snapyard").prefix(prefix).start_after(after);
        let page = list.send().await.expect("lists");
        page.contents().iter().map(|object| object.key().expect("a key").to_owned()).collect()
    };
    assert_eq!(keys("z", "").await, ["z ü&<+%.."]);
    assert_eq!(keys("packs/1", "packs/14").await, ["packs/15", "packs/16"]);
    assert_eq!(keys("none/", "").await, [""; 0]);
    let top = client.list_objects_v2().bucket("snapyard").delimiter("/").send().await.expect("lists");
    let prefixes: Vec<_> = top.common_prefixes().iter().filter_map(|prefix| prefix.prefix()).collect();
    assert_eq!(prefixes, ["manifests/", "packs/"]);
    assert_eq!(top.contents().len(), 4);
    let encoded = client.list_objects_v2().bucket("snapyard").prefix("z").encoding_type("url".into());
    let encoded = encoded.send().await.expect("lists");
    assert_eq!(encoded.contents()[0].key(), Some("z%20%C3%BC%26%3C%2B%25.."));
    let bad = client.list_objects_v2().bucket("snapyard").continuation_token("zz").send().await.expect_err("bad token");
    assert_eq!(status(&bad), 400);
    server.stop().await;
}

#[tokio::test]
async fn many_are_deleted_at_once() {
    let (_dir, server, client) = ready().await;
    for key in ["a", "b/c", "stays"] {
        put(&client, key, b"x".to_vec()).await;
    }
    let objects = ["a", "b/c", "none"].map(|key| ObjectIdentifier::builder().key(key).build().expect("a key"));
    let delete = Delete::builder().set_objects(Some(objects.to_vec())).build().expect("objects");
    let answer = client.delete_objects().bucket("snapyard").delete(delete).send().await.expect("deletes");
    let deleted: Vec<_> = answer.deleted().iter().filter_map(|object| object.key()).collect();
    assert_eq!((deleted, answer.errors().len()), (vec!["a", "b/c", "none"], 0));
    assert_eq!(get(&client, "a").await, None);
    assert_eq!(get(&client, "b/c").await, None);
    assert_eq!(get(&client, "stays").await.as_deref(), Some(&b"x"[..]));
    server.stop().await;
}

#[tokio::test]
async fn only_the_holder_of_the_keys_is_served() {
    let (_dir, server, client) = ready().await;
    put(&client, "a", b"x".to_vec()).await;
    let wrong_secret = KeyPair { secret_key: "wrong".into(), ..server.pair.clone() };
    let wrong_key = KeyPair { access_key: "SYwrong".into(), ..server.pair.clone() };
    for (pair, code) in [(wrong_secret, "SignatureDoesNotMatch"), (wrong_key, "InvalidAccessKeyId")] {
        let stranger = server.client_with(&pair, RequestChecksumCalculation::WhenRequired);
        let error = stranger.get_object().bucket("snapyard").key("a").send().await.expect_err("refused");
        assert_eq!((status(&error), error.code()), (403, Some(code)));
        let put = stranger.put_object().bucket("snapyard").key("b").body(ByteStream::from_static(b"x"));
        assert_eq!(status(&put.send().await.expect_err("refused")), 403);
    }
    let answer = raw(server.address, b"GET /snapyard/a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403"), "without a signature: {answer}");
    assert_eq!(get(&client, "b").await, None);
    server.stop().await;
}

async fn raw(address: SocketAddr, request: &[u8]) -> String {
    let mut socket = tokio::net::TcpStream::connect(address).await.expect("connects");
    socket.write_all(request).await.expect("sends");
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await.expect("answers");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn buckets() {
    let (_dir, server, client) = ready().await;
    client.head_bucket().bucket("snapyard").send().await.expect("there");
    assert_eq!(status(&client.head_bucket().bucket("none").send().await.expect_err("absent")), 404);
    let again = client.create_bucket().bucket("snapyard").send().await.expect_err("there already");
    assert_eq!((status(&again), again.code()), (409, Some("BucketAlreadyOwnedByYou")));
    let put = client.put_object().bucket("none").key("a").body(ByteStream::from_static(b"x")).send().await;
    assert_eq!(put.expect_err("no bucket").code(), Some("NoSuchBucket"));
    let get = client.get_object().bucket("none").key("a").send().await.expect_err("no bucket");
    assert_eq!((status(&get), get.code()), (404, Some("NoSuchBucket")));
    let list = client.list_objects_v2().bucket("none").send().await.expect_err("no bucket");
    assert_eq!(list.code(), Some("NoSuchBucket"));
    let delete = client.delete_object().bucket("none").key("a").send().await.expect_err("no bucket");
    assert_eq!(delete.code(), Some("NoSuchBucket"));
    server.stop().await;
}

/// No key reaches outside its bucket, or another key's object, and each is what it says.
#[tokio::test]
async fn keys_that_look_like_paths_are_only_keys() {
    let (dir, server, client) = ready().await;
    client.create_bucket().bucket("other").send().await.expect("creates");
    let keys = [
        "../other/x",
        "../../escaped",
        "a/../../../escaped",
        "/etc/passwd",
        "a/./b",
        "a//b",
        "a/b",
        "a",
        "%2e%2e/x",
        "dir/",
        "+",
        "a+/b",
        "tab\tnewline\n",
        "back\\slash",
        ".hidden",
    ];
    for key in keys {
        put(&client, key, key.as_bytes().to_vec()).await;
    }
    for key in keys {
        assert_eq!(get(&client, key).await.as_deref(), Some(key.as_bytes()), "{key:?}");
    }
    let others = client.list_objects_v2().bucket("other").send().await.expect("lists");
    assert_eq!(others.contents().len(), 0);
    let mut names: Vec<_> = std::fs::read_dir(dir.path())
        .expect("lists")
        .chain(std::fs::read_dir(dir.path().join("s3")).expect("lists"))
        .chain(std::fs::read_dir(dir.path().join("s3/buckets")).expect("lists"))
        .map(|entry| entry.expect("lists").file_name().into_string().expect("text"))
        .collect();
    names.sort();
    assert_eq!(names, ["buckets", "other", "s3", "snapyard", "tmp"]);
    let long = client.put_object().bucket("snapyard").key("x".repeat(300)).body(ByteStream::from_static(b"x"));
    let error = long.send().await.expect_err("too long for a file");
    assert_eq!((status(&error), error.code()), (400, Some("KeyTooLongError")));
    server.stop().await;
}

#[tokio::test]
async fn a_restart_keeps_objects() {
    let (dir, server, client) = ready().await;
    let bytes = noise(100_000);
    put(&client, "packs/x", bytes.clone()).await;
    let etag = client.head_object().bucket("snapyard").key("packs/x").send().await.expect("there").e_tag;
    server.stop().await;
    let server = Server::start(&dir.path().join("s3")).await;
    let client = server.client();
    assert_eq!(get(&client, "packs/x").await, Some(bytes));
    let later = client.head_object().bucket("snapyard").key("packs/x").send().await.expect("there").e_tag;
    assert_eq!(later, etag);
    server.stop().await;
}

/// What the newer SDKs send by default: checksums as trailers of a chunked body, and in headers.
#[tokio::test]
async fn checksums_are_verified() {
    use aws_sdk_s3::types::ChecksumAlgorithm;
    let (_dir, server, client) = ready().await;
    let eager = server.client_with(&server.pair, RequestChecksumCalculation::WhenSupported);
    let bytes = noise(200_000);
    for algorithm in [
        ChecksumAlgorithm::Crc32,
        ChecksumAlgorithm::Crc32C,
        ChecksumAlgorithm::Crc64Nvme,
        ChecksumAlgorithm::Sha1,
        ChecksumAlgorithm::Sha256,
    ] {
        let key = algorithm.as_str().to_owned();
        let put = eager.put_object().bucket("snapyard").key(&key).checksum_algorithm(algorithm);
        put.body(ByteStream::from(bytes.clone())).send().await.unwrap_or_else(|error| panic!("{key}: {error:?}"));
        assert_eq!(get(&client, &key).await.as_ref(), Some(&bytes), "{key}");
    }
    let wrong = || client.put_object().bucket("snapyard").key("wrong").body(ByteStream::from_static(b"x"));
    let crc = wrong().checksum_crc32("AAAAAA==").send().await.expect_err("wrong");
    assert_eq!((status(&crc), crc.code()), (400, Some("BadDigest")));
    let md5 = wrong().content_md5("AAAAAAAAAAAAAAAAAAAAAA==").send().await.expect_err("wrong");
    assert_eq!((status(&md5), md5.code()), (400, Some("BadDigest")));
    let right = client.put_object().bucket("snapyard").key("right").body(ByteStream::from_static(b"foobar"));
    right.content_md5("OFj2IjCsPJFfMAxmQxLGPw==").send().await.expect("right");
    assert_eq!(get(&client, "wrong").await, None);
    server.stop().await;
}

#[tokio::test]
async fn what_is_not_honoured_is_refused() {
    let (_dir, server, client) = ready().await;
    put(&client, "a", b"x".to_vec()).await;
    let put = || client.put_object().bucket("snapyard").key("a").body(ByteStream::from_static(b"y"));
    let refused = [
        put().if_match("\"etag\"").send().await,
        put().if_none_match("\"etag\"").send().await,
        put().metadata("key", "value").send().await,
        put().tagging("a=b").send().await,
    ];
    for outcome in refused {
        let error = outcome.expect_err("refused");
        assert_eq!((status(&error), error.code()), (501, Some("NotImplemented")));
    }
    let conditional = client.get_object().bucket("snapyard").key("a").if_none_match("\"etag\"").send().await;
    assert_eq!(status(&conditional.expect_err("refused")), 501);
    let buckets = client.list_buckets().send().await.expect_err("refused");
    assert_eq!(status(&buckets), 501);
    assert_eq!(get(&client, "a").await.as_deref(), Some(&b"x"[..]));
    server.stop().await;
}

/// A client that breaks off in the middle of a body leaves nothing; one that is slow is waited for.
#[tokio::test]
async fn a_body_that_breaks_off_leaves_no_object() {
    let (dir, server, client) = ready().await;
    let presigned = aws_sdk_s3::presigning::PresigningConfig::expires_in(Duration::from_secs(60)).expect("a minute");
    let put = client.put_object().bucket("snapyard").key("half");
    let url = put.presigned(presigned).await.expect("signs").uri().to_owned();
    let path = url.split_once(&server.address.to_string()).expect("the endpoint's").1.to_owned();
    let head = format!("PUT {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: 4000000\r\n\r\n", server.address);
    let mut socket = tokio::net::TcpStream::connect(server.address).await.expect("connects");
    socket.write_all(head.as_bytes()).await.expect("sends");
    socket.write_all(&noise(2_000_000)).await.expect("sends");
    let temporary = dir.path().join("s3/tmp");
    let files = || std::fs::read_dir(&temporary).expect("lists").count();
    let settled = async |wanted: usize| {
        while files() != wanted {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), settled(1)).await.expect("it is being written");
    drop(socket);
    tokio::time::timeout(Duration::from_secs(30), settled(0)).await.expect("it is given up");
    assert_eq!(get(&client, "half").await, None);
    server.stop().await;
}
