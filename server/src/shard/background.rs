//! Work that can wait: it gets the time that steps leave on the cores.

use std::{io, sync::Mutex};

use rustix::process::{getpriority_process, setpriority_process};
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

/// The difference in priority ("nice") to other threads. A thread with 15 gets a thirtieth of the
/// time of one with 0 that competes with it for a core, and all of the time of an idle core.
const NICE: i32 = 10;

/// The threads of all servers of this process. They are never stopped.
static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);

/// Runs `work`, and the blocking tasks that it starts, on threads of low priority.
///
/// # Errors
/// If the threads cannot be started.
pub(super) fn spawn<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // Held while the threads are started: a second runtime could not be dropped in an async task.
    let mut runtime = RUNTIME.lock().expect("no holder of the lock panics");
    let runtime = match &mut *runtime {
        Some(runtime) => runtime,
        none => {
            // Threads begin with the priority of the thread that has started them.
            let nice = (getpriority_process(None)? + NICE).min(19);
            let started = Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .thread_name("zeroshard-later")
                .on_thread_start(move || lower_priority(nice))
                .build()?;
            none.insert(started)
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

    #[tokio::test(flavor = "multi_thread", worker_threads = 8)]
    async fn work_can_be_started_by_several_tasks_at_the_same_time() {
        let start = std::sync::Arc::new(tokio::sync::Barrier::new(8));
        let tasks = (0..8).map(|number| {
            let start = start.clone();
            tokio::spawn(async move {
                start.wait().await;
                spawn(async move { number }).unwrap().await.unwrap()
            })
        });
        let tasks: Vec<_> = tasks.collect();
        for (number, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await.unwrap(), number);
        }
    }
}
