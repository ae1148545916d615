//! `snapyard sandbox create|ls|pause|resume|fork|kill` (for `exec` see [`crate::exec`]) and `snapyard rollback`.

use std::collections::BTreeMap;

use http::{HeaderMap, Method};
use serde_json::{Value, json};
use snapyard_proto::v1::ListSandboxesRequest;

use crate::cli::{CreateArgs, ForkArgs, ResumeArgs, RollbackArgs, SandboxIds, SandboxLsArgs, Timeout};
use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::grpc::TEAM;
use crate::output;
use crate::rest::segment;

/// Sandboxes per page when listing.
const PAGE: u32 = 100;

/// `sandbox create`: the id on standard output, how long it took on standard error.
pub async fn create(context: &Context, args: CreateArgs) -> Result<(), Failure> {
    let answer = context.api()?.call(Method::POST, "/v2/sandboxes", Some(&create_request(&args))).await?;
    let timing = server_timing(&answer.headers);
    if context.json {
        let mut created = answer.body;
        created["timing_ms"] = json!(timing);
        return Ok(output::print_json(&created)?);
    }
    output::print_line(text(&answer.body, "sandboxID")?)?;
    if let (Some(running), Some(ready)) = (timing.get("running"), timing.get("ready")) {
        eprintln!("running after {running:.0} ms, agent answered after {ready:.0} ms");
    }
    Ok(())
}

fn create_request(args: &CreateArgs) -> Value {
    let mut request = with_timeout(json!({"templateID": args.source, "secure": args.secure}), args.timeout);
    if !args.metadata.is_empty() {
        request["metadata"] = json!(args.metadata.iter().cloned().collect::<BTreeMap<_, _>>());
    }
    if !args.env.is_empty() {
        request["envVars"] = json!(args.env.iter().cloned().collect::<BTreeMap<_, _>>());
    }
    request
}

/// `sandbox ls`: from the catalog, since REST shows `running` for everything that is not paused.
pub async fn ls(context: &Context, args: SandboxLsArgs) -> Result<(), Failure> {
    let mut catalog = context.node().await?.catalog();
    let mut sandboxes = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListSandboxesRequest {
            team: TEAM.into(),
            metadata: args.metadata.iter().cloned().collect(),
            states: Vec::new(),
            limit: PAGE,
            page_token,
        };
        let page = catalog.list_sandboxes(request).await.map_err(|status| Failure::from_status(&status))?.into_inner();
        sandboxes.extend(page.sandboxes);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    if context.json {
        output::print_json(&sandboxes.iter().map(output::sandbox_json).collect())?;
    } else if args.quiet {
        for sandbox in &sandboxes {
            output::print_line(&sandbox.id)?;
        }
    } else if sandboxes.is_empty() {
        eprintln!("no sandboxes; `snapyard sandbox create` starts one");
    } else {
        output::print_table(&output::sandbox_table(&sandboxes, output::now()))?;
    }
    Ok(())
}

/// `sandbox kill`: every one is tried; the first failure decides the exit code.
pub async fn kill(context: &Context, args: SandboxIds) -> Result<(), Failure> {
    let api = context.api()?;
    context
        .each(&args.sandboxes, "killed", async |id| {
            api.call(Method::DELETE, &format!("/sandboxes/{}", segment(id)), None).await.map(drop)
        })
        .await
}

/// `sandbox pause`.
pub async fn pause(context: &Context, args: SandboxIds) -> Result<(), Failure> {
    let api = context.api()?;
    context
        .each(&args.sandboxes, "paused", async |id| {
            api.call(Method::POST, &format!("/sandboxes/{}/pause", segment(id)), None).await.map(drop)
        })
        .await
}

/// `sandbox resume`.
pub async fn resume(context: &Context, args: ResumeArgs) -> Result<(), Failure> {
    let api = context.api()?;
    let body = with_timeout(json!({}), args.timeout);
    context
        .each(&args.sandboxes, "resumed", async |id| {
            api.call(Method::POST, &format!("/sandboxes/{}/resume", segment(id)), Some(&body)).await.map(drop)
        })
        .await
}

/// `sandbox fork`: the ids on standard output; each that could not be started is an error, the first of them the command's.
pub async fn fork(context: &Context, args: ForkArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/fork", segment(&args.sandbox));
    let body = with_timeout(json!({"count": args.count}), args.timeout);
    let answer = context.api()?.call(Method::POST, &path, Some(&body)).await?;
    if context.json {
        output::print_json(&answer.body)?;
    }
    let mut failed = None;
    for entry in answer.body.as_array().into_iter().flatten() {
        match entry.get("sandbox") {
            Some(_) if context.json => {}
            Some(sandbox) => output::print_line(text(sandbox, "sandboxID")?)?,
            None => {
                let message = entry["error"]["message"].as_str().unwrap_or("it could not be started");
                if let Some(failure) = failed.replace(Failure::new(Kind::Refused, message.to_owned())) {
                    eprintln!("error: {failure}");
                }
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

fn with_timeout(mut request: Value, timeout: Option<Timeout>) -> Value {
    if let Some(timeout) = timeout {
        request["timeout"] = json!(timeout.wire());
    }
    request
}

/// `rollback`.
pub async fn rollback(context: &Context, args: RollbackArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/rollback", segment(&args.sandbox));
    let body = json!({"snapshotID": args.snapshot});
    let answer = context.api()?.call(Method::POST, &path, Some(&body)).await?;
    if context.json {
        return Ok(output::print_json(&answer.body)?);
    }
    output::print_line(format_args!("{} is at snapshot {}", args.sandbox, text(&answer.body, "snapshotID")?))?;
    Ok(())
}

/// A text field that the API promises.
pub fn text<'a>(body: &'a Value, field: &str) -> Result<&'a str, Failure> {
    body.get(field)
        .and_then(Value::as_str)
        .ok_or_else(|| Failure::new(Kind::Refused, format!("the server's answer has no {field}: {body}")))
}

/// Phases and their durations in milliseconds (`Server-Timing: place;dur=0.4, running;dur=12`).
pub fn server_timing(headers: &HeaderMap) -> BTreeMap<String, f64> {
    let value = headers.get("server-timing").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let phase = |entry: &str| {
        let (name, duration) = entry.split_once(";dur=")?;
        Some((name.trim().to_owned(), duration.trim().parse().ok()?))
    };
    value.split(',').filter_map(phase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn timings_are_read_and_rubbish_is_not() {
        let mut headers = HeaderMap::new();
        headers.insert("server-timing", HeaderValue::from_static("place;dur=0.4, running;dur=12, cache, x;dur=y"));
        let timing = server_timing(&headers);
        assert_eq!(timing.get("running"), Some(&12.0));
        assert_eq!(timing.len(), 2);
        assert!(server_timing(&HeaderMap::new()).is_empty());
    }

    #[test]
    fn a_create_sends_only_what_was_said() {
        let args = |metadata, env, timeout| CreateArgs { source: "base".into(), timeout, metadata, env, secure: false };
        assert_eq!(create_request(&args(vec![], vec![], None)), json!({"templateID": "base", "secure": false}));
        let full =
            args(vec![("k".into(), "v".into())], vec![("A".into(), "1".into())], Some(crate::cli::Timeout::Never));
        assert_eq!(
            create_request(&full),
            json!({"templateID": "base", "secure": false, "timeout": -1, "metadata": {"k": "v"}, "envVars": {"A": "1"}})
        );
    }
}
