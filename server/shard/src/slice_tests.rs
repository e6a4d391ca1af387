//! Initial values of a slice, the changes of a step, and the content that a step leaves unchanged.

use std::cell::Cell;

use zeroshard_kernels::Cpu;
use zeroshard_model::{Error, Manifest, Optimizer, TensorSpec};
use zeroshard_shm::Arena;

use super::*;
use crate::{state_selector::StateSelector, tier::Places};

const NUMEL: usize = 5;

pub(super) struct Subject {
    backend: Arc<Cpu>,
    budget: Arc<Budget>,
    groups: Vec<Optimizer>,
    pub(super) slice: Slice<Cpu>,
    /// The open attempt.
    attempt: Cell<Attempt>,
}

pub(super) fn bytes(values: &[f32]) -> bytes::Bytes {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(super) fn chunk(rank: u32, offset: usize, values: &[f32]) -> Chunk {
    Chunk { rank, offset, dtype: DType::F32, bytes: bytes(values) }
}

pub(super) const PARAMETERS: Upload = Upload { state: None, applied: AppliedSteps::new(0) };

impl Subject {
    fn new(optimizer: &str, tensor: TensorSpec, world: u32) -> Self {
        let groups = vec![serde_json::from_str(optimizer).unwrap()];
        let manifest = Manifest::new(vec![tensor]).unwrap();
        Self::of(JobSpec { world, ..JobSpec::new("job", manifest, groups) })
    }

    /// The first slice of a job.
    pub(super) fn of(job: JobSpec) -> Self {
        Self::in_arena(job, None)
    }

    pub(super) fn in_arena(job: JobSpec, arena: Option<&Arc<Arena>>) -> Self {
        let backend = Arc::new(Cpu::new());
        let device = Device::new(backend.clone(), None);
        let home = Home { device: &device, places: Places::default(), arena };
        let contributions = job.contributions(0);
        let attempt = Attempt::first(1, 0);
        let slice = Slice::allocate(home, &job, 0, &contributions, attempt, Role::Primary).unwrap();
        let attempt = Cell::new(attempt);
        Self { backend, budget: Budget::new(0), groups: job.groups, slice, attempt }
    }

    fn tensor() -> TensorSpec {
        TensorSpec::new("w", [NUMEL as u64])
    }

    fn buffer(dtype: DType) -> TensorSpec {
        TensorSpec { buffer: true, dtype, ..Self::tensor() }
    }

    fn upload(&self, upload: Upload, offset: usize, values: &[f32]) -> Result<(u64, bool)> {
        self.upload_chunk(upload, &chunk(0, offset, values))
    }

    /// Publishes the slice when it is complete.
    pub(super) fn upload_chunk(&self, upload: Upload, chunk: &Chunk) -> Result<(u64, bool)> {
        let uploaded = self.slice.upload(self.attempt.get(), upload, chunk, || Ok(()))?;
        if uploaded.1 {
            self.slice.publish(0).unwrap();
        }
        Ok(uploaded)
    }

    /// Begins a later attempt: earlier data is dropped.
    pub(super) fn restart(&self) {
        let attempt = self.attempt.get();
        self.attempt.set(Attempt { epoch: attempt.epoch + 1, ..attempt });
        self.slice.catch_up(self.attempt.get()).unwrap();
    }

    pub(super) fn push(&self, rank: u32, values: &[f32]) -> Option<Reduced> {
        let chunk = chunk(rank, 0, values);
        self.slice.contribute(self.attempt.get(), &chunk, &self.budget, || Ok(())).unwrap().1
    }

    pub(super) fn absent(&self, rank: u32) -> Option<Reduced> {
        self.slice.absent(self.attempt.get(), rank, || Ok(())).unwrap()
    }

    fn replace(&self, offset: usize, values: &[f32]) -> u64 {
        self.replace_chunk(&chunk(0, offset, values))
    }

    pub(super) fn replace_chunk(&self, chunk: &Chunk) -> u64 {
        self.slice.replace(self.attempt.get(), chunk, || Ok(())).unwrap()
    }

    fn unchanged(&self) -> Apply<'_> {
        Apply { groups: &self.groups, coefficient: 1.0, unclipped: 1.0, gradient_factors: &[] }
    }

    fn step_with(&self, version: u64, apply: Apply<'_>) {
        self.enter(version, Some(apply));
    }

    pub(super) fn step(&self, version: u64, coefficient: f64, unclipped: f64) {
        self.step_with(version, Apply { coefficient, unclipped, ..self.unchanged() });
    }

    pub(super) fn skip(&self, version: u64) {
        self.enter(version, None);
    }

    fn enter(&self, version: u64, apply: Option<Apply<'_>>) {
        assert_eq!(self.slice.version(), Some(version));
        let next = Attempt::first(self.attempt.get().epoch, version + 1);
        self.attempt.set(next);
        assert_eq!(self.slice.step(0, &Step { apply, next, absent: &[] }), Ok(None));
    }

    /// Where the parameters are in the arena.
    pub(super) fn place(&self, array: &Array<Cpu>) -> std::ops::Range<usize> {
        self.backend.place(array.memory().unwrap()).unwrap()
    }

    pub(super) fn held(&self, part: StateSelector, version: u64) -> Array<Cpu> {
        self.slice.read(part, "job", version).unwrap().expect("it is there")
    }

    pub(super) fn read(&self, part: StateSelector, version: u64) -> bytes::Bytes {
        self.values(&self.held(part, version))
    }

    pub(super) fn values(&self, array: &Array<Cpu>) -> bytes::Bytes {
        array.read(&self.backend, 0..self.slice.spec.numel, DType::F32).unwrap()
    }

    pub(super) fn applied(&self, version: u64) -> u64 {
        self.slice.applied("job", version).unwrap().count
    }
}

const ADAMW: &str = r#"{"name":"adamw"}"#;

#[test]
fn uploaded_state_and_steps_continue_like_an_uninterrupted_run() {
    let first = Subject::new(ADAMW, Subject::tensor(), 1);
    first.upload(PARAMETERS, 0, &[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
    for step in 0..3 {
        first.push(0, &[0.1, -0.2, 0.3, step as f32, 0.0]);
        first.step(step, 1.0, 1.0);
    }
    let values = |part| first.read(part, 3).to_vec();
    let second = Subject::new(ADAMW, Subject::tensor(), 1);
    for (state, part) in [
        (Some(0), StateSelector::State(0)),
        (Some(1), StateSelector::State(1)),
        (None, StateSelector::Master),
    ] {
        let words = values(part);
        let values: Vec<f32> =
            words.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        let upload =
            Upload { state, applied: AppliedSteps::new(if state == Some(1) { 3 } else { 0 }) };
        // The values arrive in two chunks, of which the second is repeated.
        second.upload(upload, 2, &values[2..]).unwrap();
        second.upload(upload, 0, &values[..2]).unwrap();
        assert_eq!(second.upload(upload, 0, &values[..2]).unwrap(), (0, false));
    }
    assert_eq!((second.slice.version(), second.applied(0)), (Some(0), 3));
    first.push(0, &[0.5; NUMEL]);
    first.step(3, 0.5, 1.0);
    second.push(0, &[0.5; NUMEL]);
    second.step(0, 0.5, 1.0);
    for part in [
        StateSelector::Parameters,
        StateSelector::Master,
        StateSelector::State(0),
        StateSelector::State(1),
    ] {
        assert_eq!(first.read(part, 4), second.read(part, 1), "{part:?}");
    }
}

#[test]
fn a_step_keeps_the_state_tensors_that_it_does_not_use() {
    let momentum = r#"{"name":"sgd","lr":0.5,"momentum":0.5}"#;
    let plain = [serde_json::from_str(r#"{"name":"sgd","lr":0.5}"#).unwrap()];
    let subject = Subject::new(momentum, Subject::tensor(), 1);
    subject.upload(PARAMETERS, 0, &[1.0; NUMEL]).unwrap();
    subject.push(0, &[1.0; NUMEL]);
    subject.step(0, 1.0, 1.0);
    // A reader holds the state, so that a step that wrote it would take other memory.
    let held = subject.held(StateSelector::State(0), 1);
    subject.push(0, &[1.0; NUMEL]);
    subject.step_with(1, Apply { groups: &plain, ..subject.unchanged() });
    assert_eq!(subject.read(StateSelector::Master, 2), bytes(&[0.0; NUMEL]));
    assert_eq!(subject.read(StateSelector::State(0), 2), bytes(&[1.0; NUMEL]));
    subject.push(0, &[1.0; NUMEL]);
    subject.step(2, 1.0, 1.0);
    assert_eq!(subject.read(StateSelector::State(0), 3), bytes(&[1.5; NUMEL]));
    assert_eq!(subject.read(StateSelector::Master, 3), bytes(&[-0.75; NUMEL]));
    assert_eq!(subject.values(&held), bytes(&[1.0; NUMEL]));
}

#[test]
fn state_after_the_parameters_is_refused_unless_it_arrived_before() {
    let subject = Subject::new(ADAMW, Subject::tensor(), 1);
    let state = Upload { state: Some(0), applied: AppliedSteps::new(7) };
    subject.upload(state, 0, &[0.5; 2]).unwrap();
    subject.upload(PARAMETERS, 0, &[0.0; NUMEL]).unwrap();
    assert_eq!(subject.upload(state, 0, &[0.5; 2]).unwrap().0, 0, "a push that is repeated");
    let late = subject.upload(Upload { applied: AppliedSteps::new(9), ..state }, 0, &[0.5; 3]);
    assert!(matches!(late, Err(Error::Refused { .. })));
    assert_eq!(subject.applied(0), 7);
    assert_eq!(subject.read(StateSelector::State(0), 0), bytes(&[0.5, 0.5, 0.0, 0.0, 0.0]));
}

#[test]
fn a_new_epoch_before_version_0_drops_uploaded_state_and_steps() {
    let adagrad = r#"{"name":"adagrad","initial_accumulator_value":0.25}"#;
    let subject = Subject::new(adagrad, Subject::tensor(), 1);
    subject
        .upload(Upload { state: Some(0), applied: AppliedSteps::new(7) }, 0, &[0.5; NUMEL])
        .unwrap();
    subject.restart();
    subject.restart();
    subject.upload(PARAMETERS, 0, &[0.0; NUMEL]).unwrap();
    assert_eq!(subject.applied(0), 0);
    assert_eq!(subject.read(StateSelector::State(0), 0), bytes(&[0.25; NUMEL]));
    // Later attempts keep the whole content.
    subject.restart();
    assert_eq!(subject.read(StateSelector::State(0), 0), bytes(&[0.25; NUMEL]));
}

#[test]
fn parameters_without_state_count_steps_if_they_are_trained() {
    let subject = Subject::new(r#"{"name":"sgd"}"#, Subject::tensor(), 1);
    subject
        .upload(Upload { state: None, applied: AppliedSteps::new(4) }, 0, &[0.0; NUMEL])
        .unwrap();
    assert_eq!(subject.applied(0), 4);
    let buffer = Subject::new(r#"{"name":"sgd"}"#, Subject::buffer(DType::F32), 1);
    buffer.upload(Upload { state: None, applied: AppliedSteps::new(4) }, 0, &[0.0; NUMEL]).unwrap();
    assert_eq!(buffer.applied(0), 0);
}

#[test]
fn a_slice_without_any_gradient_is_not_stepped() {
    let subject = Subject::new(r#"{"name":"adamw","weight_decay":0.5}"#, Subject::tensor(), 2);
    subject.upload(PARAMETERS, 0, &[1.0; NUMEL]).unwrap();
    assert_eq!(subject.absent(1), None);
    let reduced = subject.absent(0).expect("complete");
    assert_eq!(reduced.absent, Some(Absent { rank: 0, everywhere: true }));
    assert_eq!((reduced.sum_of_squares, reduced.overflow), (0.0, None));
    let before = subject.held(StateSelector::Parameters, 0);
    subject.step(0, 1.0, 1.0);
    let after = subject.held(StateSelector::Parameters, 1);
    let buffers = [&before, &after].map(|array| array.memory().unwrap());
    assert!(Arc::ptr_eq(buffers[0], buffers[1]), "nothing was even copied");
    assert_eq!(subject.applied(1), 0);
    // One rank's gradient is sufficient; the zeros of the other ranks are part of the mean.
    subject.absent(0);
    let reduced = subject.push(1, &[1.0; NUMEL]).expect("complete");
    assert_eq!(reduced.absent, Some(Absent { rank: 0, everywhere: false }));
    subject.step(1, 1.0, 1.0);
    assert_eq!(subject.applied(2), 1);
    assert_ne!(subject.read(StateSelector::Parameters, 2), bytes(&[1.0; NUMEL]));
}

#[test]
fn tensors_that_are_not_clipped_have_their_own_coefficient() {
    for (no_clip, expected) in [(false, 3.0), (true, 5.0)] {
        let tensor = TensorSpec { no_clip, ..Subject::tensor() };
        let subject = Subject::new(r#"{"name":"average"}"#, tensor, 1);
        subject.upload(PARAMETERS, 0, &[9.0; NUMEL]).unwrap();
        subject.push(0, &[1.0; NUMEL]);
        subject.step(0, 3.0, 5.0);
        assert_eq!(subject.read(StateSelector::Parameters, 1), bytes(&[expected; NUMEL]));
    }
}

#[test]
fn a_tensor_has_its_own_factor_beside_the_coefficient() {
    let subject = Subject::new(r#"{"name":"average"}"#, Subject::tensor(), 1);
    subject.upload(PARAMETERS, 0, &[9.0; NUMEL]).unwrap();
    subject.push(0, &[1.0; NUMEL]);
    let apply = Apply { coefficient: 3.0, gradient_factors: &[0.5, 7.0], ..subject.unchanged() };
    subject.step_with(0, apply);
    assert_eq!(subject.read(StateSelector::Parameters, 1), bytes(&[1.5; NUMEL]));
}

#[test]
fn an_average_equals_the_gradient_and_is_unchanged_without_one() {
    let tensor = TensorSpec { dtype: DType::Bf16, ..Subject::tensor() };
    let subject = Subject::new(r#"{"name":"average"}"#, tensor, 1);
    subject.upload(PARAMETERS, 0, &[9.0; NUMEL]).unwrap();
    let values = [f32::INFINITY, f32::NEG_INFINITY, -0.0, 1.0, 0.5];
    subject.push(0, &values);
    subject.step(0, 1.0, 1.0);
    for part in [StateSelector::Master, StateSelector::Parameters] {
        assert_eq!(subject.read(part, 1), bytes(&values));
    }
    subject.absent(0);
    subject.step(1, 1.0, 1.0);
    assert_eq!(subject.read(StateSelector::Master, 2), bytes(&values));
}

// promise: consistent-reads
#[test]
fn a_buffer_moves_with_the_step_bit_for_bit_and_readers_keep_their_version() {
    let subject = Subject::new(ADAMW, Subject::buffer(DType::F32), 1);
    subject.upload(PARAMETERS, 0, &[1.0; NUMEL]).unwrap();
    let before = subject.held(StateSelector::Parameters, 0);
    // A signalling NaN, a subnormal, and the words of an i64.
    let words = [0x7f80_0001u32, 0x0000_0001, 0xffff_ffff, 0x8000_0000, 12_345];
    let values = words.map(f32::from_bits);
    assert_eq!(subject.replace(2, &values[2..]), 3);
    assert_eq!(subject.replace(0, &values), 2);
    assert_eq!(subject.read(StateSelector::Parameters, 0), bytes(&[1.0; NUMEL]));
    subject.step(0, 1.0, 1.0);
    let expected: bytes::Bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    assert_eq!(subject.read(StateSelector::Parameters, 1), expected);
    assert_eq!(subject.values(&before), bytes(&[1.0; NUMEL]));
    // If the content is not pushed completely, the old content is kept.
    subject.skip(1);
    subject.replace(0, &[2.0; NUMEL - 1]);
    subject.skip(2);
    assert_eq!(subject.read(StateSelector::Parameters, 3), expected);
    // A new epoch drops the pushed content; a skipped step applies it nevertheless.
    subject.replace(0, &[2.0; NUMEL]);
    subject.restart();
    subject.replace(0, &[3.0; NUMEL]);
    subject.skip(3);
    assert_eq!(subject.read(StateSelector::Parameters, 4), bytes(&[3.0; NUMEL]));
}

#[test]
fn master_weights_are_read_beside_the_published_parameters() {
    let tensor = TensorSpec { dtype: DType::Bf16, ..Subject::tensor() };
    let subject = Subject::new(r#"{"name":"sgd"}"#, tensor, 1);
    let fine = 1.0 + 1.0 / 1024.0;
    subject.upload(PARAMETERS, 0, &[fine; NUMEL]).unwrap();
    assert_eq!(subject.read(StateSelector::Master, 0), bytes(&[fine; NUMEL]));
    assert_eq!(subject.read(StateSelector::Parameters, 0), bytes(&[1.0; NUMEL]));
    assert!(matches!(subject.slice.read(StateSelector::Master, "job", 1), Ok(None)));
    subject.skip(0);
    assert!(matches!(
        subject.slice.read(StateSelector::Master, "job", 0),
        Err(Error::VersionGone { .. })
    ));
    assert!(matches!(subject.slice.applied("job", 0), Err(Error::VersionGone { .. })));
}

#[test]
fn the_sum_of_the_gradients_can_be_read_from_completion_to_the_decision() {
    let subject = Subject::new(ADAMW, Subject::tensor(), 2);
    subject.upload(PARAMETERS, 0, &[9.0; NUMEL]).unwrap();
    let sum = |version| {
        let sum = subject.slice.read(StateSelector::GradientSum, "job", version);
        sum.map(|sum| sum.map(|sum| subject.values(&sum)))
    };
    subject.push(0, &[1.0; NUMEL]);
    assert_eq!(sum(0), Ok(None), "rank 1 has not contributed");
    subject.push(1, &[2.0; NUMEL]);
    assert_eq!(sum(0), Ok(Some(bytes(&[3.0; NUMEL]))));
    subject.step(0, 1.0, 1.0);
    assert!(matches!(sum(0), Err(Error::VersionGone { .. })));
    // A gradient that no rank has consists of zeros.
    subject.absent(0);
    subject.absent(1);
    assert_eq!(sum(1), Ok(Some(bytes(&[0.0; NUMEL]))));
}

#[test]
fn a_sum_that_a_reader_holds_does_not_change_with_the_next_step() {
    let subject = Subject::new(ADAMW, Subject::tensor(), 2);
    subject.upload(PARAMETERS, 0, &[9.0; NUMEL]).unwrap();
    subject.push(0, &[1.0; NUMEL]);
    subject.push(1, &[2.0; NUMEL]);
    let held = subject.slice.read(StateSelector::GradientSum, "job", 0).unwrap().unwrap();
    subject.push(1, &[2.0; NUMEL]); // a repeated push
    subject.step(0, 1.0, 1.0);
    subject.push(0, &[5.0; NUMEL]);
    assert_eq!(subject.values(&held), bytes(&[3.0; NUMEL]));
    subject.push(1, &[6.0; NUMEL]);
    let next = subject.slice.read(StateSelector::GradientSum, "job", 1).unwrap().unwrap();
    assert_eq!(subject.values(&next), bytes(&[11.0; NUMEL]));
}
