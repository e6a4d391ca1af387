//! What an operator should do about the cluster and about each job, for `zsctl why` and the status
//! page.

use zeroshard_model::listing::some_of;

use crate::{
    cluster::{Cluster, context::Common, servers::Missing},
    job::{Job, Phase},
    operators::metrics_view::JobState,
    state::progress::Wait,
};

/// A recommended action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The action in imperative form, without a period.
    pub text: String,
    /// A command that carries it out, with upper-case words where a value has to be inserted.
    pub command: Option<String>,
}

/// An action without a command.
fn action(text: impl Into<String>) -> Advice {
    Advice { text: text.into(), command: None }
}

fn command(text: impl Into<String>, command: impl Into<String>) -> Advice {
    Advice { text: text.into(), command: Some(command.into()) }
}

/// Starts a shard server.
const START_SERVER: &str = "zeroshard-server shard --coordinator HOST:PORT";

/// Advises what to do about the cluster itself; `None` if nothing is wrong and it has jobs.
pub fn advice(cluster: &Cluster) -> Option<Advice> {
    let missing: Vec<Missing> = cluster.missing();
    if let [first, ..] = &missing[..] {
        let names = some_of(missing.iter().map(|of| of.server.address.clone()));
        return Some(command(
            format!(
                "look at the logs of {names}, check the connections with `zsctl doctor`, and \
                 start again what has stopped; if a server will not come back, remove it from \
                 the list"
            ),
            format!("zsctl drain {}", first.server.address),
        ));
    }
    if cluster.common.startup.is_learning() {
        return Some(action(
            "wait: servers of the last coordinator connect within seconds; if a server does \
             not appear, look at its log",
        ));
    }
    if cluster.common.servers.connected().is_empty() {
        let text = "start shard servers with the address of this coordinator";
        return Some(command(text, START_SERVER));
    }
    cluster.jobs().is_empty().then(|| {
        command(
            "start workers, because there are no jobs: run your script with \
             zs.init(\"HOST:PORT\"), or train the example",
            "zeroshard-worker train --address HOST:PORT --job NAME --data DIRECTORY",
        )
    })
}

impl Job {
    /// Advises what to do about a job; `None` if nothing is wrong.
    pub fn advice(&self, common: &Common) -> Option<Advice> {
        let name = quoted(&self.name);
        match &self.phase {
            Phase::Failed { .. } => {
                return Some(command(
                    format!(
                        "correct the cause, delete the job, and create it again; `zsctl checkpoint \
                         ls {name} --url URL` lists its checkpoints, from which it can continue"
                    ),
                    format!("zsctl delete {name}"),
                ));
            }
            Phase::Open(open) if open.saves.failures() > 0 => {
                return Some(action(
                    "make sure that the coordinator and every shard server can write to the URL \
                     of the checkpoints, and that there is space: until a save succeeds, a loss \
                     goes back to the last checkpoint",
                ));
            }
            _ => {}
        }
        match (self.wait(common), self.phase.shown()) {
            (Some(Wait { lacks_servers: true, .. }), _) => Some(command(
                "start the missing shard servers, or uncordon one (zsctl uncordon SERVER), and \
                 check the connections",
                "zsctl doctor",
            )),
            (Some(Wait { lacks_workers: true, .. }), _) => self.start_workers(),
            (Some(_), JobState::Open) => Some(command(
                "none, unless the wait lasts too long: then look at the logs of these ranks; if \
                 one of them hangs, let another worker take its rank",
                format!("zsctl evict {name} RANK"),
            )),
            (_, JobState::Recovering | JobState::Restoring) => {
                Some(action("wait: the job continues when its shard servers have connected again"))
            }
            (None, JobState::Open) => self.advice_for_open(),
            _ => None,
        }
    }

    /// Advises what to do about a job that waits for nothing.
    fn advice_for_open(&self) -> Option<Advice> {
        let Phase::Open(open) = &self.phase else { return None };
        if open.degraded_slices(&self.spec) > 0 {
            let text = "start another shard server if too few are connected";
            return Some(command(text, START_SERVER));
        }
        open.members.ranks().next().is_none().then(|| {
            command(
                "none; all ranks have ended. When you do not need the state any more, free its \
                 memory",
                format!("zsctl delete {}", quoted(&self.spec.name)),
            )
        })
    }

    /// How to start workers for the ranks that have none.
    fn start_workers(&self) -> Option<Advice> {
        let Phase::Open(open) = &self.phase else { return None };
        let is_missing = |&rank: &u32| open.takes_part(rank) && open.members.get(rank).is_none();
        let rank = (0..self.spec.world).find(is_missing)?;
        let (name, world) = (quoted(&self.spec.name), self.spec.world);
        Some(command(
            "start a worker for each missing rank, with the command that started the others; the \
             job continues from the current version. For the example of ZeroShard that is",
            format!(
                "zeroshard-worker train --address HOST:PORT --job {name} --workers {world} --rank \
                 {rank}"
            ),
        ))
    }
}

/// The name of a job in a command for a shell.
fn quoted(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=".contains(c);
    match !name.is_empty() && !name.starts_with('-') && name.chars().all(is_plain) {
        true => name.to_owned(),
        false => format!("'{}'", name.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_jobs_are_quoted_for_a_shell() {
        assert_eq!(quoted("train-1.b"), "train-1.b");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("$(rm) 'x'"), r"'$(rm) '\''x'\'''");
    }
}
