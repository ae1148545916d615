//! Uploads and downloads.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use http::StatusCode;
use serde_json::json;

use crate::client::{Guest, exists, send};

const OCTETS: (&str, &str) = ("content-type", "application/octet-stream");

fn form(files: &[(&str, &str)]) -> ([(&'static str, &'static str); 1], String) {
    let mut body = String::new();
    for (name, text) in files {
        body += &format!(
            "--frontier\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
             Content-Type: text/plain\r\n\r\n{text}\r\n"
        );
    }
    ([("content-type", "multipart/form-data; boundary=frontier")], body + "--frontier--\r\n")
}

fn url(path: &str) -> String {
    format!("/files?path={path}&username=root")
}

#[tokio::test]
async fn octets_are_written_and_read_back() {
    let guest = Guest::start().await;
    let path = guest.path("new/dir/data.bin");
    let bytes: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let reply = send(guest.sdk, "POST", &url(&path), &[OCTETS], bytes.clone()).await;
    assert_eq!(reply.json(), json!([{"name": "data.bin", "path": path, "type": "file"}]));
    let read = send(guest.sdk, "GET", &url(&path), &[], "").await;
    assert_eq!(read.status, StatusCode::OK);
    assert_eq!(read.headers["content-length"], "4000000");
    assert!(read.body == bytes);
}

#[tokio::test]
async fn a_shorter_upload_replaces_all_of_a_file() {
    let guest = Guest::start().await;
    let path = guest.path("file");
    std::fs::write(&path, "a long text").unwrap();
    send(guest.sdk, "POST", &url(&path), &[OCTETS], "short").await;
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "short");
    send(guest.sdk, "POST", &url(&path), &[OCTETS], "").await;
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
}

#[tokio::test]
async fn a_form_s_file_names_are_paths() {
    let guest = Guest::start().await;
    let (one, two) = (guest.path("one"), guest.path("sub/two ü"));
    let (headers, body) = form(&[(&one, "first"), (&two, "second")]);
    let reply = send(guest.sdk, "POST", "/files?username=root", &headers, body).await;
    assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.body);
    assert_eq!(reply.json()[1], json!({"name": "two ü", "path": two, "type": "file"}));
    assert_eq!(std::fs::read_to_string(one).unwrap(), "first");
    assert_eq!(std::fs::read_to_string(two).unwrap(), "second");
}

#[tokio::test]
async fn the_query_s_path_goes_before_a_form_s_file_name() {
    let guest = Guest::start().await;
    let path = guest.path("here");
    let (headers, body) = form(&[("elsewhere", "text")]);
    assert_eq!(send(guest.sdk, "POST", &url(&path), &headers, body).await.status, StatusCode::OK);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "text");
}

#[tokio::test]
async fn gzip_is_unpacked() {
    let guest = Guest::start().await;
    let path = guest.path("packed");
    let mut packer = GzEncoder::new(Vec::new(), Compression::default());
    packer.write_all(&b"many words ".repeat(10_000)).unwrap();
    let packed = packer.finish().unwrap();
    let headers = [OCTETS, ("content-encoding", "gzip")];
    assert_eq!(send(guest.sdk, "POST", &url(&path), &headers, packed.clone()).await.status, StatusCode::OK);
    assert!(std::fs::read(&path).unwrap() == b"many words ".repeat(10_000));
    for damaged in [&packed[..packed.len() / 2], b"no gzip at all"] {
        let reply = send(guest.sdk, "POST", &url(&path), &headers, damaged.to_vec()).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST);
        assert!(reply.json()["message"].as_str().unwrap().contains("gzip"), "{:?}", reply.body);
    }
}

#[tokio::test]
async fn refusals_have_a_status_and_a_message() {
    let guest = Guest::start().await;
    let root = guest.path("");
    let missing = guest.path("missing");
    let (form_headers, two) = form(&[("a", "1"), ("b", "2")]);
    let (_, none) = form(&[]);
    let both = url(&guest.path("both"));
    for (method, path, headers, body, status) in [
        ("GET", url(&missing), &[][..], String::new(), StatusCode::NOT_FOUND),
        ("GET", url(&root), &[], String::new(), StatusCode::BAD_REQUEST),
        ("GET", "/files?username=root".to_owned(), &[], String::new(), StatusCode::BAD_REQUEST),
        ("GET", "/files?path=%zz".to_owned(), &[], String::new(), StatusCode::BAD_REQUEST),
        ("GET", format!("/files?path={missing}&username=nosuchuser"), &[], String::new(), StatusCode::BAD_REQUEST),
        ("POST", url(&root), &[OCTETS], "x".to_owned(), StatusCode::BAD_REQUEST),
        ("POST", "/files?username=root".to_owned(), &[OCTETS], "x".to_owned(), StatusCode::BAD_REQUEST),
        ("POST", both, &form_headers, two, StatusCode::BAD_REQUEST),
        ("POST", "/files?username=root".to_owned(), &form_headers, none, StatusCode::BAD_REQUEST),
        ("POST", url(&missing), &[OCTETS, ("content-encoding", "br")], "x".to_owned(), StatusCode::BAD_REQUEST),
        ("PUT", url(&missing), &[], String::new(), StatusCode::METHOD_NOT_ALLOWED),
    ] {
        let reply = send(guest.sdk, method, &path, headers, body).await;
        assert_eq!(reply.status, status, "{method} {path}");
        assert_eq!(reply.json()["code"], status.as_u16(), "{method} {path}");
        assert!(!reply.json()["message"].as_str().unwrap().is_empty());
    }
    assert!(!exists(&missing));
}

#[tokio::test]
async fn files_of_the_kernel_are_read_to_their_end() {
    let guest = Guest::start().await;
    let read = send(guest.sdk, "GET", &url("/proc/self/stat"), &[], "").await;
    assert_eq!(read.status, StatusCode::OK);
    assert!(!read.body.is_empty());
}

#[tokio::test]
async fn a_token_or_a_signature_opens_a_file() {
    use base64::Engine as _;
    let guest = Guest::start().await;
    let path = guest.path("secret");
    std::fs::write(&path, "text").unwrap();
    guest.init(Some("token")).await;
    assert_eq!(send(guest.sdk, "GET", &url(&path), &[], "").await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(send(guest.sdk, "GET", &url(&path), &[("x-access-token", "token")], "").await.status, StatusCode::OK);
    let digest = snapyard_guest::auth::sha256(format!("{path}:read:root:token").as_bytes());
    let signature = base64::engine::general_purpose::STANDARD_NO_PAD.encode(digest);
    let encoded = signature.replace('+', "%2B").replace('/', "%2F");
    let signed = format!("{}&signature=v1_{encoded}", url(&path));
    assert_eq!(send(guest.sdk, "GET", &signed, &[], "").await.body, "text");
    assert_eq!(send(guest.sdk, "POST", &signed, &[OCTETS], "x").await.status, StatusCode::UNAUTHORIZED);
}
