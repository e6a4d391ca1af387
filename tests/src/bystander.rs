//! A client that asks for the status of a cluster while something else happens to it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use zeroshard_client::{Cluster, Options};

/// The pause between two calls.
const PAUSE: Duration = Duration::from_millis(5);

/// A thread that calls `status` until [`Self::finish`].
#[derive(Debug)]
pub struct Bystander {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Duration>>,
}

impl Bystander {
    /// Starts to call the coordinator at `address`, and returns when it is connected.
    ///
    /// # Panics
    /// If it cannot connect; the thread panics if a call fails.
    pub fn start(address: &str) -> Self {
        Self::start_with(address, Options::default().timeout(crate::timeout()))
    }

    /// Like [`Self::start`], with these options.
    ///
    /// # Panics
    /// If it cannot connect; the thread panics if a call fails.
    pub fn start_with(address: &str, options: Options) -> Self {
        let (address, stop) = (address.to_owned(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let (connected, is_connected) = mpsc::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("the system has threads and sockets");
        let work = async move {
            let cluster = Cluster::connect(&address, options).await.expect("it can connect");
            // Nobody waits for the signal if the caller has panicked.
            let _ = connected.send(());
            let mut durations = Vec::new();
            loop {
                let began = Instant::now();
                cluster.status().await.expect("the status is answered");
                durations.push(began.elapsed());
                if stopped.load(Ordering::Relaxed) {
                    return durations;
                }
                tokio::time::sleep(PAUSE).await;
            }
        };
        let thread = thread::spawn(move || runtime.block_on(work));
        is_connected.recv().expect("it can connect");
        Self { stop, thread }
    }

    /// Stops. Returns the duration that 99 % of the calls did not exceed, and prints it as that of
    /// `what`.
    ///
    /// # Panics
    /// If a call has failed, or none was answered.
    pub fn finish(self, what: &str) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let mut durations = self.thread.join().expect("every call was answered");
        durations.sort_unstable();
        let most = durations[(durations.len() - 1) * 99 / 100];
        let (calls, last) = (durations.len(), durations[durations.len() - 1]);
        eprintln!("{what}: {calls} status calls, p99 {most:?}, maximum {last:?}");
        most
    }
}
