//! Collectives over the connections between workers.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use futures_util::future::try_join_all;
use zeroshard_model::{Error as ClusterError, Reduction};

use super::Collectives;
use super::algorithms;
use super::connections::Connections;
use super::error::{Error, Result};
use super::listening::Listening;
use super::mailbox::Channel;
use super::nccl::{self, Nccl};
use super::operation::{Numbers, Operation};
use super::service::Identity;

/// The connections of a worker to other workers of a job. Implements [`Collectives`] over gRPC.
///
/// If all `Peers` of the same connections are dropped without [`Peers::leave`], the other workers
/// regard this one as lost.
pub struct Peers {
    connections: Arc<Connections>,
    /// Distinguishes the operations of `Peers` with the same connections.
    communicator: u32,
    /// The connections for large messages, if there are any.
    nccl: OnceLock<Nccl>,
}

impl Listening {
    /// Connects as rank `rank` of `world` ranks to the others of `ranks`, and waits until all of
    /// them have connected to this worker. `address` returns the `host:port` of a rank, and is
    /// called again until the rank has been reached, since a rank that has ended may still be known
    /// at its old address.
    ///
    /// # Errors
    /// Those of `address`, and an error for a peer that cannot be reached before the deadline, or
    /// that has another rank.
    pub fn connect(
        self,
        rank: u32,
        world: u32,
        ranks: Range<u32>,
        address: impl AsyncFn(u32) -> Result<String, ClusterError>,
    ) -> Result<Peers> {
        if !ranks.contains(&rank) || ranks.end > world {
            let expected = format!("one of ranks {ranks:?} of {world}");
            return Err(Error::invalid("rank", rank, expected));
        }
        self.identity.send_replace(Some(Identity { rank, world }));
        let others = || ranks.clone().filter(|&peer| peer != rank);
        let dialled = others().map(async |to| {
            Ok::<_, Error>((to, self.dial(rank, to, world, async || address(to).await).await?))
        });
        let clients = self.runtime.block_on(async {
            let clients = try_join_all(dialled).await?;
            // Otherwise this worker could leave before a peer has connected to it.
            self.attached(rank, others()).await?;
            Ok::<_, Error>(clients.into_iter().collect())
        })?;
        Ok(Peers::new(Arc::new(Connections::new(self, rank, world, clients))))
    }
}

impl Peers {
    /// The next communicator of these connections.
    pub(super) fn new(connections: Arc<Connections>) -> Self {
        let communicator = connections.next_communicator();
        Self { connections, communicator, nccl: OnceLock::new() }
    }

    /// The same peers for another thread: operations of the result and those of `self` can be
    /// called in any order, as with `MPI_Comm_dup`. Its messages go over gRPC. All connected ranks
    /// must call this function equally often.
    pub fn duplicate(&self) -> Self {
        Self::new(self.connections.clone())
    }

    /// The rank of this worker.
    pub fn rank(&self) -> u32 {
        self.connections.rank
    }

    /// The number of ranks of the job.
    pub fn world(&self) -> u32 {
        self.connections.world
    }

    /// Waits until the peers have received all messages, then leaves. Operations fail afterwards.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Timeout`] if a peer does not receive its messages.
    pub fn leave(&self) -> Result<()> {
        self.connections.leave()
    }

    /// Has large messages of collectives go over NCCL, from the GPU with this number to those of
    /// the other ranks. All connected ranks must call this function.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if a rank has no NCCL or cannot use its GPU: its text says why.
    /// [`Error::Nccl`], and [`Error::Lost`] on the other ranks.
    pub fn use_nccl(&self, device: usize) -> Result<()> {
        let mut ranks: Vec<u32> = self.connections.clients.keys().copied().collect();
        ranks.push(self.rank());
        ranks.sort_unstable();
        let opened = nccl::open(device);
        let text = opened.as_ref().map_or_else(String::as_str, |_| "ready");
        self.agree(&ranks, "messages over NCCL", text)?;
        let channel = self.channel(&ranks, false);
        let connect = |at: &Operation<'_>| {
            let failed =
                |cause| Error::Nccl { rank: self.rank(), operation: at.text.clone(), cause };
            let lane = opened.map_err(failed)?;
            let me = at.me();
            let own = if me == 0 { nccl::new_id().map_err(failed)? } else { Vec::new() };
            let mut sizes = vec![0; ranks.len()];
            sizes[0] = nccl::ID_ELEMENTS;
            let id = algorithms::all_gather(at, &sizes, own)?.concat();
            let others = ranks.iter().copied().filter(|&rank| rank != self.rank()).collect();
            let connected = Nccl::connect(lane, &ranks, me, &id, &at.waiting_for(others));
            connected.map_err(|stopped| stopped.into_error(failed))
        };
        let connected = self.operate(channel, "the start of NCCL".to_owned(), connect)?;
        // A second call would make further connections, and drop them.
        let _ = self.nccl.set(connected);
        Ok(())
    }

    /// Runs an operation on a channel.
    fn operate<T>(
        &self,
        channel: Channel,
        text: String,
        run: impl FnOnce(&Operation<'_>) -> Result<T>,
    ) -> Result<T> {
        let connections = &*self.connections;
        let operation = Operation {
            sequence: connections.begin(&channel)?,
            post: connections,
            mailbox: connections.mailbox(),
            rank: connections.rank,
            channel,
            text,
            timeout: connections.deadline(),
            nccl: self.nccl.get(),
        };
        run(&operation).inspect_err(|error| connections.fail(error))
    }

    fn channel(&self, group: &[u32], pair: bool) -> Channel {
        Channel { communicator: self.communicator, group: group.to_vec(), pair }
    }

    /// Runs a collective.
    fn collect<T>(
        &self,
        group: &[u32],
        text: String,
        run: impl FnOnce(&Operation<'_>) -> Result<T>,
    ) -> Result<T> {
        self.check(group)?;
        self.operate(self.channel(group, false), text, run)
    }

    fn check(&self, group: &[u32]) -> Result<()> {
        let repeated = (1..group.len()).any(|index| group[..index].contains(&group[index]));
        let connected = group
            .iter()
            .all(|rank| *rank == self.rank() || self.connections.clients.contains_key(rank));
        if repeated || !group.contains(&self.rank()) || !connected {
            let (own, peers) = (self.rank(), self.connections.clients.keys());
            return Err(Error::refused(format!(
                "a group with rank {own} cannot be {group:?}; it has the rank and some of its \
                 peers {peers:?}, each once"
            )));
        }
        Ok(())
    }

    fn pair(&self, peer: u32, group: [u32; 2]) -> Result<Channel> {
        if !self.connections.clients.contains_key(&peer) {
            let expected = format!("one of {:?}", self.connections.clients.keys());
            return Err(Error::invalid("rank of a peer", peer, expected));
        }
        Ok(self.channel(&group, true))
    }
}

impl Collectives for Peers {
    fn rank(&self) -> u32 {
        self.connections.rank
    }

    fn all_reduce(&self, group: &[u32], reduction: Reduction, data: Vec<f32>) -> Result<Vec<f32>> {
        let text = format!("all_reduce({}) of {} f32", name(reduction), data.len());
        self.collect(group, text, |at| algorithms::all_reduce(at, reduction, data))
    }

    fn all_gather(&self, group: &[u32], sizes: &[usize], data: Vec<f32>) -> Result<Vec<Vec<f32>>> {
        let own =
            group.iter().position(|&rank| rank == self.rank()).and_then(|place| sizes.get(place));
        if sizes.len() != group.len() || own != Some(&data.len()) {
            return Err(Error::refused(format!(
                "the sizes {sizes:?} of an all_gather do not fit the ranks {group:?} and the {} f32 \
                 of rank {}",
                data.len(),
                self.rank()
            )));
        }
        let text = format!("all_gather of {sizes:?} f32");
        self.collect(group, text, |at| algorithms::all_gather(at, sizes, data))
    }

    fn reduce_scatter(
        &self,
        group: &[u32],
        reduction: Reduction,
        parts: Vec<Vec<f32>>,
    ) -> Result<Vec<f32>> {
        let sizes: Vec<usize> = parts.iter().map(Vec::len).collect();
        if sizes.len() != group.len() {
            let parts = sizes.len();
            return Err(Error::refused(format!(
                "a reduce_scatter among ranks {group:?} has {parts} parts; pass one for each rank"
            )));
        }
        let text = format!("reduce_scatter({}) of {sizes:?} f32", name(reduction));
        self.collect(group, text, |at| algorithms::reduce_scatter(at, reduction, parts))
    }

    fn all_to_all(
        &self,
        group: &[u32],
        sizes: &[usize],
        parts: Vec<Vec<f32>>,
    ) -> Result<Vec<Vec<f32>>> {
        if [parts.len(), sizes.len()] != [group.len(); 2] {
            let (parts, sizes) = (parts.len(), sizes.len());
            return Err(Error::refused(format!(
                "an all_to_all among ranks {group:?} has {parts} parts and {sizes} sizes; pass one \
                 of each for each rank"
            )));
        }
        // What a rank sends to one of the others is not known to the rest of them.
        self.collect(group, "all_to_all of f32".to_owned(), |at| {
            algorithms::all_to_all(at, sizes, parts)
        })
    }

    fn send(&self, to: u32, data: Vec<f32>) -> Result<()> {
        let channel = self.pair(to, [self.rank(), to])?;
        self.operate(channel, format!("send of {} f32", data.len()), |at| {
            at.send(1, 0, Numbers::new(data).into_bytes());
            Ok(())
        })
    }

    fn recv(&self, from: u32, elements: usize) -> Result<Vec<f32>> {
        let channel = self.pair(from, [from, self.rank()])?;
        self.operate(channel, format!("send of {elements} f32"), |at| at.take(0, 0, elements))
    }

    fn agree(&self, group: &[u32], about: &str, text: &str) -> Result<()> {
        self.collect(group, format!("{about}: {text}"), |at| {
            algorithms::all_gather(at, &vec![0; group.len()], Vec::new()).map(drop)
        })
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peers(rank {} of {})", self.rank(), self.world())
    }
}

fn name(reduction: Reduction) -> &'static str {
    match reduction {
        Reduction::Sum => "sum",
        Reduction::Avg => "avg",
        Reduction::Max => "max",
    }
}
