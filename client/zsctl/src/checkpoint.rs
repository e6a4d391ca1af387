//! `zsctl checkpoint`.

use std::{collections::BTreeSet, path::PathBuf};

use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use zeroshard_checkpoint::{Export, Manifest, Storage, exported_bytes};
use zeroshard_client::{Cluster, CreateJob, Error, Result};
use zeroshard_model::{
    JobSpec, LineVersion, Optimizer, Restore, RestoreVersion, line::parse_version,
};

use crate::{
    print,
    table::{human, table},
    tensors::kind,
};

/// Where checkpoints are.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Place {
    /// URL of the directory or prefix with the checkpoints: file:///checkpoints,
    /// s3://bucket/prefix, gs://bucket/prefix or az://container/prefix. Credentials come from the
    /// usual environment variables (AWS_ACCESS_KEY_ID, ...)
    #[arg(long, env = "ZEROSHARD_CHECKPOINTS", value_name = "URL")]
    url: String,
}

/// The number of a version, and that of its line if you have named it.
type Version = (u64, Option<u64>);

/// Subcommands of `zsctl checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Save the current version of a job while training continues
    Save {
        /// Name of the job
        job: String,
        /// URL of the directory or prefix, which all servers must be able to reach [default: that
        /// of the job's policy]
        #[arg(long, env = "ZEROSHARD_CHECKPOINTS", value_name = "URL")]
        url: Option<String>,
    },
    /// Create a job from a checkpoint. Workers that join it continue from the saved version
    Restore {
        /// Name of the saved job
        job: String,
        /// Version: 120, or 120@1 on another line than the current one [default: the latest]
        #[arg(value_parser = parse_version)]
        version: Option<Version>,
        /// Name of the new job [default: the same name]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Number of workers [default: as saved]
        #[arg(long, value_name = "N")]
        world: Option<u32>,
        /// Number of shard servers to wait for
        #[arg(long, value_name = "N", default_value_t = 1)]
        min_servers: u32,
        #[command(flatten)]
        place: Place,
    },
    /// List checkpoints
    Ls {
        /// Name of the job [default: all jobs]
        job: Option<String>,
        #[command(flatten)]
        place: Place,
    },
    /// Show the tensors, the optimizer and the files of a checkpoint
    Show {
        /// Name of the job
        job: String,
        /// Version: 120, or 120@1 on another line than the current one [default: the latest]
        #[arg(value_parser = parse_version)]
        version: Option<Version>,
        #[command(flatten)]
        place: Place,
    },
    /// Read every byte of a checkpoint and compare it with its hash
    Verify {
        /// Name of the job
        job: String,
        /// Version: 120, or 120@1 on another line than the current one [default: the latest]
        #[arg(value_parser = parse_version)]
        version: Option<Version>,
        #[command(flatten)]
        place: Place,
    },
    /// Remove a checkpoint
    Rm {
        /// Name of the job
        job: String,
        /// Version: 120, or 120@1 on another line than the current one
        #[arg(value_parser = parse_version)]
        version: Version,
        #[command(flatten)]
        place: Place,
    },
    /// State that the job that owns the checkpoints of a name is over, so that another job of this
    /// name can write there
    Release {
        /// Name of the job
        job: String,
        #[command(flatten)]
        place: Place,
    },
    /// Write the model of a checkpoint to a new directory, as Hugging Face tools read it
    Export {
        /// Name of the job
        job: String,
        /// Version: 120, or 120@1 on another line than the current one [default: the latest]
        #[arg(value_parser = parse_version)]
        version: Option<Version>,
        /// The directory, which must not exist
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        /// Size in bytes at which a file ends
        #[arg(long, value_name = "BYTES", default_value_t = 5_000_000_000)]
        file_bytes: u64,
        /// Write this running average of the job instead of its parameters
        #[arg(long, value_name = "NAME")]
        average: Option<String>,
        #[command(flatten)]
        place: Place,
    },
}

/// Carries out a command that needs no cluster; `None` for others.
pub(crate) async fn offline(command: &Command, json: bool) -> Option<Result<()>> {
    Some(match command {
        Command::Save { .. } | Command::Restore { .. } => return None,
        Command::Ls { job, place } => list(job.as_deref(), place, json).await,
        Command::Show { job, version, place } => show(job, *version, place, json).await,
        Command::Verify { job, version, place } => verify(job, *version, place, json).await,
        Command::Rm { job, version, place } => remove(job, *version, place, json).await,
        Command::Release { job, place } => release(job, place, json).await,
        Command::Export { job, version, to, file_bytes, average, place } => {
            let average = average.as_deref();
            let export = Export { directory: to, file_bytes: *file_bytes, average };
            export_model(job, *version, &export, place, json).await
        }
    })
}

/// Carries out a command that needs a cluster.
pub(crate) async fn online(command: &Command, cluster: &Cluster, json: bool) -> Result<()> {
    match command {
        Command::Save { job, url } => {
            let (version, bytes) = cluster.save_checkpoint(job, url.as_deref()).await?;
            let event = json!({"event": "saved", "job": job, "version": version, "bytes": bytes});
            let text = format!("version {version} of job {job:?} is saved: {}", human(bytes));
            print(json, &event, &text);
        }
        Command::Restore { job, version, name, world, min_servers, place } => {
            let manifest = open(job, *version, place).await?.1;
            let saved = manifest.spec();
            let name = name.clone().unwrap_or_else(|| job.clone());
            let spec = JobSpec {
                name: name.clone(),
                world: world.unwrap_or(saved.world),
                min_servers: *min_servers,
                ..saved.clone()
            };
            let version = manifest.version();
            let mut create = CreateJob::new(spec);
            create.restore = Some(Restore {
                url: place.url.clone(),
                job: job.clone(),
                version: RestoreVersion::Exactly(version.version),
                line: Some(version.line),
            });
            cluster.create_job(create).await?;
            let LineVersion { version: number, line } = version;
            let event = json!({"event": "restored", "job": name, "version": number, "line": line});
            print(json, &event, &format!("job {name:?} continues from version {version}"));
        }
        _ => {}
    }
    Ok(())
}

/// Opens the checkpoint of a version, or the latest one.
async fn open(job: &str, version: Option<Version>, place: &Place) -> Result<(Storage, Manifest)> {
    let storage = existing(&place.url)?;
    let owner = storage.owner(job).await?;
    let manifest = match version {
        Some(version) => storage.checkpoint(job, version, owner.as_ref()).await?,
        None => storage.latest(job, owner.as_ref()).await?.ok_or_else(|| Error::NoCheckpoint {
            url: place.url.clone(),
            job: job.to_owned(),
            version: "any version".to_owned(),
        })?,
    };
    Ok((storage, manifest))
}

/// Opens a storage that exists: a directory with a typing error is not created.
fn existing(url: &str) -> Result<Storage> {
    let expected = "the URL of a directory that exists";
    Storage::open_existing(url)?
        .ok_or_else(|| Error::invalid("--url", format!("{url:?}"), expected))
}

async fn list(job: Option<&str>, place: &Place, json: bool) -> Result<()> {
    let storage = existing(&place.url)?;
    let jobs = match job {
        Some(job) => vec![job.to_owned()],
        None => storage.jobs().await?,
    };
    let columns = ["JOB", "VERSION", "LINE", "SIZE", "FILES", "PARAMETERS", "RANKS WITH DATA"];
    let mut rows = table(&columns);
    for job in jobs {
        let owner = storage.owner(&job).await?;
        for version in storage.versions(&job).await? {
            let manifest = storage.manifest(&job, version).await?;
            let (files, ranks) = (manifest.files().count(), manifest.ranks().len());
            let parameters = manifest.spec().manifest.parameters();
            let is_current = owner.as_ref().is_none_or(|owner| owner.admits(&manifest));
            if json {
                let event = json!({
                    "event": "checkpoint", "job": job, "version": version.version,
                    "line": version.line, "current": is_current, "bytes": manifest.bytes(),
                    "files": files, "parameters": parameters, "ranks": ranks,
                    "created": manifest.created(),
                });
                print(true, &event, "");
            }
            rows.add_row([
                job.clone(),
                version.to_string(),
                if is_current { "current" } else { "abandoned" }.to_owned(),
                human(manifest.bytes()),
                files.to_string(),
                parameters.to_string(),
                ranks.to_string(),
            ]);
        }
    }
    if !json {
        print(false, &Value::Null, &rows.to_string());
    }
    Ok(())
}

async fn show(job: &str, version: Option<Version>, place: &Place, json: bool) -> Result<()> {
    let (_, manifest) = open(job, version, place).await?;
    let (spec, version) = (manifest.spec(), manifest.version());
    if json {
        let files: Vec<_> =
            manifest.files().map(|(name, bytes)| json!({"name": name, "bytes": bytes})).collect();
        let event = json!({
            "event": "checkpoint", "job": job, "version": version.version, "line": version.line,
            "bytes": manifest.bytes(), "files": files, "created": manifest.created(),
            "optimizer": optimizers(spec), "world": spec.world, "ranks": manifest.ranks(),
            "lost_ranks": manifest.lost_ranks(),
        });
        print(true, &event, "");
        return Ok(());
    }
    let mut tensors = table(&["TENSOR", "SHAPE", "DTYPE", "KIND"]);
    for tensor in spec.manifest.tensors() {
        let (shape, dtype) = (format!("{:?}", tensor.shape), format!("{:?}", tensor.dtype));
        tensors.add_row([tensor.name.clone(), shape, dtype, kind(tensor)]);
    }
    let mut files = table(&["FILE", "SIZE"]);
    for (name, bytes) in manifest.files() {
        files.add_row([name.to_owned(), human(bytes)]);
    }
    let lost = match manifest.lost_ranks() {
        [] => String::new(),
        lost => format!("; the data of ranks {lost:?} was lost before the save"),
    };
    let text = format!(
        "version {} of job {job:?}: {}, {} parameters, {}, saved with {} ranks, data of ranks \
         {:?}{lost}\n\n{tensors}\n\n{files}",
        version,
        human(manifest.bytes()),
        spec.manifest.parameters(),
        optimizers(spec),
        spec.world,
        manifest.ranks(),
    );
    print(false, &Value::Null, &text);
    Ok(())
}

/// The kinds of optimizers of the parameter groups, such as "adamw" or "adamw, sgd".
fn optimizers(spec: &JobSpec) -> String {
    let names: BTreeSet<&str> = spec.groups.iter().map(Optimizer::name).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

/// A progress bar over bytes, which is hidden unless standard error is a terminal.
fn bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let style = "{bar:24} {bytes}/{total_bytes} {bytes_per_sec} {eta} left";
    let style = ProgressStyle::with_template(style);
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

async fn verify(job: &str, version: Option<Version>, place: &Place, json: bool) -> Result<()> {
    let (storage, manifest) = open(job, version, place).await?;
    let bar = bar(manifest.bytes());
    let verified = storage.verify(&manifest, |bytes| bar.inc(bytes)).await;
    bar.finish_and_clear();
    verified?;
    let (version, bytes) = (manifest.version(), manifest.bytes());
    let event = json!({
        "event": "verified", "job": job, "version": version.version, "line": version.line,
        "bytes": bytes,
    });
    let text = format!("version {version} of job {job:?} is intact: {}", human(bytes));
    print(json, &event, &text);
    Ok(())
}

async fn remove(job: &str, version: Version, place: &Place, json: bool) -> Result<()> {
    let storage = existing(&place.url)?;
    let version = match version {
        (version, Some(line)) => LineVersion { version, line },
        (number, None) => the_only(&storage, job, number).await?,
    };
    storage.remove(job, version).await?;
    if storage.versions(job).await?.is_empty() {
        release_claim(&storage, job).await?;
    }
    let LineVersion { version: number, line } = version;
    let event = json!({"event": "removed", "job": job, "version": number, "line": line});
    print(json, &event, &format!("the checkpoint of version {version} of job {job:?} is removed"));
    Ok(())
}

/// Returns the only checkpoint with a number.
async fn the_only(storage: &Storage, job: &str, number: u64) -> Result<LineVersion> {
    let all = storage.versions(job).await?;
    let all: Vec<_> = all.into_iter().filter(|of| of.version == number).collect();
    match all[..] {
        // An abandoned save leaves files without a manifest, which are removed, too.
        [] => Ok(LineVersion { version: number, line: 0 }),
        [one] => Ok(one),
        _ => {
            let all: Vec<String> = all.iter().map(|of| format!("{number}@{}", of.line)).collect();
            Err(Error::refused(format!(
                "job {job:?} has several checkpoints of version {number}; name one of {}",
                all.join(", ")
            )))
        }
    }
}

async fn release(job: &str, place: &Place, json: bool) -> Result<()> {
    let storage = existing(&place.url)?;
    let Some(owner) = release_claim(&storage, job).await? else {
        let (url, job) = (place.url.clone(), job.to_owned());
        return Err(Error::NoCheckpoint { url, job, version: "any version".to_owned() });
    };
    let event = json!({"event": "released", "job": job, "owner": format!("{owner:016x}")});
    let text = format!(
        "another job {job:?} can write to {} now; the owner was the job with id {owner:016x}",
        place.url
    );
    print(json, &event, &text);
    Ok(())
}

/// Allows other jobs to claim the checkpoints of a name. Returns the owner's id, if there is one.
async fn release_claim(storage: &Storage, job: &str) -> Result<Option<u64>> {
    let Some(owner) = storage.owner(job).await? else { return Ok(None) };
    storage.release_claim(job, owner.of().job_id).await?;
    Ok(Some(owner.of().job_id))
}

async fn export_model(
    job: &str,
    version: Option<Version>,
    export: &Export<'_>,
    place: &Place,
    json: bool,
) -> Result<()> {
    let (storage, manifest) = open(job, version, place).await?;
    let bar = bar(exported_bytes(manifest.spec()));
    let exported = storage.export(&manifest, export, |bytes| bar.inc(bytes)).await;
    bar.finish_and_clear();
    exported?;
    let (version, directory) = (manifest.version(), export.directory.display().to_string());
    let LineVersion { version: number, line } = version;
    let event = json!({
        "event": "exported", "job": job, "version": number, "line": line, "to": directory,
    });
    print(json, &event, &format!("version {version} of job {job:?} is exported to {directory}"));
    Ok(())
}
