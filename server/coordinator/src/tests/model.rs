//! Tests the invariants of leases with random histories of a job's workers.
//!
//! promise: exactly-once

use std::collections::HashMap;

use proptest::prelude::*;
use zeroshard_model::Departure;

use super::*;

const WORLD: u32 = 3;

/// An event of a worker or server. The numbers select one of the existing leases.
#[derive(Debug, Clone)]
enum Step {
    Join(u32),
    Grant(usize),
    Lose(usize),
    Leave(usize, bool),
    Initialise,
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..WORLD).prop_map(Step::Join),
        4 => (0usize..64).prop_map(Step::Grant),
        2 => (0usize..64).prop_map(Step::Lose),
        3 => ((0usize..64), any::<bool>()).prop_map(|(lease, done)| Step::Leave(lease, done)),
        1 => Just(Step::Initialise),
        1 => Just(Step::Wait),
    ]
}

/// Panics if a rank gets two leases in one epoch according to the commands to the server.
fn check(commands: &[(u64, Command)]) {
    let mut epoch = 1;
    let mut held = HashMap::new();
    for (_, command) in commands {
        match *command {
            Command::NewEpoch { epoch: new, .. } => {
                assert!(new > epoch);
                epoch = new;
            }
            Command::Grant { rank, lease, .. } => {
                let before = held.insert((epoch, rank), lease);
                assert_eq!(before, None, "rank {rank} has two leases in epoch {epoch}");
            }
            _ => {}
        }
    }
}

proptest! {
    #[test]
    fn within_one_epoch_a_rank_has_at_most_one_lease(
        absent in any::<bool>(), steps in prop::collection::vec(step(), 1..80),
    ) {
        let departure = if absent { Departure::Absent } else { Departure::Error };
        let mut script = Script::opened_job(JobSpec { departure, ..spec(WORLD) }, 1);
        script.silent = true;
        let mut joins: Vec<(u32, Caller, Lease)> = Vec::new();
        for step in steps {
            let chosen = |number: usize| joins.get(number % joins.len().max(1)).copied();
            match step {
                Step::Join(rank) => {
                    let (caller, lease) = script.start_join(rank, Some("worker:1".into()));
                    joins.push((rank, caller, lease));
                }
                Step::Grant(number) => {
                    if let Some((rank, _, lease)) = chosen(number) {
                        script.said(1, ServerEvent::Granted { job: job(), rank, lease });
                    }
                }
                Step::Lose(number) => {
                    if let Some((rank, _, lease)) = chosen(number) {
                        script.lose(rank, lease);
                    }
                }
                Step::Leave(number, done) => {
                    if let Some((_, _, lease)) = chosen(number) {
                        script.leave(lease, done);
                    }
                }
                Step::Initialise => script.initialise_all(),
                Step::Wait => script.after(RANK_WAIT),
            }
            check(&script.commands);
            // A rank with a lease has exactly one of the joins, and every joined worker can read.
            prop_assert!(script.open().members.len() <= WORLD as usize);
        }
        script.after(WAIT);
        script.after(WAIT);
        prop_assert_eq!(script.cluster.next_deadline(), None, "no join waits for ever");
    }
}
