//! The error for a rank that may not send data names the reason and the ranks that may.
//!
//! promise: exactly-once

use zeroshard_model::{
    DimPlacement::{self, Partial, Replicate, Shard},
    Manifest, ProcessMesh, Reduction, SliceSpec, TensorSpec,
};

use super::*;
use crate::test_jobs::job;

fn refused(spec: &JobSpec, slice: SliceSpec, rank: u32, sent: Sent) -> String {
    let contributors = spec.contributions(0).of_slice(&slice);
    contributors_of(spec, 0, &contributors, rank, sent).expect_err("refused").to_string()
}

/// Four rows on two by two ranks, in a world of five.
fn spec(placements: [DimPlacement; 2]) -> JobSpec {
    let mesh = ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap();
    JobSpec { world: 5, ..job(TensorSpec::new("w", [4]), mesh, &placements) }
}

const WHOLE: SliceSpec = SliceSpec { tensor: 0, offset: 0, numel: 4 };

#[test]
fn gradients_of_ranks_that_do_not_contribute_are_refused() {
    let of = "cannot push the gradient of tensor \"w\"; the ranks that contribute to slice 0 are:";
    let mean = Partial(Reduction::Avg);
    assert_eq!(
        refused(&spec([mean, Replicate]), WHOLE, 3, Sent::Gradient),
        format!(
            "rank 3 (dp 1, tp 1), which is not the first along \"tp\", where the tensor is \
             replicated, {of} rank 0 (dp 0, tp 0), rank 2 (dp 1, tp 0)"
        )
    );
    assert_eq!(
        refused(&spec([mean, Replicate]), WHOLE, 4, Sent::Gradient),
        format!(
            "rank 4, which is not in the tensor's mesh, {of} rank 0 (dp 0, tp 0), rank 2 (dp 1, tp 0)"
        )
    );
    let mesh = ProcessMesh::dense([3], ["tp"]).unwrap();
    let rows = job(TensorSpec::new("w", [4]), mesh, &[Shard(0)]);
    assert_eq!(
        refused(&rows, WHOLE, 2, Sent::Gradient),
        format!(
            "rank 2 (tp 2), whose box of the tensor is empty, {of} rank 0 (tp 0), rank 1 (tp 1)"
        )
    );
    let half = SliceSpec { numel: 2, ..WHOLE };
    assert_eq!(
        refused(&rows, half, 1, Sent::Gradient),
        format!(
            "rank 1 (tp 1), whose box of the tensor does not overlap this slice, {of} rank 0 (tp 0)"
        )
    );
}

#[test]
fn uploads_of_ranks_other_than_the_first_are_refused() {
    let spec = spec([Partial(Reduction::Sum), Shard(0)]);
    assert_eq!(
        refused(&spec, WHOLE, 2, Sent::Initial),
        "rank 2 (dp 1, tp 0), which is not the first rank that holds it, cannot upload tensor \
         \"w\"; the ranks that upload parts of slice 0 are: rank 0 (dp 0, tp 0), rank 1 (dp 0, tp 1)"
    );
    let manifest = Manifest::new(vec![TensorSpec::new("b", [4])]).unwrap();
    let plain = JobSpec { manifest, meshes: vec![], world: 2, ..spec };
    assert_eq!(
        refused(&plain, WHOLE, 1, Sent::Replacement),
        "rank 1, which is not the first rank that holds it, cannot push new values of tensor \
         \"b\"; the ranks that upload parts of slice 0 are: rank 0"
    );
}

#[test]
fn a_tensor_is_replaced_by_the_rank_that_the_job_names_and_uploaded_by_the_first() {
    let tensor = TensorSpec { replaced_by: Some(1), ..TensorSpec::new("b", [4]) };
    let manifest = Manifest::new(vec![tensor]).unwrap();
    let groups = vec!["sgd".parse().unwrap()];
    let spec = JobSpec { world: 2, ..JobSpec::new("job", manifest, groups) };
    spec.validate().unwrap();
    let contributors = spec.contributions(0).of_slice(&WHOLE);
    for (rank, sent) in [(0, Sent::Initial), (1, Sent::Replacement)] {
        contributors_of(&spec, 0, &contributors, rank, sent).unwrap();
    }
    assert_eq!(
        refused(&spec, WHOLE, 0, Sent::Replacement),
        "rank 0 cannot push new values of tensor \"b\", which only rank 1 may replace, according \
         to the specification of the job"
    );
    let refused = refused(&spec, WHOLE, 1, Sent::Initial);
    assert!(refused.contains("the ranks that upload parts of slice 0 are: rank 0"), "{refused}");
}

#[test]
fn a_permitted_rank_gets_its_contributors() {
    let spec = spec([Partial(Reduction::Sum), Shard(0)]);
    let contributors = spec.contributions(0).of_slice(&WHOLE);
    for (rank, sent) in
        [(1, Sent::Gradient), (3, Sent::Gradient), (1, Sent::Initial), (1, Sent::Replacement)]
    {
        assert_eq!(*contributors_of(&spec, 0, &contributors, rank, sent).unwrap().ranks, [1, 3]);
    }
}
