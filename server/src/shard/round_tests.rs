//! The order of arrival, the cuts and repetitions do not change a bit of the sum.

use proptest::prelude::*;
use zeroshard_proto::Error;

use super::{turns::MAX_PIECES, *};
use crate::{backend::Cpu, shard::lane::tests::whole};

const NUMEL: usize = 40;

/// Values whose sum depends on the order of addition.
fn gradient(rank: u32) -> Vec<f32> {
    (0..NUMEL)
        .map(|i| (1.0 + i as f32) * 10f32.powi((rank as i32 * 5 + i as i32) % 9 - 4) * 1.000_1)
        .collect()
}

fn piece(rank: u32, range: Range<usize>) -> Piece {
    let bytes = gradient(rank)[range.clone()].iter().flat_map(|v| v.to_le_bytes()).collect();
    Piece { rank, offset: range.start, dtype: DType::F32, bytes }
}

fn sum_of(slice: u32, world: u32, pieces: &[Piece], limit: u64) -> (Round, Result<Vec<u8>>) {
    let backend = Cpu::new();
    let budget = ParkingBudget::new(limit);
    let mut round = Round::new(slice, NUMEL, &whole(NUMEL, world));
    let mut sum = backend.allocate(DType::F32, NUMEL).unwrap();
    for piece in pieces {
        if let Err(error) = round.contribute(&backend, &mut sum, piece, &budget) {
            return (round, Err(error));
        }
    }
    let bytes = backend.read(&Arc::new(sum), 0..NUMEL, DType::F32).to_vec();
    (round, Ok(bytes))
}

/// The definition: cyclic rank order from `slice mod world`.
fn expected(slice: u32, world: u32) -> Vec<u8> {
    let ranks = (0..world).map(|i| (slice + i) % world);
    let sum = ranks.map(gradient).reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
    sum.unwrap().iter().flat_map(|v| v.to_le_bytes()).collect()
}

proptest! {
    #[test]
    fn arrival_order_cuts_and_repetitions_do_not_change_a_bit(
        world in 1u32..6,
        slice in 0u32..9,
        cuts in prop::collection::vec((0u32..6, 0..NUMEL, 0..NUMEL), 0..40),
        order in any::<prop::sample::Index>(),
    ) {
        let mut pieces: Vec<_> = cuts
            .into_iter()
            .map(|(rank, a, b)| piece(rank % world, a.min(b)..a.max(b)))
            .collect();
        // All of it, in some order, so that it completes.
        let first = order.index(world as usize) as u32;
        pieces.extend((0..world).map(|i| piece((first + i * (world - 1)) % world, 0..NUMEL)));
        pieces.extend((0..world).map(|rank| piece(rank, 0..NUMEL)));
        let (round, sum) = sum_of(slice, world, &pieces, u64::MAX);
        prop_assert!(round.is_complete());
        prop_assert_eq!(sum.unwrap(), expected(slice, world));
    }
}

#[test]
fn two_workers_never_park() {
    let pieces = [piece(1, 0..NUMEL), piece(0, 0..NUMEL)];
    for slice in [0, 1] {
        let (round, sum) = sum_of(slice, 2, &pieces, 0);
        assert!(round.is_complete());
        assert_eq!(sum.unwrap(), expected(slice, 2));
    }
}

#[test]
fn the_next_in_order_is_let_in_when_the_budget_is_spent() {
    let early = piece(2, 0..NUMEL);
    let (_, refused) = sum_of(0, 3, std::slice::from_ref(&early), 100);
    assert!(matches!(refused, Err(Error::ParkingFull { rank: 2, .. })));

    let in_order = [piece(0, 0..NUMEL), piece(1, 0..NUMEL), early];
    let (round, sum) = sum_of(0, 3, &in_order, 0);
    assert!(round.is_complete());
    assert_eq!(sum.unwrap(), expected(0, 3));
}

#[test]
fn parked_bytes_are_given_back() {
    let backend = Cpu::new();
    let budget = ParkingBudget::new(1000);
    let mut round = Round::new(0, NUMEL, &whole(NUMEL, 3));
    let mut sum = backend.allocate(DType::F32, NUMEL).unwrap();
    let mut contribute = |piece| round.contribute(&backend, &mut sum, &piece, &budget).unwrap();
    assert_eq!(contribute(piece(2, 0..NUMEL)), NUMEL as u64);
    assert_eq!(budget.used(), 4 * NUMEL as u64);
    assert_eq!(contribute(piece(2, 3..9)), 0);
    contribute(piece(1, 0..NUMEL));
    contribute(piece(0, 0..10));
    assert_eq!(budget.used(), 4 * (NUMEL as u64 - 10));
    contribute(piece(0, 10..NUMEL));
    assert_eq!(budget.used(), 0);
    assert!(round.is_complete());
    assert_eq!(round.missing_rank(), None);
}

#[test]
fn the_lowest_rank_that_overflowed_is_named() {
    let bad = |rank| Piece { bytes: f32::NAN.to_le_bytes().to_vec().into(), ..piece(rank, 5..6) };
    let (round, _) = sum_of(0, 3, &[bad(1), bad(2), piece(0, 0..NUMEL)], 1000);
    assert_eq!(round.overflow(), Some(1));
    assert_eq!(round.missing_rank(), Some(1));
}

#[test]
fn a_contribution_in_too_many_pieces_is_refused() {
    let backend = Cpu::new();
    let budget = ParkingBudget::new(0);
    let numel = 3 * MAX_PIECES;
    let mut round = Round::new(0, numel, &whole(numel, 1));
    let mut sum = backend.allocate(DType::F32, numel).unwrap();
    let one = |offset| Piece { offset, ..piece(0, 0..1) };
    let results: Vec<_> = (0..numel)
        .step_by(2)
        .map(|offset| round.contribute(&backend, &mut sum, &one(offset), &budget))
        .collect();
    assert_eq!(results.iter().filter(|r| r.is_ok()).count(), MAX_PIECES);
    assert!(matches!(results.last(), Some(Err(Error::Invalid { .. }))));
}
