//! Measures saves and restores of a job, in turn with plain files of the same sizes, and steps
//! with and without a save beside them. Every server is a process.

mod files;
mod samples;
mod training;

use std::{
    io,
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use tempfile::TempDir;
use zeroshard_client::{CreateJob, Target, TensorId};
use zeroshard_model::{DType, Restore, RestoreVersion, StateDType, geometry::blocks::SLICE};
use zeroshard_tests::{Cluster, synthetic};

use self::{
    samples::{Samples, Steps},
    training::Training,
};
use crate::{
    Error,
    step::{JOB, Level, WorkerOptions, spec},
    table::Table,
};

/// The size of a parameter and its AdamW state.
const BYTES_PER_PARAMETER: usize = 12;
/// The number of slices of which a server without room can make second copies.
const SECOND_COPIES: usize = 4;

/// Measure saves and restores, compared with plain files, and steps beside a save
///
/// The job has f32 parameters and AdamW, so a checkpoint has 12 bytes per parameter. Servers are
/// processes; the ranks are in this process. Each round measures, one after the other:
///
/// - save: a checkpoint of an idle job.
///
/// - write: plain files of the same number and sizes, written sequentially and flushed to disk
///   (fsync) by as many threads as there are servers.
///
/// - read: sequential reads of these plain files by as many threads as there are servers. Their
///   pages are removed from the page cache before. The field `cold` is true if the disk has read
///   the files, according to the system's counters.
///
/// - restore: new servers create the job from the checkpoint, until the first tensor has been
///   pulled. The pages of the checkpoint are removed from the page cache before.
///
/// - step: a step (push, reduce, decide, apply, pull) without a save.
///
/// - step-beside-save: a step that begins during a save.
///
/// - save-beside-steps: the save during which these steps are made.
///
/// - step-without-room, step-beside-save-without-room, save-beside-steps-without-room: the same on
///   other servers, which have room for second copies of four slices (`--snapshot-bytes`). A step
///   beside a save waits until the other slices are written.
///
/// The table shows the median of all rounds, and of steps also the longest. `ratio_plain` is the
/// speed relative to `write` or `read`, and `ratio_step` the duration relative to `step` on the
/// same servers. `server_peak_bytes` is the sum of the servers' peaks of resident memory: of `step`
/// before the first save, of `step-beside-save` after all saves, of `restore` the largest of all
/// rounds. `ratio_state` is this peak relative to the bytes of the checkpoint.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of ranks
    #[arg(long, default_value_t = 2)]
    workers: u32,
    /// Number of shard servers
    #[arg(long, default_value_t = 2)]
    servers: usize,
    /// Number of tensors
    #[arg(long, default_value_t = 64)]
    tensors: usize,
    /// Number of elements of each tensor
    #[arg(long, default_value_t = 1 << 20)]
    numel: usize,
    /// Directory in which temporary directories for checkpoints and plain files are created
    #[arg(long, default_value = ".")]
    directory: PathBuf,
    /// Number of rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of steps without a save in each round
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let fields = [
        "operation",
        "bytes",
        "seconds",
        "longest",
        "gbps",
        "ratio_plain",
        "ratio_step",
        "cold",
        "server_peak_bytes",
        "ratio_state",
    ];
    let samples = tokio::runtime::Runtime::new()?.block_on(measure(options))?;
    let mut table = Table::new(json, &fields);
    for mut row in samples.rows() {
        row["bench"] = "checkpoint".into();
        row["params"] = (options.tensors * options.numel).into();
        row["workers"] = options.workers.into();
        row["servers"] = options.servers.into();
        row["bytes"] = samples.bytes.into();
        table.row(row);
    }
    table.finish();
    Ok(())
}

async fn measure(options: &Options) -> Result<Samples, Error> {
    // It is removed after the clusters have ended, which write to it.
    let place = tempfile::tempdir_in(std::path::absolute(&options.directory)?)?;
    let with_room = Cluster::start(options.servers);
    let slice = options.numel.min(SLICE) * BYTES_PER_PARAMETER;
    let room = (SECOND_COPIES * slice).to_string();
    let without_room = Cluster::start_with(options.servers, &["--snapshot-bytes", &room]);
    let mut samples = Samples::default();
    let mut training = Training::start(with_room.address(), &ranks(options, &with_room)).await?;
    let mut waiting =
        Training::start(without_room.address(), &ranks(options, &without_room)).await?;
    samples.with_room.peak_without_save = peak(&with_room);
    samples.without_room.peak_without_save = peak(&without_room);
    for _ in 0..options.rounds {
        save_and_restore(options, place.path(), &training, &mut samples).await?;
        steps_and_save(options.steps, place.path(), &mut training, &mut samples.with_room).await?;
        steps_and_save(options.steps, place.path(), &mut waiting, &mut samples.without_room)
            .await?;
    }
    samples.with_room.peak_with_save = peak(&with_room);
    samples.without_room.peak_with_save = peak(&without_room);
    Ok(samples)
}

/// Measures steps without a save, and steps and a save beside each other.
async fn steps_and_save(
    steps: u32,
    place: &Path,
    training: &mut Training,
    samples: &mut Steps,
) -> Result<(), Error> {
    for _ in 0..steps {
        samples.step.push(training.step().await?);
    }
    let saved = tempfile::tempdir_in(place)?;
    let (steps, save) = training.steps_beside_save(url(&saved)).await?;
    samples.step_beside_save.extend(steps);
    samples.save_beside_steps.push(save);
    Ok(())
}

/// Measures a save and a restore without steps, and plain files of the same sizes. Blocks its
/// thread while it uses the plain files; the tasks of the ranks are idle, and run in other threads.
async fn save_and_restore(
    options: &Options,
    place: &Path,
    training: &Training,
    samples: &mut Samples,
) -> Result<(), Error> {
    let (saved, folder) = (tempfile::tempdir_in(place)?, tempfile::tempdir_in(place)?);
    samples.save.push(training.save(&url(&saved)).await?);
    let data = files::data_files(&saved.path().join(JOB))?;
    samples.bytes = data.iter().map(|(_, bytes)| bytes).sum();

    let numbered = data.iter().enumerate();
    let plain: Vec<_> = numbered
        .map(|(number, (_, bytes))| (folder.path().join(number.to_string()), *bytes))
        .collect();
    let content = content();
    samples.write.push(seconds(|| files::write(&plain, options.servers, &content))?);

    files::evict(&plain)?;
    files::evict(&data)?;
    let before = files::read_from_disk("self")?;
    samples.read.push(seconds(|| files::read(&plain, options.servers))?);
    samples.read_from_disk.push(files::read_from_disk("self")? - before);

    let cluster = Cluster::start(options.servers);
    let from_disk = || -> io::Result<u64> {
        let servers = cluster.shards.iter();
        servers.map(|server| files::read_from_disk(&server.id().to_string())).sum()
    };
    let before = from_disk()?;
    samples.restore.push(restore(&ranks(options, &cluster)[0], &saved).await?);
    samples.restored_from_disk.push(from_disk()? - before);
    samples.peak_of_restore = samples.peak_of_restore.max(peak(&cluster));
    Ok(())
}

/// Creates the job from its checkpoint and pulls its first tensor. Returns the seconds.
async fn restore(rank: &WorkerOptions, saved: &TempDir) -> Result<f64, Error> {
    let client = zeroshard_client::Cluster::connect(&rank.address, Default::default()).await?;
    let mut create = CreateJob::new(spec(rank)?);
    let version = RestoreVersion::Latest;
    create.restore = Some(Restore { url: url(saved), job: JOB.to_owned(), version, line: None });
    let mut first = vec![0.0; rank.numel];
    let began = Instant::now();
    client.create_job(create).await?;
    let job = client.join(JOB, rank.rank).await?;
    let version = job.version().ok_or("the restored job has no version")?;
    job.pull(version, vec![Target::new(TensorId::new(0), &mut first)]).await?;
    Ok(began.elapsed().as_secs_f64())
}

/// The options of all ranks of the job on `cluster`.
fn ranks(options: &Options, cluster: &Cluster) -> Vec<WorkerOptions> {
    let first = WorkerOptions {
        address: cluster.address().to_owned(),
        rank: 0,
        workers: options.workers,
        servers: options.servers as u32,
        replicas: 1,
        tensors: options.tensors,
        numel: options.numel,
        level: Level::Os,
        steps: 0, // not read: the steps are made here
        dtype: DType::F32,
        state_dtype: StateDType::F32,
        wire: DType::F32.into(),
        parameter_wire: None,
    };
    first.all()
}

/// The sum of the shard servers' peaks of resident memory.
fn peak(cluster: &Cluster) -> u64 {
    cluster.shards.iter().map(|shard| shard.peak_memory()).sum()
}

/// A block for plain files. Like a checkpoint, it cannot be compressed by the disk.
fn content() -> Vec<u8> {
    let values = synthetic::values(1, files::BLOCK / size_of::<f32>());
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn url(directory: &TempDir) -> String {
    format!("file://{}", directory.path().display())
}

fn seconds(work: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed().as_secs_f64())
}
