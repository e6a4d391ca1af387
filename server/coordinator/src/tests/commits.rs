//! The barrier and the decision. Slices 0 and 2 are trained, slice 1 is frozen.
//!
//! promise: no-silent-difference

use std::sync::Arc;

use super::*;

#[test]
fn a_step_is_decided_when_all_ranks_have_committed_and_all_servers_are_ready() {
    let (mut script, leases) = Script::training(2, 2);
    let first = script.commit(commit(leases[0], 1, 0, 0));
    script.ready_all(0);
    assert!(script.decisions().is_empty());
    let second = script.commit(commit(leases[1], 1, 1, 0));
    assert_eq!(script.decisions().iter().map(|(server, _)| *server).collect::<Vec<_>>(), [1, 2]);
    // The sums of squares are 1 and 3, and there are two ranks.
    let norm = 4.0f64.sqrt() / 2.0;
    let report = Report {
        version: 1,
        applied: true,
        norm: Norm { value: norm, overflow: None, tensors: Arc::new([0.5, 0.0, 0.75f64.sqrt()]) },
        clip_coefficient: 1.0,
        loss: None,
        world: 2,
        absent: Vec::new(),
        resting: Vec::new(),
        spike: None,
    };
    assert_eq!((script.report(first), script.report(second)), (report.clone(), report));
    let decision = &script.decisions()[0].1;
    let update = decision.update.as_ref().expect("it is applied");
    assert_eq!((decision.attempt.step, update.coefficient, update.groups.len()), (0, 1.0, 1));
    assert_eq!(script.version(), Some(1));
}

#[test]
fn the_order_of_commits_and_reports_changes_nothing() {
    let play = |reports_first: bool, backwards: bool| {
        let (mut script, leases) = Script::training(2, 3);
        if reports_first {
            script.ready_all(0);
        }
        let mut ranks = [0, 1];
        if backwards {
            ranks.reverse();
        }
        for rank in ranks {
            let loss = Some([0.1, 0.7][rank]);
            script.commit(Commit { loss, ..commit(leases[rank], 1, rank as u32, 0) });
        }
        if !reports_first {
            script.ready_all(0);
        }
        let report = script.answers.values().find_map(|answer| match answer {
            Ok(Reply::Report(report, _)) => Some(report.clone()),
            _ => None,
        });
        (report.expect("decided"), script.decisions())
    };
    let expected = play(true, false);
    assert_eq!(expected.0.loss, Some((0.1 + 0.7) / 2.0));
    for (reports_first, backwards) in [(false, false), (true, true), (false, true)] {
        assert_eq!(play(reports_first, backwards), expected);
    }
}

#[test]
fn the_decision_does_not_depend_on_the_number_of_servers() {
    let play = |servers| {
        let (mut script, leases) = Script::training(1, servers);
        script.ready_all(0);
        let caller = script.commit(Commit { max_norm: Some(0.3), ..commit(leases[0], 1, 0, 0) });
        (script.report(caller), script.decisions()[0].1.clone())
    };
    let one = play(1);
    assert!(one.0.clip_coefficient < 1.0);
    for servers in [2, 3, 7] {
        assert_eq!(play(servers), one);
    }
}

#[test]
fn the_coefficient_clips_and_unscales_and_the_norm_is_the_means() {
    let (mut script, leases) = Script::training(2, 1);
    script.ready_all(0);
    let mut caller = None;
    for rank in [0, 1] {
        let terms = Commit {
            loss_scale: 8.0,
            max_norm: Some(0.1),
            ..commit(leases[rank], 1, rank as u32, 0)
        };
        caller = Some(script.commit(terms));
    }
    let report = script.report(caller.unwrap());
    assert_eq!(report.norm.value, 2.0 / 16.0);
    assert_eq!(report.clip_coefficient, 0.1 / 0.125);
    assert_eq!(script.update(0).coefficient, 0.1 / 0.125 / 8.0);
}

#[test]
fn an_overflow_skips_the_step_and_names_the_first_slice_and_its_rank() {
    let (mut script, leases) = Script::training(1, 2);
    let servers = script.servers();
    for server in servers {
        script.ready(server, 0, |report| {
            let slice = report.sums[0].0;
            report.sums[0].1 = f64::INFINITY;
            report.overflow = Some(Overflow { slice, rank: Some(slice) });
        });
    }
    let caller = script.commit(Commit { max_norm: Some(1.0), ..commit(leases[0], 1, 0, 0) });
    let report = script.report(caller);
    assert!(!report.applied && !report.norm.value.is_finite());
    assert_eq!(report.norm.overflow, Some(Overflow { slice: 0, rank: Some(0) }));
    assert!(script.decisions().iter().all(|(_, decision)| decision.update.is_none()));
    assert_eq!(report.version, 1);
}

#[test]
fn a_sum_that_is_not_finite_skips_the_step_without_naming_a_rank() {
    let (mut script, leases) = Script::training(1, 1);
    script.ready(1, 0, |report| report.sums[1].1 = f64::NAN);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    assert_eq!(script.report(caller).norm.overflow, Some(Overflow { slice: 2, rank: None }));
}

#[test]
fn a_rank_that_commits_twice_counts_once_and_both_callers_are_answered() {
    let (mut script, leases) = Script::training(2, 1);
    script.ready_all(0);
    let once = script.commit(commit(leases[0], 1, 0, 0));
    let twice = script.commit(commit(leases[0], 1, 0, 0));
    assert!(script.decisions().is_empty());
    script.commit(commit(leases[1], 1, 1, 0));
    assert_eq!(script.report(once), script.report(twice));
    assert_eq!(script.decisions().len(), 1);
}

#[test]
fn a_repeated_commit_of_the_previous_step_gets_its_report() {
    let (mut script, leases) = Script::training(1, 1);
    script.ready_all(0);
    let first = script.commit(commit(leases[0], 1, 0, 0));
    let again = script.commit(commit(leases[0], 1, 0, 0));
    assert_eq!(script.report(first), script.report(again));
    assert_eq!(script.decisions().len(), 1);
    let early = script.commit(commit(leases[0], 1, 0, 2));
    assert_eq!(
        script.error(early),
        &Error::StepMismatch { job: "job".into(), step: 2, current: 1 }
    );
    let never = script.commit(commit(leases[0], 1, 0, u64::MAX));
    assert!(matches!(script.error(never), Error::StepMismatch { .. }));
}

#[test]
fn a_lost_lease_and_a_stale_epoch_are_refused() {
    let (mut script, leases) = Script::training(2, 1);
    script.lose(1, leases[1]);
    let lost = script.commit(commit(leases[1], 1, 1, 0));
    assert_eq!(script.error(lost), &Error::LeaseLost { job: "job".into(), rank: 1 });
    let stale = script.commit(commit(leases[0], 1, 0, 0));
    assert_eq!(script.error(stale), &Error::StaleEpoch { job: "job".into(), epoch: 1, current: 2 });
    let foreign = script.commit(Commit {
        turn: Turn { job: JobRef { name: "x".into(), id: JOB }, ..turn(leases[0], 1, 0, 0) },
        ..commit(leases[0], 1, 0, 0)
    });
    assert_eq!(script.error(foreign), &Error::UnknownJob { job: "x".into() });
}

#[test]
fn ranks_that_disagree_are_told_the_differing_field() {
    let (mut script, leases) = Script::training(2, 1);
    let mut other = spec(1).groups;
    let zeroshard_model::Optimizer::AdamW(adamw) = &mut other[0] else { panic!("adamw") };
    adamw.lr = 0.5;
    let base = commit(leases[1], 1, 1, 0);
    let cases = [
        (
            Commit { groups: Some(other), ..base.clone() },
            "lr of parameter group 0",
            ["0.5", "0.001"],
        ),
        (Commit { loss_scale: 2.0, ..base.clone() }, "loss_scale", ["2", "1"]),
        (Commit { max_norm: Some(1.5), ..base.clone() }, "max_norm", ["1.5", "none"]),
        (
            Commit { gradient_factors: vec![1.0, 1.0, 0.5], ..base.clone() },
            "factor of the gradient of tensor \"b\"",
            ["0.5", "1"],
        ),
        (
            Commit { written: vec![0, 255, 0], ..base.clone() },
            "values that the program has written to tensor \"frozen\"",
            ["values with the hash 00000000000000ff", "none"],
        ),
    ];
    for (other, expected, values) in cases {
        let callers = [script.commit(commit(leases[0], 1, 0, 0)), script.commit(other)];
        for caller in callers {
            let Error::Disagreement { rank: 1, what, value, other_rank: 0, other_value, .. } =
                script.error(caller)
            else {
                panic!("disagreement")
            };
            assert_eq!((what.as_str(), [value.as_str(), other_value.as_str()]), (expected, values));
        }
    }
    // Votes that agree count.
    script.ready_all(0);
    script.commit(commit(leases[0], 1, 0, 0));
    let caller = script.commit(base);
    assert!(script.report(caller).applied);
}

#[test]
fn hyperparameters_of_a_different_optimizer_are_refused() {
    let (mut script, leases) = Script::training(1, 1);
    let groups = Some(vec!["sgd".parse().unwrap()]);
    let caller = script.commit(Commit { groups, ..commit(leases[0], 1, 0, 0) });
    assert!(matches!(script.error(caller), Error::Invalid { .. }));
}

#[test]
fn the_mean_loss_needs_every_rank() {
    let (mut script, leases) = Script::training(2, 1);
    script.ready_all(0);
    script.commit(Commit { loss: Some(1.0), ..commit(leases[0], 1, 0, 0) });
    let caller = script.commit(commit(leases[1], 1, 1, 0));
    assert_eq!(script.report(caller).loss, None);
}

#[test]
fn a_missing_rank_and_a_late_server_are_named_at_the_deadline() {
    let (mut script, leases) = Script::training(3, 2);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    script.lose(2, leases[2]);
    assert!(matches!(script.error(caller), Error::StepAborted { .. }));
    let caller = script.commit(commit(leases[0], 2, 0, 0));
    script.ready(1, 0, |_| {});
    script.said(2, ServerEvent::Stats(stats("tensor \"b\" from rank 1")));
    assert_eq!(script.cluster.next_deadline(), Some(WAIT));
    script.after(WAIT - Duration::from_millis(1));
    assert_eq!(script.answer(caller), None);
    script.after(Duration::from_millis(1));
    let Error::Timeout { waiting_for, waited_ms: 60_000 } = script.error(caller) else {
        panic!("timeout")
    };
    for part in [
        "step 0 of job \"job\" (epoch 2)",
        "have not committed (rank 1)",
        "without a worker (rank 2)",
        "shard server host:2, which waits for tensor \"b\" from rank 1",
    ] {
        assert!(waiting_for.contains(part), "{part} in {waiting_for}");
    }
    assert!(!waiting_for.contains("host:1"));
    assert_eq!(script.cluster.next_deadline(), None);
}

#[test]
fn a_commit_that_timed_out_still_counts() {
    let (mut script, leases) = Script::training(2, 1);
    script.ready_all(0);
    let late = script.commit(commit(leases[0], 1, 0, 0));
    script.after(WAIT);
    assert!(matches!(script.error(late), Error::Timeout { .. }));
    let caller = script.commit(commit(leases[1], 1, 1, 0));
    assert!(script.report(caller).applied);
    let again = script.commit(commit(leases[0], 1, 0, 0));
    assert_eq!(script.report(again), script.report(caller));
}

#[test]
fn a_committed_step_waits_for_the_initial_parameters() {
    let mut script = Script::with_servers(1);
    script.create(spec(1));
    script.open_all();
    let lease = script.join(0).unwrap();
    let caller = script.commit(commit(lease, 1, 0, 0));
    script.ready_all(0);
    assert_eq!(script.answer(caller), None);
    script.initialise_all();
    assert_eq!(script.report(caller).version, 1);
}

#[test]
fn reports_of_another_epoch_or_step_are_ignored() {
    let (mut script, leases) = Script::training(2, 1);
    script.ready_all(1);
    script.ready_at(1, Attempt::first(0, 0));
    script.ready_all(0);
    script.lose(1, leases[1]);
    let lease = script.join(1).unwrap();
    script.commit(commit(leases[0], 2, 0, 0));
    let caller = script.commit(commit(lease, 2, 1, 0));
    assert_eq!(script.answer(caller), None, "the report was of the epoch before");
    script.ready_all(0);
    assert!(script.report(caller).applied);
}

#[test]
fn a_frozen_job_needs_no_reports() {
    let mut script = Script::with_servers(2);
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    script.create(JobSpec { manifest: Manifest::new(vec![frozen]).unwrap(), ..spec(1) });
    script.open_all();
    let lease = script.join(0).unwrap();
    script.initialise_all();
    let caller = script.commit(commit(lease, 1, 0, 0));
    assert_eq!(script.report(caller).norm.value, 0.0);
    assert_eq!(script.decisions().len(), 1);
}

#[test]
fn a_report_about_other_slices_fails_the_job() {
    let changes: [fn(&mut Reduced); 4] = [
        |report| report.sums[0].0 = 1,
        |report| report.sums.clear(),
        |report| report.overflow = Some(Overflow { slice: 99, rank: None }),
        |report| report.absent.push(Absent { slice: 1, rank: 0, everywhere: false }),
    ];
    for change in changes {
        let (mut script, leases) = Script::training(1, 1);
        let caller = script.commit(commit(leases[0], 1, 0, 0));
        script.ready(1, 0, change);
        assert!(matches!(script.error(caller), Error::JobFailed { .. }));
    }
}

#[test]
fn a_step_is_decided_by_all_servers_or_by_none_for_any_loss() {
    // A rank or a server is lost after each prefix of the step's events. Either every server has
    // the decision or none has, and every caller that committed has one answer.
    for lost_server in [false, true] {
        for cut in 0..=4 {
            let (mut script, leases) = Script::training(2, 2);
            let mut callers = Vec::new();
            for event in 0..cut {
                match event {
                    0 | 2 => callers.push(script.commit(commit(
                        leases[event / 2],
                        1,
                        event as u32 / 2,
                        0,
                    ))),
                    event => script.ready(event.div_ceil(2) as u64, 0, |_| {}),
                }
            }
            if lost_server {
                script.lose_server(1);
            } else {
                script.lose(1, leases[1]);
            }
            let decided = script.decisions().len();
            assert_eq!(decided, if cut == 4 { 2 } else { 0 }, "after {cut} events");
            for caller in callers {
                assert_eq!(script.answer(caller).expect("answered").is_ok(), cut == 4);
            }
        }
    }
}
