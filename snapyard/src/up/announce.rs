//! What `up` says when it is ready: how each SDK and the command line reach it.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use crate::cluster::ClusterFile;

/// Environment variables of one kind of client.
struct Client {
    who: &'static str,
    variables: Vec<(&'static str, String)>,
}

/// The base URL of a listening address.
pub fn url(addr: SocketAddr) -> String {
    format!("http://{addr}")
}

fn clients(addr: SocketAddr, data_dir: &Path) -> Vec<Client> {
    let url = url(addr);
    vec![
        Client {
            who: "e2b, e2b-code-interpreter",
            variables: vec![
                // The SDK insists on a key; the server takes any.
                ("E2B_API_KEY", "local".into()),
                ("E2B_API_URL", url.clone()),
                ("E2B_SANDBOX_URL", url.clone()),
            ],
        },
        Client {
            who: "cubesandbox",
            variables: vec![
                ("CUBE_API_URL", url.clone()),
                ("CUBE_PROXY_NODE_IP", addr.ip().to_string()),
                ("CUBE_PROXY_PORT_HTTP", addr.port().to_string()),
                ("CUBE_TEMPLATE_ID", "base".into()),
            ],
        },
        Client {
            who: "snapyard",
            variables: vec![("SNAPYARD_URL", url), ("SNAPYARD_DATA_DIR", data_dir.display().to_string())],
        },
    ]
}

/// For people: lines that can be pasted into a shell.
pub fn text(addr: SocketAddr, data_dir: &Path) -> String {
    let file = ClusterFile::path(data_dir);
    let mut text = format!("snapyard is ready on {}\ntiers and token: {}\n", url(addr), file.display());
    for client in clients(addr, data_dir) {
        text.push_str(&format!("\n# {}\n", client.who));
        for (name, value) in client.variables {
            text.push_str(&format!("export {name}={}\n", quote(&value)));
        }
    }
    text
}

/// For programs: one object.
pub fn json(addr: SocketAddr, data_dir: &Path) -> Value {
    let environment: serde_json::Map<String, Value> = clients(addr, data_dir)
        .into_iter()
        .flat_map(|client| client.variables)
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    json!({"api_url": url(addr), "cluster_file": ClusterFile::path(data_dir), "environment": environment})
}

/// A word of a shell.
fn quote(word: &str) -> String {
    if word.chars().all(|c| c.is_ascii_alphanumeric() || "/:._-@%+=".contains(c)) && !word.is_empty() {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_client_finds_the_port() {
        let addr = "127.0.0.1:4567".parse().expect("an address");
        let text = text(addr, Path::new("/data dir"));
        for line in [
            "export E2B_API_URL=http://127.0.0.1:4567",
            "export E2B_SANDBOX_URL=http://127.0.0.1:4567",
            "export CUBE_PROXY_NODE_IP=127.0.0.1",
            "export CUBE_PROXY_PORT_HTTP=4567",
            "export SNAPYARD_DATA_DIR='/data dir'",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        let json = json(addr, Path::new("/data"));
        assert_eq!(json["environment"]["CUBE_PROXY_PORT_HTTP"], "4567");
        assert_eq!(json["cluster_file"], "/data/cluster.json");
    }

    #[test]
    fn an_ipv6_address_is_bracketed() {
        assert_eq!(url("[::1]:3000".parse().expect("an address")), "http://[::1]:3000");
    }

    #[test]
    fn words_survive_the_shell() {
        assert_eq!(quote("a'b c"), r"'a'\''b c'");
        assert_eq!(quote(""), "''");
    }
}
