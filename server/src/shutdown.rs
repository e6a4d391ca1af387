//! The shutdown of a process: it stops being ready, jobs are saved or handed over, open calls
//! finish, and the process ends. A second signal ends it at once.
//!
//! The parts of the process agree on the time to stop: each part that has jobs to leave holds a
//! `Leaving` until it has left them.

use std::{io, process, time::Duration};

use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

/// The part of the drain time in which jobs are saved. The rest is for calls that are still open.
const LEAVING: f64 = 0.75;

/// The shutdown of the parts of a process. Clones share the state.
#[derive(Debug, Clone)]
pub struct Shutdown {
    asked: CancellationToken,
    stop: CancellationToken,
    leaving: TaskTracker,
}

/// A part that still has jobs to leave. The others wait until it is dropped.
#[derive(Debug)]
pub(crate) struct Leaving {
    _token: TaskTrackerToken,
}

impl Shutdown {
    /// All parts stop when `stop` is cancelled, and leave their jobs as they are.
    pub fn at_once(stop: CancellationToken) -> Self {
        Self { asked: stop.clone(), stop, leaving: TaskTracker::new() }
    }

    /// The parts leave their jobs when `asked` is cancelled, and then stop: see [`Self::drive`].
    pub(crate) fn in_order(asked: CancellationToken) -> Self {
        Self { asked, stop: CancellationToken::new(), leaving: TaskTracker::new() }
    }

    /// Waits until the process is asked to stop.
    pub(crate) async fn asked(&self) {
        self.asked.cancelled().await;
    }

    /// Whether the process is asked to stop.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.is_cancelled()
    }

    /// Is cancelled when the parts stop.
    pub(crate) fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Stops all parts when it is dropped.
    pub(crate) fn guard(&self) -> DropGuard {
        self.stop.clone().drop_guard()
    }

    /// A part with jobs to leave.
    pub(crate) fn leaving(&self) -> Leaving {
        Leaving { _token: self.leaving.token() }
    }

    /// Stops the parts when they are asked to stop and have left their jobs, or after a part of
    /// the drain time.
    pub(crate) async fn drive(&self, drain: Duration) {
        self.asked().await;
        self.leaving.close();
        let limit = drain.mul_f64(LEAVING);
        if timeout(limit, self.leaving.wait()).await.is_err() {
            tracing::warn!(?limit, "jobs were not saved or handed over in time");
        }
        self.stop.cancel();
    }
}

/// Cancels `asked` on SIGTERM or SIGINT. A second signal ends the process at once, with the exit
/// code 143 or 130 (128 and the number of the signal), as if the signal were not handled.
///
/// # Errors
/// If the process cannot watch for signals.
pub fn stop_on_signals(asked: CancellationToken) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            let (signal, kind) = tokio::select! {
                _ = terminate.recv() => ("SIGTERM", SignalKind::terminate()),
                _ = interrupt.recv() => ("SIGINT", SignalKind::interrupt()),
            };
            if asked.is_cancelled() {
                tracing::warn!(signal, "a second signal; the server exits now");
                process::exit(128 + kind.as_raw_value());
            }
            tracing::info!(signal, "stopping; a second signal ends the server at once");
            asked.cancel();
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_parts_stop_when_all_of_them_have_left_their_jobs() {
        let asked = CancellationToken::new();
        let shutdown = Shutdown::in_order(asked.clone());
        let (one, other) = (shutdown.leaving(), shutdown.leaving());
        asked.cancel();
        let driving = shutdown.drive(Duration::from_secs(1000));
        let leave = async {
            drop(one);
            tokio::task::yield_now().await;
            assert!(!shutdown.stop().is_cancelled(), "the other part has not left");
            drop(other);
        };
        tokio::join!(driving, leave);
        assert!(shutdown.stop().is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_does_not_leave_is_stopped_before_the_drain_time_is_over() {
        let asked = CancellationToken::new();
        let shutdown = Shutdown::in_order(asked.clone());
        let _stays = shutdown.leaving();
        asked.cancel();
        let began = tokio::time::Instant::now();
        shutdown.drive(Duration::from_secs(8)).await;
        assert_eq!(began.elapsed(), Duration::from_secs(6));
    }
}
