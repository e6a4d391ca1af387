//! Work that can wait: it gets the time that steps leave on the cores.

use std::{io, sync::OnceLock};

use rustix::process::{getpriority_process, setpriority_process};
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

/// The difference in priority ("nice") to other threads. A thread with 15 gets a thirtieth of the
/// time of one with 0 that competes with it for a core, and all of the time of an idle core.
const NICE: i32 = 15;

/// The threads of all servers of this process. They are never stopped.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Runs `work`, and the blocking tasks that it starts, on threads of low priority.
///
/// # Errors
/// If the threads cannot be started.
pub(super) fn spawn<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let runtime = match RUNTIME.get() {
        Some(runtime) => runtime,
        None => {
            // Threads begin with the priority of the thread that has started them.
            let nice = (getpriority_process(None)? + NICE).min(19);
            let started = Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .thread_name("zeroshard-later")
                .on_thread_start(move || lower_priority(nice))
                .build()?;
            RUNTIME.get_or_init(|| started)
        }
    };
    Ok(runtime.spawn(work))
}

/// Lowers the priority of the calling thread. (On Linux each thread has its own.)
fn lower_priority(nice: i32) {
    if let Err(error) = setpriority_process(None, nice) {
        tracing::warn!(%error, "saves run with the priority of steps");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn background_work_has_a_lower_priority_and_leaves_that_of_other_threads() {
        let priority = || getpriority_process(None).unwrap();
        let before = priority();
        let work = async move {
            let blocking = tokio::task::spawn_blocking(priority).await.unwrap();
            (priority(), blocking)
        };
        let lower = (before + NICE).min(19);
        assert_eq!(spawn(work).unwrap().await.unwrap(), (lower, lower));
        assert_eq!(priority(), before);
    }
}
