//! Blobs in an S3 service: the only module that knows the S3 SDK.
//!
//! What the SDK leaves open is closed here:
//! - every wait has an end: connecting, the first byte, one attempt, the whole operation, and the reading of a body, which
//!   the SDK's own timeouts do not cover;
//! - a body that breaks after the headers is outside the SDK's retries: the whole read is repeated here, and its length is
//!   checked against the header and against what was asked for;
//! - checksums are sent as a plain header, never as a trailer (some services refuse those), and only on PUT: content is
//!   verified by its hash when it is read;
//! - an error is sorted by what it says about the effect: see [`BlobError`].
//!
//! Retries: the SDK repeats what is known to be repeatable, all operations here being idempotent. A conditional put whose
//! first attempt took effect although its answer was lost therefore comes back as `AlreadyThere`: the object may be our own.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation,
};
use aws_sdk_s3::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::ChecksumAlgorithm;
use bytes::{Bytes, BytesMut};

use super::{BlobEntry, BlobError, BlobOp, BlobStore, PutMode, PutOutcome};

/// How to reach a bucket.
#[derive(Clone)]
pub struct S3Config {
    /// `http(s)://host:port` of the service; `None` for AWS itself.
    pub endpoint: Option<String>,
    /// Region for the signature.
    pub region: String,
    /// The bucket; it must exist, or be created with [`S3Blobs::ensure_bucket`].
    pub bucket: String,
    /// Access key id.
    pub access_key: String,
    /// Secret access key.
    pub secret_key: String,
    /// To connect.
    pub connect_timeout: Duration,
    /// From the request's last byte to the answer's first.
    pub read_timeout: Duration,
    /// For one attempt of a request, its body included.
    pub attempt_timeout: Duration,
    /// For an operation with all its attempts.
    pub operation_timeout: Duration,
    /// Attempts per operation, the first included.
    pub max_attempts: u32,
}

impl S3Config {
    /// A bucket at an endpoint, with the timeouts that suit one data centre.
    pub fn new(endpoint: Option<String>, region: &str, bucket: &str, access_key: &str, secret_key: &str) -> Self {
        Self {
            endpoint,
            region: region.into(),
            bucket: bucket.into(),
            access_key: access_key.into(),
            secret_key: secret_key.into(),
            connect_timeout: Duration::from_secs(2),
            read_timeout: Duration::from_secs(10),
            attempt_timeout: Duration::from_secs(30),
            operation_timeout: Duration::from_secs(60),
            max_attempts: 3,
        }
    }
}

impl fmt::Debug for S3Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Config")
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("bucket", &self.bucket)
            .finish_non_exhaustive()
    }
}

/// A bucket as a blob store. Cheap to clone; all clones share the connections.
#[derive(Clone)]
pub struct S3Blobs {
    client: Client,
    config: S3Config,
}

impl S3Blobs {
    /// Prepares a client; nothing is sent yet.
    pub fn new(config: S3Config) -> Self {
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(config.connect_timeout)
            .read_timeout(config.read_timeout)
            .operation_attempt_timeout(config.attempt_timeout)
            .operation_timeout(config.operation_timeout)
            .build();
        let credentials = Credentials::new(&config.access_key, &config.secret_key, None, None, "snapyard");
        let mut builder = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(config.region.clone()))
            .credentials_provider(credentials)
            .force_path_style(true)
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .retry_config(RetryConfig::standard().with_max_attempts(config.max_attempts))
            .timeout_config(timeouts);
        if let Some(endpoint) = &config.endpoint {
            builder = builder.endpoint_url(endpoint);
        }
        Self { client: Client::from_conf(builder.build()), config }
    }

    /// Creates the bucket unless it is there.
    pub async fn ensure_bucket(&self) -> Result<(), BlobError> {
        let bucket = &self.config.bucket;
        if self.client.head_bucket().bucket(bucket).send().await.is_ok() {
            return Ok(());
        }
        match self.client.create_bucket().bucket(bucket).send().await {
            Ok(_) => Ok(()),
            Err(error) => match error.code() {
                Some("BucketAlreadyOwnedByYou" | "BucketAlreadyExists") => Ok(()),
                _ => Err(sort(BlobOp::CreateBucket, bucket, &error)),
            },
        }
    }

    /// Reads a body of which `want` says how long it must be. Repeats a read that broke off.
    async fn read(&self, key: &str, range: Option<Range<u64>>, max_len: u64) -> Result<Bytes, BlobError> {
        let attempts = async {
            let mut attempt = 1;
            loop {
                match self.read_once(key, range.clone(), max_len).await {
                    Err(broken) if broken.is_transient() && attempt < self.config.max_attempts => {
                        tracing::debug!(key, attempt, error = %broken, "a read broke off; reading again");
                        tokio::time::sleep(Duration::from_millis(50) * (1 << attempt.min(5))).await;
                        attempt += 1;
                    }
                    other => return other,
                }
            }
        };
        match tokio::time::timeout(self.config.operation_timeout, attempts).await {
            Ok(result) => result,
            Err(_) => Err(BlobError::Unavailable {
                op: BlobOp::Get,
                key: key.into(),
                reason: format!("no whole answer within {:?}", self.config.operation_timeout),
            }),
        }
    }

    async fn read_once(&self, key: &str, range: Option<Range<u64>>, max_len: u64) -> Result<Bytes, BlobError> {
        let bad = |reason: String| BlobError::BadAnswer { key: key.into(), reason };
        // No object is that long, and servers take no larger number.
        let last = |range: &Range<u64>| (range.end - 1).min(i64::MAX as u64);
        let header = range.as_ref().map(|range| format!("bytes={}-{}", range.start, last(range)));
        let request = self.client.get_object().bucket(&self.config.bucket).key(key).set_range(header);
        let mut answer = request.send().await.map_err(|error| sort(BlobOp::Get, key, &error))?;
        let stated = answer.content_length.and_then(|len| u64::try_from(len).ok());
        let stated = stated.ok_or_else(|| bad("no length stated".into()))?;
        match &range {
            Some(range) if stated != range.end - range.start => {
                return Err(bad(format!("{stated} bytes for range {range:?}")));
            }
            _ if stated > max_len => return Err(bad(format!("{stated} bytes, cap {max_len}"))),
            _ => {}
        }
        let broken = |reason: String| BlobError::Unavailable { op: BlobOp::Get, key: key.into(), reason };
        let mut body = BytesMut::with_capacity(usize::try_from(stated).map_err(|_| bad("too long".into()))?);
        let whole = async {
            while let Some(part) = answer.body.next().await {
                let part = part.map_err(|error| broken(format!("{}", DisplayErrorContext(&error))))?;
                if (body.len() + part.len()) as u64 > stated {
                    return Err(bad(format!("more than the stated {stated} bytes")));
                }
                body.extend_from_slice(&part);
            }
            Ok(())
        };
        tokio::time::timeout(self.config.attempt_timeout, whole)
            .await
            .map_err(|_| broken("the body stalls".into()))??;
        if body.len() as u64 != stated {
            return Err(broken(format!("body ends after {} of {stated} bytes", body.len())));
        }
        Ok(body.freeze())
    }
}

#[async_trait]
impl BlobStore for S3Blobs {
    async fn put(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutOutcome, BlobError> {
        let condition = (mode == PutMode::IfAbsent).then(|| "*".to_owned());
        let request = self
            .client
            .put_object()
            .bucket(&self.config.bucket)
            .key(key)
            .checksum_algorithm(ChecksumAlgorithm::Crc32)
            .set_if_none_match(condition)
            .body(ByteStream::from(bytes));
        match request.send().await {
            Ok(_) => Ok(PutOutcome::Written),
            Err(error) => match (mode, status(&error)) {
                (PutMode::IfAbsent, Some(412)) => Ok(PutOutcome::AlreadyThere),
                // Another conditional put is under way: which one wins is not known yet.
                (PutMode::IfAbsent, Some(409)) => Err(BlobError::Unavailable {
                    op: BlobOp::Put,
                    key: key.into(),
                    reason: "conflicts with another write of the same key".into(),
                }),
                _ => Err(sort(BlobOp::Put, key, &error)),
            },
        }
    }

    async fn get(&self, key: &str, max_len: u64) -> Result<Bytes, BlobError> {
        self.read(key, None, max_len).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.is_empty() {
            return Err(BlobError::BadAnswer { key: key.into(), reason: format!("empty range {range:?}") });
        }
        let len = range.end - range.start;
        self.read(key, Some(range), len).await
    }

    async fn head(&self, key: &str) -> Result<u64, BlobError> {
        let request = self.client.head_object().bucket(&self.config.bucket).key(key);
        let answer = request.send().await.map_err(|error| sort(BlobOp::Head, key, &error))?;
        answer
            .content_length
            .and_then(|len| u64::try_from(len).ok())
            .ok_or_else(|| BlobError::BadAnswer { key: key.into(), reason: "no length stated".into() })
    }

    async fn list(&self, prefix: &str, after: Option<&str>, limit: u16) -> Result<Vec<BlobEntry>, BlobError> {
        let request = self
            .client
            .list_objects_v2()
            .bucket(&self.config.bucket)
            .prefix(prefix)
            .set_start_after(after.map(str::to_owned))
            .max_keys(i32::from(limit.clamp(1, 1000)));
        let answer = request.send().await.map_err(|error| sort(BlobOp::List, prefix, &error))?;
        let entries = answer.contents.unwrap_or_default().into_iter().filter_map(|object| {
            let len = u64::try_from(object.size?).ok()?;
            Some(BlobEntry { key: object.key?, len })
        });
        Ok(entries.collect())
    }

    async fn delete(&self, key: &str) -> Result<(), BlobError> {
        match self.client.delete_object().bucket(&self.config.bucket).key(key).send().await {
            Ok(_) => Ok(()),
            Err(error) => match sort(BlobOp::Delete, key, &error) {
                BlobError::NotFound { .. } => Ok(()),
                other => Err(other),
            },
        }
    }
}

fn status<E>(error: &SdkError<E>) -> Option<u16> {
    error.raw_response().map(|answer| answer.status().as_u16())
}

/// Says what an SDK error means for the effect of the operation.
fn sort<E>(op: BlobOp, key: &str, error: &SdkError<E>) -> BlobError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let key = key.to_owned();
    let reason = DisplayErrorContext(error).to_string();
    // The answer to a write is lost or says "I do not know": it may have happened. A read has no effect to be unsure of.
    let lost = |key, reason| match op.writes() {
        true => BlobError::Unknown { op, key, reason },
        false => BlobError::Unavailable { op, key, reason },
    };
    match error {
        SdkError::ConstructionFailure(_) => BlobError::Refused { op, key, reason },
        SdkError::ServiceError(_) => match (status(error), error.code()) {
            (_, Some("NoSuchBucket")) => BlobError::Refused { op, key, reason },
            (Some(404), _) => BlobError::NotFound { key },
            (Some(416), _) => BlobError::BadAnswer { key, reason },
            (Some(429 | 503), _) => BlobError::Unavailable { op, key, reason },
            (Some(status), _) if status < 500 => BlobError::Refused { op, key, reason },
            _ => lost(key, reason),
        },
        // Dispatch failures, timeouts, answers that cannot be read.
        _ => lost(key, reason),
    }
}

#[cfg(test)]
mod tests;
