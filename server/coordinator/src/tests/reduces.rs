//! Reduced gradients: norms before the decision, tensors that are absent or not clipped, and steps
//! that are never skipped.

use std::sync::Arc;

use zeroshard_model::{DimPlacement, ProcessMesh, Reduction, TensorLayout, optimizer::Average};

use super::*;

#[test]
fn the_norm_is_returned_when_all_gradients_are_complete_and_equals_the_decisions_norm() {
    let (mut script, leases) = Script::training(2, 2);
    let early = script.reduce(leases[0], 1, 0, 4.0);
    script.ready(1, 0, |_| {});
    assert_eq!(script.answer(early), None);
    script.ready(2, 0, |_| {});
    let norm = 4.0f64.sqrt() / 8.0;
    assert_eq!(
        script.reduced(early),
        Norm { value: norm, overflow: None, tensors: Arc::new([0.125, 0.0, 0.75f64.sqrt() / 4.0]) }
    );
    let late = script.reduce(leases[0], 1, 0, 4.0);
    assert_eq!(script.reduced(late), script.reduced(early));
    assert!(script.decisions().is_empty(), "nobody has committed");

    for rank in [0, 1] {
        script.commit(Commit { loss_scale: 4.0, ..commit(leases[rank], 1, rank as u32, 0) });
    }
    let over = script.reduce(leases[0], 1, 0, 4.0);
    assert_eq!(script.reduced(over), script.reduced(early));
    let next = script.reduce(leases[0], 1, 1, 4.0);
    assert_eq!(script.answer(next), None);
    let wrong = script.reduce(leases[0], 1, 7, 4.0);
    assert_eq!(
        script.error(wrong),
        &Error::StepMismatch { job: "job".into(), step: 7, current: 1 }
    );
}

#[test]
fn an_overflow_is_reported_before_the_decision() {
    let (mut script, leases) = Script::training(1, 1);
    let overflow = Overflow { slice: 2, rank: Some(0) };
    script.ready(1, 0, |report| report.overflow = Some(overflow));
    let caller = script.reduce(leases[0], 1, 0, 1.0);
    let report = script.reduced(caller);
    assert!(report.value.is_nan());
    assert_eq!(report.overflow, Some(overflow));
}

#[test]
fn waits_for_the_norm_report_a_lost_rank_and_missing_input_at_the_deadline() {
    let (mut script, leases) = Script::training(2, 2);
    let caller = script.reduce(leases[0], 1, 0, 1.0);
    script.lose(1, leases[1]);
    assert!(matches!(script.error(caller), Error::StepAborted { epoch: 2, step: 0, .. }));
    let stale = script.reduce(leases[0], 1, 0, 1.0);
    assert!(matches!(script.error(stale), Error::StaleEpoch { .. }));
    let foreign = script.reduce(leases[1], 2, 0, 1.0);
    assert!(matches!(script.error(foreign), Error::LeaseLost { .. }));

    let caller = script.reduce(leases[0], 2, 0, 1.0);
    script.ready(1, 0, |_| {});
    assert_eq!(script.cluster.next_deadline(), Some(WAIT));
    script.after(WAIT);
    let Error::Timeout { waiting_for, waited_ms: 60_000 } = script.error(caller) else {
        panic!("timeout")
    };
    assert!(waiting_for.contains("shard server host:2"), "{waiting_for}");
    assert!(!waiting_for.contains("host:1") && !waiting_for.contains("rank"), "{waiting_for}");
    assert_eq!(script.cluster.next_deadline(), None);
}

#[test]
fn a_request_for_the_norm_waits_for_the_initial_parameters() {
    let mut script = Script::with_servers(1);
    script.create(spec(1));
    script.open_all();
    let lease = script.join(0).unwrap();
    let caller = script.reduce(lease, 1, 0, 1.0);
    script.ready_all(0);
    assert_eq!(script.answer(caller), None);
    script.initialise_all();
    assert_eq!(script.reduced(caller).value, 2.0);
}

#[test]
fn deleting_a_job_answers_the_calls_that_wait_for_its_norm() {
    let (mut script, leases) = Script::training(1, 1);
    let waiting = script.reduce(leases[0], 1, 0, 1.0);
    script.delete(0);
    assert!(matches!(script.error(waiting), Error::JobFailed { .. }));
}

#[test]
fn absences_are_merged_by_tensor_in_manifest_order() {
    let (mut script, leases) = Script::training(3, 2);
    let absent = |slice, rank, everywhere| Absent { slice, rank, everywhere };
    script.ready(1, 0, |report| report.absent = vec![absent(report.sums[0].0, 1, false)]);
    script.ready(2, 0, |report| report.absent = vec![absent(report.sums[0].0, 0, true)]);
    let callers: Vec<_> =
        (0..3).map(|rank| script.commit(commit(leases[rank], 1, rank as u32, 0))).collect();
    let report = script.report(callers[0]);
    let slices: Vec<u32> = report.absent.iter().map(|absent| absent.slice).collect();
    assert_eq!(slices, [0, 2]);
    assert!(
        report.absent.contains(&absent(0, 1, false)) || report.absent.contains(&absent(0, 0, true))
    );
    assert!(report.applied);
}

#[test]
fn a_tensor_is_absent_everywhere_only_if_all_its_slices_are() {
    let big = TensorSpec::new("a", [2 * zeroshard_model::geometry::blocks::SLICE as u64]);
    let spec = JobSpec { manifest: Manifest::new(vec![big]).unwrap(), ..spec(1) };
    for (second, everywhere) in [(true, true), (false, false)] {
        let (mut script, leases) = Script::training_of(spec.clone(), 1);
        let absent = |slice, everywhere| Absent { slice, rank: 0, everywhere };
        script.ready(1, 0, |report| {
            report.sums = vec![(0, 0.0), (1, 0.0)];
            report.absent = vec![absent(0, true), absent(1, second)];
        });
        let caller = script.commit(commit(leases[0], 1, 0, 0));
        assert_eq!(script.report(caller).absent, [absent(0, everywhere)]);
    }
}

#[test]
fn an_average_that_is_not_finite_is_applied() {
    let spec = JobSpec { groups: vec![zeroshard_model::Optimizer::Average(Average {})], ..spec(2) };
    let (mut script, leases) = Script::training_of(spec, 1);
    let overflow = Overflow { slice: 0, rank: Some(1) };
    script.ready(1, 0, |report| report.overflow = Some(overflow));
    let terms = |rank: usize, step| Commit {
        max_norm: Some(0.5),
        ..commit(leases[rank], 1, rank as u32, step)
    };
    script.commit(terms(0, 0));
    let caller = script.commit(terms(1, 0));
    let report = script.report(caller);
    assert_eq!(
        (report.applied, report.norm.overflow, report.clip_coefficient),
        (true, Some(overflow), 1.0)
    );
    assert!(report.norm.value.is_nan());
    assert_eq!(script.update(0).coefficient, 1.0);

    // A finite gradient is clipped as with other optimizers.
    script.ready_all(1);
    script.commit(terms(0, 1));
    let caller = script.commit(terms(1, 1));
    assert_eq!(script.report(caller).clip_coefficient, 0.5);
}

#[test]
fn tensors_that_are_not_clipped_are_unscaled_and_not_in_the_norm() {
    let (mut script, leases) = Script::training_of(partly_clipped(2), 2);
    script.ready_all(0);
    let terms = |rank: usize| Commit {
        loss_scale: 4.0,
        max_norm: Some(0.0625),
        ..commit(leases[rank], 1, rank as u32, 0)
    };
    script.commit(terms(0));
    let caller = script.commit(terms(1));
    let report = script.report(caller);
    // Slice 0 has the sum of squares 1.
    assert_eq!((report.norm.value, report.clip_coefficient), (0.125, 0.5));
    let update = script.update(0);
    assert_eq!((update.coefficient, update.unclipped), (0.125, 0.25));

    // An overflow in this tensor skips the step like any other overflow.
    let (mut script, leases) = Script::training_of(partly_clipped(1), 1);
    script.ready(1, 0, |report| report.sums[1].1 = f64::INFINITY);
    let caller = script.commit(commit(leases[0], 1, 0, 0));
    let report = script.report(caller);
    assert_eq!(
        (report.applied, report.norm.overflow),
        (false, Some(Overflow { slice: 2, rank: None }))
    );
    assert!(!report.norm.value.is_finite());
}

#[test]
fn factors_of_tensors_are_carried_out_and_precede_clipping() {
    let (mut script, leases) = Script::training_of(partly_clipped(1), 1);
    script.ready_all(0);
    let caller = script.reduce(leases[0], 1, 0, 2.0);
    // Slices 0 and 2 have the sums of squares 1 and 3.
    let norm = script.reduced(caller);
    assert_eq!((norm.value, &*norm.tensors), (0.5, &[0.5, 0.0, f64::sqrt(3.0) / 2.0][..]));
    let factors = vec![4.0, 1.0, f64::NAN];
    let terms = Commit {
        loss_scale: 2.0,
        max_norm: Some(1.0),
        gradient_factors: factors,
        ..commit(leases[0], 1, 0, 0)
    };
    let caller = script.commit(terms);
    let report = script.report(caller);
    // The norm is that before the factors; it is clipped after them.
    assert_eq!((report.norm.value, report.clip_coefficient), (0.5, 0.5));
    let update = script.update(0);
    assert_eq!((update.coefficient, update.gradient_factors[0]), (0.25, 4.0));
    assert!(update.gradient_factors[2].is_nan());

    let caller =
        script.commit(Commit { gradient_factors: vec![1.0], ..commit(leases[0], 1, 0, 1) });
    let error = script.error(caller);
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
}

#[test]
fn factors_that_are_not_numbers_are_equal_on_two_ranks() {
    let (mut script, leases) = Script::training(2, 1);
    script.ready_all(0);
    let terms = |rank: usize| Commit {
        gradient_factors: vec![1.0, 1.0, f64::NAN],
        ..commit(leases[rank], 1, rank as u32, 0)
    };
    script.commit(terms(0));
    let caller = script.commit(terms(1));
    assert!(script.report(caller).applied);
}

#[test]
fn each_tensors_sum_is_divided_by_its_own_number_of_averaged_ranks() {
    let mesh = ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap();
    let laid_out = |name: &str, placements| TensorSpec {
        layout: Some(TensorLayout { mesh: 0, placements }),
        ..TensorSpec::new(name, [4])
    };
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    let (mean, sum) =
        (DimPlacement::Partial(Reduction::Avg), DimPlacement::Partial(Reduction::Sum));
    for (first, second, expected) in [
        (vec![mean, DimPlacement::Shard(0)], vec![mean, mean], 1.0 / 4.0 + 3.0 / 16.0),
        (vec![sum, sum], vec![DimPlacement::Replicate, mean], 1.0 + 3.0 / 4.0),
    ] {
        let tensors = vec![laid_out("a", first), frozen.clone(), laid_out("b", second)];
        let (manifest, meshes) = (Manifest::new(tensors).unwrap(), vec![Arc::new(mesh.clone())]);
        let (mut script, leases) = Script::training_of(JobSpec { manifest, meshes, ..spec(4) }, 2);
        script.ready_all(0);
        // The sums of squares are 1 and 3.
        let caller = script.reduce(leases[0], 1, 0, 2.0);
        assert_eq!(script.reduced(caller).value, f64::sqrt(expected) / 2.0);
        for (rank, &lease) in (0..).zip(&leases) {
            let terms =
                Commit { loss_scale: 2.0, max_norm: Some(0.125), ..commit(lease, 1, rank, 0) };
            script.commit(terms);
        }
        let clip = 0.125 / (f64::sqrt(expected) / 2.0);
        assert_eq!(script.update(0).coefficient, clip / 2.0);
    }
}

/// `a` is clipped, `b` is not.
fn partly_clipped(world: u32) -> JobSpec {
    let unclipped = TensorSpec { no_clip: true, ..TensorSpec::new("b", [4]) };
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    let manifest = Manifest::new(vec![TensorSpec::new("a", [3]), frozen, unclipped]).unwrap();
    JobSpec { manifest, ..spec(world) }
}
