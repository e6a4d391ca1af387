//! `zsctl follow` writes the newest versions of a job to files.

use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::value_parser;
use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::block_in_place,
};
use zeroshard_checkpoint::{ModelLayout, NewModel};
use zeroshard_client::{
    Cluster, Copied, Error, Follow, FollowedValues, FollowedVersion, Follower, Result,
};
use zeroshard_model::{DType, JobSpec, LineVersion};

use crate::{print, table::human};
use directory::{Contents, Directory, Written};

mod directory;

/// The bytes of a tensor that are written before zsctl looks whether it is to end. A multiple of
/// the size of an element.
const WRITTEN: usize = 16 << 20;

/// Flags of `zsctl follow`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Name of the job; `zsctl status` lists the jobs
    job: String,
    /// The directory for the versions. zsctl creates it if it is missing
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Write a version only if its number is at least N higher than that of the last one written.
    /// The first version after a return to a checkpoint is always written
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = value_parser!(u64).range(1..))]
    every: u64,
    /// Dtype of the parameters in the files: f32, bf16 or f16. Buffers keep their own. In f32, most
    /// steps change almost every value, and the servers send almost as much as for a full copy
    /// [default: the dtype of the job's parameters, or f32 if they have several]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<DType>,
    /// Write only these tensors; `zsctl tensors` lists them. Tied tensors are written once, as the
    /// tensor to which they are tied [default: all tensors]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    tensors: Option<Vec<String>>,
    /// Number of versions to keep in the directory, or 0 for all. The disk needs room for one more
    #[arg(long, value_name = "K", default_value_t = 2)]
    keep: usize,
    /// End as soon as this version or a later one is written, which `--every` does not skip
    /// [default: continue until Ctrl-C]
    #[arg(long, value_name = "VERSION")]
    until: Option<u64>,
    /// Size in bytes at which a file ends
    #[arg(long, value_name = "BYTES", default_value_t = 5_000_000_000)]
    file_bytes: u64,
    /// Address of a mirror (`zsctl mirror`) that sends the values instead of the servers
    #[arg(long, value_name = "HOST:PORT")]
    mirror: Option<String>,
    /// Number of seconds to wait for the next version, and for a full copy
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) within: u64,
}

impl Arguments {
    /// Decides whether a version is written after the last one.
    fn is_due(&self, last: Option<LineVersion>, new: LineVersion) -> bool {
        let Some(last) = last.filter(|last| last.line == new.line) else { return true };
        let is_wanted = self.until.is_some_and(|until| new.version >= until);
        new.version >= last.version.saturating_add(if is_wanted { 1 } else { self.every })
    }

    fn is_last(&self, last: Option<LineVersion>, new: LineVersion) -> bool {
        let last = last.filter(|last| last.line == new.line);
        last.zip(self.until).is_some_and(|(last, until)| last.version >= until)
    }
}

/// Writes versions of a job until Ctrl-C, or until a version.
///
/// # Errors
/// Those of [`Cluster::follow`] and of [`Follower::next`]; [`Error::Storage`] if the files cannot
/// be written; [`Error::Refused`] for a directory with other files.
pub(crate) async fn run(arguments: &Arguments, cluster: &Cluster, json: bool) -> Result<()> {
    let Arguments { job, tensors, .. } = arguments;
    let of = cluster.describe_job(job).await?;
    let dtype = arguments.dtype.unwrap_or_else(|| dtype_of(&of.spec));
    let wait = Duration::from_secs(arguments.within);
    let mirror = arguments.mirror.clone();
    let follow = Follow { dtype, tensors: tensors.clone(), wait, mirror, ..Follow::default() };
    let follower = cluster.follow(job, follow).await?;
    let contents = Contents { job: job.clone(), dtype, tensors: tensors.clone() };
    let directory = Directory::open(&arguments.to, &contents, follower.description().id)?;
    let stopped = stopped()
        .map_err(|error| Error::Internal { cause: format!("cannot handle signals: {error}") })?;
    let mut asked = stopped.clone();
    let mut files = Files { arguments, directory, follower, stopped, json };
    tokio::select! {
        result = files.write_versions() => result,
        _ = asked.wait_for(|&asked| asked) => Ok(()),
    }
}

/// Returns the dtype of all parameters, or f32 if there are several.
fn dtype_of(spec: &JobSpec) -> DType {
    let parameters = spec.manifest.tensors().iter().filter(|tensor| !tensor.buffer);
    let mut dtypes = parameters.map(|tensor| tensor.dtype);
    let first = dtypes.next().unwrap_or(DType::F32);
    if dtypes.all(|dtype| dtype == first) { first } else { DType::F32 }
}

/// Returns a value that becomes `true` when the process is asked to end.
fn stopped() -> io::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (asked, stopped) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // An error means that the process already ends.
        let _ = asked.send(true);
    });
    Ok(stopped)
}

/// What the servers have sent since the last version that was written.
#[derive(Debug, Default)]
struct Received {
    bytes: u64,
    versions: u32,
    /// The sum of the fractions of the elements that each version has changed.
    changed: f64,
    copied: Option<Copied>,
}

impl Received {
    fn add(&mut self, version: &FollowedVersion) {
        self.bytes += version.bytes();
        self.versions += 1;
        self.changed += version.changed_fraction().unwrap_or_default();
        self.copied = version.copied().or(self.copied);
    }

    /// The fraction of the elements that a version has changed, on average.
    fn changed(&self) -> f64 {
        self.changed / f64::from(self.versions.max(1))
    }
}

/// The files of the versions that a follower receives.
struct Files<'a> {
    arguments: &'a Arguments,
    directory: Directory,
    follower: Follower,
    stopped: watch::Receiver<bool>,
    json: bool,
}

impl Files<'_> {
    async fn write_versions(&mut self) -> Result<()> {
        let (mut model, mut received) = (None::<Model>, Received::default());
        loop {
            let mut version = self.follower.next().await?;
            let began = Instant::now();
            let job_id = self.follower.description().id;
            let mut of = match model.take().filter(|model| model.job_id == job_id) {
                Some(model) => model,
                None => Model::new(&self.follower, self.arguments.file_bytes)?,
            };
            self.follower.apply(&mut version, of.values.targets()?).await?;
            received.add(&version);
            of.job_id = self.follower.description().id;
            let written = Written { job_id: of.job_id, version: version.version() };
            let mut last = self.directory.last(written.job_id)?;
            if self.arguments.is_due(last, written.version) {
                if !block_in_place(|| self.write(&of, written))? {
                    return Ok(());
                }
                self.say(written, &received, &of, began.elapsed());
                received = Received::default();
                last = Some(written.version);
            }
            if self.arguments.is_last(last, written.version) {
                return Ok(());
            }
            model = Some(of);
        }
    }

    /// Writes a version, and removes old ones. Returns `false` if the process is asked to end
    /// before.
    fn write(&self, model: &Model, of: Written) -> Result<bool> {
        let path = self.directory.path_of(of);
        let (job, version) = (&self.arguments.job, of.version.to_string());
        let id = format!("{:016x}", of.job_id);
        let metadata = [("format", "pt"), ("job", job), ("job_id", &id), ("version", &version)];
        let mut new = NewModel::create(&path, &model.layout, &metadata)?;
        for ((_, dtype, values), &written) in model.values.iter().zip(&model.written) {
            for values in values.chunks(WRITTEN) {
                if *self.stopped.borrow() {
                    return Ok(false);
                }
                match dtype == written {
                    true => new.write(values)?,
                    false => _ = new.write_rounded(values, written)?,
                }
            }
        }
        new.finish()?;
        self.directory.point_to(of)?;
        self.directory.prune(of.job_id, self.arguments.keep)?;
        Ok(true)
    }

    fn say(&self, of: Written, received: &Received, model: &Model, took: Duration) {
        let path = self.directory.path_of(of).display().to_string();
        let (bytes, changed, versions) = (received.bytes, received.changed(), received.versions);
        let hash = self.follower.hash().map(|hash| format!("{hash:016x}"));
        let event = json!({
            "event": "followed", "job": self.arguments.job, "version": of.version.version,
            "line": of.version.line, "to": path, "received_bytes": bytes, "versions": versions,
            "changed_fraction": changed, "copied": received.copied.map(Copied::name),
            "written_bytes": model.layout.bytes(), "hash": hash, "seconds": took.as_secs_f64(),
        });
        let how = match (received.copied, versions) {
            (Some(copied), _) => format!("with a full copy ({})", copied.name()),
            (None, 1) => format!("{:.2}% of the values changed", 100.0 * changed),
            (None, versions) => {
                let percent = 100.0 * changed;
                format!("{percent:.2}% of the values changed in each of {versions} versions")
            }
        };
        let (version, bytes, seconds) = (of.version, human(bytes), took.as_secs_f64());
        let text = format!(
            "version {version}: {bytes} received, {how}; written to {path} in {seconds:.2} s"
        );
        print(self.json, &event, &text);
    }
}

/// The values of all followed tensors, and the files to which they are written.
struct Model {
    job_id: u64,
    layout: ModelLayout,
    /// The values, in the order of the layout.
    values: FollowedValues,
    /// The dtype of each tensor in the files.
    written: Vec<DType>,
}

impl Model {
    /// Allocates arrays for the tensors of a follower.
    fn new(follower: &Follower, file_bytes: u64) -> Result<Self> {
        let manifest = &follower.spec().manifest;
        let values = FollowedValues::new(follower);
        let tensors = values.iter().map(|(index, dtype, _)| {
            let tensor = &manifest.tensors()[index];
            (tensor, if tensor.buffer { tensor.dtype } else { dtype })
        });
        let tensors: Vec<_> = tensors.collect();
        let written = tensors.iter().map(|(_, dtype)| *dtype).collect();
        let layout = ModelLayout::new(tensors, file_bytes);
        Ok(Self { job_id: follower.description().id, layout, values, written })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn arguments(flags: &str) -> Arguments {
        let line = format!("zsctl follow train --to versions {flags}");
        match crate::Arguments::parse_from(line.split_whitespace()).command {
            crate::Command::Follow(arguments) => arguments,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the versions that are written if each one on line 0, and then on line 1, appears.
    fn written(flags: &str) -> Vec<String> {
        let (arguments, mut last, mut written) = (arguments(flags), None, Vec::new());
        for (line, versions) in [(0, 2..8), (1, 5..13)] {
            for version in versions {
                let new = LineVersion { version, line };
                if arguments.is_due(last, new) {
                    written.push(new.to_string());
                    last = Some(new);
                }
                if arguments.is_last(last, new) {
                    return written;
                }
            }
        }
        written
    }

    #[test]
    fn versions_have_a_distance_except_the_first_of_a_line_and_the_last() {
        assert_eq!(written("--every 4"), ["2", "6", "5@1", "9@1"]);
        assert_eq!(written("--every 4 --until 11"), ["2", "6", "5@1", "9@1", "11@1"]);
        assert_eq!(written("--every 4 --until 6"), ["2", "6"]);
        assert_eq!(written("--until 3"), ["2", "3"]);
        assert_eq!(written("--every 4 --until 0"), ["2"]);
    }
}
