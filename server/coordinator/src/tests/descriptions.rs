//! Descriptions of jobs that are late, stale, or differ, and servers that have lost a job.

use std::sync::Arc;

use super::{
    recovery::Before,
    saves::{found, policy},
    *,
};
use crate::{
    cluster::startup::{LEARNING, RECOVERY, SETTLING},
    vocabulary::{
        commands::FailedThere,
        job_report::{JobReport, Ranks},
    },
};

#[test]
fn descriptions_that_differ_fail_the_job_and_name_both_servers() {
    let before = Before::new();
    let mut other = before.report();
    other.spec = Arc::new(JobSpec { world: 3, ..JobSpec::clone(&before.spec) });
    let script = before.recover([before.report(), other]);
    let expected = "shard server host:1 and shard server host:2 describe different specifications \
                    of the job: world";
    assert_eq!(script.failure(), Some(expected));
    assert!(script.closed().contains(&1) && script.closed().contains(&2));
    let mut other = before.report();
    let reversed = [2, 1].map(|id| Server { id, incarnation: 1, address: format!("host:{id}") });
    other.plan = Plan::new(&before.spec, &reversed[..1], &Zones::new()).unwrap();
    let script = before.recover([before.report(), other]);
    assert!(script.failure().unwrap().contains("host:2 describe different placements"));
}

#[test]
fn an_earlier_job_of_the_same_name_does_not_replace_a_later_one() {
    let before = Before::new();
    let stale = |servers: &[u64]| {
        let server = |&id| Server { id, incarnation: 1, address: format!("host:{id}") };
        let servers: Vec<_> = servers.iter().map(server).collect();
        let plan = Plan::new(&before.spec, &servers, &Zones::new()).unwrap();
        JobReport { id: 55, term: 3, plan, ..before.report() }
    };
    // A server that was away since an earlier coordinator describes its old job first or last, and
    // has all of it, or a part.
    for servers in [&[9, 8][..], &[9]] {
        for order in [[9, 1], [1, 9]] {
            let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
            for id in order {
                let report = if id == 9 { stale(servers) } else { before.report() };
                script.returns(id, 1, vec![report]);
            }
            script.returns(2, 1, vec![before.report()]);
            assert_eq!((script.version(), script.cluster.jobs()["job"].id), (Some(4), JOB));
            let closes = script.told_to(9);
            assert_eq!(
                closes,
                [Command::Close(JobRef { id: 55, ..job() })],
                "{order:?} {servers:?}"
            );
        }
    }
}

#[test]
fn a_job_that_failed_without_a_coordinator_keeps_its_reason() {
    let before = Before::new();
    for order in [[1, 2], [2, 1]] {
        let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
        for id in order {
            match id {
                1 => script.returns(1, 1, vec![before.report()]),
                _ => script.returns_after(2, 1, vec![], &[(JOB, "out of memory")]),
            }
        }
        assert_eq!(script.failure(), Some("shard server host:2: out of memory"));
        assert_eq!(script.closed(), [1, 2]);
    }
}

#[test]
fn a_job_returns_to_its_checkpoint_again_if_a_server_could_not_read_it_without_a_coordinator() {
    let spec = Arc::new(JobSpec { min_servers: 2, ..policy(2, 2) });
    let before = Before { spec, ..Before::new() };
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.found = found(2);
    script.returns(1, 1, vec![before.report()]);
    let server = Server { id: 2, incarnation: 1, address: "host:2".into() };
    let stream = script.next();
    script.links.insert(2, Link { server: 2, stream });
    let failure = FailedThere { reason: "cannot read the store".into(), transient: true };
    let about = About { failed: BTreeMap::from([(JOB, failure)]), ..About::default() };
    script.event(Event::ServerJoined { stream, server, about, reports: vec![], is_new: true });
    assert_eq!(script.failure(), None);
    script.after(LEARNING);
    script.open_all();
    assert_eq!((script.version(), script.failure()), (Some(2), None));
}

#[test]
fn a_half_opened_job_without_one_of_its_servers_can_be_created_again() {
    let before = Before::new();
    let opened = JobReport {
        attempt: Attempt { epoch: 3, step: 0, number: 0 },
        published: false,
        ranks: Ranks::default(),
        ..before.report()
    };
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(1, 1, vec![opened]);
    script.after(RECOVERY);
    assert!(script.cluster.jobs().is_empty() && script.closed() == [1]);
    let creating = script.create(JobSpec { min_servers: 1, ..JobSpec::clone(&before.spec) });
    assert_eq!((script.answer(creating), script.opens().len()), (None, 1));
}

#[test]
fn a_job_that_is_created_before_its_servers_return_does_not_replace_the_one_they_hold() {
    let before = Before::new();
    let unavailable = |error: &Error| matches!(error, Error::Unavailable { .. });
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    // No server is there: nothing is known about any job.
    assert!(unavailable(&script.describe("job").unwrap_err()));
    let deleting = script.delete(0);
    assert!(unavailable(script.error(deleting)));
    let creating = script.create(JobSpec { min_servers: 1, ..JobSpec::clone(&before.spec) });
    assert_eq!(script.answer(creating), None);
    script.returns(1, 1, vec![before.report()]);
    assert!(unavailable(script.error(creating)));
    script.returns(2, 1, vec![before.report()]);
    assert_eq!((script.version(), script.opens().len()), (Some(4), 0));
    // A server that holds other jobs does not get new ones before all have had time to return.
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(3, 1, vec![]);
    script.create(spec(1));
    assert!(script.opens().is_empty());
    script.after(RECOVERY);
    assert_eq!(script.opens().len(), 1);
}

#[test]
fn servers_of_an_earlier_coordinator_have_time_to_return_after_a_new_one() {
    let before = Before::new();
    let create = || {
        let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
        let server = Server { id: 3, incarnation: 1, address: "host:3".into() };
        let stream = script.next();
        script.links.insert(3, Link { server: 3, stream });
        let (reports, failed) = (Vec::new(), BTreeMap::new());
        script.event(Event::ServerJoined {
            stream,
            server,
            about: About { failed, ..About::default() },
            reports,
            is_new: false,
        });
        let creating = script.create(JobSpec { min_servers: 1, ..JobSpec::clone(&before.spec) });
        let unknown = script.attach(0, before.leases[0]);
        assert!(matches!(unknown, Err(Error::Unavailable { .. })), "{unknown:?}");
        assert!(script.answer(creating).is_none() && script.opens().is_empty());
        (script, creating)
    };
    let (mut script, creating) = create();
    script.returns(1, 1, vec![before.report()]);
    assert!(matches!(script.error(creating), Error::Unavailable { .. }));
    script.returns(2, 1, vec![before.report()]);
    assert_eq!((script.version(), script.opens().len()), (Some(4), 0));

    let (mut script, _) = create();
    script.after(SETTLING);
    assert_eq!(script.opens().len(), 1);
}

#[test]
fn calls_about_jobs_that_servers_may_still_describe_are_to_be_repeated() {
    let before = Before::new();
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    let unavailable = |result: Result<()>| matches!(result, Err(Error::Unavailable { .. }));
    assert!(unavailable(script.attach(0, before.leases[0])));
    assert!(unavailable(script.join(0).map(drop)));
    script.returns(1, 1, vec![before.report()]);
    assert!(unavailable(script.attach(0, before.leases[0])));
    let caller = script.create(JobSpec::clone(&before.spec));
    assert!(unavailable(Err(script.error(caller).clone())));
    // The other server does not come.
    script.after(RECOVERY);
    let reason = script.failure().unwrap();
    assert_eq!(reason, "shard server host:2 did not connect within 45s of the coordinator's start");
    // Its address refuses connections.
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(1, 1, vec![before.report()]);
    let [dead] = &script.probed[..] else { panic!("{:?}", script.probed) };
    assert_eq!(dead.id, 2);
    let dead = dead.clone();
    script.event(Event::Refused(dead));
    let reason = script.failure().unwrap();
    assert!(reason.contains("host:2 was lost (its address refuses connections)"), "{reason}");
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.after(RECOVERY);
    let unknown = Error::UnknownJob { job: "job".into() };
    assert_eq!(script.attach(0, before.leases[0]), Err(unknown));
}

#[test]
fn a_job_without_one_of_its_servers_fails_or_was_closed() {
    let before = Before::new();
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(1, 1, vec![before.report()]);
    script.returns(2, 5, vec![]);
    let reason = script.failure().unwrap();
    assert!(reason.starts_with("shard server host:2 was lost (it was restarted)"), "{reason}");
    assert!(script.closed().contains(&1));
    // A server that does not hold the job any more has been told to close it.
    for order in [[1, 2], [2, 1]] {
        let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
        for id in order {
            script.returns(id, 1, if id == 1 { vec![before.report()] } else { vec![] });
        }
        assert!(script.cluster.jobs().is_empty());
        assert!(script.closed().contains(&1));
    }
    // A server that comes back before the deadline is welcome.
    let mut script = Script { cluster: Cluster::starting(), ..Script::default() };
    script.returns(1, 1, vec![before.report()]);
    script.lose_link(script.links[&1]);
    script.returns(2, 1, vec![before.report()]);
    script.returns(1, 1, vec![before.report()]);
    assert_eq!(script.version(), Some(4));
}

#[test]
fn a_job_that_another_coordinator_has_had_meanwhile_is_learned_again() {
    let before = Before::new();
    let [step, epoch] = [(3, 5), (4, 4)].map(|(epoch, step)| Attempt::first(epoch, step));
    for attempt in [step, epoch] {
        let mut script = before.recover([before.report(), before.report()]);
        script.attach(0, before.leases[0]).unwrap();
        script.lose_link(script.links[&1]);
        script.dismissed.clear();
        let later = JobReport { term: 9, attempt, ..before.report() };
        script.returns(1, 1, vec![later.clone()]);
        assert!(matches!(script.describe("job"), Err(Error::Unavailable { .. })));
        assert_eq!(script.dismissed, [2], "it describes the job again");
        let (lease, error) = script.ended.last().expect("the rank opens a new stream");
        assert_eq!(*lease, before.leases[1]);
        assert!(matches!(error, Some(Error::Unavailable { .. })), "{error:?}");
        script.returns(2, 1, vec![later]);
        assert_eq!((script.version(), script.epoch()), (Some(attempt.step), attempt.epoch));
        assert!(script.closed().is_empty(), "its servers keep it");
        script.attach(0, before.leases[0]).unwrap();
    }
}
