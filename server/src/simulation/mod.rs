//! A deterministic simulation of a cluster: the state machine of the coordinator and the jobs of
//! shard servers, which are those of production, and workers, readers and mirrors on a virtual
//! network. Everything that happens follows from a seed: delays, lost and repeated messages,
//! crashes, broken connections, processes that stand still, and saves that fail. The clock is a
//! number.
//!
//! A run trains a small job, with checkpoints or without. Every version that a worker pulls must
//! have the bits of an undisturbed run, and so must every version that a reader shows. Every rank
//! must receive the same report of each step, a version may be visible only when all servers of its
//! slices have the decision, and the run must end. A run that does not do so prints its seed, and
//! with this seed it happens again:
//!
//! ```sh
//! SIMULATION_SEED=17 cargo test --package zeroshard-server --lib simulation -- --nocapture
//! ```
//!
//! Some runs have two coordinators that know nothing of each other, of which at most one may decide
//! about a step:
//!
//! ```sh
//! SIMULATION_PAIR_SEED=17 cargo test --package zeroshard-server --lib simulation -- --nocapture
//! ```
//!
//! `world` delivers messages and timers. `coordinator`, `server`, `worker` and `reader` are the
//! processes, `data` and `follow` are what servers answer and `mirror` what a mirror answers,
//! `checkpoints` is the storage, `faults` decides what goes wrong, and `record` is what must be the
//! same in all runs. `pair` is the network of two coordinators, `decisions` compares what they have
//! decided, and `visible` checks when a version is sent.

mod checkpoints;
mod coordinator;
mod data;
mod decisions;
mod faults;
mod follow;
mod mirror;
mod pair;
mod reader;
mod record;
mod safeguard;
mod server;
mod tests;
mod visible;
mod worker;
mod world;

pub(crate) use safeguard::{Safeguard, is_missing};
