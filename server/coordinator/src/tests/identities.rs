//! Identities: messages from earlier lives of jobs and servers.

use super::*;

fn server(id: u64, incarnation: u64, address: &str) -> Server {
    Server { id, incarnation, address: address.into() }
}

#[test]
fn a_call_about_an_earlier_job_of_the_name_is_refused() {
    let (mut script, leases) = Script::training(1, 1);
    script.delete(JOB);
    script.create_as(8, spec(1));
    script.said(1, script.opened(JobRef { id: 8, ..job() }));
    let replaced = Error::JobReplaced { job: "job".into() };
    let calls = [
        script.commit(commit(leases[0], 1, 0, 0)),
        script.reduce(leases[0], 1, 0, 1.0),
        script.discard(turn(leases[0], 1, 0, 0)),
        script.leave(leases[0], false),
        script.delete(JOB),
    ];
    for caller in calls {
        assert_eq!(script.error(caller), &replaced);
    }
    assert_eq!(script.describe("job").unwrap().job_id, 8);
    assert_eq!(script.cluster.jobs()["job"].id, 8);
    let caller = script.delete(8);
    assert_eq!(script.answer(caller), Some(&Ok(Reply::Deleted)));
}

#[test]
fn a_member_without_a_job_id_is_refused() {
    let (mut script, leases) = Script::training(1, 1);
    let unsaid = Turn { job: JobRef { id: 0, ..job() }, ..turn(leases[0], 1, 0, 0) };
    let caller = script.commit(Commit { turn: unsaid, ..commit(leases[0], 1, 0, 0) });
    assert!(matches!(script.error(caller), Error::Invalid { what, .. } if what.contains("job_id")));
}

#[test]
fn a_servers_messages_about_an_earlier_job_of_the_name_are_ignored() {
    let mut script = Script::with_servers(1);
    let caller = script.create_as(8, spec(1));
    script.said(1, script.opened(job()));
    assert_eq!(script.answer(caller), None);
    script.failed(1, "closed");
    assert_eq!(script.answer(caller), None);
    script.said(1, script.opened(JobRef { id: 8, ..job() }));
    script.said(1, ServerEvent::Initialised { job: job(), epoch: 1 });
    assert_eq!(script.version(), None);
    script.said(1, ServerEvent::Initialised { job: JobRef { id: 8, ..job() }, epoch: 1 });
    assert_eq!(script.version(), Some(0));
    let caller = script.caller();
    let (lease, spec_id) = (script.join(0).unwrap(), JobRef { id: 8, ..job() });
    script.ready_at(1, Attempt::first(1, 0));
    let turn = Turn { job: spec_id, ..turn(lease, 1, 0, 0) };
    script.event(Event::Commit {
        caller,
        commit: Box::new(Commit { turn, ..commit(lease, 1, 0, 0) }),
    });
    assert_eq!(script.answer(caller), None);
    script.ready_all(0);
    assert!(script.report(caller).applied);
}

#[test]
fn a_new_incarnation_of_a_server_first_removes_the_old_one() {
    let (mut script, leases) = Script::training(1, 1);
    let old = script.links[&1];
    let waiting = script.commit(commit(leases[0], 1, 0, 0));
    script.server_as(server(1, 2, "elsewhere:1"));
    assert_eq!((script.dismissed.as_slice(), script.servers()), (&[1][..], vec![1]));
    assert!(
        matches!(script.error(waiting), Error::JobFailed { reason, .. } if reason.contains("restarted"))
    );
    // The remaining messages of the old stream, and its end, arrive late.
    script.event(Event::FromServer { from: old, event: ServerEvent::Stats(stats("a gradient")) });
    script.lose_link(old);
    assert_eq!(script.servers(), [1]);
    let server = script.cluster.common.servers.get(1).unwrap();
    assert_eq!((server.incarnation, &server.stats), (2, &None));
    assert!(!script.commands.iter().any(|(_, command)| matches!(command, Command::Close(_))));
}

#[test]
fn a_server_with_the_address_of_another_replaces_it() {
    let mut script = Script::with_servers(1);
    script.server_as(server(2, 1, "host:1"));
    assert_eq!((script.dismissed.as_slice(), script.servers()), (&[1][..], vec![2]));
    script.lose_server(1);
    assert_eq!(script.servers(), [2]);
}

#[test]
fn a_new_stream_of_the_same_incarnation_replaces_the_old_stream() {
    let mut script = Script::with_servers(1);
    let old = script.links[&1];
    script.server(1);
    script.lose_link(old);
    assert_eq!(script.servers(), [1]);
}

#[test]
fn placements_carry_the_identity_of_servers_and_messages_their_address() {
    let mut script = Script::default();
    script.server_as(server(0xfeed, 77, "host:1"));
    script.create(spec(1));
    let Some((0xfeed, Command::Open(open))) = script.commands.last() else { panic!("OpenJob") };
    assert_eq!(open.placement.servers(), [server(0xfeed, 77, "host:1")]);
    assert_eq!(open.job_id, JOB);
    script.said(0xfeed, script.opened(job()));
    script.lose_server(0xfeed);
    let failure = script.failure().expect("it has failed");
    assert!(failure.contains("shard server host:1 was lost"), "{failure}");
}

#[test]
fn a_placement_on_a_restarted_server_is_computed_again() {
    let mut script = Script::with_servers(1);
    let caller = script.caller();
    let create = Event::Create { caller, job_id: JOB, create: creation(spec(1)), wait: WAIT };
    let actions = script.cluster.handle(create, script.now);
    let [Action::Place(placing)] = &actions[..] else { panic!("{actions:?}") };
    script.server_as(server(1, 2, "host:1"));
    let plan = Plan::new(&placing.spec, &placing.live, &placing.zones);
    let placed = plan.map(|plan| Placed {
        plan,
        checkpoint: None,
        user_data: UserData::default(),
        line: Line::default(),
        recent: RecentSteps::default(),
    });
    script.event(Event::Placed { job: placing.job.clone(), placed });
    let Some((1, Command::Open(open))) = script.commands.last() else { panic!("OpenJob") };
    assert_eq!(open.placement.servers()[0].incarnation, 2);
}
