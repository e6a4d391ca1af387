//! The input of one call: its frames, their timing, its end, and its token. The input depends only
//! on the seed, the number of the call, and the facts.

use std::time::Duration;

use fastrand::Rng;
use prost::Message;

use crate::{
    facts::Facts,
    generate::Generator,
    schema::{Rpc, Server},
};

/// How a caller ends its side of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The caller ends its side after the last message.
    Complete,
    /// The caller sends nothing more, and waits for the answer.
    Stalled,
    /// The caller resets the stream.
    Reset,
}

/// The owner of the token that a call carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Identity {
    /// A user who may use the jobs that may be disturbed.
    Owner,
    /// A user who may read these jobs.
    Reader,
    Server,
    /// A user who may read the job of the bystander. Only the mirror gets this token.
    Spectator,
    /// A caller with a token that no server knows.
    Stranger,
    /// A caller without a token.
    Nobody,
}

/// The input of a call.
#[derive(Debug, Clone)]
pub(crate) struct Input {
    pub(crate) number: u64,
    /// The position of the call in the list of all calls.
    pub(crate) rpc: usize,
    pub(crate) path: String,
    pub(crate) identity: Identity,
    /// The gRPC frames: a prefix of five bytes, then a message.
    pub(crate) frames: Vec<Vec<u8>>,
    /// The pause before each frame.
    pub(crate) pauses: Vec<Duration>,
    pub(crate) ending: Ending,
    /// `true` if the call carries [`Self::limit`] as its deadline. Otherwise the caller cancels it
    /// after this time.
    pub(crate) has_deadline: bool,
    pub(crate) limit: Duration,
}

impl Input {
    /// Generates the input of the call with this number to the target `of`.
    pub(crate) fn new(seed: u64, number: u64, calls: &[Rpc], of: &Target, facts: &Facts) -> Self {
        let mut random = Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number);
        let rpc = choose(&mut random, calls, of.serves);
        let called = &calls[rpc];
        // A server that registers is trusted, so the test does not let it act on the bystander's
        // job.
        let is_attack = called.method.name() != "Serve" && random.u32(..100) < 5;
        // The mirror follows the bystander's job.
        let is_attack = is_attack || of.serves == Server::Mirror;
        let member = if is_attack { facts.bystander.clone() } else { facts.any(&mut random) };
        let mut generator = Generator { random, member, facts };
        let identity = generator.identity(called);
        let plan = generator.random.u32(..100);
        let frames = generator.frames(calls, called, of.number, plan);
        let pauses = frames.iter().map(|_| generator.pause()).collect();
        let ending = match generator.random.u32(..100) {
            _ if plan < 35 => Ending::Complete,
            0..5 => Ending::Stalled,
            5..10 => Ending::Reset,
            _ => Ending::Complete,
        };
        Self {
            number,
            rpc,
            path: called.path.clone(),
            identity,
            frames,
            pauses,
            ending,
            has_deadline: generator.chance(90),
            limit: Duration::from_millis(generator.random.u64(100..500)),
        }
    }
}

/// A process that is called.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) address: String,
    pub(crate) serves: Server,
    /// The index of the shard server or worker; 0 for the others.
    pub(crate) number: usize,
}

/// The calls that are sent rarely.
const RARE: [&str; 3] = ["Serve", "DeleteJob", "Leave"];

/// Chooses a call that the server offers. Calls that register servers or remove jobs and ranks are
/// rare, so that most calls concern existing jobs and ranks.
fn choose(random: &mut Rng, calls: &[Rpc], serves: Server) -> usize {
    loop {
        let rpc = random.usize(..calls.len());
        let is_any =
            calls[rpc].server == Server::Any && !matches!(serves, Server::Worker | Server::Mirror);
        let is_rare = is_any || RARE.contains(&calls[rpc].method.name());
        if (calls[rpc].server == serves || is_any) && (!is_rare || random.u32(..4) == 0) {
            return rpc;
        }
    }
}

impl Generator<'_> {
    fn identity(&mut self, rpc: &Rpc) -> Identity {
        match self.random.u32(..100) {
            0 => Identity::Nobody,
            1 => Identity::Stranger,
            2..5 => Identity::Reader,
            _ if rpc.server == Server::Mirror => Identity::Spectator,
            _ if rpc.method.name() == "Serve" => Identity::Server,
            5..10 if rpc.server == Server::Shard => Identity::Server,
            _ => Identity::Owner,
        }
    }

    fn pause(&mut self) -> Duration {
        let millis = if self.chance(3) { self.random.u64(1..100) } else { 0 };
        Duration::from_millis(millis)
    }

    /// Generates the frames of a call. `plan` (0 to 99) selects their faults.
    fn frames(&mut self, calls: &[Rpc], rpc: &Rpc, server: usize, plan: u32) -> Vec<Vec<u8>> {
        let other = self.one_of(calls).filter(|_| (80..85).contains(&plan));
        let mut messages = self.messages(other.unwrap_or(rpc), server);
        if (35..75).contains(&plan) {
            for _ in 0..self.random.usize(1..4) {
                let index = self.random.usize(..messages.len().max(1));
                messages.get_mut(index).into_iter().for_each(|message| self.mutate(message));
            }
        }
        if (85..92).contains(&plan) {
            self.reorder(&mut messages);
        }
        let mut encoded: Vec<Vec<u8>> = messages.iter().map(Message::encode_to_vec).collect();
        if (70..80).contains(&plan) {
            encoded.iter_mut().for_each(|bytes| self.corrupt(bytes));
        }
        let mut frames: Vec<Vec<u8>> = encoded.iter().map(|bytes| frame(bytes)).collect();
        if plan >= 92 {
            self.corrupt_frame(&mut frames);
        }
        frames
    }

    /// Removes, repeats or reorders messages.
    fn reorder<T: Clone>(&mut self, messages: &mut Vec<T>) {
        let length = messages.len();
        match self.random.u32(..5) {
            0 => messages.reverse(),
            1 => messages.clear(),
            2 => messages.extend_from_within(..),
            3 if length > 0 => _ = messages.remove(0),
            _ => messages.truncate(self.random.usize(..=length)),
        }
    }

    /// Corrupts the length or the flag of a gRPC frame, or truncates it.
    fn corrupt_frame(&mut self, frames: &mut Vec<Vec<u8>>) {
        let index = self.random.usize(..frames.len().max(1));
        let choice = self.random.u32(..7);
        let Some(frame) = frames.get_mut(index) else { return frames.push(vec![0; 3]) };
        match choice {
            0 => frame[0] = 1,
            1 => frame[0] = 77,
            2 => frame[1] = 0xff,
            3 => frame[4] = frame[4].wrapping_add(1),
            4 => frame[4] = frame[4].wrapping_sub(1),
            5 => frame.truncate(self.random.usize(..frame.len())),
            _ => frame.extend([0; 7]),
        }
    }
}

fn frame(message: &[u8]) -> Vec<u8> {
    [&[0], &(message.len() as u32).to_be_bytes()[..], message].concat()
}
