//! Commands of the coordinator to a job before, during and between pushes.
//!
//! promise: exactly-once

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use zeroshard_kernels::Cpu;
use zeroshard_model::{Manifest, Server, StridedBox, TensorBox, TensorSpec, View};

use super::*;
use crate::{
    fair::Resources,
    round::Absent,
    slice::{Apply, Since},
    state_selector::StateSelector,
    tier::{
        Tiers,
        tests::{Fault, failing, scarce},
    },
};

const JOB_ID: u64 = 5;
const UPLOAD: Upload = Upload { state: None, applied: AppliedSteps::new(0) };

/// `slices` slices of two elements each, on the only server of a job of `world` ranks with plain
/// SGD.
struct Subject {
    job: Job<Cpu, Attempt>,
    said: UnboundedReceiver<JobEvent>,
    ahead: Arc<AtomicU64>,
}

/// Keeps the events of a job. Its clock is ahead by this number of seconds.
struct Listener(UnboundedSender<JobEvent>, Arc<AtomicU64>);

impl Host for Listener {
    fn now(&self) -> Instant {
        Instant::now() + Duration::from_secs(self.1.load(Ordering::Relaxed))
    }

    fn tell(&self, event: JobEvent) {
        // The receiver may be gone.
        let _ = self.0.send(event);
    }

    fn measured(&self, _: Phase, _: Attempt, _: Duration, _: Option<&Error>) {}
}

/// The owners of all slices, as positions among two servers, of which the first is the subject.
fn placed(replicas: usize, owners: Vec<u32>) -> Placement {
    let server = |id| Server { id, incarnation: 1, address: format!("host:{id}") };
    Placement::new(vec![server(1), server(2)], replicas, owners).unwrap()
}

fn chunk(rank: u32, value: f32) -> Chunk {
    let bytes = [value, value].iter().flat_map(|value| value.to_le_bytes()).collect();
    Chunk { rank, offset: 0, dtype: zeroshard_model::DType::F32, bytes }
}

impl Subject {
    fn new(slices: usize, world: u32) -> Self {
        Self::on(slices, world, None)
    }

    fn on(slices: usize, world: u32, tiers: Option<Arc<Tiers<Cpu>>>) -> Self {
        Self::open(slices, world, tiers).unwrap()
    }

    fn open(slices: usize, world: u32, tiers: Option<Arc<Tiers<Cpu>>>) -> Result<Self> {
        let tensors = (0..slices).map(|index| TensorSpec::new(format!("t{index}"), [2]));
        let manifest = Manifest::new(tensors.collect()).unwrap();
        let spec = JobSpec { world, ..JobSpec::new("job", manifest, vec!["sgd".parse().unwrap()]) };
        Self::with(spec, placed(1, vec![0; slices]), tiers)
    }

    fn with(spec: JobSpec, placement: Placement, tiers: Option<Arc<Tiers<Cpu>>>) -> Result<Self> {
        let (events, said) = unbounded_channel();
        let opening = Opening {
            id: JOB_ID,
            spec,
            epoch: 1,
            placement,
            server: 1,
            version: None,
            is_restored: false,
            closed: CancellationToken::new(),
            devices: Arc::new([Device::new(Arc::new(Cpu::new()), tiers)]),
            shares: Resources::new().shares(),
            budget: Budget::new(1 << 20),
        };
        let ahead = Arc::<AtomicU64>::default();
        let job = Job::open(opening, Arc::new(Listener(events, ahead.clone())))?;
        Ok(Self { job, said, ahead })
    }

    /// A job at version 0 whose elements are 0.
    fn initialised(slices: usize, world: u32) -> Self {
        let mut subject = Self::new(slices, world);
        subject.upload_all(1, 0.0);
        assert!(matches!(subject.said.try_recv(), Ok(JobEvent::Initialised { .. })));
        subject.job.publish(1).unwrap();
        subject
    }

    fn upload_all(&self, epoch: u64, value: f32) {
        for slice in 0..self.job.slices.len() as u32 {
            self.job.upload(Attempt::first(epoch, 0), slice, UPLOAD, &chunk(0, value)).unwrap();
        }
    }

    fn push(&self, attempt: Attempt, slice: u32, rank: u32, value: f32) -> Result<u64> {
        self.job.contribute(attempt, slice, &chunk(rank, value))
    }

    fn decide(&self, attempt: Attempt) -> Result<()> {
        let groups = &self.job.spec.groups;
        let apply = Apply { groups, coefficient: 1.0, unclipped: 1.0, gradient_factors: &[] };
        self.job.decide(&Arc::new(attempt), attempt, (Some(apply), &[]))
    }

    fn ready(&mut self) -> Option<StepReady> {
        loop {
            match self.said.try_recv() {
                Ok(JobEvent::Ready { attempt, reduced }) => {
                    return Some(StepReady::new(attempt, reduced));
                }
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    }
}

/// The complete gradients of an attempt.
struct StepReady {
    epoch: u64,
    step: u64,
    attempt: u32,
    slices: Vec<Reduced>,
    absent: Vec<Absent>,
}

impl StepReady {
    fn new(attempt: Attempt, reduced: Ready) -> Self {
        let Attempt { epoch, step, number: attempt } = attempt;
        let slices: Vec<Reduced> = reduced.slices.into_iter().map(|(_, of)| of).collect();
        let absent = slices.iter().filter_map(|of| of.absent).collect();
        Self { epoch, step, attempt, slices, absent }
    }
}

fn at(epoch: u64, step: u64, number: u32) -> Attempt {
    Attempt { epoch, step, number }
}

#[test]
fn a_failing_disk_ends_the_job_with_an_error_that_names_slice_and_file() {
    for fault in Fault::ALL {
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let (tiers, _) = failing(&Arc::new(Cpu::new()), fault, &left, 1 << 20);
        let mut subject = Subject::on(2, 1, Some(tiers));
        subject.upload_all(1, 0.0);
        subject.job.publish(1).unwrap();
        left.store(0, Ordering::Relaxed);
        let pushed =
            (0..2).try_for_each(|slice| subject.push(at(1, 0, 0), slice, 0, 1.0).map(drop));
        // Pushes write to the disk, and steps read from it.
        let failed = pushed.and_then(|()| subject.decide(at(1, 0, 0))).unwrap_err();
        assert!(matches!(failed, Error::Storage { .. }), "{failed}");
        let told = std::iter::from_fn(|| subject.said.try_recv().ok());
        let told: Vec<String> = told
            .filter_map(|event| match event {
                JobEvent::Failed { reason, .. } => Some(reason),
                _ => None,
            })
            .collect();
        // The task of the job reports the failure of a step.
        assert_eq!(!told.is_empty(), fault != Fault::Read);
        let reason = told.first().unwrap_or(&failed.to_string()).clone();
        // A step reads both slices at the same time, so either can fail first.
        let slices = if fault == Fault::Read { &["slice 0", "slice 1"][..] } else { &["slice 0"] };
        assert!(slices.iter().any(|slice| reason.contains(slice)), "{reason}");
        assert!(reason.contains("scratch file in /scratch"), "{reason}");
    }
}

#[test]
fn a_job_for_whose_arrays_host_memory_is_missing_is_refused_and_gives_its_budgets_back() {
    // Two slices have master weights and a sum each, in a page.
    for arrays in 0..4 {
        let left = Arc::new(AtomicU64::new(arrays));
        let tiers = scarce(&Arc::new(Cpu::new()), &left);
        let Err(refused) = Subject::open(2, 1, Some(tiers.clone())) else {
            panic!("there is memory for {arrays} arrays");
        };
        assert!(matches!(refused, Error::OutOfMemory { bytes: 8, .. }), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("slice ") && text.contains("host memory (--host-memory)"), "{text}");
        assert_eq!(tiers.used(), [0; 3]);
        left.store(u64::MAX, Ordering::Relaxed);
        let subject = Subject::on(2, 1, Some(tiers.clone()));
        subject.upload_all(1, 0.0);
        subject.job.publish(1).unwrap();
        assert_eq!(tiers.used(), [0, 4 * 4_096, 0]);
    }
}

#[test]
fn a_push_acknowledged_in_an_epoch_is_not_erased_by_the_beginning_of_that_epoch() {
    // Ranks push the same gradients again in every epoch, while the epoch changes. All gradients
    // that were acknowledged in the last epoch must count.
    const SLICES: u32 = 20_000;
    const EPOCHS: u64 = 40;
    let mut subject = Subject::initialised(SLICES as usize, 2);
    let stop = AtomicBool::new(false);
    let acknowledged = [AtomicU64::new(0), AtomicU64::new(0)];
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (subject, stop, acknowledged) = (&subject, &stop, &acknowledged[rank as usize]);
            scope.spawn(move || {
                loop {
                    let last = stop.load(Ordering::Acquire);
                    let attempt = subject.job.attempt();
                    let pushed = (0..SLICES)
                        .try_for_each(|slice| subject.push(attempt, slice, rank, 1.0).map(drop));
                    match pushed {
                        Ok(()) => acknowledged.store(attempt.epoch, Ordering::Release),
                        Err(Error::StaleEpoch { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    }
                    if last {
                        return;
                    }
                }
            });
        }
        for epoch in 2..=EPOCHS {
            subject.job.new_epoch(epoch, 0, false).unwrap();
        }
        stop.store(true, Ordering::Release);
    });
    for epoch in acknowledged {
        assert_eq!(epoch.into_inner(), EPOCHS);
    }
    let last =
        std::iter::from_fn(|| subject.ready()).last().expect("all gradients were acknowledged");
    assert_eq!((last.epoch, last.slices.len()), (EPOCHS, SLICES as usize));
    subject.decide(at(EPOCHS, 0, 0)).unwrap();
}

#[test]
fn gradients_of_an_attempt_never_count_in_a_later_one() {
    let mut subject = Subject::initialised(1, 2);
    subject.push(at(1, 0, 0), 0, 0, 7.0).unwrap();
    subject.push(at(1, 0, 0), 0, 1, 7.0).unwrap();
    assert!(subject.ready().is_some());
    // The attempt was reported as ready, and is open again.
    subject.job.open_attempt(at(1, 0, 1), None).unwrap();
    let stale = subject.push(at(1, 0, 0), 0, 0, 7.0);
    assert!(matches!(stale, Err(Error::StaleAttempt { attempt: 0, current: 1, .. })), "{stale:?}");
    assert!(matches!(subject.decide(at(1, 0, 0)), Err(Error::Internal { .. })));
    assert_eq!(subject.push(at(1, 0, 1), 0, 0, 1.0).unwrap(), 2);
    assert!(subject.ready().is_none());
    assert_eq!(subject.push(at(1, 0, 1), 0, 1, 3.0).unwrap(), 2);
    let ready = subject.ready().unwrap();
    assert_eq!((ready.attempt, ready.slices[0].sum_of_squares), (1, 32.0));
}

#[test]
fn a_command_that_is_repeated_drops_no_gradients() {
    let mut subject = Subject::initialised(1, 2);
    subject.job.new_epoch(2, 1, false).unwrap();
    subject.job.open_attempt(at(2, 0, 1), None).unwrap();
    subject.push(at(2, 0, 1), 0, 0, 1.0).unwrap();
    // The server is told of another lease that ended before, and of the attempt again.
    subject.job.new_epoch(2, 0, true).unwrap();
    subject.job.open_attempt(at(2, 0, 1), Some(0)).unwrap();
    subject.push(at(2, 0, 1), 0, 1, 3.0).unwrap();
    assert_eq!(subject.ready().unwrap().slices[0].sum_of_squares, 32.0);
    assert_eq!(subject.job.report().rested, None);
}

#[test]
fn the_description_of_a_job_has_the_end_of_a_rest_and_a_done_rank_does_not_rest() {
    let subject = Subject::initialised(1, 2);
    subject.job.open_attempt(at(1, 0, 1), Some(1)).unwrap();
    assert_eq!(subject.job.report().rested, Some(1));
    subject.job.open_attempt(at(1, 0, 2), None).unwrap();
    assert_eq!(subject.job.report().rested, None);
    subject.job.grant(1, 7);
    subject.job.rank_rests(Rest { rank: 1, since: 0, excluded: false }, false).unwrap();
    subject.job.rank_done(1).unwrap();
    let report = subject.job.report();
    assert_eq!((report.resting.len(), report.leases.len(), report.done), (0, 0, vec![1]));
}

#[test]
fn an_upload_of_an_earlier_epoch_does_not_count() {
    let mut subject = Subject::new(2, 1);
    subject.job.upload(at(1, 0, 0), 0, UPLOAD, &chunk(0, 1.0)).unwrap();
    subject.job.new_epoch(2, 0, false).unwrap();
    // A slice that was completed in epoch 1 may be counted only now.
    subject.job.finish_upload(at(1, 0, 0), 1);
    let stale = subject.job.upload(at(1, 0, 0), 1, UPLOAD, &chunk(0, 1.0));
    assert!(matches!(stale, Err(Error::StaleEpoch { epoch: 1, current: 2, .. })));
    subject.job.upload(at(2, 0, 0), 1, UPLOAD, &chunk(0, 2.0)).unwrap();
    assert!(subject.said.try_recv().is_err(), "slice 0 has nothing in this epoch");
    assert!(matches!(subject.job.publish(2), Err(Error::Internal { .. })));
    subject.job.upload(at(2, 0, 0), 0, UPLOAD, &chunk(0, 2.0)).unwrap();
    assert!(matches!(subject.said.try_recv(), Ok(JobEvent::Initialised { epoch: 2 })));
}

#[test]
fn nothing_is_readable_before_version_0_is_published() {
    let subject = Subject::new(2, 1);
    subject.upload_all(1, 1.0);
    let read = |slice| {
        let slice: &Slice<Cpu> = subject.job.slice(slice).unwrap();
        slice.read(crate::state_selector::StateSelector::Parameters, "job", 0).unwrap()
    };
    assert!(read(0).is_none() && read(1).is_none());
    subject.job.publish(1).unwrap();
    assert!(read(0).is_some() && read(1).is_some());
}

#[test]
fn only_the_granted_lease_of_a_rank_is_accepted_until_it_ends() {
    let subject = Subject::initialised(1, 2);
    let check = |rank, lease| subject.job.check_lease(rank, lease);
    assert!(matches!(check(0, 7), Err(Error::LeaseLost { rank: 0, .. })));
    subject.job.grant(0, 7);
    assert!(check(0, 7).is_ok());
    assert!(matches!(check(0, 8), Err(Error::LeaseLost { .. })));
    assert!(matches!(check(1, 7), Err(Error::LeaseLost { rank: 1, .. })));
    subject.job.new_epoch(2, 0, false).unwrap();
    assert!(matches!(check(0, 7), Err(Error::LeaseLost { .. })));
}

#[test]
fn a_decision_is_reported_as_stored_once_and_before_it_is_applied() {
    let mut subject = Subject::initialised(1, 1);
    subject.push(at(1, 0, 0), 0, 0, 1.0).unwrap();
    assert!(subject.ready().is_some());
    subject.decide(at(1, 0, 0)).unwrap();
    assert!(matches!(subject.said.try_recv(), Ok(JobEvent::Stored { step: 0, .. })));
    assert!(matches!(subject.decide(at(1, 0, 0)), Err(Error::Internal { .. })));
    let late = subject.push(at(1, 0, 0), 0, 0, 1.0);
    assert!(matches!(late, Err(Error::StepMismatch { step: 0, current: 1, .. })), "{late:?}");
}

#[test]
fn a_done_rank_counts_as_zeros_in_every_later_step_until_it_returns() {
    let mut subject = Subject::initialised(2, 2);
    subject.push(at(1, 0, 0), 0, 0, 1.0).unwrap();
    subject.job.rank_done(1).unwrap();
    subject.push(at(1, 0, 0), 1, 0, 1.0).unwrap();
    for step in 0..2 {
        let ready = subject.ready().expect("rank 0 has pushed everything");
        assert_eq!(ready.absent.len(), 2);
        subject.decide(at(1, step, 0)).unwrap();
        for slice in 0..2 {
            subject.push(at(1, step + 1, 0), slice, 0, 1.0).unwrap();
        }
    }
    assert!(subject.ready().is_some());
    subject.job.new_epoch(2, 1, false).unwrap();
    for slice in 0..2 {
        subject.push(at(2, 2, 0), slice, 0, 1.0).unwrap();
    }
    assert!(subject.ready().is_none(), "rank 1 takes part again");
}

#[test]
fn a_rank_that_is_done_before_version_0_is_absent_from_the_first_step() {
    let mut subject = Subject::new(2, 1);
    subject.job.rank_done(0).unwrap();
    subject.upload_all(1, 0.0);
    assert!(subject.ready().is_none());
    subject.job.publish(1).unwrap();
    let ready = subject.ready().expect("nobody else has a gradient");
    assert!(ready.absent.len() == 2 && ready.absent.iter().all(|absent| absent.everywhere));
    subject.decide(at(1, 0, 0)).unwrap();
    assert_eq!(subject.ready().expect("and so on").step, 1);
}

#[test]
fn opening_stops_when_the_job_is_closed() {
    let manifest = Manifest::new(vec![TensorSpec::new("w", [2])]).unwrap();
    let spec = JobSpec::new("job", manifest, vec!["sgd".parse().unwrap()]);
    let servers = vec![Server { id: 1, incarnation: 1, address: "host:1".to_owned() }];
    let placement = Placement::new(servers, 1, vec![0]).unwrap();
    let closed = CancellationToken::new();
    closed.cancel();
    let opening = Opening {
        id: JOB_ID,
        spec,
        epoch: 1,
        placement,
        server: 1,
        version: None,
        is_restored: false,
        closed,
        devices: Arc::new([Device::new(Arc::new(Cpu::new()), None)]),
        shares: Resources::new().shares(),
        budget: Budget::new(0),
    };
    let opened =
        Job::<_, Attempt>::open(opening, Arc::new(Listener(unbounded_channel().0, Arc::default())));
    assert!(matches!(opened.err(), Some(Error::JobFailed { .. })));
}

/// A running job of one rank whose second slice was on another server until now. The subject is to
/// copy it.
fn degraded() -> Subject {
    let tensors = ["here", "there"].map(|name| TensorSpec::new(name, [2]));
    let manifest = Manifest::new(tensors.to_vec()).unwrap();
    let groups = vec!["sgd".parse().unwrap()];
    let spec = JobSpec { replicas: 2, ..JobSpec::new("job", manifest, groups) };
    let mut subject = Subject::with(spec, placed(1, vec![0, 1]), None).unwrap();
    subject.job.upload(at(1, 0, 0), 0, UPLOAD, &chunk(0, 0.0)).unwrap();
    assert!(matches!(subject.said.try_recv(), Ok(JobEvent::Initialised { .. })));
    subject.job.publish(1).unwrap();
    subject.job.new_placement(2, placed(2, vec![0, 1, 1, 0])).unwrap();
    subject
}

impl Subject {
    /// Copies slice 1, whose elements are 4, and applies a step in which all gradients are 1.
    fn copy_and_step(&self, attempt: Attempt) {
        assert_eq!(self.job.begin_copy(1, &[1]).unwrap(), Some(vec![1]));
        let Chunk { bytes, .. } = chunk(0, 4.0);
        let slice = self.job.slice(1).unwrap();
        slice.fill(StateSelector::Master, 0, &bytes).unwrap();
        slice.end_copy().unwrap();
        self.push(attempt, 0, 0, 1.0).unwrap();
        self.job.store_reduced(attempt, 1, 0, &chunk(0, 1.0).bytes).unwrap();
        self.decide(attempt).unwrap();
    }

    /// The elements of slice 1.
    fn copied(&self, version: u64) -> Chunk {
        let slice = self.job.slice(1).unwrap();
        let array = slice.read(StateSelector::Master, "job", version).unwrap().unwrap();
        let dtype = zeroshard_model::DType::F32;
        Chunk { bytes: array.read(&Cpu::new(), 0..2, dtype).unwrap(), ..chunk(0, 0.0) }
    }
}

#[test]
fn new_values_of_a_slice_wait_for_its_copy() {
    let subject = degraded();
    let lr = 0.001;
    assert_eq!(subject.job.replace(at(2, 0, 0), 1, &chunk(0, 8.0)), Ok(2));
    assert_eq!(subject.job.replace(at(2, 0, 0), 1, &chunk(0, 8.0)), Ok(0), "they are there");
    subject.copy_and_step(at(2, 0, 0));
    assert_eq!(subject.copied(1).bytes, chunk(0, 8.0 - lr).bytes);
}

#[test]
fn new_values_of_an_attempt_that_has_ended_do_not_count_in_a_copy() {
    let subject = degraded();
    let lr = 0.001;
    subject.job.replace(at(2, 0, 0), 1, &chunk(0, 8.0)).unwrap();
    subject.job.open_attempt(at(2, 0, 1), None).unwrap();
    let stale = subject.job.replace(at(2, 0, 0), 1, &chunk(0, 8.0));
    assert!(matches!(stale, Err(Error::StaleAttempt { .. })), "{stale:?}");
    subject.copy_and_step(at(2, 0, 1));
    assert_eq!(subject.copied(1).bytes, chunk(0, 4.0 - lr).bytes);
}

#[test]
fn a_slice_without_its_new_values_is_not_copied() {
    let mut subject = degraded();
    subject.job.replace(at(2, 0, 0), 1, &chunk(0, 8.0)).unwrap();
    // There was no memory for another slice: this server keeps no more values.
    subject.job.refuse_copy(1, "no memory".to_owned());
    assert_eq!(subject.job.replace(at(2, 0, 0), 1, &chunk(0, 8.0)), Ok(2));
    assert_eq!(subject.job.begin_copy(2, &[1]).unwrap(), None);
    for number in [1, 2] {
        let said = subject.said.try_recv();
        assert!(matches!(said, Ok(JobEvent::CopyRefused { number: n, .. }) if n == number));
    }
    // The next attempt has other values.
    subject.job.open_attempt(at(2, 0, 1), None).unwrap();
    subject.copy_and_step(at(2, 0, 1));
    assert_eq!(subject.copied(1).bytes, chunk(0, 4.0 - 0.001).bytes);
}

#[test]
fn new_values_of_slices_of_other_servers_are_refused() {
    let subject = degraded();
    subject.job.new_placement(3, placed(1, vec![0, 1])).unwrap();
    let refused = subject.job.replace(at(3, 0, 0), 1, &chunk(0, 8.0));
    assert!(matches!(refused, Err(Error::NotHere { slice: 1, .. })), "{refused:?}");
}

#[test]
fn the_contributions_to_the_last_steps_are_recorded() {
    let mut subject = Subject::initialised(2, 2);
    let refused = subject.job.contributions(0).unwrap_err();
    assert!(refused.to_string().contains("decided no step"), "{refused}");
    for step in 0..3 {
        let attempt = Attempt::first(1, step);
        for (slice, rank) in [(0, 1), (0, 0), (1, 0)] {
            subject
                .push(attempt, slice, rank, (step + 1) as f32 * 10f32.powi(rank as i32))
                .unwrap();
        }
        subject.job.absent(attempt, 1, 1).unwrap();
        let ready = subject.ready().expect("complete");
        assert_eq!(ready.slices.len(), 2);
        subject.decide(attempt).unwrap();
    }
    let found = subject.job.contributions(1).unwrap();
    let squares: Vec<_> = found.figures.iter().map(|(key, tally)| (*key, tally.squares)).collect();
    assert_eq!(squares, [((0, 0), 8.0), ((0, 1), 800.0), ((1, 0), 8.0)]);
    assert_eq!(found.arrived.keys().copied().collect::<Vec<_>>(), [0, 1]);
    let refused = subject.job.contributions(3).unwrap_err();
    assert!(refused.to_string().contains("it has those to steps 0 to 2"), "{refused}");
}

#[test]
fn an_attempt_that_is_made_again_is_recorded_once() {
    let mut subject = Subject::initialised(1, 1);
    let first = Attempt::first(1, 0);
    subject.push(first, 0, 0, 100.0).unwrap();
    let next = Attempt { number: 1, ..first };
    subject.job.open_attempt(next, None).unwrap();
    subject.push(next, 0, 0, 1.0).unwrap();
    assert!(subject.ready().is_some());
    subject.decide(next).unwrap();
    assert_eq!(subject.job.contributions(0).unwrap().figures[&(0, 0)].squares, 2.0);
}

#[test]
fn changes_are_recorded_until_nobody_has_asked_for_them_for_a_minute() {
    let subject = Subject::initialised(2, 1);
    let (job, budget) = (&subject.job, Budget::new(1 << 20));
    let view = View::whole(zeroshard_model::DType::F32);
    let step = |version| {
        (0..2).for_each(|slice| _ = subject.push(at(1, version, 0), slice, 0, 1.0).unwrap());
        subject.decide(at(1, version, 0)).unwrap();
    };
    let is_known = |from| {
        let known = |slice: &Slice<Cpu>| {
            matches!(slice.changes(&view, from, from + 1), Since::Known { .. })
        };
        job.slices().map(|(_, slice)| known(slice)).collect::<Vec<_>>()
    };
    step(0);
    assert_eq!((is_known(0), budget.used()), (vec![false; 2], 0));
    (0..2).for_each(|tensor| job.note_follower(tensor, &view).unwrap());
    for index in 0..2 {
        let unhashed = job.follow(index, &view, &budget).unwrap().unwrap();
        unhashed.compute(job.slice(index).unwrap().backend()).unwrap();
    }
    step(1);
    assert_eq!((is_known(1), job.readable_version()), (vec![true; 2], Some(2)));
    subject.ahead.store(59, Ordering::Relaxed);
    step(2);
    assert_eq!(is_known(2), [true; 2]);
    (0..2).for_each(|tensor| job.note_follower(tensor, &view).unwrap());
    subject.ahead.store(118, Ordering::Relaxed);
    step(3);
    assert_eq!(is_known(1), [true; 2]);
    assert!(budget.used() > 0);
    subject.ahead.store(119, Ordering::Relaxed);
    step(4);
    assert_eq!((is_known(1), is_known(4), budget.used()), (vec![false; 2], vec![false; 2], 0));
}

#[test]
fn a_tensor_is_followed_in_a_limited_number_of_boxes_and_always_as_a_whole() {
    let subject = Subject::initialised(2, 1);
    let job = &subject.job;
    let dtypes = zeroshard_model::DType::ALL;
    let note = |tensor, at| {
        let bounds = TensorBox { offset: vec![at], size: vec![1] };
        let bounds = Arc::new(StridedBox::new(&[100], bounds));
        job.note_follower(tensor, &View::new(dtypes[0], Some(bounds)))
    };
    for at in 0..64 {
        note(0, at).unwrap();
    }
    let refused = note(0, 64).unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused}");
    let sentence = refused.to_string();
    assert!(sentence.starts_with("64 boxes of tensor \"t0\" are followed"), "{sentence}");
    note(0, 63).unwrap();
    note(1, 64).unwrap();
    dtypes.into_iter().for_each(|dtype| job.note_follower(0, &View::whole(dtype)).unwrap());
    subject.ahead.store(60, Ordering::Relaxed);
    job.end_follows();
    note(0, 64).unwrap();
}
