//! What a command runs with: where the server is, and how to print.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::cli::Global;
use crate::cluster::{self, ClusterFile};
use crate::failure::Failure;
use crate::grpc::{self, Backend};
use crate::output;
use crate::rest::{Api, DEFAULT_URL};

/// Resolved global options.
#[derive(Debug)]
pub struct Context {
    url: Option<String>,
    data_dir: PathBuf,
    /// Print JSON.
    pub json: bool,
}

impl Context {
    /// Resolves what was given; touches nothing.
    pub fn new(global: Global) -> Result<Self, Failure> {
        let data_dir = cluster::data_dir(global.data_dir.as_deref())?;
        Ok(Self { url: global.url, data_dir, json: global.json })
    }

    /// The REST API: at the given URL, else of the server that runs in the data directory, else at the default one.
    pub fn api(&self) -> Result<Api, Failure> {
        let url = match &self.url {
            Some(url) => url.clone(),
            None => match ClusterFile::read(&self.data_dir) {
                Ok(Some(file)) => file.api_url,
                // Another user's file must not keep anybody from the public API.
                Ok(None) | Err(_) => DEFAULT_URL.to_owned(),
            },
        };
        Api::new(&url)
    }

    /// The server's data directory.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The node behind it.
    pub async fn node(&self) -> Result<Backend, Failure> {
        let file = grpc::find(&self.data_dir)?;
        Backend::connect("node", &file.node_url, &file.token).await
    }

    /// The scheduler behind it.
    pub async fn scheduler(&self) -> Result<Backend, Failure> {
        let file = grpc::find(&self.data_dir)?;
        Backend::connect("scheduler", &file.scheduler_url, &file.token).await
    }

    /// Does one thing to each of `names`. All are tried; each success is printed, each failure is too, and the first
    /// failure is the command's.
    pub async fn each(
        &self,
        names: &[String],
        done: &str,
        mut action: impl AsyncFnMut(&str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut first = None;
        for name in names {
            match action(name).await {
                Ok(()) if self.json => output::print_json(&json!({done: name}))?,
                Ok(()) => output::print_line(format_args!("{done} {name}"))?,
                Err(failure) if first.is_none() => first = Some(failure),
                Err(failure) if self.json => eprintln!("{}", failure.json()),
                Err(failure) => eprintln!("error: {failure}"),
            }
        }
        first.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Kind;

    fn context(url: Option<&str>, data_dir: PathBuf) -> Context {
        Context { url: url.map(str::to_owned), data_dir, json: false }
    }

    #[test]
    fn the_server_is_found_by_flag_then_file_then_default() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let here = || dir.path().to_owned();
        assert_eq!(context(None, here()).api().expect("default").url(), DEFAULT_URL);
        let file = ClusterFile::new("http://127.0.0.1:4000".into(), String::new(), String::new(), "t".into());
        file.write(dir.path()).expect("write");
        assert_eq!(context(None, here()).api().expect("file").url(), "http://127.0.0.1:4000");
        assert_eq!(context(Some("http://127.0.0.1:5000"), here()).api().expect("flag").url(), "http://127.0.0.1:5000");
    }

    #[tokio::test]
    async fn all_are_tried_and_the_first_failure_counts() {
        let mut tried = Vec::new();
        let names = ["a", "b", "c"].map(str::to_owned);
        let outcome = context(None, PathBuf::new())
            .each(&names, "done", async |name| {
                tried.push(name.to_owned());
                match name {
                    "a" => Ok(()),
                    "b" => Err(Failure::new(Kind::NotFound, "b")),
                    _ => Err(Failure::new(Kind::Conflict, "c")),
                }
            })
            .await;
        assert_eq!(outcome.expect_err("b failed").kind, Kind::NotFound);
        assert_eq!(tried, names);
    }
}
