//! The shutdown of a process: it becomes unready, saves its jobs or hands them over, finishes open
//! calls, and exits. A second signal ends the process immediately.
//!
//! The parts of a process stop together: each part that still has jobs to leave holds a `Leaving`
//! until it has left them.

use std::{io, process, time::Duration};

use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

/// The share of the drain time for saving jobs. The rest is for open calls.
const LEAVING: f64 = 0.75;

/// The shutdown of the parts of a process. Clones share the state.
#[derive(Debug, Clone)]
pub struct Shutdown {
    asked: CancellationToken,
    stop: CancellationToken,
    leaving: TaskTracker,
}

/// A part of the process that still has jobs to leave. The other parts do not stop before it is
/// dropped.
#[derive(Debug)]
pub(crate) struct Leaving {
    _token: TaskTrackerToken,
}

impl Shutdown {
    /// A shutdown in which all parts stop as soon as `stop` is cancelled, without saving jobs.
    pub fn at_once(stop: CancellationToken) -> Self {
        Self { asked: stop.clone(), stop, leaving: TaskTracker::new() }
    }

    /// A shutdown in which the parts leave their jobs when `asked` is cancelled, and then stop.
    /// [`Self::drive`] must run.
    pub(crate) fn in_order(asked: CancellationToken) -> Self {
        Self { asked, stop: CancellationToken::new(), leaving: TaskTracker::new() }
    }

    /// Waits until the process has been asked to stop.
    pub(crate) async fn asked(&self) {
        self.asked.cancelled().await;
    }

    /// Returns whether the process has been asked to stop.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.is_cancelled()
    }

    /// The token that is cancelled when the parts must stop.
    pub(crate) fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// A guard that stops all parts when it is dropped.
    pub(crate) fn guard(&self) -> DropGuard {
        self.stop.clone().drop_guard()
    }

    /// Registers a part with jobs to leave.
    pub(crate) fn leaving(&self) -> Leaving {
        Leaving { _token: self.leaving.token() }
    }

    /// Waits until the process is asked to stop, and then until all parts have left their jobs or
    /// the time for that is over. Then stops the parts.
    pub(crate) async fn drive(&self, drain: Duration) {
        self.asked().await;
        self.leaving.close();
        let limit = drain.mul_f64(LEAVING);
        if timeout(limit, self.leaving.wait()).await.is_err() {
            tracing::warn!(?limit, "not all jobs were saved or handed over in time");
        }
        self.stop.cancel();
    }
}

/// Cancels `asked` on SIGTERM or SIGINT. A second signal ends the process immediately. The exit
/// code is then 143 or 130 (128 plus the number of the signal), as if the signal were not handled.
///
/// # Errors
/// The error of the system if signal handlers cannot be installed.
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
                tracing::warn!(signal, "received a second signal; the server exits immediately");
                process::exit(128 + kind.as_raw_value());
            }
            tracing::info!(signal, "stopping; a second signal ends the server immediately");
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
