//! The algorithms of the collectives. For small data and for two ranks, every rank sends to every
//! other rank directly. For large data the ranks form a ring (Patarasuk and Yuan 2009).
//!
//! Data to be summed is split into one piece per rank. Piece c is added up in the order of the
//! ring: cyclically from the rank after c to c itself. The direct algorithm adds in the same order,
//! so both algorithms give the same bits.

use std::ops::Range;

use zeroshard_model::Reduction;

use super::error::Result;
use super::operation::{Numbers, Operation};

/// The minimum number of elements for a ring. For fewer elements, the latency of the rounds costs
/// more time than the smaller number of bytes saves.
const RING_FROM: usize = 64 << 10;

/// Returns whether to use a ring for `elements` elements in a group of `size` ranks. With two ranks
/// both algorithms transfer the same number of bytes.
pub(super) fn uses_ring(size: usize, elements: usize) -> bool {
    size > 2 && elements >= RING_FROM
}

/// See [`super::Collectives::all_reduce`].
pub(super) fn all_reduce(
    at: &Operation<'_>,
    reduction: Reduction,
    data: Vec<f32>,
) -> Result<Vec<f32>> {
    let pieces = pieces(data.len(), at.size());
    if uses_ring(at.size(), data.len()) {
        let parts = pieces.iter().map(|piece| data[piece.clone()].to_vec()).collect();
        let mine = reduce_round(at, reduction, parts)?;
        let sizes: Vec<usize> = pieces.iter().map(Range::len).collect();
        let rounds = at.size() as u32 - 1;
        return Ok(gather_round(at, rounds, &sizes, mine)?.concat());
    }
    let elements = data.len();
    let parts = to_all(at, &vec![elements; at.size()], data)?;
    let mut result = Vec::with_capacity(elements);
    for (place, piece) in pieces.into_iter().enumerate() {
        let parts: Vec<&[f32]> = parts.iter().map(|part| &part[piece.clone()]).collect();
        result.extend(fold(reduction, place, &parts));
    }
    Ok(result)
}

/// See [`super::Collectives::reduce_scatter`].
pub(super) fn reduce_scatter(
    at: &Operation<'_>,
    reduction: Reduction,
    parts: Vec<Vec<f32>>,
) -> Result<Vec<f32>> {
    if uses_ring(at.size(), parts.iter().map(Vec::len).sum()) {
        return reduce_round(at, reduction, parts);
    }
    let elements = parts[at.me()].len();
    let parts = all_to_all(at, &vec![elements; at.size()], parts)?;
    let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
    Ok(fold(reduction, at.me(), &parts))
}

/// See [`super::Collectives::all_to_all`].
pub(super) fn all_to_all(
    at: &Operation<'_>,
    sizes: &[usize],
    mut parts: Vec<Vec<f32>>,
) -> Result<Vec<Vec<f32>>> {
    let own = std::mem::take(&mut parts[at.me()]);
    let mut received =
        with_others(at, sizes, |other| Numbers::new(std::mem::take(&mut parts[other])))?;
    received[at.me()] = own;
    Ok(received)
}

/// See [`super::Collectives::all_gather`].
pub(super) fn all_gather(
    at: &Operation<'_>,
    sizes: &[usize],
    data: Vec<f32>,
) -> Result<Vec<Vec<f32>>> {
    if uses_ring(at.size(), sizes.iter().sum()) {
        return gather_round(at, 0, sizes, data);
    }
    to_all(at, sizes, data)
}

/// Sends `data` to all other ranks, and returns the data of all ranks. `sizes` has the number of
/// elements of each rank.
fn to_all(at: &Operation<'_>, sizes: &[usize], data: Vec<f32>) -> Result<Vec<Vec<f32>>> {
    let mine = Numbers::new(data);
    let mut parts = with_others(at, sizes, |_| mine.clone())?;
    parts[at.me()] = mine.into_values();
    Ok(parts)
}

/// Sends `part(other)` to every other rank, and returns the parts that they have sent to this one,
/// by place. The part of this rank is empty.
fn with_others(
    at: &Operation<'_>,
    sizes: &[usize],
    mut part: impl FnMut(usize) -> Numbers,
) -> Result<Vec<Vec<f32>>> {
    let sent = at.others().map(|other| (other, part(other))).collect();
    let expected: Vec<_> = at.others().map(|other| (other, sizes[other])).collect();
    let received = at.exchange(0, sent, &expected)?;
    let mut parts = vec![Vec::new(); at.size()];
    for (other, part) in at.others().zip(received) {
        parts[other] = part;
    }
    Ok(parts)
}

/// Reduce-scatter in a ring: rounds 0 to `size - 2`.
fn reduce_round(
    at: &Operation<'_>,
    reduction: Reduction,
    parts: Vec<Vec<f32>>,
) -> Result<Vec<f32>> {
    let (size, me) = (at.size(), at.me());
    let (next, before) = neighbours(at);
    let mut parts: Vec<Option<Vec<f32>>> = parts.into_iter().map(Some).collect();
    let mut own = |place: usize| parts[place].take().expect("each part is used once");
    let mut moving = own((me + size - 1) % size);
    for round in 0..size - 1 {
        let mine = own((me + 2 * size - 2 - round) % size);
        moving = at.pass_on(round as u32, (next, Numbers::new(moving)), (before, mine.len()))?;
        combine(reduction, &mut moving, &mine);
    }
    finish(reduction, size, &mut moving);
    Ok(moving)
}

/// All-gather in a ring: `size - 1` rounds, numbered from `first`.
fn gather_round(
    at: &Operation<'_>,
    first: u32,
    sizes: &[usize],
    data: Vec<f32>,
) -> Result<Vec<Vec<f32>>> {
    let (size, me) = (at.size(), at.me());
    let (next, before) = neighbours(at);
    let mut parts: Vec<Option<Numbers>> = vec![None; size];
    parts[me] = Some(Numbers::new(data));
    for round in 0..size - 1 {
        let (sent, received) = ((me + size - round) % size, (me + 2 * size - 1 - round) % size);
        let part = parts[sent].clone().expect("it is our own or came in the previous round");
        let part = at.pass_on(first + round as u32, (next, part), (before, sizes[received]))?;
        parts[received] = Some(Numbers::new(part));
    }
    Ok(parts.into_iter().flatten().map(Numbers::into_values).collect())
}

/// The next and the previous place in the ring.
fn neighbours(at: &Operation<'_>) -> (usize, usize) {
    let (me, size) = (at.me(), at.size());
    ((me + 1) % size, (me + size - 1) % size)
}

/// Splits `elements` elements into one piece for each place.
fn pieces(elements: usize, places: usize) -> Vec<Range<usize>> {
    let step = elements.div_ceil(places);
    (0..places)
        .map(|place| (step * place).min(elements)..(step * (place + 1)).min(elements))
        .collect()
}

/// Reduces the parts of all ranks for piece number `place`.
fn fold(reduction: Reduction, place: usize, parts: &[&[f32]]) -> Vec<f32> {
    let order = (1..=parts.len()).map(|distance| parts[(place + distance) % parts.len()]);
    let mut result: Vec<f32> = Vec::new();
    for (index, part) in order.enumerate() {
        if index == 0 {
            result.extend_from_slice(part);
        } else {
            combine(reduction, &mut result, part);
        }
    }
    finish(reduction, parts.len(), &mut result);
    result
}

fn combine(reduction: Reduction, sum: &mut [f32], part: &[f32]) {
    let pairs = sum.iter_mut().zip(part);
    match reduction {
        Reduction::Sum | Reduction::Avg => pairs.for_each(|(sum, &part)| *sum += part),
        // The maximum with NaN is NaN, as in torch.
        Reduction::Max => pairs.for_each(|(sum, &part)| {
            if part > *sum || part.is_nan() {
                *sum = part;
            }
        }),
    }
}

fn finish(reduction: Reduction, ranks: usize, sum: &mut [f32]) {
    if reduction == Reduction::Avg {
        sum.iter_mut().for_each(|sum| *sum /= ranks as f32);
    }
}
