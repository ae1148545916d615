//! Pages of sandboxes and snapshots: a JSON list, and the header `x-next-token` unless the page is the last.
//!
//! The catalog pages newest first and filters by metadata and state. What else a client may ask for is done here, by
//! walking the catalog's pages: other filters (each call asks for as many as are still missing, so the catalog's token
//! always marks the place where the client's page ends), and oldest first, which needs the whole walk.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue};
use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use snapyard_proto::v1::{ListSandboxesRequest, ListSnapshotsRequest, Sandbox, SandboxState};

use super::App;
use super::query::Query;
use crate::errors::ApiError;
use crate::names::{is_sandbox_id, snapshot_name};
use crate::team::{Team, team_of};
use crate::validate;
use crate::wire::{SandboxInfo, SnapshotInfo, states_behind};

const MAX_PAGE: u32 = 100;

pub(super) async fn snapshots(
    State(app): State<Arc<App>>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let team = team_of(&headers)?;
    let limit = validate::limit(query.get("limit"))?;
    // What cannot be a name or an id names nothing: an empty list, not an error.
    let name = match query.get("name").map(|name| snapshot_name(name, team.name())) {
        None => String::new(),
        Some(Ok(name)) => name,
        Some(Err(_)) => return page::<SnapshotInfo>(Vec::new(), ""),
    };
    let sandbox_id = query.get("sandboxID").unwrap_or_default();
    if !sandbox_id.is_empty() && !is_sandbox_id(sandbox_id) {
        return page::<SnapshotInfo>(Vec::new(), "");
    }
    let request = ListSnapshotsRequest {
        team: team.to_field(),
        sandbox_id: sandbox_id.to_owned(),
        name,
        limit,
        page_token: query.get("nextToken").unwrap_or_default().to_owned(),
    };
    let listed = app.clients.catalog().list_snapshots(request).await?.into_inner();
    page(listed.snapshots.into_iter().map(SnapshotInfo::from).collect(), &listed.next_page_token)
}

pub(super) async fn sandboxes(
    State(app): State<Arc<App>>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let team = team_of(&headers)?;
    let wanted = WantedSandboxes::from_query(&query)?;
    let (sandboxes, token) = if wanted.oldest_first {
        wanted.oldest_first_page(wanted.walk(&app, &team, String::new(), u32::MAX).await?.0)?
    } else {
        wanted.walk(&app, &team, wanted.token.clone(), wanted.limit).await?
    };
    page(sandboxes.into_iter().map(SandboxInfo::listed).collect(), &token)
}

fn page<T: Serialize>(items: Vec<T>, next_token: &str) -> Result<Response, ApiError> {
    let mut response = axum::Json(items).into_response();
    if !next_token.is_empty() {
        let token = HeaderValue::try_from(next_token)
            .map_err(|_| tonic::Status::internal("the catalog's page token cannot be sent in a header"))?;
        response.headers_mut().insert("x-next-token", token);
    }
    Ok(response)
}

/// What a client asks to see of its sandboxes.
#[derive(Debug)]
struct WantedSandboxes {
    metadata: Vec<(String, String)>,
    states: Vec<SandboxState>,
    template: Option<String>,
    started_after: Option<Timestamp>,
    oldest_first: bool,
    limit: u32,
    token: String,
}

impl WantedSandboxes {
    fn from_query(query: &Query) -> Result<Self, ApiError> {
        let mut states: Vec<SandboxState> = Vec::new();
        for state in query.get("state").unwrap_or("running,paused").split(',') {
            let behind = states_behind(state.trim())
                .ok_or_else(|| ApiError::invalid("`state` must be `running`, `paused` or `running,paused`"))?;
            for state in behind {
                if !states.contains(state) {
                    states.push(*state);
                }
            }
        }
        let started_after = match query.get("startedAfter").map(str::parse) {
            None => None,
            Some(Ok(time)) => Some(time),
            Some(Err(_)) => return Err(ApiError::invalid("`startedAfter` must be a time as in RFC 3339")),
        };
        let oldest_first = match query.get("order") {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => return Err(ApiError::invalid("`order` must be `asc` or `desc`")),
        };
        Ok(Self {
            metadata: query.get("metadata").map(metadata_filter).unwrap_or_default(),
            states,
            template: query.get("template").map(str::to_owned),
            started_after,
            oldest_first,
            limit: validate::limit(query.get("limit"))?,
            token: query.get("nextToken").unwrap_or_default().to_owned(),
        })
    }

    /// Up to `most` matching sandboxes from `token` on, newest first, and the token behind them.
    async fn walk(
        &self,
        app: &App,
        team: &Team,
        mut token: String,
        most: u32,
    ) -> Result<(Vec<Sandbox>, String), ApiError> {
        let mut found = Vec::new();
        loop {
            let missing = most - u32::try_from(found.len()).unwrap_or(most);
            let request = ListSandboxesRequest {
                team: team.to_field(),
                metadata: self.metadata.iter().cloned().collect(),
                states: self.states.iter().map(|state| i32::from(*state)).collect(),
                limit: missing.min(MAX_PAGE),
                page_token: token,
            };
            let listed = app.clients.catalog().list_sandboxes(request).await?.into_inner();
            token = listed.next_page_token;
            found.extend(listed.sandboxes.into_iter().filter(|sandbox| self.matches(sandbox)));
            if token.is_empty() || found.len() >= most as usize {
                return Ok((found, token));
            }
        }
    }

    fn matches(&self, sandbox: &Sandbox) -> bool {
        let template = self.template.as_ref().is_none_or(|t| *t == sandbox.template_id || *t == sandbox.alias);
        let started = self.started_after.is_none_or(|after| sandbox.started_unix_ms >= after.as_millisecond());
        template && started
    }

    /// The client's page of `all`, oldest first. The token is the place of the page's last sandbox in that order, so
    /// the walk goes on rightly when sandboxes come and go between two pages.
    fn oldest_first_page(&self, mut all: Vec<Sandbox>) -> Result<(Vec<Sandbox>, String), ApiError> {
        let place = |sandbox: &Sandbox| (sandbox.started_unix_ms, sandbox.id.clone());
        all.sort_by_key(place);
        if !self.token.is_empty() {
            let after = self
                .token
                .split_once('.')
                .and_then(|(started, id)| Some((started.parse::<i64>().ok()?, id.to_owned())))
                .ok_or_else(|| ApiError::invalid("`nextToken` is not one that this listing has given"))?;
            all.retain(|sandbox| place(sandbox) > after);
        }
        let more = all.len() > self.limit as usize;
        all.truncate(self.limit as usize);
        let token = match all.last() {
            Some(last) if more => format!("{}.{}", last.started_unix_ms, last.id),
            _ => String::new(),
        };
        Ok((all, token))
    }
}

/// `key=value&…` whose keys and values are percent-encoded a second time: clients quote them, then encode the form.
fn metadata_filter(text: &str) -> Vec<(String, String)> {
    let decode = |part: &str| percent_decode_str(part).decode_utf8_lossy().into_owned();
    form_urlencoded::parse(text.as_bytes()).map(|(key, value)| (decode(&key), decode(&value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(query: &str) -> Result<WantedSandboxes, ApiError> {
        WantedSandboxes::from_query(&Query::parse(query))
    }

    fn sandbox(id: &str, started_unix_ms: i64) -> Sandbox {
        Sandbox { id: id.into(), started_unix_ms, ..Sandbox::default() }
    }

    #[test]
    fn metadata_is_decoded_as_often_as_the_sdk_encodes() {
        // urllib.parse.urlencode({quote("a b"): quote("x&y=z/%")}), encoded once more by the HTTP client.
        let query = Query::parse("metadata=a%252520b%3Dx%252526y%25253Dz%2F%252525");
        let filter = metadata_filter(query.get("metadata").expect("given"));
        assert_eq!(filter, [("a b".to_owned(), "x&y=z/%".to_owned())]);
        assert_eq!(metadata_filter("user=abc&app=prod").len(), 2);
    }

    #[test]
    fn states_are_those_behind_the_public_ones() {
        assert_eq!(wanted("state=paused").expect("valid").states, [SandboxState::Pausing, SandboxState::Paused]);
        assert_eq!(wanted("").expect("valid").states.len(), 5);
        assert_eq!(wanted("state=running,paused,running").expect("valid").states.len(), 5);
        for bad in ["state=killed", "state=running,", "order=up", "startedAfter=today", "limit=0", "limit=101"] {
            assert_eq!(wanted(bad).expect_err(bad).status(), 400);
        }
    }

    #[test]
    fn filters_that_the_catalog_does_not_have() {
        let both = wanted("template=base&startedAfter=1970-01-01T00:00:01%2B00:00").expect("valid");
        let base = |started| Sandbox { alias: "base".into(), ..sandbox("a", started) };
        assert!(both.matches(&base(1_000)) && !both.matches(&base(999)));
        assert!(!both.matches(&sandbox("a", 2_000)));
    }

    #[test]
    fn oldest_first_walks_over_pages_without_loss_or_repetition() {
        let all = || vec![sandbox("d", 4), sandbox("b", 2), sandbox("c", 2), sandbox("a", 1)];
        let mut seen = Vec::new();
        let mut token = String::new();
        for _ in 0..4 {
            let page = wanted(&format!("order=asc&limit=2&nextToken={token}")).expect("valid");
            let (found, next) = page.oldest_first_page(all()).expect("a token of ours");
            seen.extend(found.into_iter().map(|sandbox| sandbox.id));
            token = next;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(seen, ["a", "b", "c", "d"]);
        assert!(wanted("order=asc&nextToken=x").expect("valid").oldest_first_page(all()).is_err());
    }
}
