//! `snapyard template build|ls`.

use std::path::Path;

use snapyard_proto::v1::{BuildTemplateRequest, ListTemplatesRequest, Template};

use crate::cli::TemplateBuildArgs;
use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::grpc::{Backend, TEAM};
use crate::output;
use crate::progress::Progress;

/// The recipe of the template that every server has.
pub const BASE_RECIPE: &str = include_str!("../../guest/recipes/base.toml");
/// Its alias.
pub const BASE_ALIAS: &str = "base";

/// `template build`: progress on standard error, the template's id on standard output.
pub async fn build(context: &Context, args: TemplateBuildArgs) -> Result<(), Failure> {
    let recipe = read_recipe(&args.recipe)?;
    let name = args.recipe.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let template =
        run_build(&context.node().await?, recipe, args.rebuild, Progress::start(format!("template {name}"))).await?;
    if context.json {
        output::print_json(&output::template_json(&template))?;
    } else {
        output::print_line(&template.id)?;
    }
    Ok(())
}

/// A recipe by path, or the built-in one by its name if there is no such file.
fn read_recipe(path: &Path) -> Result<String, Failure> {
    match std::fs::read_to_string(path) {
        Ok(recipe) => Ok(recipe),
        Err(_) if path == Path::new("base") => Ok(BASE_RECIPE.to_owned()),
        Err(error) => Err(Failure::new(Kind::NotFound, format!("recipe {}: {error}", path.display()))
            .hint("a recipe is a TOML file; `base` is the one that comes with the program")),
    }
}

/// Has the node build a template, and shows how far it is.
pub async fn run_build(
    backend: &Backend,
    recipe_toml: String,
    rebuild: bool,
    mut progress: Progress,
) -> Result<Template, Failure> {
    let request = BuildTemplateRequest { team: TEAM.into(), recipe_toml, rebuild };
    let built = async {
        let mut messages = backend.node().build_template(request).await?.into_inner();
        while let Some(message) = messages.message().await? {
            if let Some(template) = message.done {
                return Ok(template);
            }
            progress.update(&message.step, message.percent);
        }
        Err(tonic::Status::unknown("the build ended without saying how"))
    };
    match built.await {
        Ok(template) => {
            progress.finish("ready");
            Ok(template)
        }
        Err(status) => {
            progress.finish("failed");
            Err(Failure::from_status(&status))
        }
    }
}

/// `template ls`: from the catalog, with templates that are still being built and those that failed.
pub async fn ls(context: &Context) -> Result<(), Failure> {
    let request = ListTemplatesRequest { team: TEAM.into() };
    let mut catalog = context.node().await?.catalog();
    let answer = catalog.list_templates(request).await.map_err(|status| Failure::from_status(&status))?;
    let templates = answer.into_inner().templates;
    if context.json {
        output::print_json(&templates.iter().map(output::template_json).collect())?;
    } else if templates.is_empty() {
        eprintln!("no templates; `snapyard template build` makes `base`");
    } else {
        output::print_table(&output::template_table(&templates, output::now()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_is_built_in_and_other_recipes_are_files() {
        assert_eq!(read_recipe(Path::new("base")).expect("built in"), BASE_RECIPE);
        assert!(BASE_RECIPE.contains(&format!("\nalias = {BASE_ALIAS:?}\n")));
        let failure = read_recipe(Path::new("/nonexistent/recipe.toml")).expect_err("no such file");
        assert_eq!(failure.kind, Kind::NotFound);
    }
}
