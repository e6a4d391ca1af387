//! Readers follow a job for 500 versions, while readers and servers are killed. Every version that
//! a reader has written to disk equals the trainer's.
//!
//! promise: consistent-reads

use std::{
    collections::BTreeMap,
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use half::bf16;
use tempfile::TempDir;
use zeroshard_client::{Cluster as Client, Job, Options};
use zeroshard_model::{JobSpec, TensorSpec};
use zeroshard_tests::{Cluster, Process, binary, safetensors, synthetic, timeout, training};

use crate::disturbed::{Random, seed};

const VERSIONS: u64 = 500;
const JOB: &str = "followed";
/// The number of readers. The last one reads through a mirror.
const READERS: usize = 4;

/// A reader: `zsctl follow`, which keeps all versions.
struct Reader {
    folder: TempDir,
    process: Option<Child>,
    arguments: Vec<String>,
    kills: u32,
}

impl Reader {
    fn new(address: &str, mirror: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let arguments =
            format!("--address {address} --json follow {JOB} --dtype bf16 --keep 0 --to");
        let mut arguments: Vec<_> = arguments.split(' ').map(str::to_owned).collect();
        arguments.push(folder.path().to_str().unwrap().to_owned());
        arguments.extend(mirror.iter().flat_map(|at| ["--mirror".to_owned(), (*at).to_owned()]));
        Self { folder, process: None, arguments, kills: 0 }
    }

    fn start(&mut self) {
        let mut command = Command::new(binary("zsctl"));
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null());
        self.process = Some(command.spawn().unwrap());
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
            self.kills += 1;
        }
    }

    /// Lets the process stand still for a moment.
    fn sleep(&self, duration: Duration) {
        if let Some(process) = &self.process {
            Process::stand_still_for(process.id(), duration);
        }
    }

    /// Returns the versions in the folder. Names of incomplete ones are no numbers.
    fn versions(&self) -> Vec<u64> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter_map(|name| name.parse().ok()).collect()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The bytes of all tensors of a version, as the trainer has pulled them.
async fn pulled(job: &Job, version: u64) -> BTreeMap<String, Vec<u8>> {
    let values = training::pull(job, version).await.unwrap();
    let tensors = job.spec().manifest.tensors().iter().zip(values);
    let bytes = |values: Vec<f32>| -> Vec<u8> {
        values.into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
    };
    tensors.map(|(tensor, values)| (tensor.name.clone(), bytes(values))).collect()
}

/// Disturbs readers and servers.
fn disturb(readers: &mut [Reader], cluster: &mut Cluster, version: u64, random: &mut Random) {
    let reader = random.below(READERS as u64) as usize;
    match random.below(40) {
        0..2 => readers[reader].kill(),
        2..4 => readers[reader].sleep(Duration::from_millis(random.below(1500))),
        _ => {}
    }
    // A reader that was killed, or joins late.
    if let Some(reader) = readers.iter_mut().find(|reader| reader.process.is_none())
        && random.below(10) == 0
    {
        reader.start();
    }
    let whole = format!("zeroshard_job_degraded_slices{{job=\"{JOB}\"}} 0\n");
    if version % 60 == 59 && cluster.coordinator.get("/metrics").contains(&whole) {
        let server = random.below(cluster.shards.len() as u64) as usize;
        cluster.shards[server].kill();
        cluster.shards[server] = Cluster::shard(cluster.coordinator.address(), &[]);
    }
}

/// Waits until all readers have written the last version.
fn finish(readers: &mut [Reader]) {
    readers.iter_mut().filter(|reader| reader.process.is_none()).for_each(Reader::start);
    let deadline = Instant::now() + timeout();
    while !readers.iter().all(|reader| reader.versions().contains(&VERSIONS)) {
        assert!(Instant::now() < deadline, "not all readers have written version {VERSIONS}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_version_of_every_reader_is_the_trainers_while_readers_and_servers_are_killed() {
    let (mut cluster, mut random) = (Cluster::start(3), seed());
    let tensors = vec![TensorSpec::new("w", [70_000]), TensorSpec::new("b", [33])];
    let spec = synthetic::job(JOB, 1, "adamw".parse().unwrap(), tensors).unwrap();
    let spec = JobSpec { min_servers: 3, replicas: 2, ..spec };
    let client =
        Client::connect(cluster.address(), Options::default().timeout(timeout())).await.unwrap();
    client.create_job(&spec).await.unwrap();
    let trainer = client.join(JOB, 0).await.unwrap();
    trainer.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    let mut mirror = Command::new(binary("zsctl"));
    mirror.args(["--json", "--address", cluster.address(), "mirror", JOB, "--dtype", "bf16"]);
    let mirror = Process::start({
        mirror.args(["--listen", "127.0.0.1:0"]);
        mirror
    });
    let through = |reader| (reader + 1 == READERS).then(|| mirror.address());
    let mut readers: Vec<_> =
        (0..READERS).map(|reader| Reader::new(cluster.address(), through(reader))).collect();
    readers[0].start();
    let (mut expected, mut slowest) = (BTreeMap::new(), Duration::ZERO);
    for version in 0..VERSIONS {
        expected.insert(version, pulled(&trainer, version).await);
        disturb(&mut readers, &mut cluster, version, &mut random);
        let began = Instant::now();
        training::step_despite_losses(&trainer, version).await;
        slowest = slowest.max(began.elapsed());
    }
    expected.insert(VERSIONS, pulled(&trainer, VERSIONS).await);
    finish(&mut readers);
    for (number, reader) in readers.iter().enumerate() {
        let versions = reader.versions();
        for version in &versions {
            let found = safetensors::read(&reader.folder.path().join(version.to_string()));
            let found = found.into_iter().map(|(name, (_, bytes))| (name, bytes));
            assert_eq!(
                found.collect::<BTreeMap<_, _>>(),
                expected[version],
                "reader {number}, version {version}"
            );
        }
        println!("reader {number}: {} versions, killed {} times", versions.len(), reader.kills);
    }
    println!("the slowest step took {slowest:?}");
}
