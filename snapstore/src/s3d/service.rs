//! The operations, between what `s3s` has parsed and checked (signature, payload hash, names) and the files.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use s3s::dto::{
    CommonPrefix, CreateBucketInput, CreateBucketOutput, DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput,
    DeleteObjectsOutput, DeletedObject, ETag, EncodingType, Error as KeyError, GetObjectInput, GetObjectOutput,
    HeadBucketInput, HeadBucketOutput, HeadObjectInput, HeadObjectOutput, ListObjectsV2Input, ListObjectsV2Output,
    Object, PutObjectInput, PutObjectOutput, StreamingBlob,
};
use s3s::{Body, S3, S3Error, S3Request, S3Response, S3Result, s3_error};
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};
use tokio_util::io::ReaderStream;

use super::checksums::Expected;
use super::files::{Files, FilesError, Listed, Meta, Query, Temporary};

const CONTENT_TYPE: &str = "application/octet-stream";

/// Reads of up to this many bytes are answered from memory, in one go; longer ones are streamed.
const INLINE_READ_BYTES: u64 = 1 << 20;
const STREAM_BUFFER_BYTES: usize = 256 << 10;
/// A body is written in pieces of this size.
const WRITE_BYTES: usize = 1 << 20;

const MAX_KEYS: usize = 1000;

/// The S3 trait over a directory.
#[derive(Debug)]
pub(super) struct Endpoint {
    files: Arc<Files>,
}

impl Endpoint {
    pub(super) fn new(files: Arc<Files>) -> Self {
        Self { files }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Files) -> Result<T, FilesError> + Send + 'static,
    ) -> S3Result<T> {
        let files = Arc::clone(&self.files);
        let outcome = tokio::task::spawn_blocking(move || work(&files)).await;
        outcome.map_err(|error| s3_error!(error, InternalError, "the endpoint is stopping"))?.map_err(answer)
    }

    async fn existing(&self, bucket: String, key: String) -> S3Result<(std::fs::File, Meta)> {
        let found = self.blocking(move |files| files.read(&bucket, &key)).await?;
        found.ok_or_else(|| s3_error!(NoSuchKey))
    }

    /// Writes the body to a temporary file. The length must be what the request says, and every checksum too.
    async fn receive(&self, request: &mut S3Request<PutObjectInput>) -> S3Result<(std::fs::File, Temporary)> {
        let mut expected = Expected::of(request)?;
        let declared = request.input.content_length;
        let body = request.input.body.take();
        let (file, temporary) = self.blocking(|files| Ok(files.temporary()?)).await?;
        let mut sink = Sink { file: Arc::new(file), at: 0, buffer: BytesMut::with_capacity(WRITE_BYTES) };
        if let Some(mut body) = body {
            while let Some(piece) = body.next().await {
                let piece = piece.map_err(|error| {
                    tracing::debug!(%error, "an object's body broke off or is not what its hash says");
                    s3_error!(IncompleteBody, "the body cannot be read to its end: {error}")
                })?;
                expected.update(&piece);
                sink.write(&piece).await?;
            }
        }
        let (file, len) = sink.finish().await?;
        if declared.is_some_and(|declared| u64::try_from(declared) != Ok(len)) {
            return Err(s3_error!(IncompleteBody, "the body has {len} bytes, the request says {declared:?}"));
        }
        expected.verify(request)?;
        Ok((file, temporary))
    }
}

/// Collects small pieces of a body into large writes, each off the runtime's threads.
struct Sink {
    file: Arc<std::fs::File>,
    at: u64,
    buffer: BytesMut,
}

impl Sink {
    async fn write(&mut self, mut piece: &[u8]) -> S3Result<()> {
        while !piece.is_empty() {
            let now = piece.len().min(WRITE_BYTES - self.buffer.len());
            self.buffer.extend_from_slice(&piece[..now]);
            piece = &piece[now..];
            if self.buffer.len() == WRITE_BYTES {
                self.flush().await?;
            }
        }
        Ok(())
    }

    async fn flush(&mut self) -> S3Result<()> {
        let bytes = std::mem::take(&mut self.buffer);
        let (file, at) = (Arc::clone(&self.file), self.at);
        self.at += u64::try_from(bytes.len()).expect("a buffer's length fits");
        let written = tokio::task::spawn_blocking(move || file.write_all_at(&bytes, at).map(|()| bytes)).await;
        let mut bytes = written.map_err(io::Error::other).flatten().map_err(|error| answer(error.into()))?;
        bytes.clear();
        self.buffer = bytes;
        Ok(())
    }

    async fn finish(mut self) -> S3Result<(std::fs::File, u64)> {
        self.flush().await?;
        let file = Arc::into_inner(self.file).expect("no write is under way");
        Ok((file, self.at))
    }
}

fn answer(error: FilesError) -> S3Error {
    match error {
        FilesError::NoBucket => s3_error!(NoSuchBucket),
        FilesError::Exists => s3_error!(PreconditionFailed, "the object exists"),
        FilesError::KeyTooLong => s3_error!(KeyTooLongError, "{error}"),
        FilesError::Io(error) if error.kind() == io::ErrorKind::InvalidFilename => s3_error!(KeyTooLongError),
        FilesError::Io(error) => {
            tracing::error!(%error, "the S3 endpoint's directory fails");
            s3_error!(InternalError, "the endpoint's directory fails: {error}")
        }
    }
}

fn refuse(given: bool, what: &str) -> S3Result<()> {
    if given { Err(s3_error!(NotImplemented, "{what} is not implemented by this endpoint")) } else { Ok(()) }
}

fn length(len: u64) -> i64 {
    i64::try_from(len).expect("no file is longer")
}

#[async_trait::async_trait]
impl S3 for Endpoint {
    async fn create_bucket(&self, request: S3Request<CreateBucketInput>) -> S3Result<S3Response<CreateBucketOutput>> {
        let bucket = request.input.bucket;
        let location = format!("/{bucket}");
        if self.blocking(move |files| Ok(files.create_bucket(&bucket)?)).await? {
            Ok(S3Response::new(CreateBucketOutput { location: Some(location) }))
        } else {
            Err(s3_error!(BucketAlreadyOwnedByYou))
        }
    }

    async fn head_bucket(&self, request: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        let bucket = request.input.bucket;
        self.blocking(move |files| files.bucket(&bucket)).await?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn put_object(&self, mut request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let input = &request.input;
        let only_new = match &input.if_none_match {
            None => false,
            Some(condition) if condition.is_any() => true,
            Some(_) => return Err(s3_error!(NotImplemented, "If-None-Match with an ETag is not implemented")),
        };
        refuse(input.if_match.is_some(), "If-Match")?;
        refuse(input.write_offset_bytes.is_some(), "x-amz-write-offset-bytes")?;
        refuse(input.metadata.as_ref().is_some_and(|metadata| !metadata.is_empty()), "user metadata")?;
        refuse(input.tagging.is_some(), "tagging")?;
        refuse(input.server_side_encryption.is_some() || input.sse_customer_algorithm.is_some(), "encryption")?;
        refuse(input.object_lock_mode.is_some() || input.object_lock_legal_hold_status.is_some(), "object lock")?;

        let (bucket, key) = (input.bucket.clone(), input.key.clone());
        // What is bound to fail should fail before the body is sent; the commit decides.
        let there = self.blocking({
            let (bucket, key) = (bucket.clone(), key.clone());
            move |files| files.read(&bucket, &key)
        });
        if there.await?.is_some() && only_new {
            return Err(answer(FilesError::Exists));
        }
        let (file, temporary) = self.receive(&mut request).await?;
        let meta = self.blocking(move |files| files.commit(&file, temporary, &bucket, &key, only_new)).await?;
        Ok(S3Response::new(PutObjectOutput { e_tag: Some(ETag::Strong(meta.etag)), ..Default::default() }))
    }

    async fn get_object(&self, request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        refuse(input.if_match.is_some() || input.if_none_match.is_some(), "a condition on the ETag")?;
        refuse(input.if_modified_since.is_some() || input.if_unmodified_since.is_some(), "a condition on the time")?;
        refuse(input.part_number.is_some() || input.version_id.is_some(), "parts and versions")?;
        let (file, meta) = self.existing(input.bucket, input.key).await?;
        let range = match input.range {
            Some(range) => range.check(meta.len)?,
            None => 0..meta.len,
        };
        let len = range.end - range.start;
        let content_range =
            input.range.is_some().then(|| format!("bytes {}-{}/{}", range.start, range.end - 1, meta.len));
        let body = if len <= INLINE_READ_BYTES {
            let bytes = self.blocking(move |_| {
                let mut bytes = vec![0; usize::try_from(len).expect("an inline read is short")];
                file.read_exact_at(&mut bytes, range.start)?;
                Ok(Bytes::from(bytes))
            });
            StreamingBlob::from(Body::from(bytes.await?))
        } else {
            let mut file = tokio::fs::File::from_std(file);
            file.seek(io::SeekFrom::Start(range.start)).await.map_err(|error| answer(error.into()))?;
            StreamingBlob::wrap(ReaderStream::with_capacity(file.take(len), STREAM_BUFFER_BYTES))
        };
        Ok(S3Response::new(GetObjectOutput {
            body: Some(body),
            content_length: Some(length(len)),
            content_range,
            accept_ranges: Some("bytes".into()),
            content_type: Some(CONTENT_TYPE.into()),
            last_modified: Some(meta.modified.into()),
            e_tag: Some(ETag::Strong(meta.etag)),
            ..Default::default()
        }))
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        refuse(input.if_match.is_some() || input.if_none_match.is_some(), "a condition on the ETag")?;
        refuse(input.if_modified_since.is_some() || input.if_unmodified_since.is_some(), "a condition on the time")?;
        refuse(
            input.range.is_some() || input.part_number.is_some() || input.version_id.is_some(),
            "part of an object",
        )?;
        let (_, meta) = self.existing(input.bucket, input.key).await?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(length(meta.len)),
            accept_ranges: Some("bytes".into()),
            content_type: Some(CONTENT_TYPE.into()),
            last_modified: Some(meta.modified.into()),
            e_tag: Some(ETag::Strong(meta.etag)),
            ..Default::default()
        }))
    }

    async fn delete_object(&self, request: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = request.input;
        refuse(input.version_id.is_some() || input.if_match.is_some(), "a condition on a delete")?;
        self.blocking(move |files| files.delete(&input.bucket, &input.key)).await?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let DeleteObjectsInput { bucket, delete, .. } = request.input;
        if delete.objects.len() > MAX_KEYS {
            return Err(s3_error!(MalformedXML, "at most {MAX_KEYS} keys at once"));
        }
        let conditional = delete.objects.iter().any(|object| object.version_id.is_some() || object.e_tag.is_some());
        refuse(conditional, "a condition on a delete")?;
        let quiet = delete.quiet.unwrap_or(false);
        let (deleted, errors) = self
            .blocking(move |files| {
                files.bucket(&bucket)?;
                let (mut deleted, mut errors) = (Vec::new(), Vec::new());
                for object in delete.objects {
                    match files.delete(&bucket, &object.key).map_err(answer) {
                        Ok(()) => deleted.push(DeletedObject { key: Some(object.key), ..Default::default() }),
                        Err(error) => errors.push(KeyError {
                            key: Some(object.key),
                            code: Some(error.code().as_str().to_owned()),
                            message: error.message().map(str::to_owned),
                            ..Default::default()
                        }),
                    }
                }
                Ok((deleted, errors))
            })
            .await?;
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted: (!quiet).then_some(deleted),
            errors: (!errors.is_empty()).then_some(errors),
            ..Default::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = request.input;
        let by_directory = match input.delimiter.as_deref() {
            None | Some("") => false,
            Some("/") => true,
            Some(_) => return Err(s3_error!(NotImplemented, "a delimiter other than / is not implemented")),
        };
        let encode = match &input.encoding_type {
            None => str::to_owned as fn(&str) -> String,
            Some(encoding) if encoding.as_str() == EncodingType::URL => url_encode,
            Some(_) => return Err(s3_error!(InvalidArgument, "the encoding type must be url")),
        };
        let asked = usize::try_from(input.max_keys.unwrap_or(1000)).map_err(|_| s3_error!(InvalidArgument))?;
        let limit = asked.min(MAX_KEYS);
        let after = match &input.continuation_token {
            Some(token) => from_token(token).ok_or_else(|| s3_error!(InvalidArgument, "unknown continuation token"))?,
            None => input.start_after.clone().unwrap_or_default(),
        };
        let query = Query { prefix: input.prefix.clone().unwrap_or_default(), after, by_directory, limit };
        let bucket = input.bucket.clone();
        let (steps, more) = self.blocking(move |files| files.list(&bucket, &query)).await?;
        let more = more && limit > 0;

        let next_continuation_token = steps.last().filter(|_| more).map(|last| to_token(last.key()));
        let key_count = i32::try_from(steps.len()).expect("a page is short");
        let (mut contents, mut common_prefixes) = (Vec::new(), Vec::new());
        for step in steps {
            match step {
                Listed::Object(key, meta) => contents.push(Object {
                    key: Some(encode(&key)),
                    size: Some(length(meta.len)),
                    last_modified: Some(meta.modified.into()),
                    e_tag: Some(ETag::Strong(meta.etag)),
                    ..Default::default()
                }),
                Listed::Prefix(prefix) => common_prefixes.push(CommonPrefix { prefix: Some(encode(&prefix)) }),
            }
        }
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: input.prefix.as_deref().map(encode),
            start_after: input.start_after.as_deref().map(encode),
            delimiter: input.delimiter,
            encoding_type: input.encoding_type,
            max_keys: Some(i32::try_from(limit).expect("a page is short")),
            key_count: Some(key_count),
            is_truncated: Some(more),
            continuation_token: input.continuation_token,
            next_continuation_token,
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            ..Default::default()
        }))
    }
}

fn url_encode(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
        encoded
    })
}

/// The last key of a page as hex digits: safe in any URL, and plainly not a key.
fn to_token(key: &str) -> String {
    key.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn from_token(token: &str) -> Option<String> {
    let digits = token.as_bytes();
    if digits.is_empty() || !digits.len().is_multiple_of(2) || !token.is_ascii() {
        return None;
    }
    let bytes = digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    String::from_utf8(bytes.collect::<Option<Vec<_>>>()?).ok()
}
