//! The embedded S3 endpoint: what a single node puts its packs and manifests into when no other service is configured.
//!
//! ```text
//!   TcpListener ─▶ hyper (HTTP/1.1) ─▶ s3s (SigV4, parsing) ─▶ service: the operations we use ─▶ files: a directory
//! ```
//!
//! Serves PutObject (with `If-None-Match: *`), GetObject (with ranges), HeadObject, DeleteObject, DeleteObjects,
//! ListObjectsV2, CreateBucket and HeadBucket, path style, to the holder of one key pair. Everything else, and every
//! option that is not honoured, is answered `NotImplemented`: an endpoint that ignores a condition is worse than none.
//!
//! An answered write is durable: see [`files`] for how. Objects do not carry user metadata; all are
//! `application/octet-stream`. The ETag identifies the written file and is not the MD5 of its bytes.

mod checksums;
mod credentials;
mod files;
mod paths;
mod service;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::GracefulShutdown;
use s3s::auth::{S3Auth, SecretKey};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3Result, s3_error};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub use credentials::{CredentialsError, KeyPair};
use files::Files;
use service::Endpoint;

/// How long requests under way may take to end after shutdown began.
const DRAIN: Duration = Duration::from_secs(10);

/// Pause after a failed `accept`: it fails for want of file descriptors, which does not pass at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why the endpoint cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The directory cannot be prepared.
    #[error("cannot keep objects in {dir}: {source}")]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Serves `dir` (made if need be) on `listener` until `shutdown` is done, then lets requests under way end, for at most ten
/// seconds. Nobody else may use the directory meanwhile.
pub async fn serve(
    listener: TcpListener,
    dir: &Path,
    credentials: &KeyPair,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let root = dir.to_owned();
    let files = tokio::task::spawn_blocking(move || Files::open(&root)).await.map_err(io::Error::other);
    let files = files.flatten().map_err(|source| ServeError::Directory { dir: dir.to_owned(), source })?;
    let mut builder = S3ServiceBuilder::new(Endpoint::new(Arc::new(files)));
    builder.set_auth(OneHolder(credentials.clone()));
    accept(listener, builder.build(), shutdown).await;
    Ok(())
}

/// Knows one key pair. (`s3s` has such a thing, which answers an unknown key with an error that no client expects.)
struct OneHolder(KeyPair);

#[async_trait::async_trait]
impl S3Auth for OneHolder {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        if access_key == self.0.access_key {
            Ok(SecretKey::from(self.0.secret_key.clone()))
        } else {
            Err(s3_error!(InvalidAccessKeyId))
        }
    }
}

async fn accept(listener: TcpListener, service: S3Service, shutdown: impl Future<Output = ()> + Send) {
    let mut shutdown = std::pin::pin!(shutdown);
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    loop {
        let socket = tokio::select! {
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => socket,
                Err(error) => {
                    tracing::warn!(%error, "the S3 endpoint cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        // Small answers must not wait for more to send; without it, ranges of a few KiB take 40 ms.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "a connection without TCP_NODELAY");
        }
        let connection =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service.clone());
        let connection = graceful.watch(connection);
        connections.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "an S3 client's connection broke");
            }
        });
    }
    drop(listener);
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!(open = connections.len(), "S3 requests did not end in time and are cut off");
    }
    connections.shutdown().await;
}

#[cfg(test)]
mod tests;
