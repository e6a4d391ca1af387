//! The division of tensors among the ranks of a group ([`JobSpec::group_size`]): the elements of
//! each tensor whose gradients a rank adds up for its group and pushes, and whose parameters it
//! pulls.
//!
//! The ranks exchange values with any library: [`Exchange::pack`] copies what a rank sends to
//! another one, and [`Exchange::add`] adds what it has received. The sums do not depend on the
//! library, because they are made here, in the order of the servers. Parameters go the other way:
//! [`Exchange::pack_part`] copies what another rank needs of those that this rank has pulled, and
//! [`Exchange::split`] finds their places.
//!
//! [`JobSpec::group_size`]: zeroshard_model::JobSpec::group_size

use std::ops::Range;

use zeroshard_model::{
    DType, Error, JobSpec, Result, TensorId,
    local::{GroupShare, LocalTensor},
};
use zeroshard_proto::pb;

use crate::{
    local::{check_owner, local},
    values::{Slots, Values},
};

/// The division of some tensors among the ranks of a group, from [`Job::exchange`].
///
/// [`Job::exchange`]: crate::Job::exchange
#[derive(Debug, Clone)]
pub struct Exchange {
    rank: u32,
    group: Range<u32>,
    tensors: Vec<TensorId>,
    /// The number of elements that this rank holds of each tensor.
    numels: Vec<usize>,
    is_whole: bool,
    /// The elements whose gradients are added and pushed by one rank.
    pushed: Vec<Piece>,
    /// The elements whose parameters are pulled by one rank.
    pulled: Vec<Piece>,
}

/// The sums of the gradients in the pieces of a rank, from [`Exchange::add`].
#[derive(Debug, Clone)]
pub struct Sums {
    /// The sums of one piece after the other.
    pub(crate) values: Values,
    /// The slices with a sum that is not finite.
    pub(crate) overflow: Vec<pb::Overflow>,
}

/// Elements of one slice that one rank of the group pushes or pulls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The rank.
    pub rank: u32,
    /// The position of the tensor among those of the exchange.
    pub tensor: usize,
    /// The elements, counted among those that the ranks hold of the tensor.
    pub elements: Range<usize>,
    /// Of a push, the ranks whose gradients are added, in the order of addition; of a pull, the
    /// ranks that hold the elements.
    pub(crate) ranks: Vec<u32>,
    /// The index of the slice.
    pub(crate) slice: u32,
    /// The first element, counted among those that the ranks hold of the slice.
    pub(crate) offset: usize,
    /// The place of a push in the order in which the servers add them.
    pub(crate) turn: usize,
}

impl Exchange {
    /// # Errors
    /// [`Error::Invalid`] for a tensor that does not exist or is tied to another.
    pub(crate) fn new(
        spec: &JobSpec,
        rank: u32,
        locals: &[LocalTensor],
        tensors: &[TensorId],
    ) -> Result<Self> {
        let manifest = &spec.manifest;
        let mut exchange = Self {
            rank,
            group: spec.group_of(rank),
            tensors: tensors.to_vec(),
            numels: Vec::new(),
            is_whole: true,
            pushed: Vec::new(),
            pulled: Vec::new(),
        };
        for (position, &tensor) in tensors.iter().enumerate() {
            let local = local("exchanged", manifest, locals, tensor)?;
            check_owner(manifest, tensor.index())?;
            exchange.numels.push(local.of.numel());
            exchange.is_whole &= manifest.tensors()[tensor.index()].layout.is_none();
            for slice in manifest.slices_of(tensor.index()) {
                let held = local.of.in_slice(&manifest.slices()[slice]);
                exchange.divide(local, position, slice as u32, held);
            }
        }
        Ok(exchange)
    }

    /// Adds the pieces of a slice, of which this rank holds the elements `held` of the tensor.
    fn divide(&mut self, local: &LocalTensor, tensor: usize, slice: u32, held: Range<usize>) {
        let order = if local.is_shared() { local.in_order(slice) } else { vec![self.rank] };
        let piece = |rank, ranks: &[u32], elements: Range<usize>, turn| Piece {
            rank,
            tensor,
            elements: held.start + elements.start..held.start + elements.end,
            ranks: ranks.to_vec(),
            slice,
            offset: elements.start,
            turn,
        };
        let push = |GroupShare { rank, turn, elements }| piece(rank, &order, elements, turn);
        self.pushed.extend(local.shares(slice, held.len()).into_iter().map(push));
        let pull = |(rank, elements)| piece(rank, local.holders(), elements, 0);
        self.pulled.extend(local.pulls(slice, held.len()).into_iter().map(pull));
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The ranks of the group.
    pub fn group(&self) -> Range<u32> {
        self.group.clone()
    }

    /// The tensors.
    pub fn tensors(&self) -> &[TensorId] {
        &self.tensors
    }

    /// The pieces that this rank pushes.
    pub(crate) fn own_pushes(&self) -> impl Iterator<Item = &Piece> {
        of_rank(&self.pushed, self.rank)
    }

    /// The number of elements of gradients that this rank sends to `rank`.
    pub fn sent_to(&self, rank: u32) -> usize {
        numel(of_rank(&self.pushed, rank))
    }

    /// The number of elements of gradients that this rank receives from `rank`.
    pub fn received_from(&self, rank: u32) -> usize {
        numel(self.own_pushes().filter(|piece| piece.ranks.contains(&rank)))
    }

    /// The elements of the gradients that this rank sends to `rank`, as `dtype`, little endian.
    /// `gradients` has the gradient of each tensor of the exchange, if this rank has one; the
    /// others count as zeros.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes that do not match.
    pub fn pack(&self, gradients: &[Option<Values>], dtype: DType, rank: u32) -> Result<Vec<u8>> {
        self.check(gradients)?;
        let mut packed = Vec::with_capacity(self.sent_to(rank) * dtype.size());
        for Piece { tensor, elements, .. } in of_rank(&self.pushed, rank) {
            match &gradients[*tensor] {
                Some(gradient) => gradient.append(elements.clone(), dtype, &mut packed),
                None => packed.resize(packed.len() + elements.len() * dtype.size(), 0),
            }
        }
        Ok(packed)
    }

    /// Adds what each rank of the group has packed for this one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes that do not match.
    pub fn add(&self, received: &[&[u8]], dtype: DType) -> Result<Sums> {
        self.check_received(received, dtype)?;
        let mut rest = received.to_vec();
        let mut sums = vec![0_f32; self.sent_to(self.rank)];
        let (mut overflow, mut values) = (Vec::new(), Vec::new());
        let mut begin = 0;
        for Piece { elements, ranks, slice, .. } in self.own_pushes() {
            let numel = elements.len();
            let sum = &mut sums[begin..begin + numel];
            begin += numel;
            let (mut lowest, mut is_finite) = (None, true);
            for (turn, &rank) in ranks.iter().enumerate() {
                let from = &mut rest[(rank - self.group.start) as usize];
                let (part, later) = from.split_at(numel * dtype.size());
                *from = later;
                values.resize(numel, 0.0);
                Slots::from(&mut values).decode(part, dtype);
                match turn {
                    0 => sum.copy_from_slice(&values),
                    _ => sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value),
                }
                if !is_all_finite(&values) {
                    lowest = lowest.into_iter().chain([rank]).min();
                }
                is_finite &= is_all_finite(sum);
            }
            if !is_finite {
                overflow.push(pb::Overflow { slice: *slice, rank: lowest });
            }
        }
        Ok(Sums { values: sums.into(), overflow })
    }

    /// Returns whether every rank of the group holds the same elements of all tensors, as it does
    /// of tensors without a layout. Then each rank needs the whole part that another one pulls.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// The pieces whose parameters this rank pulls.
    pub(crate) fn own_pulls(&self) -> impl Iterator<Item = &Piece> {
        of_rank(&self.pulled, self.rank)
    }

    /// The number of elements of parameters that this rank pulls.
    pub fn part_len(&self) -> usize {
        numel(self.own_pulls())
    }

    /// The number of elements that `rank` needs of those that this rank pulls.
    pub fn part_for(&self, rank: u32) -> usize {
        numel(self.own_pulls().filter(|piece| piece.ranks.contains(&rank)))
    }

    /// The number of elements that this rank needs of those that `rank` pulls.
    pub fn part_from(&self, rank: u32) -> usize {
        numel(of_rank(&self.pulled, rank))
    }

    /// Appends to `message` the parameters that `rank` needs of `part`, which has those that this
    /// rank has pulled, as `dtype`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size that does not match.
    pub fn pack_part(
        &self,
        part: &[u8],
        dtype: DType,
        rank: u32,
        message: &mut Vec<u8>,
    ) -> Result<()> {
        let mut rest = part;
        for Piece { elements, ranks, .. } in self.own_pulls() {
            let (piece, later) = take(rest, elements.len() * dtype.size())?;
            rest = later;
            if ranks.contains(&rank) {
                message.extend_from_slice(piece);
            }
        }
        Ok(())
    }

    /// The pieces that `rank` pulls and this rank needs, each with its elements in `message`, which
    /// has those of one piece after the other as `dtype`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size that does not match.
    pub fn split<'a>(
        &'a self,
        rank: u32,
        message: &'a [u8],
        dtype: DType,
    ) -> impl Iterator<Item = Result<(&'a Piece, &'a [u8])>> {
        let mut rest = message;
        of_rank(&self.pulled, rank).map(move |piece| {
            let (elements, later) = take(rest, piece.elements.len() * dtype.size())?;
            rest = later;
            Ok((piece, elements))
        })
    }

    fn check_received(&self, received: &[&[u8]], dtype: DType) -> Result<()> {
        for (rank, bytes) in self.group.clone().zip(received) {
            let expected = self.received_from(rank) * dtype.size();
            if bytes.len() != expected {
                let found = bytes.len();
                return Err(Error::refused(format!(
                    "rank {rank} of the group sent {found} bytes of gradients instead of {expected}"
                )));
            }
        }
        if received.len() != self.group.len() {
            let expected = format!("{}, one for each rank of the group", self.group.len());
            return Err(Error::invalid("number of parts received", received.len(), expected));
        }
        Ok(())
    }

    fn check(&self, gradients: &[Option<Values>]) -> Result<()> {
        if gradients.len() != self.tensors.len() {
            let expected = format!("{}, one for each tensor", self.tensors.len());
            return Err(Error::invalid("number of gradients", gradients.len(), expected));
        }
        for (position, gradient) in gradients.iter().enumerate() {
            let (len, expected) = (gradient.as_ref().map(Values::len), self.numels[position]);
            if len.is_some_and(|len| len != expected) {
                let (tensor, found) = (self.tensors[position].index(), len.unwrap_or_default());
                return Err(Error::refused(format!(
                    "the gradient of tensor {tensor} has {found} elements instead of {expected}"
                )));
            }
        }
        Ok(())
    }
}

fn of_rank(pieces: &[Piece], rank: u32) -> impl Iterator<Item = &Piece> {
    pieces.iter().filter(move |piece| piece.rank == rank)
}

fn numel<'a>(pieces: impl Iterator<Item = &'a Piece>) -> usize {
    pieces.map(|piece| piece.elements.len()).sum()
}

/// The first `len` bytes of parameters, and the rest.
fn take(bytes: &[u8], len: usize) -> Result<(&[u8], &[u8])> {
    bytes.split_at_checked(len).ok_or_else(|| {
        let expected = format!("{len} or more for the next piece");
        Error::invalid("size of the parameters from a rank of the group", bytes.len(), expected)
    })
}

fn is_all_finite(values: &[f32]) -> bool {
    // Without an early return, so that the loop is vectorised.
    values.iter().fold(true, |all, value| all & value.is_finite())
}
