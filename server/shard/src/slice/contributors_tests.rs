//! Slices whose elements have several sets of contributors.

use zeroshard_model::{
    DimPlacement::{self, Partial, Replicate, Shard},
    Error, JobSpec, ProcessMesh, Reduction, TensorSpec,
};

use super::{
    tests::{PARAMETERS, Subject, bytes, chunk},
    *,
};
use crate::{state_selector::StateSelector, test_jobs::job};

/// A matrix of two rows and four columns, on two by two ranks.
fn spec(tensor: TensorSpec, placements: [DimPlacement; 2]) -> JobSpec {
    job(tensor, ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap(), &placements)
}

fn tensor() -> TensorSpec {
    TensorSpec::new("w", [2, 4])
}

/// Ranks 0 and 2 hold the first two columns, ranks 1 and 3 the others.
const COLUMNS: [DimPlacement; 2] = [Partial(Reduction::Avg), Shard(1)];

/// The parts of 1, 2, ... 8 that ranks 0 and 1 hold.
const LEFT: [f32; 4] = [1.0, 2.0, 5.0, 6.0];
const RIGHT: [f32; 4] = [3.0, 4.0, 7.0, 8.0];
const ALL: [f32; 8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];

#[test]
fn parameters_and_state_are_complete_when_each_uploading_rank_has_sent_its_box() {
    let subject = Subject::of(spec(tensor(), COLUMNS));
    let state = Upload { state: Some(1), applied: AppliedSteps::new(3) };
    assert_eq!(subject.slice.missing_upload(), Some(0));
    assert_eq!(subject.upload_chunk(state, &chunk(1, 0, &RIGHT)).unwrap(), (4, false));
    assert_eq!(subject.upload_chunk(PARAMETERS, &chunk(1, 2, &RIGHT[2..])).unwrap(), (2, false));
    assert_eq!(subject.upload_chunk(PARAMETERS, &chunk(1, 0, &RIGHT)).unwrap(), (2, false));
    assert_eq!(subject.slice.missing_upload(), Some(0));
    assert_eq!(subject.upload_chunk(state, &chunk(0, 0, &LEFT)).unwrap(), (4, false));
    assert_eq!(subject.upload_chunk(PARAMETERS, &chunk(0, 0, &LEFT)).unwrap(), (4, true));
    assert_eq!((subject.slice.missing_upload(), subject.slice.version()), (None, Some(0)));
    for part in [StateSelector::Parameters, StateSelector::State(1)] {
        assert_eq!(subject.read(part, 0), bytes(&ALL));
    }
    assert_eq!(subject.applied(0), 3);
}

#[test]
fn ranks_with_different_numbers_of_applied_steps_are_refused() {
    let subject = Subject::of(spec(tensor(), COLUMNS));
    let upload = Upload { state: None, applied: AppliedSteps::new(3) };
    subject.upload_chunk(upload, &chunk(0, 0, &LEFT)).unwrap();
    let other = subject
        .upload_chunk(Upload { applied: AppliedSteps::new(4), ..upload }, &chunk(1, 0, &RIGHT));
    assert!(matches!(other, Err(Error::Refused { .. })));
    assert!(subject.upload_chunk(upload, &chunk(1, 0, &RIGHT)).unwrap().1);
    assert_eq!(subject.applied(0), 3);
}

#[test]
fn an_aborted_upload_begins_again_for_every_uploading_rank() {
    let subject = Subject::of(spec(tensor(), COLUMNS));
    subject.upload_chunk(PARAMETERS, &chunk(0, 0, &LEFT)).unwrap();
    subject.restart();
    assert_eq!(subject.upload_chunk(PARAMETERS, &chunk(1, 0, &RIGHT)).unwrap(), (4, false));
    assert_eq!(subject.upload_chunk(PARAMETERS, &chunk(0, 0, &LEFT)).unwrap(), (4, true));
}

#[test]
fn a_buffer_moves_when_all_of_its_boxes_have_arrived() {
    let subject = Subject::of(spec(TensorSpec { buffer: true, ..tensor() }, [Replicate, Shard(1)]));
    for (rank, values) in [(0, LEFT), (1, RIGHT)] {
        subject.upload_chunk(PARAMETERS, &chunk(rank, 0, &values)).unwrap();
    }
    assert_eq!(subject.replace_chunk(&chunk(1, 0, &LEFT)), 4);
    subject.step(0, 1.0, 1.0);
    assert_eq!(subject.read(StateSelector::Parameters, 1), bytes(&ALL), "half of it has come");
    subject.replace_chunk(&chunk(1, 0, &[0.0; 4]));
    assert_eq!(subject.replace_chunk(&chunk(0, 0, &LEFT)), 4);
    subject.step(1, 1.0, 1.0);
    assert_eq!(
        subject.read(StateSelector::Parameters, 2),
        bytes(&[1.0, 2.0, 0.0, 0.0, 5.0, 6.0, 0.0, 0.0])
    );
}

#[test]
fn the_gradient_is_the_mean_along_averaged_dimensions() {
    let average = |placements, pushes: &[(u32, [f32; 4])]| {
        let groups = vec!["average".parse().unwrap()];
        let subject = Subject::of(JobSpec { groups, ..spec(tensor(), placements) });
        for (rank, values) in [(0, LEFT), (1, RIGHT)] {
            subject.upload_chunk(PARAMETERS, &chunk(rank, 0, &values)).unwrap();
        }
        let last = pushes.iter().map(|(rank, values)| subject.push(*rank, values)).last().unwrap();
        subject.step(0, 1.0, 1.0);
        (subject.read(StateSelector::Parameters, 1), last.expect("complete").sum_of_squares)
    };
    let pushes = [(3, [8.0; 4]), (1, [2.0; 4]), (0, [4.0; 4]), (2, [1.0; 4])];
    let mean = [2.5, 2.5, 5.0, 5.0, 2.5, 2.5, 5.0, 5.0];
    assert_eq!(average(COLUMNS, &pushes), (bytes(&mean), 500.0));
    let sum = mean.map(|mean| 2.0 * mean);
    assert_eq!(average([Partial(Reduction::Sum), Shard(1)], &pushes), (bytes(&sum), 500.0));
    let first = [4.0, 4.0, 2.0, 2.0, 4.0, 4.0, 2.0, 2.0];
    assert_eq!(average([Replicate, Shard(1)], &pushes[1..3]), (bytes(&first), 80.0));
}

#[test]
fn missing_elements_count_as_zeros_and_a_slice_without_any_element_is_not_stepped() {
    let subject = Subject::of(spec(tensor(), COLUMNS));
    for (rank, values) in [(0, LEFT), (1, RIGHT)] {
        subject.upload_chunk(PARAMETERS, &chunk(rank, 0, &values)).unwrap();
    }
    for rank in [0, 2, 1] {
        assert_eq!(subject.absent(rank), None);
    }
    assert_eq!(subject.slice.missing_rank(), Some(3));
    let reduced = subject.push(3, &[1.0; 4]).expect("complete");
    assert_eq!(reduced.absent, Some(Absent { rank: 0, everywhere: false }));
    assert_eq!(reduced.sum_of_squares, 4.0);
    subject.step(0, 1.0, 1.0);
    assert_eq!(subject.applied(1), 1);

    let last = [3, 0, 2, 1].map(|rank| subject.absent(rank))[3];
    assert_eq!(last.expect("complete").absent, Some(Absent { rank: 0, everywhere: true }));
    subject.step(1, 1.0, 1.0);
    assert_eq!(subject.applied(2), 1);
}
