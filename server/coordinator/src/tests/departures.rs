//! Tests of servers and coordinators that are about to stop.

use super::{
    saves::{completion_save, found, policy},
    *,
};
use crate::state::interrupted::SERVERS_LIMIT;

impl Script {
    /// The ids of the released servers.
    fn released(&self) -> Vec<u64> {
        let of =
            |(server, command): &(u64, Command)| (*command == Command::Release).then_some(*server);
        self.commands.iter().filter_map(of).collect()
    }

    fn versions(&self) -> Vec<u64> {
        self.writes().into_iter().map(|(_, _, version)| version).collect()
    }
}

#[test]
fn a_server_is_released_when_its_jobs_are_saved() {
    let (mut script, leases) = Script::training_of(policy(1, 100), 2);
    script.step_all(&leases, 0);
    script.said(1, ServerEvent::Departing);
    assert_eq!((script.versions(), script.released()), (vec![1, 1], Vec::new()));
    script.write_all();
    assert!(script.released().is_empty(), "there is no manifest");
    script.completed(completion_save(&script), Ok(1));
    assert_eq!(script.released(), [1]);
    script.said(2, ServerEvent::Departing);
    assert_eq!(script.released(), [1, 2], "the version is saved");
    assert_eq!(script.versions().len(), 2);
}

#[test]
fn a_later_version_is_saved_after_the_one_that_is_being_saved() {
    let (mut script, leases) = Script::training_of(policy(1, 1), 1);
    script.step_all(&leases, 0);
    script.step_all(&leases, 1);
    script.said(1, ServerEvent::Departing);
    assert_eq!(script.versions(), [1]);
    script.write_all();
    script.completed(completion_save(&script), Ok(1));
    assert_eq!((script.versions(), script.released()), (vec![1, 2], Vec::new()));
}

#[test]
fn a_server_without_jobs_to_save_is_released_at_once_and_gets_no_more_slices() {
    let replicated = JobSpec { replicas: 2, min_servers: 2, ..policy(1, 100) };
    for spec in [replicated, spec(1)] {
        let (mut script, leases) = Script::training_of(spec, 3);
        script.step_all(&leases, 0);
        script.said(1, ServerEvent::Departing);
        assert_eq!((script.versions(), script.released()), (vec![], vec![1]));
        let live: Vec<u64> =
            script.cluster.common.servers.live().iter().map(|server| server.id).collect();
        assert_eq!(live, [2, 3]);
        script.server(1);
        assert_eq!(script.cluster.common.servers.live().len(), 3, "it has been started again");
    }
}

#[test]
fn a_job_does_not_wait_for_a_server_that_has_departed() {
    let (mut script, leases) = Script::training_of(policy(1, 100), 2);
    script.step_all(&leases, 0);
    script.said(1, ServerEvent::Departing);
    script.write_all();
    script.completed(completion_save(&script), Ok(1));
    script.found = found(1);
    script.commands.clear();
    script.lose_link(script.links[&1]);
    assert!(script.describe("job").is_err(), "it returns to its checkpoint at once");
    // After this time, another server may take the place of the departed one.
    script.after(SERVERS_LIMIT);
    script.open_all();
    assert_eq!(script.version(), Some(1));
    let left: Vec<u64> = script.open().servers().collect();
    assert_eq!(left, [2]);
}

#[test]
fn a_coordinator_saves_all_jobs_before_it_stops() {
    let (mut script, leases) = Script::training_of(policy(1, 100), 2);
    script.step_all(&leases, 0);
    assert!(!script.cluster.common.index.is_saving() && !script.cluster.is_stopping());
    script.event(Event::Stopping);
    assert_eq!(script.versions(), [1, 1]);
    assert!(script.cluster.common.index.is_saving() && script.cluster.is_stopping());
    script.write_all();
    script.completed(completion_save(&script), Ok(1));
    assert!(!script.cluster.common.index.is_saving());
}
