//! The file system calls and their errors.

use http::StatusCode;
use serde_json::{Value, json};

use crate::client::{Guest, exists};

async fn call(guest: &Guest, method: &str, message: Value) -> (StatusCode, Value) {
    let reply = guest.unary(&format!("filesystem.Filesystem/{method}"), message).await;
    (reply.status, reply.json())
}

#[tokio::test]
async fn entries_are_described() {
    let guest = Guest::start().await;
    let file = guest.path("file.txt");
    std::fs::write(&file, "12345").unwrap();
    std::os::unix::fs::symlink("file.txt", guest.path("link")).unwrap();
    let (status, stat) = call(&guest, "Stat", json!({"path": file})).await;
    assert_eq!(status, StatusCode::OK);
    let entry = &stat["entry"];
    assert_eq!((&entry["name"], &entry["type"]), (&json!("file.txt"), &json!("FILE_TYPE_FILE")));
    assert_eq!((&entry["size"], &entry["path"]), (&json!("5"), &json!(file)));
    assert!(entry["modifiedTime"].as_str().unwrap().ends_with('Z'), "{entry}");
    let (_, link) = call(&guest, "Stat", json!({"path": guest.path("link")})).await;
    assert_eq!(link["entry"]["type"], "FILE_TYPE_SYMLINK");
    assert_eq!(link["entry"]["symlinkTarget"], "file.txt");
}

#[tokio::test]
async fn listings_go_as_deep_as_asked() {
    let guest = Guest::start().await;
    std::fs::create_dir_all(guest.path("d/b/c")).unwrap();
    std::fs::write(guest.path("d/a"), "").unwrap();
    std::fs::write(guest.path("d/b/c/deep"), "").unwrap();
    let names = |listing: &Value| -> Vec<String> {
        let entries = listing["entries"].as_array().unwrap();
        entries.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect()
    };
    let (_, one) = call(&guest, "ListDir", json!({"path": guest.path("d")})).await;
    assert_eq!(names(&one), ["a", "b"]);
    let (_, three) = call(&guest, "ListDir", json!({"path": guest.path("d"), "depth": 3})).await;
    assert_eq!(names(&three), ["a", "b", "c", "deep"]);
}

#[tokio::test]
async fn directories_are_made_once_with_their_parents() {
    let guest = Guest::start().await;
    let path = guest.path("x/y/z");
    let (status, made) = call(&guest, "MakeDir", json!({"path": path})).await;
    assert_eq!((status, &made["entry"]["type"]), (StatusCode::OK, &json!("FILE_TYPE_DIRECTORY")));
    let (status, again) = call(&guest, "MakeDir", json!({"path": path})).await;
    assert_eq!((status, &again["code"]), (StatusCode::CONFLICT, &json!("already_exists")));
}

#[tokio::test]
async fn moving_makes_the_destination_s_parents() {
    let guest = Guest::start().await;
    std::fs::write(guest.path("from"), "text").unwrap();
    let to = guest.path("new/dir/to");
    let (status, moved) = call(&guest, "Move", json!({"source": guest.path("from"), "destination": to})).await;
    assert_eq!((status, &moved["entry"]["path"]), (StatusCode::OK, &json!(to)));
    assert_eq!(std::fs::read_to_string(&to).unwrap(), "text");
    assert!(!exists(&guest.path("from")));
}

#[tokio::test]
async fn removing_is_complete_and_repeatable() {
    let guest = Guest::start().await;
    std::fs::create_dir_all(guest.path("d/e")).unwrap();
    std::fs::write(guest.path("kept"), "").unwrap();
    std::os::unix::fs::symlink(guest.path("kept"), guest.path("d/link")).unwrap();
    for _ in 0..2 {
        let (status, _) = call(&guest, "Remove", json!({"path": guest.path("d")})).await;
        assert_eq!(status, StatusCode::OK);
    }
    assert!(!exists(&guest.path("d")));
    assert!(exists(&guest.path("kept")), "a link is removed, not what it points to");
}

#[tokio::test]
async fn errors_name_the_path() {
    let guest = Guest::start().await;
    std::fs::write(guest.path("file"), "").unwrap();
    let file = guest.path("file");
    let missing = guest.path("missing");
    for (method, message, status, code, word) in [
        ("Stat", json!({"path": missing}), StatusCode::NOT_FOUND, "not_found", missing.as_str()),
        ("ListDir", json!({"path": missing}), StatusCode::NOT_FOUND, "not_found", &missing),
        ("ListDir", json!({"path": file}), StatusCode::BAD_REQUEST, "invalid_argument", &file),
        ("MakeDir", json!({"path": file}), StatusCode::BAD_REQUEST, "invalid_argument", &file),
        ("MakeDir", json!({"path": format!("{file}/x")}), StatusCode::BAD_REQUEST, "invalid_argument", &file),
        ("Move", json!({"source": missing, "destination": file}), StatusCode::NOT_FOUND, "not_found", &missing),
        ("Remove", json!({"path": "/"}), StatusCode::BAD_REQUEST, "invalid_argument", "root directory"),
        ("Stat", json!({"path": 7}), StatusCode::BAD_REQUEST, "invalid_argument", "malformed"),
        ("WatchDir", json!({"path": "/"}), StatusCode::OK, "", ""),
        ("CreateWatcher", json!({"path": "/"}), StatusCode::NOT_IMPLEMENTED, "unimplemented", "watching"),
    ] {
        let reply = guest.unary(&format!("filesystem.Filesystem/{method}"), message).await;
        assert_eq!(reply.status, status, "{method}");
        if !code.is_empty() {
            let json = reply.json();
            assert_eq!(json["code"], code, "{method}: {json}");
            assert!(json["message"].as_str().unwrap().contains(word), "{method}: {json}");
        }
    }
}

#[tokio::test]
async fn an_unknown_user_is_refused() {
    let guest = Guest::start().await;
    // "nosuchuser:"
    let header = [("authorization", "Basic bm9zdWNodXNlcjo=")];
    let reply = guest.unary_with("filesystem.Filesystem/Stat", json!({"path": "/tmp"}), &header).await;
    assert_eq!((reply.status, &reply.json()["code"]), (StatusCode::BAD_REQUEST, &json!("invalid_argument")));
}
