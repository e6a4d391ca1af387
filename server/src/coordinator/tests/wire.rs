//! The messages into which commands and answers are converted.

use std::sync::Arc;

use prost::Message as _;
use zeroshard_coordinator::vocabulary::{commands::Begins, decision::Replicated};
use zeroshard_model::{JobVersion, Optimizer, Placement};
use zeroshard_proto::pb::{self, serve_response::Command as Wire};

use super::*;
use crate::coordinator::{
    control::{job_report, server_event, wire},
    responses::{self, Message as _},
};

#[test]
fn a_report_of_gradients_is_converted_with_every_field() {
    let ready = pb::StepReady {
        job: "job".into(),
        job_id: JOB,
        epoch: 1,
        step: 2,
        attempt: 3,
        slices: vec![pb::ReducedSlice {
            slice: 4,
            sum_of_squares: 5.0,
            largest_rank: Some(2),
            largest_squares: 3.0,
        }],
        overflow: Some(pb::Overflow { slice: 6, rank: Some(7) }),
        absent: vec![pb::Absent { slice: 8, rank: 9, everywhere: true }],
        copies: 10,
    };
    let Ok(ServerEvent::Ready { job: of, attempt, reduced }) =
        server_event(pb::serve_request::Event::Ready(ready))
    else {
        panic!("Ready")
    };
    assert_eq!((of, attempt), (job(), Attempt { epoch: 1, step: 2, number: 3 }));
    assert_eq!((reduced.sums, reduced.copies), (vec![(4, 5.0)], 10));
    assert_eq!(reduced.overflow, Some(Overflow { slice: 6, rank: Some(7) }));
    assert_eq!(reduced.absent, [Absent { slice: 8, rank: 9, everywhere: true }]);
    assert_eq!(reduced.largest, [Largest { slice: 4, rank: 2, squares: 3.0 }]);
}

/// The figures of two steps.
fn recent_steps() -> RecentSteps {
    RecentSteps { norms: vec![1.0, 2.0], losses: vec![0.5], nonfinite: 3, spikes: vec![7] }
}

fn report() -> Report {
    let overflow = Some(Overflow { slice: 2, rank: None });
    Report {
        version: 1,
        applied: true,
        norm: Norm { value: 2.0, overflow, tensors: Arc::new([9.0]) },
        clip_coefficient: 3.0,
        loss: Some(4.0),
        world: 5,
        absent: vec![Absent { slice: 6, rank: 7, everywhere: false }],
        resting: vec![8, 9],
        spike: Some("its norm is large".into()),
    }
}

#[test]
fn the_report_of_a_step_is_converted_with_every_field() {
    let message = pb::CommitResponse {
        version: 1,
        applied: true,
        gradient_norm: 2.0,
        clip_coefficient: 3.0,
        overflow: Some(pb::Overflow { slice: 2, rank: None }),
        loss: Some(4.0),
        world: 5,
        absent: vec![pb::Absent { slice: 6, rank: 7, everywhere: false }],
        resting: vec![8, 9],
        next_epoch: 0,
        spike: "its norm is large".into(),
    };
    assert_eq!(report().message(), message);
    // Servers keep no norms of tensors.
    let kept = Report { norm: Norm { tensors: [].into(), ..report().norm }, ..report() };
    assert_eq!(responses::report(message), kept);
}

#[test]
fn commands_about_replicas_are_converted_with_every_field() {
    let (job_id, name) = (JOB, "job".to_owned());
    let servers = vec![Server { id: 1, incarnation: 2, address: "host:1".to_owned() }];
    let placement = Arc::new(Placement::new(servers, 1, vec![0]).unwrap());
    let next = pb::NewPlacement {
        job: name.clone(),
        job_id,
        epoch: 3,
        placement: Some(placement.as_ref().into()),
    };
    let command = Command::NewPlacement { job: job(), epoch: 3, placement };
    assert_eq!(wire(command), Wire::NewPlacement(next));
    let (number, version, slices) = (4, 5, vec![6, 7]);
    let copy =
        pb::CopySlices { job: name.clone(), job_id, number, version, slices: slices.clone() };
    let command = Command::Copy { job: job(), number, version, slices };
    assert_eq!(wire(command), Wire::Copy(copy));
    let serve = pb::ServeVersion { job: name.clone(), job_id, version };
    let command = Command::ServeVersion { job: job(), version };
    assert_eq!(wire(command), Wire::ServeVersion(serve));
    let copied = pb::SlicesCopied { job: name.clone(), job_id, number };
    let Ok(ServerEvent::Copied { job: of, number: 4 }) =
        server_event(pb::serve_request::Event::Copied(copied))
    else {
        panic!("Copied")
    };
    assert_eq!(of, job());
    let refused = pb::CopyRefused { job: name, job_id, number, reason: "memory".into() };
    let Ok(ServerEvent::CopyRefused { job: of, number: 4, reason }) =
        server_event(pb::serve_request::Event::CopyRefused(refused))
    else {
        panic!("CopyRefused")
    };
    assert_eq!((of, reason.as_str()), (job(), "memory"));
}

#[test]
fn commands_are_converted_with_every_field() {
    let (job_id, name, attempt) = (JOB, "job".to_owned(), Attempt { epoch: 1, step: 2, number: 3 });
    let adamw: Optimizer = "adamw".parse().unwrap();
    let update = Update {
        groups: vec![adamw],
        coefficient: 0.5,
        unclipped: 0.25,
        gradient_factors: vec![2.0, 3.0],
    };
    let (resting, user_data) = (vec![1], vec![0]);
    let (spike, recent) = (report().spike, recent_steps());
    let figures = Figures {
        scale: 2.0,
        clip_coefficient: 0.5,
        loss: Some(3.0),
        resting,
        user_data,
        spike,
        recent,
    };
    let replicated = Some(Box::new(Replicated { absent: vec![4], report: report() }));
    let decision = Decision { attempt, update: Some(update), figures, replicated };
    let sent = |command: Command| wire(command);
    let close = pb::CloseJob { job: name.clone(), job_id };
    assert_eq!(sent(Command::Close(job())), Wire::Close(close));
    let publish = pb::Publish { job: name.clone(), job_id, epoch: 4 };
    assert_eq!(sent(Command::Publish { job: job(), epoch: 4 }), Wire::Publish(publish));
    let grant = pb::GrantLease { job: name.clone(), job_id, rank: 5, lease: 6 };
    assert_eq!(sent(Command::Grant { job: job(), rank: 5, lease: Lease(6) }), Wire::Grant(grant));
    let epoch = pb::NewEpoch { job: name.clone(), job_id, epoch: 7, rank: 8, left: true };
    assert_eq!(
        sent(Command::NewEpoch { job: job(), epoch: 7, rank: 8, left: true }),
        Wire::NewEpoch(epoch)
    );
    let next = pb::NewAttempt {
        job: name.clone(),
        job_id,
        epoch: 1,
        step: 2,
        attempt: 3,
        rested: Some(4),
    };
    assert_eq!(
        sent(Command::NewAttempt { job: job(), attempt, rested: Some(4) }),
        Wire::NewAttempt(next)
    );
    let done = pb::RankDone { job: name.clone(), job_id, rank: 9 };
    assert_eq!(sent(Command::RankDone { job: job(), rank: 9 }), Wire::Done(done));
    let rests =
        pb::RankRests { job: name.clone(), job_id, rank: 9, ends: false, since: 4, excluded: true };
    let begins = Some(Begins { since: 4, excluded: true });
    assert_eq!(sent(Command::RankRests { job: job(), rank: 9, begins }), Wire::Rests(rests));
    let groups = vec![(&adamw).into()];
    let update = Some(pb::Update {
        groups,
        coefficient: 0.5,
        unclipped: 0.25,
        gradient_factors: vec![2.0, 3.0],
    });
    let decide = pb::Decision {
        job: name,
        job_id,
        epoch: 1,
        step: 2,
        attempt: 3,
        update,
        scale: 2.0,
        clip_coefficient: 0.5,
        loss: Some(3.0),
        resting: vec![1],
        user_data: vec![0],
        absent: vec![4],
        report: Some(report().message()),
        recent: Some((&recent_steps()).into()),
        spike: "its norm is large".into(),
    };
    assert_eq!(sent(Command::Decide { job: job(), decision }), Wire::Decide(decide));
}

#[test]
fn a_server_is_told_what_to_copy_from_which_server() {
    let servers = [1, 2].map(|id| Server { id, incarnation: 1, address: format!("host:{id}") });
    let predecessor = Arc::new(spec(1));
    let placed = Plan::new(&predecessor, &servers, &Zones::new()).unwrap();
    let from = JobVersion { job: "job".into(), job_id: JOB, version: 0 };
    let fork = Arc::new(Fork { from: from.clone(), fresh_state: false });
    let source =
        Source { fork: fork.clone(), spec: predecessor, placement: placed.placement.clone() };
    let next = Arc::new(JobSpec { name: "next".into(), ..spec(1) });
    let mut slices = Vec::new();
    for server in [1, 2] {
        let open = OpenJob {
            spec: next.clone(),
            placement: placed.placement.clone(),
            job_id: 8,
            epoch: 1,
            line: Arc::default(),
            server,
            fork: Some(fork.clone()),
            source: Some(source.clone()),
            checkpoint: None,
            requested: None,
            leases: Vec::new(),
            done: Vec::new(),
            left: Vec::new(),
            version: None,
            decision: None,
            recent: recent_steps(),
        };
        let Wire::Open(open) = wire(Command::Open(open)) else { panic!("OpenJob") };
        assert_eq!(open.recent, Some((&recent_steps()).into()));
        let pb::Fork { from: source, servers, copies, .. } = open.fork.unwrap();
        assert_eq!(source, Some((&from).into()));
        assert_eq!(servers.iter().map(|server| server.id).collect::<Vec<_>>(), [1, 2]);
        for copy in copies {
            let owner = placed.placement.primary(copy.source as usize);
            assert_eq!(copy.server as usize, owner);
            slices.push((copy.slice, copy.length));
        }
    }
    slices.sort_unstable();
    assert_eq!(slices, [(0, 3), (1, 2), (2, 4)]);
}

#[test]
fn a_message_about_one_peer_is_small() {
    let told = Change {
        lease: Lease(u64::MAX),
        job_id: JOB,
        epoch: 1,
        world: 1000,
        version: None,
        spec: None,
        placement: None,
        peers: vec![Peer { rank: 999, address: Some("worker-999:7".to_owned()) }],
        restored: None,
        line: Arc::default(),
    };
    let bytes = told.message().encoded_len();
    assert!(bytes < 64, "{bytes} bytes for a message about one peer");
}

#[test]
fn a_description_with_ranks_slices_or_steps_that_do_not_exist_is_refused() {
    let spec = spec(2);
    let server = Server { id: 1, incarnation: 1, address: "host:1".into() };
    let placement = Plan::new(&spec, &[server], &Zones::new()).unwrap().placement;
    let report = || pb::JobReport {
        spec: Some((&spec).into()),
        placement: Some(placement.as_ref().into()),
        job_id: 3,
        ..Default::default()
    };
    assert!(job_report(report()).is_ok());
    let ready = |slice| {
        let slices = vec![pb::ReducedSlice { slice, sum_of_squares: 1.0, ..Default::default() }];
        Some(pb::StepReady { slices, ..Default::default() })
    };
    let rests = pb::RankRests { rank: 2, ..Default::default() };
    let done_and_resting = pb::RankRests { rank: 1, ..Default::default() };
    let decision = |step, resting| Some(pb::Decision { step, resting, ..Default::default() });
    let refused = [
        (pb::JobReport { leases: vec![pb::RankLease { rank: 2, lease: 1 }], ..report() }, "rank"),
        (pb::JobReport { done: vec![7], ..report() }, "rank"),
        (pb::JobReport { left: vec![7], ..report() }, "rank"),
        (pb::JobReport { resting: vec![rests], ..report() }, "rank"),
        (pb::JobReport { decision: decision(1, vec![9]), ..report() }, "rank"),
        (
            pb::JobReport { done: vec![1], resting: vec![done_and_resting], ..report() },
            "rests and is done",
        ),
        (pb::JobReport { ready: ready(3), ..report() }, "slice"),
        (pb::JobReport { decided: ready(u32::MAX), ..report() }, "slice"),
        (pb::JobReport { step: u64::MAX, ..report() }, "step"),
        (pb::JobReport { epoch: u64::MAX, ..report() }, "epoch"),
        (pb::JobReport { decision: decision(u64::MAX, vec![]), ..report() }, "step"),
    ];
    for (report, what) in refused {
        let error = job_report(report).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("description of job"), "{error}");
    }
}

#[test]
fn a_status_shows_each_server_with_its_own_data_while_another_one_departs() {
    let mut cluster = Cluster::default();
    for id in [1, 2] {
        let server = Server { id, incarnation: 1, address: format!("host:{id}") };
        let about = About { version: format!("version {id}"), ..About::default() };
        let (reports, is_new) = (Vec::new(), true);
        let joined = Event::ServerJoined { stream: id, server, about, reports, is_new };
        cluster.handle(joined, Now::ZERO);
    }
    let from = Link { server: 1, stream: 1 };
    cluster.handle(Event::FromServer { from, event: ServerEvent::Departing }, Now::ZERO);
    let status = responses::status(&cluster, Now::ZERO);
    let shown: Vec<_> = status.servers.iter().map(|of| of.version.as_str()).collect();
    assert_eq!(shown, ["version 2"]);
}
