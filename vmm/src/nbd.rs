//! The disk server: serves one guest's [`Overlay`] to its VMM over NBD, on a socket that the VMM inherited.
//!
//! ```text
//!   greeting ─▶ options (GO / EXPORT_NAME; others refused) ─▶ requests, up to 16 side by side ─▶ DISC or end of stream
//!                                                                │
//!                                       base not to be had: the request stays unanswered, the failure is reported
//! ```
//!
//! Protocol: `doc/proto.md` of the NBD project: fixed newstyle, one export, simple replies. Flushing is a no-op: nothing
//! of the overlay outlives the node anyway, and freezing sees every completed write.
//!
//! What the peer sends is checked for its sizes before anything is allocated; nonsense ends the connection.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::overlay::{DiskError, Overlay};

const GREETING: u64 = 0x4e42_444d_4147_4943;
const OPTION: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;

const HANDSHAKE_FIXED_NEWSTYLE: u16 = 1;
const HANDSHAKE_NO_ZEROES: u16 = 2;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;

const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = (1 << 31) + 1;
const REPLY_INVALID: u32 = (1 << 31) + 3;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// has flags, flush, FUA, trim, write zeroes
const EXPORT_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;

const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const COMMAND_DISC: u16 = 2;
const COMMAND_FLUSH: u16 = 3;
const COMMAND_TRIM: u16 = 4;
const COMMAND_WRITE_ZEROES: u16 = 6;

const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

/// The longest payload of a request: what QEMU sends at most.
const MAX_PAYLOAD: u32 = 32 << 20;
const MAX_OPTION: u32 = 64 << 10;
/// What QEMU keeps under way on one connection.
const MAX_REQUESTS: usize = 16;

/// Why a guest's disk can no longer be read. The guest waits for ever, and has to be killed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("guest disk: {reason}")]
pub struct DiskFault {
    /// For people.
    pub reason: String,
}

/// A disk that is being served, until this is stopped or dropped.
#[derive(Debug)]
pub struct DiskServer {
    failure: watch::Receiver<Option<DiskFault>>,
    task: JoinHandle<()>,
}

impl DiskServer {
    /// Serves `overlay` to the VMM at the other end of `socket`. Must be called on a tokio runtime.
    pub fn serve(socket: UnixStream, overlay: Arc<Overlay>) -> Self {
        let (sender, failure) = watch::channel(None);
        let task = tokio::spawn(async move {
            if let Err(cause) = serve(socket, overlay, &sender).await {
                tracing::debug!(%cause, "disk connection ended");
            }
        });
        Self { failure, task }
    }

    /// Becomes `Some` when the disk's base cannot be read any more. Stays so.
    pub fn failure(&self) -> watch::Receiver<Option<DiskFault>> {
        self.failure.clone()
    }

    /// Ends the connection and waits until no request is under way.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    socket: UnixStream,
    overlay: Arc<Overlay>,
    failure: &watch::Sender<Option<DiskFault>>,
) -> io::Result<()> {
    let (reader, mut writer) = socket.into_split();
    let mut reader = BufReader::with_capacity(64 << 10, reader);
    if !negotiate(&mut reader, &mut writer, overlay.size_bytes()).await? {
        return Ok(());
    }
    let writer = Arc::new(Mutex::new(writer));
    let slots = Arc::new(Semaphore::new(MAX_REQUESTS));
    // Dropped with this future: requests do not outlive their connection.
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let Some(request) = Request::read(&mut reader).await? else { break };
        if request.command == COMMAND_DISC {
            break;
        }
        let slot = Arc::clone(&slots).acquire_owned().await.expect("never closed");
        let (overlay, writer, failure) = (Arc::clone(&overlay), Arc::clone(&writer), failure.clone());
        running.spawn(async move {
            let _slot = slot;
            let handle = request.handle;
            match perform(request, &overlay).await {
                Ok(data) => reply(&writer, handle, 0, &data).await,
                Err(DiskError::Base { .. } | DiskError::Gone) if failure.borrow().is_some() => Ok(()),
                Err(error @ (DiskError::Base { .. } | DiskError::Gone)) => {
                    tracing::warn!(%error, "a guest's disk failed");
                    failure.send_replace(Some(DiskFault { reason: error.to_string() }));
                    Ok(())
                }
                Err(error) => {
                    tracing::warn!(%error, "a disk request failed");
                    reply(&writer, handle, errno(&error), &[]).await
                }
            }
        });
    }
    while running.join_next().await.is_some() {}
    Ok(())
}

async fn perform(request: Request, overlay: &Overlay) -> Result<Vec<u8>, DiskError> {
    let (offset, len) = (request.offset, u64::from(request.len));
    match request.command {
        COMMAND_READ if request.len <= MAX_PAYLOAD => return overlay.read(offset, len).await,
        COMMAND_WRITE => overlay.write(offset, request.payload).await?,
        COMMAND_FLUSH => {}
        COMMAND_TRIM => overlay.trim(offset, len).await?,
        COMMAND_WRITE_ZEROES => overlay.write_zeros(offset, len).await?,
        _ => return Err(DiskError::OutOfRange { offset, len, size_bytes: overlay.size_bytes() }),
    }
    Ok(Vec::new())
}

fn errno(error: &DiskError) -> u32 {
    match error {
        DiskError::OutOfRange { .. } => EINVAL,
        DiskError::Layer(cause) if cause.kind() == io::ErrorKind::StorageFull => ENOSPC,
        _ => EIO,
    }
}

async fn reply(writer: &Mutex<OwnedWriteHalf>, handle: u64, error: u32, data: &[u8]) -> io::Result<()> {
    let mut head = Vec::with_capacity(16);
    head.extend(REPLY.to_be_bytes());
    head.extend(error.to_be_bytes());
    head.extend(handle.to_be_bytes());
    let mut writer = writer.lock().await;
    writer.write_all(&head).await?;
    writer.write_all(data).await
}

#[derive(Debug)]
struct Request {
    command: u16,
    handle: u64,
    offset: u64,
    len: u32,
    payload: Bytes,
}

impl Request {
    /// The next request; `None` at the end of the stream.
    async fn read(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let magic = match reader.read_u32().await {
            Ok(magic) => magic,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        };
        if magic != REQUEST {
            return Err(nonsense(format!("request magic {magic:#x}")));
        }
        let _flags = reader.read_u16().await?;
        let command = reader.read_u16().await?;
        let handle = reader.read_u64().await?;
        let offset = reader.read_u64().await?;
        let len = reader.read_u32().await?;
        let mut payload = Vec::new();
        if command == COMMAND_WRITE {
            if len > MAX_PAYLOAD {
                return Err(nonsense(format!("a write of {len} bytes")));
            }
            payload.resize(len as usize, 0);
            reader.read_exact(&mut payload).await?;
        }
        Ok(Some(Self { command, handle, offset, len, payload: payload.into() }))
    }
}

/// Greets and haggles. `false`: the client went away in peace.
async fn negotiate(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    size_bytes: u64,
) -> io::Result<bool> {
    writer.write_u64(GREETING).await?;
    writer.write_u64(OPTION).await?;
    writer.write_u16(HANDSHAKE_FIXED_NEWSTYLE | HANDSHAKE_NO_ZEROES).await?;
    let client_flags = match reader.read_u32().await {
        Ok(flags) => flags,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        Err(error) => return Err(error),
    };
    let no_zeroes = client_flags & u32::from(HANDSHAKE_NO_ZEROES) != 0;
    loop {
        let magic = match reader.read_u64().await {
            Ok(magic) => magic,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(error) => return Err(error),
        };
        if magic != OPTION {
            return Err(nonsense(format!("option magic {magic:#x}")));
        }
        let option = reader.read_u32().await?;
        let len = reader.read_u32().await?;
        if len > MAX_OPTION {
            return Err(nonsense(format!("an option of {len} bytes")));
        }
        let mut data = vec![0; len as usize];
        reader.read_exact(&mut data).await?;
        match option {
            OPTION_EXPORT_NAME => {
                let mut answer = Vec::new();
                answer.extend(size_bytes.to_be_bytes());
                answer.extend(EXPORT_FLAGS.to_be_bytes());
                if !no_zeroes {
                    answer.extend([0; 124]);
                }
                writer.write_all(&answer).await?;
                return Ok(true);
            }
            OPTION_INFO | OPTION_GO if !is_info_request(&data) => {
                option_reply(writer, option, REPLY_INVALID, &[]).await?;
            }
            OPTION_INFO | OPTION_GO => {
                let mut export = Vec::new();
                export.extend(INFO_EXPORT.to_be_bytes());
                export.extend(size_bytes.to_be_bytes());
                export.extend(EXPORT_FLAGS.to_be_bytes());
                option_reply(writer, option, REPLY_INFO, &export).await?;
                let mut sizes = Vec::new();
                sizes.extend(INFO_BLOCK_SIZE.to_be_bytes());
                // Smallest, preferred, largest. Parts of blocks work, at the price of reading the rest of the block.
                for size in [1u32, 4096, MAX_PAYLOAD] {
                    sizes.extend(size.to_be_bytes());
                }
                option_reply(writer, option, REPLY_INFO, &sizes).await?;
                option_reply(writer, option, REPLY_ACK, &[]).await?;
                if option == OPTION_GO {
                    return Ok(true);
                }
            }
            OPTION_ABORT => {
                option_reply(writer, option, REPLY_ACK, &[]).await?;
                return Ok(false);
            }
            _ => option_reply(writer, option, REPLY_UNSUPPORTED, &[]).await?,
        }
    }
}

/// Name length, name, number of information requests, those requests: any name is the one export.
fn is_info_request(data: &[u8]) -> bool {
    let parse = || {
        let (name_len, rest) = data.split_first_chunk::<4>()?;
        let rest = rest.get(u32::from_be_bytes(*name_len) as usize..)?;
        let (count, rest) = rest.split_first_chunk::<2>()?;
        (rest.len() == 2 * usize::from(u16::from_be_bytes(*count))).then_some(())
    };
    parse().is_some()
}

async fn option_reply(writer: &mut (impl AsyncWrite + Unpin), option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut answer = Vec::with_capacity(20 + data.len());
    answer.extend(OPTION_REPLY.to_be_bytes());
    answer.extend(option.to_be_bytes());
    answer.extend(kind.to_be_bytes());
    answer.extend((data.len() as u32).to_be_bytes());
    answer.extend(data);
    writer.write_all(&answer).await
}

fn nonsense(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not NBD: {what}"))
}

#[cfg(test)]
mod tests;
