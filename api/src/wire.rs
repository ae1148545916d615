//! What clients get: the JSON shapes of the public REST API.
//!
//! The SDKs' parsers are strict. A required field is never null or missing, times are RFC 3339 in UTC, `state` is
//! `running` or `paused` and nothing else, and `envdVersion` is a version.

use std::collections::HashMap;

use jiff::Timestamp;
use serde::Serialize;
use snapyard_proto::v1;
use snapyard_proto::v1::SandboxState;

use crate::errors::ApiError;
use crate::routes::metrics::AgentMetrics;

/// Version given for an agent that has not told its own: the lowest that clients accept.
const OLDEST_AGENT: &str = "0.1.0";

/// When a sandbox ends that never ends: clients require a time.
const NEVER_ENDS: &str = "9999-12-31T00:00:00Z";

/// Answer to a create or a connect.
#[derive(Debug, Serialize)]
pub(crate) struct CreatedSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: String,
    #[serde(rename = "envdVersion")]
    envd_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    alias: String,
    #[serde(rename = "envdAccessToken", skip_serializing_if = "String::is_empty")]
    envd_access_token: String,
    domain: String,
}

impl CreatedSandbox {
    pub(crate) fn new(sandbox: v1::Sandbox, domain: &str) -> Self {
        Self {
            client_id: client_id(&sandbox),
            envd_version: agent_version(&sandbox),
            template_id: sandbox.template_id,
            sandbox_id: sandbox.id,
            alias: sandbox.alias,
            envd_access_token: sandbox.access_token,
            domain: domain.to_owned(),
        }
    }
}

/// One entry of the answer to a fork.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Forked {
    /// It runs.
    Sandbox(CreatedSandbox),
    /// It could not be started.
    Error {
        /// As an answer's status.
        code: u16,
        /// What went wrong.
        message: String,
    },
}

impl Forked {
    pub(crate) fn new(fork: Result<v1::Sandbox, ApiError>, domain: &str) -> Self {
        match fork {
            Ok(sandbox) => Self::Sandbox(CreatedSandbox::new(sandbox, domain)),
            Err(error) => Self::Error { code: error.status().as_u16(), message: error.message().to_owned() },
        }
    }
}

/// One sandbox of a listing; with `detail` also the answer to a get.
#[derive(Debug, Serialize)]
pub(crate) struct SandboxInfo {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: String,
    #[serde(rename = "startedAt")]
    started_at: String,
    #[serde(rename = "endAt")]
    end_at: String,
    #[serde(rename = "cpuCount")]
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    state: &'static str,
    #[serde(rename = "envdVersion")]
    envd_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    alias: String,
    metadata: HashMap<String, String>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    detail: Option<SandboxDetail>,
}

/// What only a get tells.
#[derive(Debug, Serialize)]
pub(crate) struct SandboxDetail {
    #[serde(rename = "envdAccessToken", skip_serializing_if = "String::is_empty")]
    envd_access_token: String,
    domain: String,
    lifecycle: Lifecycle,
}

#[derive(Debug, Serialize)]
struct Lifecycle {
    #[serde(rename = "autoResume")]
    auto_resume: bool,
    #[serde(rename = "onTimeout")]
    on_timeout: &'static str,
}

impl SandboxInfo {
    /// An entry of a listing.
    pub(crate) fn listed(sandbox: v1::Sandbox) -> Self {
        let shape = sandbox.shape.unwrap_or_default();
        Self {
            client_id: client_id(&sandbox),
            envd_version: agent_version(&sandbox),
            state: public_state(sandbox.state()),
            started_at: rfc3339(sandbox.started_unix_ms),
            end_at: if sandbox.ends_unix_ms == 0 { NEVER_ENDS.to_owned() } else { rfc3339(sandbox.ends_unix_ms) },
            cpu_count: shape.vcpus,
            memory_mb: shape.memory_bytes >> 20,
            disk_size_mb: shape.disk_bytes >> 20,
            template_id: sandbox.template_id,
            sandbox_id: sandbox.id,
            alias: sandbox.alias,
            metadata: sandbox.metadata,
            detail: None,
        }
    }

    /// The answer to a get.
    pub(crate) fn detailed(sandbox: v1::Sandbox, domain: &str) -> Self {
        let detail = SandboxDetail {
            envd_access_token: sandbox.access_token.clone(),
            domain: domain.to_owned(),
            lifecycle: Lifecycle {
                auto_resume: sandbox.lifecycle_auto_resume,
                on_timeout: if sandbox.lifecycle_auto_pause { "pause" } else { "kill" },
            },
        };
        Self { detail: Some(detail), ..Self::listed(sandbox) }
    }
}

/// A snapshot, created or listed.
#[derive(Debug, Serialize)]
pub(crate) struct SnapshotInfo {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    names: Vec<String>,
}

impl From<v1::Snapshot> for SnapshotInfo {
    fn from(snapshot: v1::Snapshot) -> Self {
        Self { snapshot_id: snapshot.id, names: snapshot.names }
    }
}

/// Answer to a rollback.
#[derive(Debug, Serialize)]
pub(crate) struct RolledBack {
    #[serde(rename = "sandboxID")]
    pub(crate) sandbox_id: String,
    #[serde(rename = "snapshotID")]
    pub(crate) snapshot_id: String,
    #[serde(rename = "operationID")]
    pub(crate) operation_id: String,
    pub(crate) status: &'static str,
}

/// A template. `builds` only in the answer to a get; builds are not recorded one by one, so it is empty.
#[derive(Debug, Serialize)]
pub(crate) struct TemplateInfo {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    #[serde(rename = "cpuCount")]
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    public: bool,
    aliases: Vec<String>,
    names: Vec<String>,
    #[serde(rename = "createdAt")]
    created_at: String,
    #[serde(rename = "updatedAt")]
    updated_at: String,
    #[serde(rename = "createdBy")]
    created_by: Option<()>,
    #[serde(rename = "lastSpawnedAt")]
    last_spawned_at: Option<()>,
    #[serde(rename = "spawnCount")]
    spawn_count: u32,
    #[serde(rename = "buildCount")]
    build_count: u32,
    #[serde(rename = "envdVersion")]
    envd_version: &'static str,
    #[serde(rename = "buildStatus")]
    build_status: &'static str,
    /// The same, under the name that `cubesandbox` reads.
    status: &'static str,
    #[serde(rename = "lastError", skip_serializing_if = "String::is_empty")]
    last_error: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    builds: Option<[(); 0]>,
}

impl TemplateInfo {
    /// An entry of a listing.
    pub(crate) fn listed(template: v1::Template) -> Self {
        let shape = template.shape.unwrap_or_default();
        let created = rfc3339(template.created_unix_ms);
        let (status, last_error) = match template.build_status.as_str() {
            "ready" => ("ready", String::new()),
            "building" => ("building", String::new()),
            _ => ("error", template.build_message),
        };
        let (aliases, names) = if template.alias.is_empty() {
            (Vec::new(), Vec::new())
        } else {
            (vec![template.alias.clone()], vec![format!("{}/{}", template.team, template.alias)])
        };
        Self {
            template_id: template.id,
            build_id: template.snapshot_id,
            cpu_count: shape.vcpus,
            memory_mb: shape.memory_bytes >> 20,
            disk_size_mb: shape.disk_bytes >> 20,
            public: false,
            aliases,
            names,
            updated_at: created.clone(),
            created_at: created,
            created_by: None,
            last_spawned_at: None,
            spawn_count: 0,
            build_count: 1,
            envd_version: OLDEST_AGENT,
            build_status: status,
            status,
            last_error,
            builds: None,
        }
    }

    /// The answer to a get.
    pub(crate) fn detailed(template: v1::Template) -> Self {
        Self { builds: Some([]), ..Self::listed(template) }
    }
}

/// Answer to a look-up of an alias.
#[derive(Debug, Serialize)]
pub(crate) struct TemplateAlias {
    #[serde(rename = "templateID")]
    pub(crate) template_id: String,
    pub(crate) public: bool,
}

/// One reading of what a guest uses.
#[derive(Debug, Serialize)]
pub(crate) struct Metrics {
    timestamp: String,
    #[serde(rename = "timestampUnix")]
    timestamp_unix: i64,
    #[serde(rename = "cpuCount")]
    cpu_count: u32,
    #[serde(rename = "cpuUsedPct")]
    cpu_used_pct: f64,
    #[serde(rename = "memUsed")]
    mem_used: u64,
    #[serde(rename = "memTotal")]
    mem_total: u64,
    #[serde(rename = "memCache")]
    mem_cache: u64,
    #[serde(rename = "diskUsed")]
    disk_used: u64,
    #[serde(rename = "diskTotal")]
    disk_total: u64,
}

impl From<AgentMetrics> for Metrics {
    fn from(reading: AgentMetrics) -> Self {
        Self {
            timestamp: rfc3339(reading.ts.saturating_mul(1000)),
            timestamp_unix: reading.ts,
            cpu_count: reading.cpu_count,
            cpu_used_pct: reading.cpu_used_pct,
            mem_used: reading.mem_used,
            mem_total: reading.mem_total,
            mem_cache: reading.mem_cache,
            disk_used: reading.disk_used,
            disk_total: reading.disk_total,
        }
    }
}

/// The two states that clients know.
fn public_state(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Pausing | SandboxState::Paused => "paused",
        _ => "running",
    }
}

/// The states that a client means by one of the two it knows.
pub(crate) fn states_behind(public: &str) -> Option<&'static [SandboxState]> {
    match public {
        "running" => Some(&[SandboxState::Running, SandboxState::Snapshotting, SandboxState::Resuming]),
        "paused" => Some(&[SandboxState::Pausing, SandboxState::Paused]),
        _ => None,
    }
}

fn client_id(sandbox: &v1::Sandbox) -> String {
    if sandbox.node_id.is_empty() { "snapyard".to_owned() } else { sandbox.node_id.clone() }
}

fn agent_version(sandbox: &v1::Sandbox) -> String {
    if sandbox.agent_version.is_empty() { OLDEST_AGENT.to_owned() } else { sandbox.agent_version.clone() }
}

/// A time of the wire protocol as clients read it. What no calendar holds is shown as the epoch.
fn rfc3339(unix_ms: i64) -> String {
    Timestamp::from_millisecond(unix_ms).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn sandbox() -> v1::Sandbox {
        v1::Sandbox {
            id: "abc".into(),
            template_id: "tpl-1".into(),
            alias: "base".into(),
            state: SandboxState::Snapshotting.into(),
            started_unix_ms: 1_700_000_000_123,
            ends_unix_ms: 0,
            shape: Some(v1::Shape { vcpus: 2, memory_bytes: 512 << 20, disk_bytes: 2048 << 20 }),
            metadata: HashMap::from([("k".into(), "v".into())]),
            node_id: "n1".into(),
            access_token: "secret".into(),
            agent_version: "0.5.7".into(),
            ..v1::Sandbox::default()
        }
    }

    fn to_json(value: impl Serialize) -> Value {
        serde_json::to_value(value).expect("plain data")
    }

    #[test]
    fn a_created_sandbox() {
        let expected = json!({
            "templateID": "tpl-1", "sandboxID": "abc", "clientID": "n1", "envdVersion": "0.5.7", "alias": "base",
            "envdAccessToken": "secret", "domain": "example.test",
        });
        assert_eq!(to_json(CreatedSandbox::new(sandbox(), "example.test")), expected);
    }

    #[test]
    fn a_listed_sandbox_keeps_its_token_and_a_detailed_one_tells_it() {
        let listed = json!({
            "templateID": "tpl-1", "sandboxID": "abc", "clientID": "n1", "startedAt": "2023-11-14T22:13:20.123Z",
            "endAt": NEVER_ENDS, "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 2048, "state": "running",
            "envdVersion": "0.5.7", "alias": "base", "metadata": {"k": "v"},
        });
        assert_eq!(to_json(SandboxInfo::listed(sandbox())), listed);

        let mut detailed = listed;
        detailed["envdAccessToken"] = json!("secret");
        detailed["domain"] = json!("d");
        detailed["lifecycle"] = json!({"autoResume": false, "onTimeout": "kill"});
        assert_eq!(to_json(SandboxInfo::detailed(sandbox(), "d")), detailed);
    }

    #[test]
    fn required_fields_are_there_even_when_nothing_is_known() {
        let empty = to_json(SandboxInfo::detailed(v1::Sandbox::default(), ""));
        for field in ["templateID", "sandboxID", "clientID", "startedAt", "endAt", "state", "envdVersion"] {
            assert!(empty[field].is_string(), "{field}");
        }
        for field in ["cpuCount", "memoryMB", "diskSizeMB"] {
            assert!(empty[field].is_u64(), "{field}");
        }
        assert_eq!(to_json(SnapshotInfo::from(v1::Snapshot::default())), json!({"snapshotID": "", "names": []}));
    }

    #[test]
    fn a_template() {
        let template = v1::Template {
            id: "tpl-1".into(),
            alias: "base".into(),
            team: "default".into(),
            snapshot_id: "u".into(),
            build_status: "ready".into(),
            ..v1::Template::default()
        };
        let listed = to_json(TemplateInfo::listed(template.clone()));
        assert_eq!(listed["aliases"], json!(["base"]));
        assert_eq!(listed["names"], json!(["default/base"]));
        assert_eq!(listed["buildStatus"], "ready");
        assert!(listed.get("createdBy").is_some_and(Value::is_null), "required, and may be null");
        assert!(listed.get("builds").is_none());
        assert_eq!(to_json(TemplateInfo::detailed(template))["builds"], json!([]));
    }

    #[test]
    fn states_agree_in_both_directions() {
        for public in ["running", "paused"] {
            for state in states_behind(public).expect("known") {
                assert_eq!(public_state(*state), public);
            }
        }
        assert!(states_behind("killed").is_none());
    }
}
