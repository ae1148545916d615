//! Contexts with a kernel made of a few lines of shell, which answers each request with the request itself.

use std::time::Duration;

use serde_json::{Value, json};

use super::context::{Context, Job, Work};
use super::kernel::Recipe;
use super::*;
use crate::state::Session;
use crate::users::User;

const PATIENCE: Duration = Duration::from_secs(60);

const ECHO: &str = r#"
echo R >&4
while IFS= read -r line <&3; do
    case "$line" in
        *'"exit"'*) exit 3 ;;
        *'"hang"'*) echo "E$line" >&4; sleep 1000 ;;
        *'"half"'*) printf '\303' ; sleep 0.05; printf '\251' ;;
    esac
    echo printed
    echo "E$line" >&4
    echo D >&4
done
"#;

fn context() -> Context {
    let user = User { name: "root".into(), uid: 0, gid: 0, home: "/".into(), shell: "/bin/sh".into() };
    let cgroup = Arc::new(UserCgroup::open(None).unwrap());
    let command = ["/bin/bash", "-c", ECHO, "kernel"].map(str::to_owned).to_vec();
    let env = BTreeMap::from([("PATH".to_owned(), crate::process::PATH.to_owned())]);
    Context::start("id".into(), Recipe { user, env, cwd: "/tmp".into(), command, cgroup })
}

fn session(generation: u64) -> Arc<Session> {
    Arc::new(Session { generation, env: BTreeMap::from([("A".into(), "b".into())]), ..Session::default() })
}

async fn submit(context: &Context, code: &str, generation: u64) -> mpsc::Receiver<Bytes> {
    let (sink, lines) = mpsc::channel(16);
    let work = Work::Cell { code: code.to_owned(), env: BTreeMap::new() };
    context.submit(Job { work, session: session(generation), sink }).await;
    lines
}

async fn all(mut lines: mpsc::Receiver<Bytes>) -> Vec<Value> {
    let mut found = Vec::new();
    while let Some(line) = tokio::time::timeout(PATIENCE, lines.recv()).await.expect("the cell ends") {
        assert!(line.ends_with(b"\n"));
        found.push(serde_json::from_slice(&line).unwrap());
    }
    found
}

#[tokio::test]
async fn what_was_printed_comes_before_what_was_replied() {
    let context = context();
    let found = all(submit(&context, "x", 1).await).await;
    assert_eq!((found.len(), &found[0]["type"], &found[0]["text"]), (2, &json!("stdout"), &json!("printed\n")));
    assert_eq!(found[1]["code"], "x");
}

#[tokio::test]
async fn a_character_in_two_pieces_comes_whole() {
    let context = context();
    let found = all(submit(&context, "half", 1).await).await;
    let text: String = found.iter().filter_map(|event| event["text"].as_str()).collect();
    assert_eq!(text, "éprinted\n");
}

#[tokio::test]
async fn the_environment_is_told_once_for_each_generation() {
    let context = context();
    for (generation, defaults) in [(1, json!({"A": "b"})), (1, Value::Null), (2, json!({"A": "b"})), (2, Value::Null)] {
        let found = all(submit(&context, "x", generation).await).await;
        let request = found.last().unwrap();
        assert_eq!((&request["generation"], &request["defaults"]), (&json!(generation), &defaults));
    }
}

#[tokio::test]
async fn a_kernel_that_ends_is_reported_and_replaced() {
    let context = context();
    let found = all(submit(&context, "exit", 1).await).await;
    assert_eq!(found.last().unwrap()["name"], "KernelDied");
    assert!(found.last().unwrap()["value"].as_str().unwrap().contains("exit code 3"));
    assert!(!context.is_running());
    assert_eq!(all(submit(&context, "again", 1).await).await.last().unwrap()["code"], "again");
}

#[tokio::test]
async fn stopping_ends_a_cell_that_hangs() {
    let context = context();
    let mut hanging = submit(&context, "hang", 1).await;
    tokio::time::timeout(PATIENCE, hanging.recv()).await.expect("it has begun").unwrap();
    tokio::time::timeout(PATIENCE, context.stop()).await.expect("it stops");
    assert_eq!(all(hanging).await.last().unwrap()["name"], "KernelDied");
    assert_eq!(all(submit(&context, "next", 1).await).await.last().unwrap()["code"], "next");
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_stop_its_cell() {
    let context = context();
    drop(submit(&context, "half", 1).await);
    // Cells of a context run in order: this one would not be answered if the one before had broken it.
    assert_eq!(all(submit(&context, "x", 1).await).await.last().unwrap()["code"], "x");
}

#[tokio::test]
async fn a_context_that_is_dropped_ends_its_kernel() {
    let context = context();
    all(submit(&context, "x", 1).await).await;
    let pid = context.pid();
    drop(context);
    let gone = async {
        while std::path::Path::new(&format!("/proc/{pid}")).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the kernel ends");
}

#[test]
fn ids_look_like_uuids_and_differ() {
    let (one, two) = (new_id().unwrap(), new_id().unwrap());
    assert_eq!(one.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
    assert_ne!(one, two);
}
