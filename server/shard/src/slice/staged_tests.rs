//! 8-bit state that arrives in any parts is rounded once, and only steps change it.

use zeroshard_kernels::Cpu;
use zeroshard_model::{
    DimPlacement::{Partial, Shard},
    Manifest, ProcessMesh, Reduction, StateDType, TensorSpec,
    checkpoint::Part,
};

use super::{
    tests::{PARAMETERS, Subject, bytes, chunk},
    *,
};
use crate::{state_selector::StateSelector, test_jobs};

/// Two whole tiles, and a part of one.
const NUMEL: usize = 300;
/// The largest magnitude of a tile with some exponent, which is not rounded.
const EXACT: f32 = 247.0 / 256.0;
const STATE: [StateSelector; 2] = [StateSelector::State(0), StateSelector::State(1)];

fn job(optimizer: &str, numel: usize) -> JobSpec {
    let manifest = Manifest::new(vec![TensorSpec::new("w", [numel as u64])]).unwrap();
    let spec = JobSpec::new("job", manifest, vec![serde_json::from_str(optimizer).unwrap()]);
    let spec = JobSpec { state_dtype: StateDType::Int8, ..spec };
    spec.validate().unwrap();
    spec
}

fn adamw() -> Subject {
    Subject::of(job(r#"{"name":"adamw"}"#, NUMEL))
}

/// Positive numbers of different magnitudes, which are valid for every state tensor.
fn state() -> Vec<f32> {
    (0..NUMEL).map(|index| (1.0 + index as f32).powi(-3) * (1.0 + (index % 7) as f32)).collect()
}

fn upload_of(position: usize) -> Upload {
    Upload { state: Some(position), applied: AppliedSteps::new(3) }
}

fn complete(subject: &Subject) {
    subject.upload_chunk(PARAMETERS, &chunk(0, 0, &[1.0; NUMEL])).unwrap();
}

/// The state tensors after they were uploaded at once.
fn expected() -> [bytes::Bytes; 2] {
    let subject = adamw();
    for position in [0, 1] {
        subject.upload_chunk(upload_of(position), &chunk(0, 0, &state())).unwrap();
    }
    complete(&subject);
    STATE.map(|part| subject.read(part, 0))
}

#[test]
fn uploaded_state_does_not_depend_on_the_chunks() {
    let values = state();
    assert!(expected()[0] != bytes(&values), "it is rounded");
    for length in [1, 7, 128, 200] {
        let subject = adamw();
        for position in [1, 0] {
            let chunks = values.chunks(length).enumerate().collect::<Vec<_>>();
            for (number, part) in chunks.into_iter().rev() {
                let chunk = chunk(0, number * length, part);
                subject.upload_chunk(upload_of(position), &chunk).unwrap();
                assert_eq!(subject.upload_chunk(upload_of(position), &chunk).unwrap().0, 0);
            }
        }
        complete(&subject);
        assert!(STATE.map(|part| subject.read(part, 0)) == expected(), "chunks of {length}");
    }
}

#[test]
fn state_of_a_checkpoint_or_another_server_does_not_depend_on_its_parts() {
    let values = state();
    for length in [3, 128, 300] {
        let (restored, copied) = (adamw(), adamw());
        for position in [0, 1] {
            for (number, part) in values.chunks(length).enumerate() {
                let at = number * length;
                let part = bytes(part);
                restored.slice.restore(Part::State(position), 4 * at, &part).unwrap();
                copied.slice.fill(STATE[position], at, &part).unwrap();
            }
        }
        for subject in [restored, copied] {
            complete(&subject);
            assert!(STATE.map(|part| subject.read(part, 0)) == expected(), "parts of {length}");
        }
    }
}

#[test]
fn state_that_ranks_upload_by_columns_is_that_of_the_whole() {
    let shape = [20, 15];
    let mesh = ProcessMesh::dense([1, 3], ["dp", "tp"]).unwrap();
    let tensor = TensorSpec::new("w", shape);
    let job = test_jobs::job(tensor, mesh, &[Partial(Reduction::Avg), Shard(1)]);
    let subject = Subject::of(JobSpec { state_dtype: StateDType::Int8, ..job });
    let (values, columns) = (state(), 5);
    for rank in [2, 0, 1] {
        let inside = |(index, _): &(usize, &f32)| index % 15 / columns == rank;
        let part: Vec<f32> =
            values.iter().enumerate().filter(inside).map(|(_, &value)| value).collect();
        for position in [0, 1] {
            for (number, part) in part.chunks(33).enumerate() {
                let chunk = chunk(rank as u32, number * 33, part);
                subject.upload_chunk(upload_of(position), &chunk).unwrap();
            }
        }
    }
    for rank in 0..3 {
        subject.upload_chunk(PARAMETERS, &chunk(rank, 0, &[1.0; 100])).unwrap();
    }
    assert!(STATE.map(|part| subject.read(part, 0)) == expected());
}

#[test]
fn a_part_of_the_state_leaves_the_rest_at_zero() {
    let subject = adamw();
    subject.upload_chunk(upload_of(0), &chunk(0, 0, &[EXACT; 2])).unwrap();
    complete(&subject);
    let mut expected = vec![0.0; NUMEL];
    expected[..2].fill(EXACT);
    assert_eq!(subject.read(STATE[0], 0), bytes(&expected));
}

#[test]
fn an_upload_that_begins_again_forgets_the_state_of_the_first_one() {
    let subject = adamw();
    subject.upload_chunk(upload_of(0), &chunk(0, 0, &[7.0; 100])).unwrap();
    subject.restart();
    subject.upload_chunk(upload_of(1), &chunk(0, 0, &[0.5; 2])).unwrap();
    complete(&subject);
    assert_eq!(subject.read(STATE[0], 0), bytes(&[0.0; NUMEL]));
}

#[test]
fn state_takes_a_byte_for_each_element_and_4_more_while_it_arrives() {
    let subject = adamw();
    let memory = || subject.slice.memory().state;
    assert_eq!(memory(), 2 * 303);
    subject.upload_chunk(upload_of(0), &chunk(0, 0, &state()[..200])).unwrap();
    assert_eq!(memory(), 2 * 303 + 4 * 300);
    subject.upload_chunk(upload_of(0), &chunk(0, 200, &state()[200..])).unwrap();
    assert_eq!(memory(), 2 * 303);
    complete(&subject);
    let job = job(r#"{"name":"adamw"}"#, NUMEL);
    assert_eq!(job.arrays(0).state, [303, 303]);
}

#[test]
fn uploaded_state_continues_like_an_uninterrupted_run() {
    let optimizers = [
        (r#"{"name":"adam","weight_decay":0.1}"#, 2),
        (r#"{"name":"adamw"}"#, 2),
        (r#"{"name":"lion"}"#, 1),
        (r#"{"name":"sgd","momentum":0.9}"#, 1),
    ];
    for (optimizer, states) in optimizers {
        let [first, second] = [(); 2].map(|()| Subject::of(job(optimizer, NUMEL)));
        let step = |subject: &Subject, version, seed: usize| {
            let gradient: Vec<f32> =
                (0..NUMEL).map(|index| ((index + 31 * seed) as f32).sin()).collect();
            subject.push(0, &gradient);
            subject.step(version, 0.5, 1.0);
        };
        complete(&first);
        (0..3).for_each(|version| step(&first, version, version as usize));
        let values = |part| -> Vec<f32> {
            let bytes = first.read(part, 3);
            bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
        };
        for (position, &part) in STATE[..states].iter().enumerate() {
            second.upload_chunk(upload_of(position), &chunk(0, 0, &values(part))).unwrap();
        }
        second.upload_chunk(PARAMETERS, &chunk(0, 0, &values(StateSelector::Master))).unwrap();
        for version in 0..3 {
            step(&first, 3 + version, 9);
            step(&second, version, 9);
        }
        assert_eq!(
            first.slice.digest("job", 6).unwrap(),
            second.slice.digest("job", 3).unwrap(),
            "{optimizer}"
        );
    }
}

#[test]
fn a_step_that_is_skipped_or_has_no_gradient_changes_no_state() {
    let subject = adamw();
    for position in [0, 1] {
        subject.upload_chunk(upload_of(position), &chunk(0, 0, &state())).unwrap();
    }
    complete(&subject);
    let before = STATE.map(|part| subject.read(part, 0));
    subject.push(0, &[f32::NAN; NUMEL]);
    subject.skip(0);
    subject.absent(0);
    subject.step(1, 1.0, 1.0);
    assert!(STATE.map(|part| subject.read(part, 2)) == before);
    assert_eq!(subject.applied(2), 3);
}

#[test]
fn a_reader_keeps_the_state_of_its_version() {
    let [read, alone] = [(); 2].map(|()| adamw());
    let mut held = Vec::new();
    for subject in [&read, &alone] {
        complete(subject);
    }
    for version in 0..4 {
        let arrays = STATE.map(|part| read.held(part, version));
        held.push((arrays.each_ref().map(|array| read.values(array)), arrays));
        for subject in [&read, &alone] {
            subject.push(0, &state());
            subject.step(version, 1.0, 1.0);
        }
    }
    for (values, arrays) in &held {
        assert!(arrays.each_ref().map(|array| read.values(array)) == *values);
    }
    assert_eq!(read.slice.digest("job", 4), alone.slice.digest("job", 4));
}

#[test]
fn a_backup_that_copies_again_forgets_the_first_copy() {
    let job = job(r#"{"name":"adamw"}"#, NUMEL);
    let backend = Arc::new(Cpu::new());
    let device = Device::new(backend, None);
    let home = Home { device: &device, places: Default::default(), arena: None };
    let first = Attempt::first(1, 0);
    let contributions = job.contributions(0);
    let slice = Slice::allocate(home, &job, 0, &contributions, first, Role::Empty).unwrap();
    slice.begin_empty(first);
    slice.set_role(Role::Copying);
    slice.fill(STATE[0], 0, &bytes(&[9.0; 200])).unwrap();
    slice.set_role(Role::Empty);
    slice.set_role(Role::Copying);
    for (at, part) in [(0, &state()[..150]), (150, &state()[150..])] {
        slice.fill(STATE[0], at, &bytes(part)).unwrap();
    }
    slice.fill(StateSelector::Master, 0, &bytes(&[1.0; NUMEL])).unwrap();
    slice.end_copy().unwrap();
    let copied = slice.read(STATE[0], "job", 0).unwrap().unwrap();
    let values = slice.values(STATE[0], &copied, 0..NUMEL, DType::F32).unwrap();
    assert_eq!(values, expected()[0]);
}
