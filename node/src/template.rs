//! Templates: from a recipe to a snapshot that every create of that template restores.
//!
//! ```text
//! recipe (data) ─► root file system (script, cached by content) ─► boot ─► agent answers ─► start command
//!   ─► warm ─► capture ─► store ─► commit the snapshot and the template's row ─► the virtual machine ends
//! ```
//!
//! Crash points: nothing is visible before the last commit, which also replaces an older template of the same alias.
//! A root file system appears in the cache by rename. Retry: building what is ready answers at once, unless a rebuild
//! is asked for; one build an alias at a time.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Deserialize;
use snapyard_snapstore as store;
use snapyard_snapstore::catalog::{BuildStatus, CatalogError, SnapshotCommit, SnapshotRow, TemplateRow};
use snapyard_snapstore::ids::{SnapshotId, TeamId, TemplateId};
use snapyard_snapstore::manifest::ManifestError;
use snapyard_snapstore::publish::Outcome;
use snapyard_vmm::{GuestPort, PageSource, Shape};
use tokio::sync::mpsc;

use crate::agent::{Agent, Processes};
use crate::capture::{self, Identity};
use crate::error::NodeError;
use crate::node::State;
use crate::ops::restore;
use crate::source::{FILL_BYTES, FileImage};

/// How long a booted guest may take until its agent answers. Emulated guests boot in a few seconds.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);

/// What a template is made of. See `guest/recipes/base.toml`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name that creates use.
    pub alias: String,
    /// Debian packages of the root file system.
    pub packages: Vec<String>,
    /// Unprivileged users, beside root.
    #[serde(default)]
    pub users: Vec<String>,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_mib: u64,
    /// Disk.
    pub disk_mib: u64,
    /// Debian release of the root file system.
    #[serde(default = "default_suite")]
    pub suite: String,
    /// Shell command to start before the capture; it is running in every sandbox. Empty: none.
    #[serde(default)]
    pub start_command: String,
    /// Commands to run to their end before the capture, one after the other.
    #[serde(default)]
    pub warm: Vec<WarmStep>,
}

/// A command that runs in the booted guest, so that what it touches is in memory in every sandbox.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct WarmStep {
    /// As whom.
    pub user: String,
    /// For `/bin/bash -l -c`. Must succeed.
    pub command: String,
}

fn default_suite() -> String {
    "bookworm".to_owned()
}

impl Recipe {
    /// Parses and checks a recipe.
    pub fn parse(text: &str) -> Result<Self, NodeError> {
        let recipe: Self = toml::from_str(text).map_err(|error| NodeError::Invalid(format!("the recipe: {error}")))?;
        let plain = |text: &str, extra: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || extra.contains(c))
        };
        let wrong = |what: String| Err(NodeError::Invalid(format!("the recipe: {what}")));
        if !plain(&recipe.alias, "-_") {
            return wrong(format!("alias {:?} must match [a-z0-9_-]+", recipe.alias));
        }
        // Names go to a package tool's command line: nothing that could be an option or a path.
        if let Some(name) = recipe.packages.iter().find(|name| !plain(name, "+-.") || name.starts_with('-')) {
            return wrong(format!("package {name:?} is not a Debian package name"));
        }
        if let Some(name) = recipe.users.iter().find(|name| !plain(name, "_-") || name.starts_with('-')) {
            return wrong(format!("user {name:?} must match [a-z0-9_-]+"));
        }
        if !plain(&recipe.suite, "-") || recipe.suite.starts_with('-') {
            return wrong(format!("suite {:?} is not a Debian release", recipe.suite));
        }
        if recipe.packages.is_empty() {
            return wrong("packages is empty".to_owned());
        }
        if !(1..=64).contains(&recipe.vcpus) {
            return wrong(format!("vcpus is {}, must be 1 to 64", recipe.vcpus));
        }
        if !(128..=1 << 20).contains(&recipe.memory_mib) || !(256..=1 << 20).contains(&recipe.disk_mib) {
            return wrong("memory_mib must be 128 to 1048576 and disk_mib 256 to 1048576".to_owned());
        }
        Ok(recipe)
    }

    fn shape(&self) -> Shape {
        Shape { vcpus: self.vcpus, memory_bytes: self.memory_mib << 20, disk_bytes: self.disk_mib << 20 }
    }
}

/// A step of a build, for people.
#[derive(Clone, Debug)]
pub struct Progress {
    /// What is being done.
    pub step: &'static str,
    /// Of the whole, 0 to 100.
    pub percent: u32,
}

/// Held while an alias is being built.
type BuildLock = Arc<tokio::sync::Mutex<()>>;

/// Builds in progress: one an alias.
#[derive(Default)]
pub struct Templates {
    building: Mutex<HashMap<(TeamId, String), BuildLock>>,
}

impl Templates {
    fn lock(&self, team: &TeamId, alias: &str) -> BuildLock {
        Arc::clone(self.building.lock().entry((team.clone(), alias.to_owned())).or_default())
    }
}

/// Builds the template of `recipe`, telling `progress`.
pub async fn build(
    node: &Arc<State>,
    team: &TeamId,
    recipe: &Recipe,
    rebuild: bool,
    progress: &mpsc::Sender<Progress>,
) -> Result<TemplateRow, NodeError> {
    let lock = node.templates.lock(team, &recipe.alias);
    let _building = lock.lock().await;
    drop_misfit(node, team, &recipe.alias).await?;
    let row = match node.catalog.get_template(team, &recipe.alias).await {
        Ok(row) if !rebuild && row.build_status == BuildStatus::Ready => return Ok(row),
        Ok(row) => row,
        Err(CatalogError::NotFound { .. }) => announce(node, team, recipe).await?,
        Err(error) => return Err(error.into()),
    };
    node.catalog.set_build_status(team, &row.id, BuildStatus::Building, "").await?;
    let built = run(node, &row, recipe, progress).await;
    if let Err(error) = &built {
        node.catalog.set_build_status(team, &row.id, BuildStatus::Error, &error.to_string()).await?;
    }
    built
}

/// Deletes a template that was built under another VMM or machine, so that no guest of it can start here: whoever asks
/// for it is told that it is being built, as soon as it is, and not that it does not fit.
pub async fn drop_misfit(node: &State, team: &TeamId, alias: &str) -> Result<(), NodeError> {
    let row = match node.catalog.get_template(team, alias).await {
        Ok(row) => row,
        Err(CatalogError::NotFound { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let Some(snapshot) = &row.snapshot_id else { return Ok(()) };
    let misfit = match store::Manifest::decode(&node.catalog.manifest(snapshot).await?) {
        Ok(manifest) => restore::check_host(&manifest.facts, node.hypervisor.facts())
            .err()
            .map(|(what, built, here)| format!("{what} was {built} when it was built and is {here} now")),
        Err(error @ ManifestError::Version(_)) => Some(error.to_string()),
        Err(error) => return Err(NodeError::Internal(format!("the manifest of template {alias} is damaged: {error}"))),
    };
    if let Some(misfit) = misfit {
        tracing::info!(template = alias, misfit, "deleted, to be built anew for this host");
        node.catalog.delete_template(team, alias).await?;
    }
    Ok(())
}

/// The template's row, before its first build.
async fn announce(node: &State, team: &TeamId, recipe: &Recipe) -> Result<TemplateRow, NodeError> {
    let shape = recipe.shape();
    let row = TemplateRow {
        id: TemplateId::from_random(random_bits()?),
        alias: Some(recipe.alias.clone()),
        team: team.clone(),
        snapshot_id: None,
        shape: store::Shape { vcpus: shape.vcpus, memory_bytes: shape.memory_bytes, disk_bytes: shape.disk_bytes },
        created_unix_ms: node.clock.now_unix_ms(),
        build_status: BuildStatus::Building,
        build_message: String::new(),
    };
    node.catalog.create_template(&row).await?;
    Ok(row)
}

async fn run(
    node: &Arc<State>,
    row: &TemplateRow,
    recipe: &Recipe,
    progress: &mpsc::Sender<Progress>,
) -> Result<TemplateRow, NodeError> {
    let tell = |step, percent| {
        // A caller that went away does not stop the build.
        let _ = progress.try_send(Progress { step, percent });
        tracing::info!(template = recipe.alias, step, percent, "building");
    };
    tell("making the root file system", 5);
    let rootfs = root_file_system(node, recipe).await?;
    tell("booting", 50);
    let row = boot_and_capture(node, row, recipe, &rootfs, &tell).await?;
    node.prewarm(&row.shape);
    tell("ready", 100);
    node.uploads.notify_one();
    Ok(row)
}

async fn boot_and_capture(
    node: &Arc<State>,
    template: &TemplateRow,
    recipe: &Recipe,
    rootfs: &std::path::Path,
    tell: &impl Fn(&'static str, u32),
) -> Result<TemplateRow, NodeError> {
    let alias = recipe.alias.as_str();
    let disk =
        FileImage::open(rootfs, FILL_BYTES).map_err(|error| failed(alias, format!("{}: {error}", rootfs.display())))?;
    let booted = node.hypervisor.boot(recipe.shape(), disk as Arc<dyn PageSource>, "").await;
    let vm = booted.map_err(|cause| NodeError::Vm { sandbox: alias.to_owned(), cause })?;
    let captured = async {
        let agent = Agent::new(vm.port(GuestPort::Control), alias);
        agent.wait_healthy(BOOT_DEADLINE).await?;
        tell("warming", 60);
        agent.warm().await?;
        warm_up(&Processes::new(vm.port(GuestPort::Agent), alias), recipe).await?;
        tell("capturing", 80);
        capture::capture_guest(&vm, &agent, alias).await
    }
    .await;
    vm.kill().await;
    let (capture, pause) = captured?;

    tell("storing", 85);
    let identity = Identity {
        id: SnapshotId::random(),
        key: node.catalog.ensure_team(&template.team).await?.dedup_key,
        shape: recipe.shape(),
        parent: None,
        created_unix_ms: node.clock.now_unix_ms(),
    };
    let kept = capture::keep_capture(node, &identity, capture)?;
    let row = |stored: &capture::Stored| SnapshotRow {
        internal: true,
        pause_us: u32::try_from(pause.as_micros()).unwrap_or(u32::MAX),
        ..capture::row(node, &identity, stored, &template.team)
    };
    let commit = |commit: SnapshotCommit| async move {
        Ok(Outcome::Ours(node.catalog.complete_template(&template.team, &template.id, &commit).await?))
    };
    match capture::publish(node, &identity, &kept, row, commit).await? {
        (_, Outcome::Ours(row) | Outcome::Other(row)) => Ok(row),
    }
}

/// Runs the recipe's warm steps and starts its command.
async fn warm_up(processes: &Processes, recipe: &Recipe) -> Result<(), NodeError> {
    for step in &recipe.warm {
        processes.run(&step.user, &step.command).await?;
    }
    if recipe.start_command.is_empty() {
        return Ok(());
    }
    processes.start("root", &recipe.start_command).await
}

/// The root file system of `recipe`, from the cache or made now.
async fn root_file_system(node: &State, recipe: &Recipe) -> Result<PathBuf, NodeError> {
    let alias = recipe.alias.as_str();
    let script = tokio::fs::read(&node.config.rootfs_script)
        .await
        .map_err(|error| failed(alias, format!("{}: {error}", node.config.rootfs_script.display())))?;
    let mut arguments = vec![
        ("--packages", recipe.packages.join(",")),
        ("--size-mib", recipe.disk_mib.to_string()),
        ("--suite", recipe.suite.clone()),
    ];
    if !recipe.users.is_empty() {
        arguments.push(("--users", recipe.users.join(",")));
    }
    // Named by what it is made from, so a changed recipe or script makes a new one.
    let key = format!("{arguments:?}{}", String::from_utf8_lossy(&script));
    let out = node.config.assets_dir.join("rootfs").join(format!("{}.ext4", blake3::hash(key.as_bytes()).to_hex()));
    if tokio::fs::try_exists(&out).await.unwrap_or(false) {
        return Ok(out);
    }
    let mut command = tokio::process::Command::new("bash");
    command.arg(&node.config.rootfs_script);
    for (name, value) in &arguments {
        command.arg(name).arg(value);
    }
    command.arg("--out").arg(&out).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let output = command.output().await.map_err(|error| failed(alias, format!("cannot start bash: {error}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = stderr.lines().rev().take(8).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        return Err(failed(alias, format!("its root file system: {}: {}", output.status, last.join("; "))));
    }
    Ok(out)
}

fn failed(alias: &str, why: String) -> NodeError {
    NodeError::Build { alias: alias.to_owned(), why }
}

fn random_bits() -> Result<u64, NodeError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| NodeError::Internal(format!("no randomness: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "alias = 'a'\npackages = ['python3']\nvcpus = 1\nmemory_mib = 256\ndisk_mib = 512\n";

    #[test]
    fn a_recipe_is_data_and_is_checked() {
        let recipe = Recipe::parse(GOOD).expect("good");
        assert_eq!(recipe.shape(), Shape { vcpus: 1, memory_bytes: 256 << 20, disk_bytes: 512 << 20 });
        for (from, to) in [
            ("'a'", "'a/b'"),
            ("'python3'", "'--hook=x'"),
            ("'python3'", "'a b'"),
            ("['python3']", "[]"),
            ("vcpus = 1", "vcpus = 0"),
            ("memory_mib = 256", "memory_mib = 1"),
            ("alias", "colour"),
        ] {
            let bad = GOOD.replacen(from, to, 1);
            assert!(matches!(Recipe::parse(&bad), Err(NodeError::Invalid(_))), "{bad}");
        }
    }

    #[test]
    fn the_shipped_recipe_is_good() {
        let recipe = Recipe::parse(include_str!("../../guest/recipes/base.toml")).expect("good");
        assert_eq!(recipe.alias, "base");
    }
}
