//! A reader, which follows the job as the client does: it copies one version in full, and then asks
//! all servers of its slices for what steps have changed. Its decisions are those of the client
//! (`zeroshard_changes::Reader`). It skips versions, writes to its own values now and then, and is
//! killed and started again.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use fastrand::Rng;
use zeroshard_changes::{self as changes, Copied, Gathering, Known, SliceChange};
use zeroshard_coordinator::job::{Description, Job};
use zeroshard_model::{DType, Error, Server};
use zeroshard_proto::pb;

use super::{
    data::{Answer, Payload, Request, Sender},
    mirror::Mirror,
    safeguard::{Safeguard, is_missing},
    world::{Happening, JOB, World},
};

mod apply;
mod mirrored;
mod requests;

use mirrored::{Receiving, Unverified};

/// The time in which all servers must have answered. Afterwards the job is described again.
const ROUND: Duration = Duration::from_millis(400);
/// The pause after an error.
const REFRESH: Duration = Duration::from_millis(20);

/// Where a message for a reader belongs. A message of an earlier round is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) reader: usize,
    pub(super) life: u64,
    pub(super) number: u64,
}

/// What a reader waits for.
#[derive(Debug)]
enum Phase {
    Rests,
    /// A description of the job, to copy its version or to ask for changes.
    Description {
        copies: bool,
    },
    /// The answers of all servers.
    Changes(Vec<Option<Known>>),
    /// The rest of the changes, from the servers that were behind.
    Rest(Gathering),
    /// The slices of a full copy, from a mirror.
    Receive(Receiving),
    /// The changes of those that were behind, from the mirror.
    Missing(Receiving),
    /// The hashes of a version that a mirror has sent, from all servers.
    Hashes {
        version: u64,
        of: Unverified,
        answers: Vec<Option<Known>>,
    },
    /// A mirror has published changes, and is about to apply them.
    Published {
        version: u64,
        slices: BTreeMap<u32, SliceChange>,
    },
    /// The values of a version, from this number of servers.
    Copy {
        version: u64,
        waits: usize,
        values: BTreeMap<u32, Vec<u8>>,
    },
}

/// A process of a reader, and those before it.
pub(super) struct Reader {
    life: u64,
    is_alive: bool,
    dtype: DType,
    /// The slices that it follows.
    slices: BTreeSet<u32>,
    /// The mirror through which it follows.
    through: Option<usize>,
    /// What it sends to others, if it is a mirror.
    pub(super) mirror: Option<Mirror>,
    round: u64,
    phase: Phase,
    /// The job, as the coordinator has described it last.
    of: Option<Box<Description>>,
    state: Option<changes::Reader>,
    values: BTreeMap<u32, Vec<u8>>,
    /// `true` if the program has written to the values since they were copied or changed.
    has_written: bool,
    /// `true` if a mirror has lied to it since.
    is_misled: bool,
    /// Which server of each slice it asks, if there are several.
    turn: usize,
    /// How many servers of a slice, one after the other, do not know the changes.
    unknown: usize,
    /// The newest version of the servers or the mirror before it copies all values, with the job
    /// and its line.
    newest: Option<(u64, u64, u64)>,
    /// How far after the described version it pins one, because steps are fast.
    ahead: u64,
    /// The job, the line and the version that it has shown last.
    last: Option<(u64, u64, u64)>,
    /// The jobs and lines that it has left.
    left: BTreeSet<(u64, u64)>,
}

/// The versions that the readers of a run have shown.
#[derive(Debug, Default, Clone)]
pub(super) struct Shown {
    /// The number of versions that came as changes.
    pub(super) changed: u64,
    /// The number of those for which a server was behind.
    pub(super) completed: u64,
    /// The number of full copies, by reason.
    pub(super) copied: BTreeMap<Copied, u64>,
    /// The number of versions that came as changes from a mirror.
    pub(super) mirrored: u64,
    /// The number of lies that a mirror has told.
    pub(super) lies: u64,
}

impl Shown {
    pub(super) fn add(&mut self, other: &Self) {
        self.changed += other.changed;
        self.completed += other.completed;
        self.mirrored += other.mirrored;
        self.lies += other.lies;
        for (&reason, number) in &other.copied {
            *self.copied.entry(reason).or_default() += number;
        }
    }
}

impl Reader {
    /// A reader of some of `slices`, in any dtype.
    pub(super) fn any(rng: &mut Rng, slices: u32) -> Self {
        let dtype = [DType::F32, DType::Bf16, DType::F16][rng.usize(..3)];
        let (all, one) = (rng.bool(), rng.u32(..slices));
        let slices = (0..slices).filter(|&slice| all || slice == one || rng.bool()).collect();
        Self::new(dtype, slices)
    }

    /// A mirror of all slices, in any dtype.
    pub(super) fn mirror(rng: &mut Rng, slices: u32) -> Self {
        let mirror = Some(Mirror::new(rng));
        Self { slices: (0..slices).collect(), mirror, ..Self::any(rng, slices) }
    }

    /// The same reader, through a mirror.
    pub(super) fn through(self, at: usize, mirror: &Self) -> Self {
        Self { dtype: mirror.dtype, through: Some(at), ..self }
    }

    fn new(dtype: DType, slices: BTreeSet<u32>) -> Self {
        Self {
            life: 0,
            is_alive: false,
            dtype,
            slices,
            through: None,
            mirror: None,
            round: 0,
            phase: Phase::Rests,
            of: None,
            state: None,
            values: BTreeMap::new(),
            has_written: false,
            is_misled: false,
            turn: 0,
            unknown: 0,
            newest: None,
            ahead: 0,
            last: None,
            left: BTreeSet::new(),
        }
    }

    /// Begins a round, after which messages of earlier ones are ignored.
    fn begin(&mut self, phase: Phase) {
        self.round += 1;
        self.phase = phase;
    }

    pub(super) fn is_alive(&self) -> bool {
        self.is_alive
    }

    /// The version in its arrays, and the values; `None`: they need a full copy.
    pub(super) fn held(&self) -> Option<(u64, &BTreeMap<u32, Vec<u8>>)> {
        Some((self.state.as_ref()?.version()?, &self.values))
    }

    fn state(&mut self) -> &mut changes::Reader {
        self.state.as_mut().expect("the job has been described")
    }

    fn of(&self) -> &Description {
        self.of.as_deref().expect("the job has been described")
    }
}

impl World {
    fn round(&self, reader: usize) -> Round {
        let Reader { life, round, .. } = self.readers[reader];
        Round { reader, life, number: round }
    }

    /// The reader that waits for a message of a round.
    fn waiting(&mut self, round: Round) -> Option<&mut Reader> {
        let of = &mut self.readers[round.reader];
        (of.is_alive && (of.life, of.round) == (round.life, round.number)).then_some(of)
    }

    pub(super) fn reader_starts(&mut self, reader: usize) {
        let old = &self.readers[reader];
        if old.is_alive {
            return;
        }
        let (life, through, is_mirror) = (old.life + 1, old.through, old.mirror.is_some());
        let new = Reader::new(old.dtype, old.slices.clone());
        let mirror = is_mirror.then(|| Mirror::new(&mut self.rng));
        self.readers[reader] = Reader { life, is_alive: true, through, mirror, ..new };
        self.describe(reader, false);
    }

    /// The process of a reader ends, and is started again.
    fn kill_reader(&mut self, reader: usize) {
        self.readers[reader].is_alive = false;
        let wait = Duration::from_micros(self.rng.u64(..100_000));
        self.after(wait, Happening::ReaderStarts { reader });
    }

    /// Asks the coordinator for the servers of the job.
    fn describe(&mut self, reader: usize, copies: bool) {
        self.readers[reader].begin(Phase::Description { copies });
        let round = self.round(reader);
        self.later(Happening::Describe(round));
    }

    /// A reader's question reaches the coordinator.
    pub(super) fn describe_to(&mut self, round: Round) {
        let running = self.clusters().count();
        let any = if running > 1 { self.rng.usize(..running) } else { 0 };
        let cluster = self.clusters().nth(any);
        let of = cluster.and_then(|cluster| cluster.job(JOB).and_then(Job::describe).ok());
        self.later(Happening::Described(round, of.map(Box::new)));
    }

    pub(super) fn described(&mut self, round: Round, of: Option<Box<Description>>) {
        let Some(reader) = self.waiting(round) else { return };
        let Phase::Description { copies } = reader.phase else { return };
        let Some(of) = of.filter(|of| of.version.is_some()) else { return self.pause(round) };
        let id = (of.job_id, Some(of.line));
        let is_current = match &mut reader.state {
            Some(_) if is_missing(Safeguard::ReaderLines) => true,
            Some(state) => state.described(id),
            state => {
                *state = Some(changes::Reader::new(id));
                true
            }
        };
        if !is_current {
            return self.pause(round);
        }
        reader.of = Some(of);
        if copies { self.copy(round.reader) } else { self.ask_for_changes(round.reader) }
    }

    /// Describes the job again after a while.
    fn pause(&mut self, round: Round) {
        let Some(reader) = self.waiting(round) else { return };
        reader.begin(Phase::Description { copies: false });
        let round = self.round(round.reader);
        let wait = REFRESH + Duration::from_micros(self.rng.u64(..20_000));
        self.after(wait, Happening::Describe(round));
    }

    /// Asks all servers for changes since the version in the arrays.
    fn ask_for_changes(&mut self, reader: usize) {
        self.readers[reader].turn += 1;
        if let Some(mirror) = self.readers[reader].through {
            return self.ask_mirror(reader, mirror);
        }
        let requests = self.readers[reader].requests();
        self.readers[reader].begin(Phase::Changes(vec![None; requests.len()]));
        let requests = requests.into_iter().enumerate();
        let requests = requests.map(|(at, (server, request))| (at, server, request));
        self.send_changes(reader, requests.collect());
    }

    fn send_changes(&mut self, reader: usize, requests: Vec<(usize, Server, pb::ChangesRequest)>) {
        for (at, server, request) in requests {
            self.send_to(reader, (at, &server), Request::Changes(Box::new(request)));
        }
        let round = self.round(reader);
        self.after(ROUND, Happening::ReaderWakes(round));
    }

    fn send_to(&mut self, reader: usize, (at, server): (usize, &Server), request: Request) {
        let round = self.round(reader);
        self.request(server, Sender::Reader { round, at }, request);
    }

    /// Copies all values of the described version, or of a later one.
    fn copy(&mut self, reader: usize) {
        if let Some(mirror) = self.readers[reader].through {
            return self.copy_of_mirror(reader, mirror);
        }
        let of = &mut self.readers[reader];
        let description = of.of();
        let version = description.version.unwrap_or_default() + of.ahead;
        let (job, line) = (description.job_id, description.line);
        let servers = of.servers(0);
        of.begin(Phase::Copy { version, waits: servers.len(), values: BTreeMap::new() });
        for (at, (server, slices)) in servers.into_iter().enumerate() {
            self.send_to(reader, (at, &server), Request::Pin { job, line, version, slices });
        }
        let round = self.round(reader);
        self.after(ROUND, Happening::ReaderWakes(round));
    }

    /// A reader has rested, or some servers have not answered.
    pub(super) fn reader_wakes(&mut self, round: Round) {
        let Some(reader) = self.waiting(round) else { return };
        match reader.phase {
            Phase::Rests => self.ask_for_changes(round.reader),
            Phase::Published { .. } => self.apply_published(round.reader),
            _ => {
                reader.ahead = 0;
                self.pause(round);
            }
        }
    }

    pub(super) fn reader_answered(&mut self, round: Round, at: usize, answer: Answer) {
        let Some(reader) = self.waiting(round) else { return };
        match (answer, &mut reader.phase) {
            (Ok(Payload::Known(known)), Phase::Changes(answers)) => {
                answers[at] = Some(known);
                let all: Option<Vec<Known>> = answers.iter().cloned().collect();
                if let Some(all) = all {
                    self.gather(round.reader, all);
                }
            }
            (Ok(Payload::Known(known)), Phase::Rest(_)) => self.add_rest(round.reader, at, known),
            (Ok(Payload::Known(known)), Phase::Missing(_)) => {
                self.receive_missing(round.reader, at, known);
            }
            (Ok(Payload::Known(known)), Phase::Hashes { .. }) => {
                self.receive_hashes(round.reader, at, known);
            }
            (Ok(Payload::MirrorSlice { slice, version, values }), Phase::Receive(_)) => {
                self.receive_slice(round.reader, slice, version, &values);
            }
            (Ok(Payload::Pinned(slices)), Phase::Copy { waits, values, .. }) => {
                // A repeated request has two answers.
                let is_new = slices.keys().any(|slice| !values.contains_key(slice));
                *waits -= usize::from(is_new);
                values.extend(slices.into_iter().map(|(slice, of)| (slice, of.to_vec())));
                if *waits == 0 {
                    self.end_copy(round.reader);
                }
            }
            (Ok(payload), phase) => {
                let failure = format!("{payload:?} answers a reader in {phase:?}");
                self.fail(failure);
            }
            (Err(error), _) => self.refused_reader(round, *error),
        }
    }

    /// An error of a server. The coordinator knows where the job is now.
    fn refused_reader(&mut self, round: Round, error: Error) {
        let Some(reader) = self.waiting(round) else { return };
        match (error, &reader.phase) {
            // The steps are fast: the reader asks for a version before it exists.
            (Error::VersionGone { .. }, Phase::Copy { .. }) => {
                reader.ahead = (2 * reader.ahead).clamp(2, 64);
                self.describe(round.reader, true);
            }
            (
                Error::VersionGone { .. }
                | Error::Unavailable { .. }
                | Error::UnknownJob { .. }
                | Error::JobReplaced { .. }
                | Error::JobFailed { .. }
                | Error::NotHere { .. },
                _,
            ) => self.pause(round),
            (error, phase) => {
                let failure = format!("a reader in {phase:?} gets {error}");
                self.fail(failure);
            }
        }
    }

    /// Returns whether all readers have shown the last version of the job.
    pub(super) fn readers_have_ended(&self) -> bool {
        let mut described =
            self.clusters().filter_map(|cluster| cluster.job(JOB).and_then(Job::describe).ok());
        described.any(|of| {
            let last = Some((of.job_id, of.line, self.size.steps));
            self.readers.iter().all(|reader| reader.last == last)
        })
    }
}
