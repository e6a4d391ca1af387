//! Sends calls to all servers concurrently.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    call::{Answer, Connection},
    counts::Counts,
    facts::Facts,
    guarded::token,
    input::{Input, Target},
    jobs,
    judge::{Verdict, judge},
    schema::{self, Rpc, Server},
    workers::Workers,
};

/// The number of concurrent calls to each target.
const LANES: usize = 3;
/// The pause after a refused or broken connection.
const PAUSE: Duration = Duration::from_millis(10);
/// The number of bytes of a frame, and of an answer, in the report of a fault.
const SHOWN: usize = 2048;
/// The number of bytes of the text by which faults are distinguished.
const KIND: usize = 90;

/// The calls of a test.
pub(crate) struct Fuzz {
    seed: u64,
    facts: Arc<Facts>,
    targets: Vec<Target>,
    calls: Vec<Rpc>,
    pub(crate) counts: Counts,
    next: AtomicU64,
}

impl Fuzz {
    pub(crate) fn new(seed: u64, facts: Facts, targets: Vec<Target>) -> Self {
        let calls = schema::calls(&schema::pool());
        let (counts, facts) = (Counts::new(&calls), Arc::new(facts));
        Self { seed, facts, targets, calls, counts, next: AtomicU64::new(0) }
    }

    /// Sends calls for this duration.
    ///
    /// # Panics
    /// If an answer violates the protocol. The message contains the input.
    pub(crate) async fn run(&mut self, time: Duration) {
        let (stop, until) = (CancellationToken::new(), Instant::now() + time);
        let counts = Mutex::new(std::mem::take(&mut self.counts));
        let faults = Mutex::new(BTreeMap::new());
        let coordinator = self.targets[0].address.clone();
        let shards = self.targets.iter().filter(|target| target.serves == Server::Shard);
        let shards: Vec<String> = shards.map(|target| target.address.clone()).collect();
        let keep = |number| {
            let (facts, stop) = (self.facts.clone(), stop.clone());
            tokio::spawn(jobs::keep(number, coordinator.clone(), shards.clone(), facts, stop))
        };
        let kept: Vec<_> = (0..jobs::JOBS).map(keep).collect();
        let workers = Workers::start(&coordinator);
        let lanes = self.targets.iter().cycle().take(self.targets.len() * LANES);
        let lanes =
            lanes.map(|target| self.lane(Place::Fixed(target.clone()), until, &counts, &faults));
        let to_workers =
            (0..LANES).map(|_| self.lane(Place::Worker(&workers), until, &counts, &faults));
        join_all(lanes.chain(to_workers)).await;
        stop.cancel();
        join_all(kept).await.into_iter().for_each(Result::unwrap);
        workers.stop().await;
        self.counts = counts.into_inner().unwrap();
        let faults: Vec<String> = faults.into_inner().unwrap().into_values().collect();
        assert!(faults.is_empty(), "{}", faults.join("\n\n"));
    }

    /// Sends one call after the other, and records the first fault of each kind.
    async fn lane(
        &self,
        place: Place<'_>,
        until: Instant,
        counts: &Mutex<Counts>,
        faults: &Mutex<BTreeMap<String, String>>,
    ) {
        let mut connection = None;
        while Instant::now() < until {
            let target = match place {
                Place::Fixed(ref target) => target.clone(),
                Place::Worker(workers) => workers.target().await,
            };
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let input = Input::new(self.seed, number, &self.calls, &target, &self.facts);
            let connection = match &mut connection {
                Some((address, connection)) if *address == target.address => connection,
                other => {
                    let new = Connection::new(&target.address);
                    &mut other.insert((target.address.clone(), new)).1
                }
            };
            let stays_open = self.calls[input.rpc].method.is_server_streaming();
            let answer = connection.call(&input, token(input.identity), stays_open).await;
            if matches!(answer, Answer::Broken(_)) {
                // A restarted worker may not listen yet.
                sleep(PAUSE).await;
            }
            let verdict = judge(&input.path, &answer);
            counts.lock().unwrap().add(&input.path, &verdict);
            match verdict {
                Verdict::Fault(fault) => {
                    let kind =
                        format!("{} {}", input.path, &fault[..fault.floor_char_boundary(KIND)]);
                    let report = || self.report(&fault, &input, &answer);
                    faults.lock().unwrap().entry(kind).or_insert_with(report);
                }
                Verdict::Refused(error) => self.facts.learn(&error),
                Verdict::Answered | Verdict::Ended => {}
            }
        }
    }

    fn report(&self, fault: &str, input: &Input, answer: &Answer) -> String {
        let mut text = format!(
            "{fault}\nLIVE_FUZZ_SEED={}, call {} of {} as {:?}, {:?} after {:?}:",
            self.seed, input.number, input.path, input.identity, input.ending, input.limit
        );
        for frame in &input.frames {
            text += "\n  frame ";
            for byte in frame.iter().take(SHOWN) {
                let _ = write!(text, "{byte:02x}");
            }
        }
        text + &format!("\n  answer {answer:?}").chars().take(SHOWN).collect::<String>()
    }
}

/// The target of a lane.
enum Place<'a> {
    Fixed(Target),
    /// A worker that is running at the time of the call.
    Worker(&'a Workers),
}
