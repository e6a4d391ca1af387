//! The servers that the cluster misses: those that were connected, until they connect again or an
//! operator drains them.

use zeroshard_model::Server;

use super::{
    cluster::Cluster,
    events::{Action, Now, ServerId},
    history::Severity,
    operators::is_named,
    state::Phase,
};

/// The maximum number of missing servers that are remembered.
const MAX_MISSING: usize = 1000;

/// A server that is not connected any more.
#[derive(Debug, Clone)]
pub struct Missing {
    pub server: Server,
    /// When its control stream ended.
    pub since: Now,
    /// Why.
    pub cause: String,
}

impl Cluster {
    /// A server is not connected any more. It is missed, unless it was drained.
    pub(super) fn note_loss(
        &mut self,
        id: ServerId,
        cause: &str,
        has_departed: bool,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let name = self.name(id);
        let Some(known) = self.servers.remove(&id) else { return };
        let is_drained = known.cordoned && !self.jobs.values().any(|job| job.phase.uses(id));
        let cause = if has_departed { "it was stopped" } else { cause };
        let (severity, what) = match (is_drained, has_departed) {
            (true, _) => (Severity::Info, "has left the cluster, and held no slices"),
            (false, true) => (Severity::Warning, "has left the cluster"),
            (false, false) => (Severity::Warning, "was lost"),
        };
        out.push(Action::Alarm(severity, format!("{name} {what} ({cause})")));
        if !is_drained && self.missing.len() < MAX_MISSING {
            let server = Server { id, incarnation: known.incarnation, address: known.address };
            let missing = Missing { server, since: now, cause: cause.to_owned() };
            self.missing.insert(id, missing);
        }
    }

    /// A server has connected that was missed, or takes the address of one that was.
    pub(super) fn forget_missing(&mut self, id: ServerId, address: &str) {
        self.missing.retain(|other, missing| *other != id && missing.server.address != address);
    }

    /// Returns whether a server was connected, and is missed.
    pub fn misses(&self, id: ServerId) -> bool {
        self.missing.contains_key(&id)
    }

    /// The missing servers, by id: also those of jobs that wait for servers which this coordinator
    /// has never seen.
    pub fn missing(&self) -> Vec<Missing> {
        let mut all = self.missing.clone();
        for job in self.jobs.values() {
            let Phase::Recovering(recovery) = &job.phase else { continue };
            for server in recovery.missing() {
                let cause = "it has not connected since this coordinator began to lead";
                if !self.servers.contains_key(&server.id) {
                    let (server, cause) = (server.clone(), cause.to_owned());
                    let missing = Missing { server, since: Now::ZERO, cause };
                    all.entry(missing.server.id).or_insert(missing);
                }
            }
        }
        all.into_values().collect()
    }

    /// The missing server that an operator means.
    pub(super) fn find_missing(&self, name: &str) -> Option<Server> {
        let mut servers = self.missing.values().map(|missing| &missing.server);
        servers.find(|server| is_named(server, name)).cloned()
    }
}
