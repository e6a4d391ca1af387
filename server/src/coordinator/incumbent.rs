//! Two processes with one server id, such as a pod that was deleted by force and comes back. The
//! registered one stays if it answers; otherwise the other one takes its place, as after a restart.

use std::time::Duration;

use zeroshard_model::{Error, Result, Server};

use super::driver::Driver;

/// How long a registered server may be silent. It reports its memory every second.
const SILENCE: Duration = Duration::from_secs(3);

impl Driver {
    /// Waits until a registered server with the id of `newcomer`, if there is one, answers or has
    /// been silent for [`SILENCE`].
    ///
    /// # Errors
    /// [`Error::ServerIdTaken`] if it answers.
    pub(super) async fn check_incumbent(&self, newcomer: &Server) -> Result<()> {
        let (mut heard, dismissed, address) = {
            let inner = self.lock();
            let incumbent = inner.servers.get(&newcomer.id);
            let other = incumbent.filter(|of| of.server.incarnation != newcomer.incarnation);
            let Some(other) = other else { return Ok(()) };
            let address = other.server.address.clone();
            (other.heard.subscribe(), other.dismissal.ended(), address)
        };
        tokio::select! {
            // Fails when the stream has ended.
            Ok(()) = heard.changed() => {
                let error = Error::ServerIdTaken { id: newcomer.id, address };
                tracing::warn!(newcomer = newcomer.address, %error, "a shard server is refused");
                Err(error)
            }
            () = dismissed => Ok(()),
            () = tokio::time::sleep(SILENCE) => {
                let id = format!("{:016x}", newcomer.id);
                tracing::warn!(
                    id,
                    silent = address,
                    newcomer = newcomer.address,
                    "a shard server takes the place of one that does not answer"
                );
                Ok(())
            }
        }
    }
}
