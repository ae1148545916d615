//! What a client may ask for. Pure: a parsed body in, a request in the server's terms or a 400 out.
//!
//! Order of judgement for a create: types and shapes here, then what the reference resolves to (404), then what may
//! not be set when that is a snapshot (400), then what this server does not have (501). So an error names the most
//! basic thing that is wrong.

use std::collections::HashMap;

use crate::errors::ApiError;
use crate::fields::Fields;
use crate::names::{is_reference, is_sandbox_id};

/// Longest finite life of a sandbox: ten years, seconds.
const MAX_TIMEOUT_S: i64 = 10 * 366 * 24 * 3600;

/// Most bytes of metadata, keys and values together: a page of 100 sandboxes must fit in one gRPC message.
const MAX_METADATA_BYTES: usize = 16 << 10;

/// What a sandbox may be told to do with its life: `-1` is for ever.
const NEVER: i64 = -1;

/// What a create that names a snapshot may not set: the guest is what it was. Metadata with the prefix
/// [`SYSTEM_METADATA`] belongs to them.
const FORBIDDEN_FROM_SNAPSHOT: [&str; 9] =
    ["envVars", "volumeMounts", "volumes", "mounts", "function", "functionConfig", "build", "buildConfig", "image"];
const SYSTEM_METADATA: &str = "fc.";

/// A create, checked as far as can be without knowing what it is created from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Create {
    /// `templateID`, as the client sent it.
    pub(crate) reference: String,
    /// The client's own id for the sandbox.
    pub(crate) sandbox_id: Option<String>,
    /// Life from now, milliseconds; -1 for ever.
    pub(crate) timeout_ms: i64,
    /// Whether the agent asks for an access token.
    pub(crate) secure: bool,
    pub(crate) metadata: HashMap<String, String>,
    pub(crate) env: HashMap<String, String>,
    /// Paused, not killed, when its time is over.
    pub(crate) auto_pause: bool,
    /// Woken by a request when paused.
    pub(crate) auto_resume: bool,
    /// The first field that a create from a snapshot may not have.
    forbidden_from_snapshot: Option<String>,
    /// The first thing asked for that this server does not have.
    unsupported: Option<&'static str>,
}

/// What the route decides where the body says nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CreateDefaults {
    pub(crate) timeout_s: u32,
    /// The v2 route belongs to clients that always send the access token; on the v1 route are clients that never do.
    pub(crate) secure: bool,
}

impl Create {
    pub(crate) fn from_fields(body: &Fields, defaults: CreateDefaults) -> Result<Self, ApiError> {
        let reference = match body.string("templateID")? {
            Some(reference) if is_reference(reference) => reference.to_owned(),
            Some("") | None => {
                return Err(ApiError::invalid(
                    "`templateID` is missing; it names a template (id or alias) or a snapshot (id or team/name:tag)",
                ));
            }
            Some(_) => return Err(ApiError::invalid("`templateID` is too long, or has control characters")),
        };
        let sandbox_id = match body.string("sandboxID")? {
            None | Some("") => None,
            Some(id) if is_sandbox_id(id) => Some(id.to_owned()),
            Some(_) => return Err(ApiError::invalid("`sandboxID` must be 1 to 57 of a-z and 0-9")),
        };
        let timeout_ms = match body.integer("timeout")? {
            None => i64::from(defaults.timeout_s) * 1000,
            Some(0) => return Err(ApiError::invalid("`timeout` must be at least 1 second, or -1 for never")),
            Some(seconds) => timeout_ms(seconds)?,
        };
        let metadata = metadata(body)?;
        let (auto_pause, auto_resume) = lifecycle(body)?;
        let env = body.string_map("envVars")?;
        if let Some(name) = env.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
            return Err(ApiError::invalid(format!("`envVars` has a variable that cannot be named `{name}`")));
        }
        if let Some(name) = env.iter().find(|(_, value)| value.contains('\0')).map(|(name, _)| name) {
            return Err(ApiError::invalid(format!("`envVars.{name}` contains a NUL character")));
        }
        Ok(Self {
            reference,
            sandbox_id,
            timeout_ms,
            secure: body.boolean("secure")?.unwrap_or(defaults.secure),
            forbidden_from_snapshot: FORBIDDEN_FROM_SNAPSHOT
                .into_iter()
                .find(|field| body.is_given(field))
                .map(str::to_owned)
                .or_else(|| {
                    let key = metadata.keys().filter(|key| key.starts_with(SYSTEM_METADATA)).min()?;
                    Some(format!("metadata.{key}"))
                }),
            unsupported: unsupported(body)?,
            metadata,
            env,
            auto_pause,
            auto_resume,
        })
    }

    /// For a create from a snapshot: 400 naming the field that may not be set.
    pub(crate) fn check_from_snapshot(&self) -> Result<(), ApiError> {
        match &self.forbidden_from_snapshot {
            Some(field) => Err(ApiError::invalid(format!(
                "`{field}` cannot be set when a sandbox is created from snapshot {}: it starts exactly as captured",
                self.reference
            ))),
            None => Ok(()),
        }
    }

    /// 501 for what would otherwise be ignored in silence.
    pub(crate) fn check_supported(&self) -> Result<(), ApiError> {
        self.unsupported.map_or(Ok(()), |what| Err(ApiError::unimplemented(what)))
    }
}

/// Whether a sandbox is paused at its timeout, and whether a request wakes it.
fn lifecycle(body: &Fields) -> Result<(bool, bool), ApiError> {
    let lifecycle = body.object("lifecycle")?.unwrap_or_default();
    let on_timeout = lifecycle.string("onTimeout")?.unwrap_or("kill");
    if !["kill", "pause"].contains(&on_timeout) {
        return Err(ApiError::invalid("`lifecycle.onTimeout` must be `kill` or `pause`"));
    }
    let auto_resume = match body.object("autoResume") {
        Ok(config) => config.unwrap_or_default().boolean("enabled")?,
        // Older clients send the bare flag.
        Err(_) => body.boolean("autoResume")?,
    };
    let pausing = body.boolean("autoPause")?.unwrap_or(false) || on_timeout == "pause";
    let resuming = auto_resume.unwrap_or(false) || lifecycle.boolean("autoResume")?.unwrap_or(false);
    Ok((pausing, resuming))
}

fn unsupported(body: &Fields) -> Result<Option<&'static str>, ApiError> {
    let without_memory = body.boolean("autoPauseMemory")? == Some(false);
    let offline = body.boolean("allow_internet_access")? == Some(false);
    let checks = [
        (without_memory, "`autoPauseMemory=false` (booting a paused sandbox from its disk)"),
        (offline, "`allow_internet_access=false`"),
        (body.is_given("network"), "`network`"),
        (body.is_given("volumeMounts"), "`volumeMounts`"),
        (body.is_given("mcp"), "`mcp`"),
        (body.is_given("iam"), "`iam`"),
        (body.is_given("distributionScope"), "`distributionScope`"),
    ];
    Ok(checks.into_iter().find(|(asked, _)| *asked).map(|(_, what)| what))
}

fn metadata(body: &Fields) -> Result<HashMap<String, String>, ApiError> {
    let metadata = body.string_map("metadata")?;
    let bytes: usize = metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAX_METADATA_BYTES {
        return Err(ApiError::invalid(format!("`metadata` has {bytes} bytes; at most {MAX_METADATA_BYTES} are kept")));
    }
    Ok(metadata)
}

/// Seconds as a client sends them to milliseconds as a node takes them: -1 or 0 and more.
fn timeout_ms(seconds: i64) -> Result<i64, ApiError> {
    match seconds {
        NEVER => Ok(NEVER),
        0..=MAX_TIMEOUT_S => Ok(seconds * 1000),
        i64::MIN..NEVER => Err(ApiError::invalid("`timeout` must not be negative, except -1 for never")),
        _ => Err(ApiError::invalid(format!("`timeout` must be at most {MAX_TIMEOUT_S} seconds, or -1 for never"))),
    }
}

/// Body of `POST /sandboxes/{id}/timeout`: life from now in milliseconds; 0 ends it at once, -1 never.
pub(crate) fn set_timeout(body: &Fields) -> Result<i64, ApiError> {
    let seconds = body.integer("timeout")?.ok_or_else(|| ApiError::invalid("`timeout` (seconds) is missing"))?;
    timeout_ms(seconds)
}

/// Body of a pause.
pub(crate) fn pause(body: &Fields) -> Result<(), ApiError> {
    match body.boolean("memory")? {
        Some(false) => Err(ApiError::unimplemented("`memory=false` (booting a paused sandbox from its disk)")),
        _ => Ok(()),
    }
}

/// Body of a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fork {
    /// How many.
    pub(crate) count: u32,
    /// Life of each from now, milliseconds; -1 for ever.
    pub(crate) timeout_ms: i64,
}

/// Most sandboxes of one fork.
const MAX_FORKS: u32 = 100;

/// Body of `POST /sandboxes/{id}/fork`.
pub(crate) fn fork(body: &Fields, default_timeout_s: u32) -> Result<Fork, ApiError> {
    let count = match body.integer("count")? {
        None => 1,
        Some(count) => u32::try_from(count)
            .ok()
            .filter(|count| (1..=MAX_FORKS).contains(count))
            .ok_or_else(|| ApiError::invalid(format!("`count` must be a number from 1 to {MAX_FORKS}")))?,
    };
    let timeout_ms = match body.integer("timeout")? {
        None => i64::from(default_timeout_s) * 1000,
        Some(0) => return Err(ApiError::invalid("`timeout` must be at least 1 second, or -1 for never")),
        Some(seconds) => timeout_ms(seconds)?,
    };
    Ok(Fork { count, timeout_ms })
}

/// Body of a connect: life from now in milliseconds that is left at the least; `None` when the body says nothing.
pub(crate) fn connect(body: &Fields) -> Result<Option<i64>, ApiError> {
    if body.boolean("memory")? == Some(false) {
        return Err(ApiError::unimplemented("`memory=false` (booting a paused sandbox from its disk)"));
    }
    match body.integer("timeout")? {
        None => Ok(None),
        Some(0) => Err(ApiError::invalid("`timeout` must be at least 1 second, or -1 for never")),
        Some(seconds) => timeout_ms(seconds).map(Some),
    }
}

/// Body of `POST /sandboxes/{id}/refreshes`: life from now in milliseconds that is left at the least.
pub(crate) fn refresh(body: &Fields, default_timeout_s: u32) -> Result<i64, ApiError> {
    match body.integer("duration")? {
        None => Ok(i64::from(default_timeout_s) * 1000),
        Some(seconds @ 0..=MAX_TIMEOUT_S) => Ok(seconds * 1000),
        Some(_) => Err(ApiError::invalid("`duration` must be a number of seconds, and not negative")),
    }
}

/// `limit` of a listing: 1 to 100, and 100 when absent.
pub(crate) fn limit(text: Option<&str>) -> Result<u32, ApiError> {
    let Some(text) = text else { return Ok(100) };
    match text.parse::<u32>() {
        Ok(limit @ 1..=100) => Ok(limit),
        _ => Err(ApiError::invalid("`limit` must be a number from 1 to 100")),
    }
}

/// The header `Idempotency-Key`; empty when absent.
pub(crate) fn idempotency_key(headers: &http::HeaderMap) -> Result<String, ApiError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(String::new()) };
    match value.to_str() {
        Ok(key) if (1..=255).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Ok(key.to_owned())
        }
        _ => Err(ApiError::invalid("the header Idempotency-Key must be 1 to 255 printable ASCII characters")),
    }
}

#[cfg(test)]
mod tests;
