//! Templates: list, get, look up an alias; and `DELETE /templates/{id}`, which deletes snapshots too.
//!
//! A reference reaches this route percent-encoded as one segment, or raw with its slash and colon
//! (`/templates/team/short:tag`), hence the wildcard.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, Uri};
use snapyard_proto::v1::{DeleteRequest, GetTemplateRequest, ListTemplatesRequest, Template};

use super::{App, PathText, after_the_fact};
use crate::errors::ApiError;
use crate::names::is_reference;
use crate::team::{Team, team_of};
use crate::wire::{TemplateAlias, TemplateInfo};

pub(super) async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Response, ApiError> {
    let request = ListTemplatesRequest { team: team_of(&headers)?.to_field() };
    let templates = app.clients.catalog().list_templates(request).await?.into_inner().templates;
    let templates: Vec<TemplateInfo> = templates.into_iter().map(TemplateInfo::listed).collect();
    Ok(axum::Json(templates).into_response())
}

/// What a path below `/templates/` asks for with GET.
#[derive(Debug, PartialEq, Eq)]
enum Wanted<'a> {
    Template(&'a str),
    Alias(&'a str),
    /// Tags, build status, build logs, upload links.
    Unimplemented,
}

/// `path` is decoded; whether its slashes were raw is seen in `raw`, the path as it came.
fn wanted<'a>(path: &'a str, raw: &str) -> Wanted<'a> {
    let raw_segments = raw.trim_start_matches('/').split('/').count();
    if let Some(alias) = path.strip_prefix("aliases/").filter(|_| raw_segments > 2) {
        return Wanted::Alias(alias);
    }
    let below = path.split('/').nth(1).filter(|_| raw_segments > 2);
    match below {
        Some("tags" | "builds" | "files") => Wanted::Unimplemented,
        _ => Wanted::Template(path),
    }
}

pub(super) async fn get(
    State(app): State<Arc<App>>,
    PathText(path): PathText<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let team = team_of(&headers)?;
    match wanted(&path, uri.path()) {
        Wanted::Template(reference) => {
            let template = template(&app, &team, reference).await?;
            Ok(axum::Json(TemplateInfo::detailed(template)).into_response())
        }
        Wanted::Alias(alias) => {
            let template_id = template(&app, &team, alias).await?.id;
            Ok(axum::Json(TemplateAlias { template_id, public: false }).into_response())
        }
        Wanted::Unimplemented => Err(ApiError::unimplemented("building and tagging templates over REST")),
    }
}

async fn template(app: &App, team: &Team, reference: &str) -> Result<Template, ApiError> {
    check(reference)?;
    let request = GetTemplateRequest { team: team.to_field(), reference: reference.to_owned() };
    let answer = app.clients.catalog().get_template(request).await;
    let no_template = || ApiError::not_found(format!("template `{reference}` was not found"));
    Ok(answer.map_err(|status| ApiError::from(status).if_not_found(no_template))?.into_inner())
}

/// Deletes a template (by id or alias) or a snapshot (by id or full name).
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    PathText(reference): PathText<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    check(&reference)?;
    let team = team_of(&headers)?;
    let request = DeleteRequest { team: team.to_field(), reference: reference.clone() };
    app.clients.catalog().delete(request).await.map_err(|status| {
        // The word "template" is how one of the SDKs knows what was not found.
        after_the_fact(ApiError::from(status)).if_not_found(|| {
            ApiError::not_found(format!("template or snapshot `{reference}` was not found or is deleted"))
        })
    })?;
    tracing::info!(reference, "deleted");
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn check(reference: &str) -> Result<(), ApiError> {
    if is_reference(reference) {
        Ok(())
    } else {
        Err(ApiError::invalid("the name of a template or snapshot is too long, or has control characters"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_depends_on_raw_slashes() {
        let cases = [
            ("base", "/templates/base", Wanted::Template("base")),
            ("team/tags", "/templates/team%2Ftags", Wanted::Template("team/tags")),
            ("team/short:tag", "/templates/team/short:tag", Wanted::Template("team/short:tag")),
            ("aliases/base", "/templates/aliases/base", Wanted::Alias("base")),
            ("aliases/default/base", "/templates/aliases/default%2Fbase", Wanted::Alias("default/base")),
            ("aliases/base", "/templates/aliases%2Fbase", Wanted::Template("aliases/base")),
            ("tpl-1/tags", "/templates/tpl-1/tags", Wanted::Unimplemented),
            ("tpl-1/builds/b/status", "/templates/tpl-1/builds/b/status", Wanted::Unimplemented),
            ("tpl-1/files/hash", "/templates/tpl-1/files/hash", Wanted::Unimplemented),
        ];
        for (path, raw, expected) in cases {
            assert_eq!(wanted(path, raw), expected, "{raw}");
        }
    }
}
