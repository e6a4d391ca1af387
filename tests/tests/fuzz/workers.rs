//! Two workers that train with collectives. An invalid message may end them with an error, because
//! workers trust each other. They are then started again. They must not panic.

use std::{
    io::Read,
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{sync::Mutex, task::spawn_blocking, time::sleep};
use zeroshard_client::Cluster as Client;
use zeroshard_tests::binary;

use crate::{
    guarded::{owner, token},
    input::{Identity, Target},
    schema::Server,
};

/// The job of the workers.
const JOB: &str = "fuzz/workers";
/// The training text: sources of this project.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/src/frame");
/// The flags of a small model, which leaves most of the processor time to the servers.
const FLAGS: &str = "--quiet --group 2 --data-parallel 2 --shards 1 --width 8 --heads 1 --blocks 1 \
                     --context 16 --batch 2 --steps 1000000 --sample-chars 0 --timeout 20";
/// The pause before workers are started again.
const PAUSE: Duration = Duration::from_millis(500);

/// The running workers.
pub(crate) struct Workers {
    coordinator: String,
    out: TempDir,
    running: Mutex<Vec<Running>>,
}

struct Running {
    process: Child,
    address: String,
}

impl Workers {
    pub(crate) fn start(coordinator: &str) -> Self {
        let out = tempfile::tempdir().unwrap();
        Self { coordinator: coordinator.to_owned(), out, running: Mutex::default() }
    }

    /// Returns a running worker, and restarts workers that have ended.
    pub(crate) async fn target(&self) -> Target {
        let mut running = self.running.lock().await;
        let has_ended = |one: &mut Running| one.process.try_wait().unwrap().is_some();
        if running.is_empty() || running.iter_mut().any(has_ended) {
            for one in running.drain(..) {
                spawn_blocking(move || one.end()).await.unwrap();
            }
            sleep(PAUSE).await;
            if let Ok(client) = Client::connect(&self.coordinator, owner(PAUSE * 4)).await {
                // The job may not exist.
                let _ = client.delete_job(JOB).await;
            }
            *running = (0..2).map(|rank| self.worker(rank)).collect();
        }
        let number = fastrand::usize(..running.len());
        let address = running[number].address.clone();
        Target { address, serves: Server::Worker, number }
    }

    fn worker(&self, rank: usize) -> Running {
        let address = unused();
        let out = self.out.path().join(rank.to_string());
        // Workers have a low priority, so that they do not delay the servers and the bystander.
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(binary("zeroshard-worker")).arg("train");
        command.args(FLAGS.split_whitespace()).args(["--data", TEXT, "--job", JOB]);
        command.args(["--address", &self.coordinator, "--listen", &address]);
        command.args(["--rank", &rank.to_string(), "--out"]).arg(out);
        command.env("ZEROSHARD_TOKEN", token(Identity::Owner));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Running { process: command.spawn().unwrap(), address }
    }

    /// Ends the workers.
    pub(crate) async fn stop(self) {
        for one in self.running.into_inner() {
            spawn_blocking(move || one.end()).await.unwrap();
        }
    }
}

impl Running {
    /// Ends the process, and asserts that nothing in it has panicked.
    fn end(mut self) {
        // An error means that the process has already ended.
        let _ = self.process.kill();
        let mut text = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let ended = self.process.wait().unwrap();
        let is_killed = std::os::unix::process::ExitStatusExt::signal(&ended) == Some(9);
        assert!(is_killed || ended.code() == Some(1), "{ended}: {text}");
        if !is_killed {
            eprintln!("a worker has ended: {}", text.lines().next().unwrap_or_default());
        }
        assert!(!text.contains("panicked"), "a worker has panicked: {text}");
    }
}

/// Finds an address on which no process listens.
fn unused() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}
